"""Ranks and machines that are lost under DiLoCo cost the round, not the run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launched import launch
from problems import difference

from lockstep.data.ledger import judge

TRAINS = """
import os, signal, sys
import torch, torch.nn.functional as F, lockstep
from lockstep.strategies import DiLoCo
from torch.utils.data import DataLoader, TensorDataset
dies, step, replicas = map(int, sys.argv[1:])
random = torch.Generator().manual_seed(0)
data = TensorDataset(
    torch.randn(96, 8, generator=random), torch.randint(3, (96,), generator=random)
)
world = lockstep.init(DiLoCo(replicas=replicas, every=4), seed=0, precision="fp64")
model = torch.nn.Linear(8, 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=12, shuffle=True)
model, optimizer, loader = world.prepare(model, optimizer, loader)
checkpoint = world.checkpoint("checkpoints", model=model, optimizer=optimizer, loader=loader)
resumed = checkpoint.resume()
for epoch in world.epochs(2):
    for x, y in loader:
        world.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.step()
        if world.rank == dies and world.step == step and not resumed:
            os.kill(os.getpid(), signal.SIGKILL)
if world.is_main:
    torch.save(model.state_dict(), f"weights-{dies}.pt")
world.close()
"""


def weights(folder: Path, dies: int) -> dict[str, torch.Tensor]:
    return torch.load(folder / f"weights-{dies}.pt")


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_is_killed_costs_its_round(tmp_path: Path, size: int) -> None:
    (tmp_path / "script.py").write_text(TRAINS)
    run = ["run", "--ledger=ledger", "--max-restarts=1"]
    args = ["script.py", str(size - 1), "6", str(size)]
    lost = launch([*run, f"--nproc={size}", *args], tmp_path)
    assert lost.returncode == 0, lost.stderr
    assert f"FIRST FAILURE: rank {size - 1}" in lost.stderr
    assert "resumed the last round, from memory (epoch 0, step 4" in lost.stdout
    assert not (tmp_path / "checkpoints").exists()
    report = judge(tmp_path / "ledger")
    assert report.findings == []
    assert [each["first"] for each in report.attempts] == [0, 4]

    whole = launch(["run", "--nproc=1", "script.py", "-1", "0", str(size)], tmp_path)
    assert whole.returncode == 0, whole.stderr
    assert difference(weights(tmp_path, -1), weights(tmp_path, size - 1)) < 1e-9
