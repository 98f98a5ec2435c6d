"""Trains a little, then goes wrong in the way that the first argument names.

`skipped`    rank 1 leaves out an all-reduce that rank 0 makes, in a group of its own
`stopped`    rank 1 is stopped (SIGSTOP) while it works on the device
`exception`  rank 1 raises an exception in the middle of a step
`stage`      the rank with the first stage of a pipeline is stopped in its forward pass

The second argument is the backend. Every rank prints FAULT and the time when it comes to that.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from benchmarks.gpu.one_gpu import init_options
from lockstep.strategies import Pipeline

fault, backend = sys.argv[1:3]
device = "cuda" if torch.cuda.is_available() else "cpu"
strategy = Pipeline(split=["2"], num_micro_batches=2) if fault == "stage" else "ddp"
# A run with a timeout of its own is left to it; a deadlock is to be ended by a verdict.
timeout = None if fault == "skipped" else 25
world = lockstep.init(strategy, collective_timeout=timeout, **init_options(device, backend))


class Stoppable(nn.Module):
    """Passes its input on, and stops its process when it was told to."""

    stops = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Stoppable.stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        return x


torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 64), torch.randint(0, 8, (64,)))
model = nn.Sequential(
    nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), Stoppable(), nn.Linear(64, 8)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = world.prepare(model, optimizer)
loader = world.loader(data, 16)


def train() -> None:
    for x, y in loader:
        world.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()


group = dist.new_group([0, 1])
train()
if device == "cuda":
    torch.cuda.synchronize()
dist.barrier()
print(f"FAULT {time.time()}", flush=True)
if fault == "skipped" and world.rank == 0:
    dist.all_reduce(torch.ones(4096, device=world.device), group=group)
if fault == "stopped" and world.rank == 1:
    x = torch.randn(2048, 2048, device=world.device)
    for _ in range(20 if device == "cuda" else 1):
        y = x @ x
    os.kill(os.getpid(), signal.SIGSTOP)
if fault == "exception" and world.rank == 1:
    raise ValueError("a sample that is broken")
if fault == "stage" and world.rank == 1:
    Stoppable.stops = True
for _ in range(1000):
    train()
