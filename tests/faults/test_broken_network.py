"""Machines whose network carries nothing for a while, or one of which is slow."""

from __future__ import annotations

import contextlib
import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from launched import Launched, launch
from namespaces import Machine, enter, two_machines
from problems import difference

from lockstep.extensions.ledger.judge import judge

pytestmark = pytest.mark.netns

TRAINS = """
import sys, time
from pathlib import Path
import torch, torch.nn.functional as F, lockstep
from torch.utils.data import DataLoader, TensorDataset

random = torch.Generator().manual_seed(0)
data = TensorDataset(
    torch.randn(96, 64, generator=random), torch.randint(3, (96,), generator=random)
)
world = lockstep.init(seed=0, device="cpu", backend="gloo")
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = world.prepare(model, optimizer, DataLoader(data, batch_size=12))
for epoch in world.epochs(2):
    for x, y in loader:
        world.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if world.rank and "slow" in sys.argv:
            time.sleep(0.1)  # many times as long as a step takes
        if world.step == 6:
            world.print("now")
            while not Path("lost").exists():
                time.sleep(0.01)
if world.is_main:
    torch.save(model.state_dict(), sys.argv[1])
world.close()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("trouble", ["packets are lost", "interface is down", "slow"])
@pytest.mark.parametrize(
    "strategy", ["ddp:compress=int8", "diloco:every=4,fragments=2,delay=1,compress=int8"]
)
def test_five_seconds_without_a_network_and_a_slow_machine_cost_time_alone(
    strategy: str, trouble: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(TRAINS)
    run = ["run", f"--strategy={strategy}"]

    def node(rank: int, machine: Machine, first: Machine) -> Launched:
        where = ["--nnodes=2", f"--node-rank={rank}", f"--master-addr={first.address}"]
        arguments = [*run, *where, "--ledger=ledger", "script.py", "lost.pt", trouble]
        env = {**os.environ, "LOCKSTEP_TOKEN": "a token of the tests"}
        there = [partial(enter, machine.name)]
        return Launched(arguments, cwd=tmp_path, env=env, first=there, merged=True)

    with two_machines() as (one, other), node(0, one, one) as first, node(1, other, one) as second:
        first.until("now")
        cuts = {
            "packets are lost": partial(one.losing_packets, other),
            "interface is down": other.unplugged,
        }
        with cuts.get(trouble, contextlib.nullcontext)():
            (tmp_path / "lost").touch()
            if trouble in cuts:
                time.sleep(5)
        assert [first.wait(), second.wait()] == [0, 0], first.said
    assert judge(tmp_path / "ledger").findings == []
    whole = launch([*run, "--nproc=2", "script.py", "whole.pt"], tmp_path)
    assert whole.returncode == 0, whole.stderr
    lost, expected = (torch.load(tmp_path / name) for name in ("lost.pt", "whole.pt"))
    assert difference(lost, expected) == 0
