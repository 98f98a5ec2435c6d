"""Faults as data: what goes wrong, and what `lockstep run` must say, with which exit code.

Each script is one that a user might write; most know nothing of Lockstep. `says` are patterns that
the last block must hold, in that order (`.` matches line ends).
"""

from __future__ import annotations

from dataclasses import dataclass

_GLOO = """
import os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
dist.all_reduce(torch.ones(1))
"""
_DDP = (
    _GLOO
    + """
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
model = torch.nn.parallel.DistributedDataParallel(module)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(steps):
    for _ in range(steps):
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
)


@dataclass(frozen=True)
class Fault:
    """One way to go wrong."""

    name: str
    script: str
    exit_code: int
    says: tuple[str, ...]
    nproc: int = 2
    flags: tuple[str, ...] = ()
    launcher_signal: int | None = None
    """Sent to the launcher when the script has printed FAULT."""
    memory_bytes: int | None = None
    """Limit of the control group in which the run is started."""


FAULTS = [
    Fault(
        "exception on one rank",
        _GLOO
        + """
def load(sample):
    raise ValueError(f"sample {sample} is broken")

print("FAULT", flush=True)
if rank == 1:
    load(17)
dist.all_reduce(torch.ones(1))
""",
        exit_code=1,
        says=("FIRST FAILURE: rank 1", "ValueError: sample 17 is broken", r"script.py:\d+: raise"),
    ),
    Fault(
        "sys.exit(3)",
        _GLOO
        + """
print("FAULT", flush=True)
if rank == 1:
    sys.exit(3)
dist.all_reduce(torch.ones(1))
""",
        exit_code=3,
        says=("FIRST FAILURE: rank 1", r"sys\.exit\(3\)"),
    ),
    Fault(
        "os._exit(4)",
        _GLOO
        + """
print("FAULT", flush=True)
if rank == 1:
    os._exit(4)
dist.all_reduce(torch.ones(1))
""",
        exit_code=4,
        says=("FIRST FAILURE: rank 1", "exit code 4"),
    ),
    Fault(
        "SIGKILL",
        _GLOO
        + """
print("FAULT", flush=True)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))
""",
        exit_code=71,
        says=("FIRST FAILURE: rank 1", "SIGKILL"),
    ),
    Fault(
        "the kernel's out-of-memory killer",
        _GLOO
        + """
print("FAULT", flush=True)
if rank == 1:
    hoard = [torch.ones(1 << 24) for _ in range(100)]
dist.all_reduce(torch.ones(1))
""",
        exit_code=71,
        says=("FIRST FAILURE: rank 1", "killed by the kernel's out-of-memory killer", "--micro-ba"),
        memory_bytes=1500 << 20,
    ),
    Fault(
        "segmentation fault",
        _GLOO
        + """
import ctypes
print("FAULT", flush=True)
if rank == 1:
    ctypes.string_at(0)
dist.all_reduce(torch.ones(1))
""",
        exit_code=71,
        says=("FIRST FAILURE: rank 1", "SIGSEGV", r"script.py:\d+: ctypes.string_at\(0\)"),
    ),
    Fault(
        "SIGSTOP",
        _GLOO
        + """
print("FAULT", flush=True)
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
dist.all_reduce(torch.ones(1))
""",
        exit_code=71,
        says=("FIRST FAILURE: rank 1", "stopped"),
    ),
    Fault(
        "the GIL held in C",
        _GLOO
        + """
began = time.process_time()  # of this process alone, however busy the machine is
sum(range(10**7))
a_second = int(10**7 / (time.process_time() - began))
print("FAULT", flush=True)
if rank == 1:
    sum(range(20 * a_second))  # one call of C, which never lets go of the lock
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
""",
        exit_code=0,
        says=("rank 1 is in C code that holds Python.s lock", r"script.py:\d+: sum\(range"),
    ),
    Fault(
        "endless loop on one rank",
        _GLOO
        + """
print("FAULT", flush=True)
end = time.monotonic() + 13
while rank == 1 and time.monotonic() < end:
    pass
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
""",
        exit_code=0,
        says=("rank 1 works on", "rank 0 .*waits", r"script.py:\d+: (while|pass)"),
    ),
    Fault(
        "all_reduce against barrier",
        _GLOO
        + """
print("FAULT", flush=True)
if rank == 1:
    dist.barrier()
else:
    dist.all_reduce(torch.ones(4))
dist.all_reduce(torch.ones(1))
""",
        exit_code=70,
        says=(
            "deadlock",
            "first mismatch: call 2",
            r"rank 0: all_reduce.*script.py:\d+: dist.all_reduce\(torch.ones\(4\)\)",
            r"rank 1: barrier.*script.py:\d+: dist.barrier\(\)",
        ),
    ),
    Fault(
        "the same collective with other shapes",
        _GLOO
        + """
print("FAULT", flush=True)
dist.all_reduce(torch.ones(3 + rank))
dist.barrier()
""",
        exit_code=70,
        says=("deadlock", "different sizes", "rank 0: all_reduce of 3", "rank 1: all_reduce of 4"),
    ),
    Fault(
        "both ranks receive",
        _GLOO
        + """
print("FAULT", flush=True)
dist.recv(torch.ones(1), 1 - rank)
""",
        exit_code=70,
        says=(
            "deadlock: ranks 0-1 wait in recv, for each other",
            r"script.py:\d+: dist.recv",
            "send",
        ),
    ),
    Fault(
        "a stage of a pipeline leaves the loop",
        """
import lockstep, torch
from torch.utils.data import TensorDataset
with lockstep.init("pipeline", device="cpu") as world:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = world.prepare(model, optimizer)
    print("FAULT", flush=True)
    for turn, (x,) in enumerate(world.loader(TensorDataset(torch.randn(64, 4)), 16)):
        if world.rank == 1 and turn == 10:
            break
        world.backward(model(x).sum())
        optimizer.step()
        optimizer.zero_grad()
    world.sum(1.0)
""",
        exit_code=70,
        says=(
            "deadlock: ranks 0-1 wait in all_gather and recv, for each other",
            "rank 0 .*waits in recv, between the stages of the pipeline",
            r"script.py:\d+: world.backward",
            r"rank 1 .*waits in all_gather",
            r"script.py:\d+: world.sum",
            "same turns of the loop",
        ),
    ),
    Fault(
        "the same collective with far larger shapes",
        _GLOO
        + """
print("FAULT", flush=True)
dist.all_reduce(torch.ones(1 if rank else 100_000))
""",
        exit_code=71,
        says=("FIRST FAILURE: rank 1", "SIGABRT", r"script.py:\d+: dist.all_red", "other sizes"),
    ),
    Fault(
        "uneven numbers of steps under DDP",
        _DDP
        + """
print("FAULT", flush=True)
train(5 + rank)
dist.barrier()
""",
        exit_code=70,
        says=("deadlock", r"script.py:\d+: dist.barrier\(\)", r"script.py:\d+: model\(torch"),
    ),
    Fault(
        "rank 0 alone evaluates with the DDP model",
        _DDP
        + """
train(3)
print("FAULT", flush=True)
if rank == 0:
    model(torch.randn(8, 4))
dist.barrier()
""",
        exit_code=70,
        says=("deadlock", r"script.py:\d+: model\(torch.randn\(8, 4\)\)", "model.module|all ranks"),
    ),
    Fault(
        "one rank returns from main early",
        _DDP
        + """
train(3)
print("FAULT", flush=True)
if rank == 0:
    train(1)
""",
        exit_code=71,
        says=("FIRST FAILURE: rank 1", "left"),
    ),
    Fault(
        "honest work of rank 0 alone",
        _DDP
        + """
train(3)
print("FAULT", flush=True)
end = time.monotonic() + 14
while rank == 0 and time.monotonic() < end:
    sum(range(10000))
dist.barrier()
dist.destroy_process_group()
""",
        exit_code=0,
        says=("rank 0 works on", r"rank 1.*barrier"),
    ),
    Fault(
        "a slow rank",
        _DDP
        + """
print("FAULT", flush=True)
for _ in range(60):
    if rank == 1:
        time.sleep(0.25)
    train(1)
dist.destroy_process_group()
""",
        exit_code=0,
        says=("rank 1", "straggler|slow|late"),
    ),
    Fault(
        "Ctrl-C",
        _GLOO
        + """
print("FAULT", flush=True)
while True:
    time.sleep(0.1)
""",
        exit_code=130,
        says=("SIGINT",),
        launcher_signal=2,
    ),
    Fault(
        "SIGTERM",
        _GLOO
        + """
print("FAULT", flush=True)
dist.barrier() if rank else time.sleep(300)
""",
        exit_code=143,
        says=("SIGTERM",),
        launcher_signal=15,
    ),
]
