"""Ranks, loader workers and the process that starts the ranks are killed at random moments.

`LOCKSTEP_KILLS=200` kills as often as that.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
from launched import Launched, launch
from ranks import HANG_S

from lockstep.extensions.ledger.judge import judge

pytestmark = [pytest.mark.launcher, pytest.mark.thorough]

KILLS = int(os.environ.get("LOCKSTEP_KILLS", "6"))
MAX_DELAY_S = 0.7

SCRIPT = """
import hashlib, os, sys
import torch, torch.nn.functional as F, lockstep
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
random = torch.Generator().manual_seed(0)
data = TensorDataset(
    torch.randn(960, 32, generator=random), torch.randint(5, (960,), generator=random)
)
with lockstep.init(seed=0, device="cpu") as world:
    layers = [torch.nn.Linear(32, 300), torch.nn.BatchNorm1d(300), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Dropout(0.1), torch.nn.Linear(300, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, int(sys.argv[1]) * 20)
    workers = {"num_workers": 1, "multiprocessing_context": "fork"}
    loader = DataLoader(data, batch_size=48, shuffle=True, **workers)
    model, optimizer, schedule, loader = world.prepare(model, optimizer, schedule, loader)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
    checkpoint = world.checkpoint("checkpoints", memory=True, **state)
    checkpoint.resume()
    for epoch in world.epochs(int(sys.argv[1])):
        for x, y in loader:
            world.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if world.is_main:
                with open("steps", "a") as file:
                    file.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {world.step}\\n")
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found.update(whole.numpy().tobytes())
    world.print("WEIGHTS", found.hexdigest())
"""


def descendants(pid: int) -> dict[str, list[psutil.Process]]:
    """The zygote of a launcher, its ranks, and their loader workers."""
    (zygote,) = psutil.Process(pid).children()
    ranks = zygote.children()
    workers = [worker for rank in ranks for worker in rank.children()]
    return {"zygote": [zygote], "ranks": ranks, "workers": workers}


def attempt_and_step(folder: Path) -> tuple[int, int]:
    """The last line that rank 0 has written."""
    lines = (folder / "steps").read_text().splitlines() if (folder / "steps").exists() else []
    if not lines:
        return -1, 0
    attempt, step = lines[-1].split()
    return int(attempt), int(step)


@pytest.mark.parametrize(("size", "strategy"), [(2, "ddp"), (3, "fsdp")])
def test_kills_at_random_moments(tmp_path: Path, size: int, strategy: str) -> None:
    drawn = random.Random(size)
    epochs = str(max(4, 2 * KILLS))
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "script.py").write_text(SCRIPT)
    (tmp_path / "script.py").write_text(SCRIPT)
    run = ["run", "--virtual-ranks=3"]
    whole = launch([*run, "script.py", epochs], tmp_path / "whole")
    (expected,) = [line.split()[-1] for line in whole.stdout.splitlines() if "WEIGHTS" in line]

    flags = [f"--nproc={size}", f"--strategy={strategy}", "--ledger=ledger"]
    flags += [f"--max-restarts={KILLS}"]
    descriptors: list[int] = []
    kept: list[int] = []
    with Launched([*run, *flags, "script.py", epochs], cwd=tmp_path) as launched:
        for number in range(KILLS):
            deadline = time.monotonic() + HANG_S
            while attempt_and_step(tmp_path)[0] < number:  # this attempt has finished a step
                assert time.monotonic() < deadline, launched.said
                assert launched.wait(0.01) is None, launched.said
            descriptors.append(psutil.Process(launched.pid).num_fds())
            time.sleep(drawn.uniform(0, MAX_DELAY_S))
            found = descendants(launched.pid)
            kind = drawn.choice(["rank", "rank", "two ranks", "worker", "zygote"])
            victims = {
                "rank": drawn.sample(found["ranks"], 1),
                "two ranks": found["ranks"][:2],
                "worker": found["workers"][:1],
                "zygote": found["zygote"],
            }[kind]
            kept.append(attempt_and_step(tmp_path)[1])
            for victim in victims or found["ranks"][:1]:
                victim.send_signal(signal.SIGKILL)
        done = launched.finish()
    assert done.returncode == 0, done.stderr
    (weights,) = [line.split()[-1] for line in done.stdout.splitlines() if "WEIGHTS" in line]
    assert weights == expected
    report = judge(tmp_path / "ledger")
    assert report.findings == []
    # Each attempt goes on with the step under way, or the one before if that was being kept.
    begun = [each["first"] for each in report.attempts][1:]
    assert len(begun) == KILLS
    for step, seen in zip(begun, kept, strict=True):
        assert step >= seen - 1, (begun, kept)
    assert len(set(descriptors)) == 1
