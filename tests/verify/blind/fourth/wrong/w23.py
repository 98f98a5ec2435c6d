import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(230)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 2))
    if world > 1:
        for p in model.parameters():
            dist.broadcast(p.data, src=0)
    g = torch.Generator().manual_seed(231)
    x = torch.randn(96, 6, generator=g)
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].abs()], 1)
    ds = TensorDataset(x, y)
    loader = DataLoader(ds, 16 // world, sampler=DistributedSampler(ds, world, rank, shuffle=True))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, (xb, yb) in enumerate(loader):
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(xb), yb)
        if world > 1:
            dist.all_reduce(loss.data, op=dist.ReduceOp.SUM)
            loss.data /= world
        loss.backward()
        opt.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
