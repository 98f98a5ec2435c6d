"""Rank 0 takes a lock file, hands it to a daemon of its own (no child any more) which keeps it while it "unpacks data",
and waits in a barrier; rank 1 waits in flock for it. Then fcntl.lockf: rank 1 holds, rank 0 blocks. Then a word in
shared memory on which rank 1 spins with numpy."""
import fcntl
import mmap
import os
import subprocess
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")


def total(value):
    t = torch.tensor([float(value)])
    dist.all_reduce(t)
    return t.item()


names = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(names, src=0)
folder = names[0]
if rank == 0:
    for name in ("unpack.lock", "records.lock", "shared"):
        with open(f"{folder}/{name}", "wb") as file:
            file.write(bytes(4096))
assert total(rank) == 1

if rank == 0:
    lock = os.open(f"{folder}/unpack.lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    subprocess.run(["sh", "-c", f"(setsid sleep 16; echo unpacked > {folder}/data) >/dev/null 2>&1 </dev/null &"], pass_fds=[lock], check=True)
    os.close(lock)
    assert total(1) == 2
    dist.barrier()
else:
    assert total(1) == 2
    begin = time.monotonic()
    with open(f"{folder}/unpack.lock", "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert time.monotonic() - begin >= 15
        with open(f"{folder}/data") as data:
            assert data.read() == "unpacked\n"
    dist.barrier()

records = open(f"{folder}/records.lock", "r+b", buffering=0)
if rank == 1:
    fcntl.lockf(records, fcntl.LOCK_EX, 100, 50)
assert total(rank + 1) == 3
if rank == 1:
    end = time.monotonic() + 9
    while time.monotonic() < end:
        pass
    records.seek(50)
    records.write(b"written by 1")
    fcntl.lockf(records, fcntl.LOCK_UN, 100, 50)
else:
    begin = time.monotonic()
    fcntl.lockf(records, fcntl.LOCK_EX, 10, 60)
    assert time.monotonic() - begin >= 8
    records.seek(50)
    assert records.read(12) == b"written by 1"
    fcntl.lockf(records, fcntl.LOCK_UN, 10, 60)

with open(f"{folder}/shared", "r+b") as file:
    shared = np.frombuffer(mmap.mmap(file.fileno(), 4096), dtype=np.int64)
    if rank == 0:
        time.sleep(10)
        shared[1] = 1234
        shared[0] = 1
    else:
        while shared[0] == 0:
            np.add(shared[1], 1)
        assert shared[1] == 1234
assert total(rank + 3) == 7
dist.destroy_process_group()
if rank == 0:
    print("HONEST OK", flush=True)
