"""Rank 0's main thread waits in an all_reduce of group A, rank 1's in an all_gather of group B. The partners are
second threads, which come late: rank 0's after a usleep in C, rank 1's after reading a pipe that a child closes."""
import ctypes
import os
import subprocess
import threading
import time

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
group_a, group_b = dist.new_group([0, 1]), dist.new_group([0, 1])
for group in (None, group_a, group_b):
    x = torch.tensor([rank + 1.0])
    dist.all_reduce(x, group=group)
    assert x.item() == 3.0
result, problems = {}, []


def on_a():
    x = torch.full((64,), rank + 1.0)
    dist.all_reduce(x, group=group_a)
    result["a"] = x.tolist()


def on_b():
    parts = [torch.zeros(3), torch.zeros(3)]
    dist.all_gather(parts, torch.full((3,), float(rank)), group=group_b)
    result["b"] = torch.cat(parts).tolist()


def late():
    try:
        begin = time.monotonic()
        if rank == 0:
            assert ctypes.CDLL(None).usleep(20_000_000) == 0
            assert time.monotonic() - begin >= 19.9
            on_b()
        else:
            child = subprocess.Popen(["sh", "-c", "sleep 25; echo go"], stdout=subprocess.PIPE)
            assert os.read(child.stdout.fileno(), 100) == b"go\n"
            assert child.wait() == 0
            assert time.monotonic() - begin >= 24.9
            on_a()
    except BaseException as error:
        problems.append(repr(error))
        os._exit(3)


thread = threading.Thread(target=late)
thread.start()
(on_a if rank == 0 else on_b)()
thread.join()
assert not problems
assert result == {"a": [3.0] * 64, "b": [0.0] * 3 + [1.0] * 3}, result
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    print("HONEST OK", flush=True)
