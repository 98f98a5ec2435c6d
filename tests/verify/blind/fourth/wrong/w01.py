import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

GLOBAL_BATCH = 16


def make_loader(world):
    g = torch.Generator().manual_seed(70)
    x = torch.randn(128, 1, 10, 10, generator=g)
    y = (x.mean((1, 2, 3)) > 0).long()
    order = torch.Generator().manual_seed(71)
    return DataLoader(TensorDataset(x, y), batch_size=GLOBAL_BATCH // world, shuffle=True, generator=order, drop_last=True)


def main():
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(96, 2))
    if world > 1:
        model = DDP(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = make_loader(world)
    steps = 128 // GLOBAL_BATCH
    it = iter(loader)
    for step in range(steps):
        x, y = next(it)
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
