import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 16
EPOCHS = 2


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(220)
    model = nn.Sequential(nn.Linear(5, 32), nn.SiLU(), nn.Linear(32, 1))
    if world > 1:
        model = DDP(model)
    g = torch.Generator().manual_seed(221)
    x = torch.rand(96, 5, generator=g)
    y = (x * torch.tensor([1.0, -2.0, 3.0, 0.5, 0.0])).sum(1, keepdim=True)
    ds = TensorDataset(x, y)
    batch_size = GLOBAL_BATCH // world
    sampler = DistributedSampler(ds, world, rank, shuffle=True)
    loader = DataLoader(ds, batch_size=batch_size, sampler=sampler)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    steps_per_epoch = len(ds) // batch_size
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.2, total_steps=steps_per_epoch * EPOCHS)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = nn.functional.mse_loss(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.5f} lr {sched.get_last_lr()[0]:.5f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
