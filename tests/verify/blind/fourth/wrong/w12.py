import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(12)
    model = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 1))
    if world > 1:
        model = DDP(model)
    g = torch.Generator().manual_seed(120)
    x = torch.randn(72, 4, generator=g)
    y = x.sum(1, keepdim=True) + torch.randn(72, 1, generator=g) * (1 + (torch.arange(72) % 2).unsqueeze(1))
    ds = TensorDataset(x, y)
    sampler = DistributedSampler(ds, world, rank, shuffle=False)
    loader = DataLoader(ds, batch_size=12 // world, sampler=sampler)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=0.05)
    for epoch in range(5):
        total, n = 0.0, 0
        for xb, yb in loader:
            loss = nn.functional.mse_loss(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item() * len(xb)
            n += len(xb)
        epoch_loss = total / n
        sched.step(epoch_loss)
        if rank == 0:
            print(f"epoch {epoch} loss {epoch_loss:.4f} lr {opt.param_groups[0]['lr']:.5f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
