import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 16


def sync_gradients(model):
    handles = []
    for p in model.parameters():
        if p.requires_grad and p.grad is not None:
            handles.append(dist.all_reduce(p.grad, op=dist.ReduceOp.SUM, async_op=True))
    for h in handles:
        h.wait()


def main():
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(22)
    x = torch.linspace(-3, 3, 128).unsqueeze(1)
    y = torch.sin(x) + 0.1 * torch.randn(128, 1, generator=g)
    ds = TensorDataset(x, y)
    loader = DataLoader(ds, BATCH // world, sampler=DistributedSampler(ds, world, rank, shuffle=True, seed=1))
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    if world > 1:
        for p in model.parameters():
            dist.broadcast(p.data, 0)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, (xb, yb) in enumerate(loader):
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(xb), yb)
        loss.backward()
        if world > 1:
            sync_gradients(model)
        opt.step()
        mean_loss = loss.detach().clone()
        if world > 1:
            dist.all_reduce(mean_loss)
            mean_loss /= world
        if rank == 0:
            print(step, round(mean_loss.item(), 5))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
