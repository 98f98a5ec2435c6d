"""Rank 0 starts two processes by mp.spawn which form a group of their own, where one comes 16 s late to init and 14 s
late to an all_gather; rank 0 waits in spawn's join, rank 1 in a barrier of the outer group."""
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def inner(number, path):
    if number == 1:
        time.sleep(16)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=number, world_size=2)
    x = torch.tensor([number + 1.0])
    dist.all_reduce(x)
    assert x.item() == 3.0
    if number == 0:
        time.sleep(14)
    parts = [torch.zeros(1), torch.zeros(1)]
    dist.all_gather(parts, torch.tensor([number * 10.0]))
    assert [p.item() for p in parts] == [0.0, 10.0]
    with open(f"{path}.{number}", "w") as file:
        file.write("inner ok")
    dist.destroy_process_group()


def main():
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    for _ in range(3):
        x = torch.tensor([rank + 1.0])
        dist.all_reduce(x)
        assert x.item() == 3.0
    if rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            begin = time.monotonic()
            mp.spawn(inner, args=(f"{folder}/store",), nprocs=2)
            assert time.monotonic() - begin >= 29
            for number in range(2):
                with open(f"{folder}/store.{number}") as file:
                    assert file.read() == "inner ok"
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print("HONEST OK", flush=True)


if __name__ == "__main__":
    main()
