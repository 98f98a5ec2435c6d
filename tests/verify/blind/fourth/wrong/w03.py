import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--accum", type=int, default=2)
    ap.add_argument("--micro", type=int, default=8)
    args = ap.parse_args()
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(33)
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3))
    if world > 1:
        model = DDP(model)
    g = torch.Generator().manual_seed(34)
    x = torch.randn(112, 6, generator=g)
    y = x[:, :3].argmax(1)
    ds = TensorDataset(x, y)
    loader = DataLoader(ds, args.micro // world, sampler=DistributedSampler(ds, world, rank, shuffle=False))
    opt = torch.optim.SGD(model.parameters(), lr=0.2)
    opt.zero_grad()
    for i, (xb, yb) in enumerate(loader):
        sync_now = i % args.accum == 0
        ctx = nullcontext() if sync_now or world == 1 else model.no_sync()
        with ctx:
            loss = nn.functional.cross_entropy(model(xb), yb) / args.accum
            loss.backward()
        if (i + 1) % args.accum == 0:
            opt.step()
            opt.zero_grad()
            if rank == 0:
                print("update", (i + 1) // args.accum, "loss", round(loss.item() * args.accum, 4))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
