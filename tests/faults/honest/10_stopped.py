"""Rank 1 is stopped by SIGSTOP for 15 s and continued by a helper that is no child of it any more, while rank 0 waits
in an all_reduce; then both ranks are stopped for 16 s. Each must see exactly one SIGCONT each time."""
import os
import signal
import subprocess
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

continued = []
signal.signal(signal.SIGCONT, lambda number, frame: continued.append(time.monotonic()))


def stop(seconds):
    del continued[:]
    subprocess.run(["sh", "-c", f"(sleep {seconds}; kill -CONT {os.getpid()}) >/dev/null 2>&1 </dev/null &"], check=True)
    begin = time.monotonic()
    os.kill(os.getpid(), signal.SIGSTOP)
    took = time.monotonic() - begin
    time.sleep(0.5)
    assert took >= seconds - 0.5, took
    assert len(continued) == 1, continued


if rank == 1:
    stop(15)
assert total(rank + 5) == 11
stop(16)
assert total(rank + 6) == 13
dist.destroy_process_group()
if rank == 0:
    print("HONEST OK", flush=True)
