"""Rank 1's main thread holds the GIL in C: PyDLL poll (14 s), then sleep (9 s); then a second thread of rank 0
holds it for some 12 s in one call of sum() while rank 0's main waits in the collective that rank 1 joins late."""
import ctypes
import itertools
import os
import threading
import time

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")


def total(value):
    t = torch.tensor([float(value)])
    dist.all_reduce(t)
    return t.item()


for step in range(3):
    assert total(rank + step) == 1 + 2 * step

if rank == 1:
    holding = ctypes.PyDLL(None, use_errno=True)
    begin = time.monotonic()
    assert holding.poll(None, 0, 14_000) == 0
    assert time.monotonic() - begin >= 13.9
    begin = time.monotonic()
    assert holding.sleep(9) == 0
    assert time.monotonic() - begin >= 8.9
assert total(rank + 5) == 11

if rank == 0:
    begin = time.monotonic()
    assert sum(itertools.repeat(1, 5_000_000)) == 5_000_000
    many = int(5_000_000 * 12 / (time.monotonic() - begin))
    found = []
    thread = threading.Thread(target=lambda: found.append(sum(itertools.repeat(1, many))))
    thread.start()
    assert total(6) == 13
    thread.join()
    assert found == [many]
else:
    time.sleep(8)
    assert total(7) == 13
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    print("HONEST OK", flush=True)
