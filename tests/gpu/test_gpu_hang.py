"""`lockstep run` watches ranks that work on a GPU: a stopped one ends the run, a busy one does not.

Both ranks share the GPU, so their collectives go over Gloo.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import Fault
from test_faults import check

pytestmark = pytest.mark.unit

TRAIN = """
import os, signal, sys, time
import torch
import lockstep
world = lockstep.init(collective_timeout=30)
model = torch.nn.Linear(64, 64)
model, optimizer = world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.randn(64, 64))
loader = world.loader(data, 16)

def train():
    for (x,) in loader:
        world.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()

train()
x = torch.randn(2048, 2048, device=world.device)
print("FAULT", flush=True)
"""
STOPPED = """
if world.rank == 1:
    for _ in range(50):
        y = x @ x  # still at work on the GPU when this process stops
    os.kill(os.getpid(), signal.SIGSTOP)
for _ in range(3):
    train()
"""
BUSY = """
end = time.monotonic() + 20
while world.rank == 1 and time.monotonic() < end:
    for _ in range(200):
        y = x @ x
    if world.device.type == "cuda":
        torch.cuda.synchronize()
train()
world.close()
print("all trained", flush=True)
"""


def fault(device: str, rest: str, exit_code: int, *says: str) -> Fault:
    flags = ("--device", device, "--backend", "gloo")
    return Fault("on a GPU", TRAIN + rest, exit_code, says=says, nproc=2, flags=flags)


@pytest.mark.gpu
def test_a_rank_that_stops_ends_the_run(tmp_path: Path) -> None:
    stopped = fault("cuda", STOPPED, 71, "FIRST FAILURE: rank 1", "stopped")
    (tmp_path / "script.py").write_text(stopped.script)
    check(stopped, tmp_path, None)


@pytest.mark.gpu
def test_a_rank_that_waits_for_its_gpu_is_not_taken_for_a_hanging_one(tmp_path: Path) -> None:
    busy = fault("cuda", BUSY, 0, r"rank 1 .*script\.py")
    (tmp_path / "script.py").write_text(busy.script)
    check(busy, tmp_path, None)
