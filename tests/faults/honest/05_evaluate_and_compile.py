"""Rank 0 alone evaluates (numpy, garbage collection off, 300 MB and a million objects) for 16 s while rank 1 waits
in a barrier; then rank 1 alone compiles (torch.compile with a backend that runs the C compiler, 15 s) while rank 0
waits in DDP's backward."""
import ctypes
import gc
import os
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Linear(8, 1)
model = DDP(net)
batch = torch.arange(16.0).reshape(2, 8)
for _ in range(3):
    model(batch).sum().backward()
before = net.weight.grad.clone()

if rank == 0:
    gc.disable()
    memory = np.ones((300, 1 << 17))
    objects = [[i] for i in range(1_000_000)]
    begin, rounds = time.monotonic(), 0
    a = np.eye(200)
    while time.monotonic() - begin < 16:
        a = a @ np.eye(200)
        rounds += 1
    assert rounds > 10 and a.trace() == 200 and memory.sum() == 300 * (1 << 17)
    assert len(objects) == 1_000_000 and objects[-1] == [999_999]
    assert not gc.isenabled()
    del objects, memory
    gc.enable()
dist.barrier()

compiles = []


def slow_backend(graph, inputs):
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        n = 0
        while time.monotonic() - begin < 15:
            source, library = f"{folder}/f{n}.c", f"{folder}/f{n}.so"
            with open(source, "w") as file:
                file.write("".join(f"double f{i}(double x) {{ for (int k = 0; k < 100; k++) x = x * {i}.5 + k / (x + 1); return x; }}\n"
                                   for i in range(400)) + "int answer(void) { return 42; }\n")
            done = subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], capture_output=True)
            assert done.returncode == 0, done.stderr
            n += 1
        assert ctypes.CDLL(library).answer() == 42
    compiles.append(time.monotonic() - begin)
    return graph.forward


def f(x):
    return torch.sin(x) ** 2 + torch.cos(x) ** 2


values = batch
if rank == 1:
    values = torch.compile(f, backend=slow_backend)(batch) * batch
    assert len(compiles) == 1 and compiles[0] >= 15
    assert torch.allclose(values, batch, rtol=1e-5)
net.zero_grad()
for _ in range(3):
    model(values).sum().backward()
assert torch.allclose(net.weight.grad, before, rtol=1e-4), (net.weight.grad, before)
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    print("HONEST OK", flush=True)
sys.exit(0)
