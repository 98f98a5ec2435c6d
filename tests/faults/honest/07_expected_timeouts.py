"""Waits that end by their own timeout, which the script expects and handles: a probing collective in a side group
that rank 1 never joins (18 s), store.wait for a key that nobody sets (8 s), a receive of rank 1 from a queue that stays
empty (10 s). The other rank waits in collectives of the main group."""
import datetime
import os
import queue
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

side = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=18))
if rank == 0:
    begin = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1), group=side)
    except RuntimeError as error:
        text = str(error)
    else:
        raise AssertionError("nobody joined")
    took = time.monotonic() - begin
    assert "imed out" in text or "imeout" in text, text
    assert 17.5 <= took < 45, took
assert total(rank) == 1
if rank == 0:
    store = dist.distributed_c10d._get_default_store()
    begin = time.monotonic()
    try:
        store.wait(["nobody sets this"], datetime.timedelta(seconds=8))
    except dist.DistStoreError:
        pass
    else:
        raise AssertionError("the key was never set")
    assert time.monotonic() - begin >= 7.5
assert total(rank + 1) == 3
if rank == 1:
    begin = time.monotonic()
    try:
        queue.Queue().get(timeout=10)
    except queue.Empty:
        pass
    assert time.monotonic() - begin >= 9.9
assert total(rank + 2) == 5
dist.barrier()
if rank == 0:
    print("HONEST OK", flush=True)
dist.destroy_process_group()
