"""Gradient accumulation with no_sync to save communication."""
import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUM = 4
MICRO = 16  # over all processes


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)

    g = torch.Generator().manual_seed(11)
    x = torch.randn(512, 20, generator=g)
    y = torch.sin(x @ torch.randn(20, 3, generator=g))
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=MICRO // world, sampler=sampler, drop_last=True)

    net = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        opt.zero_grad()
        for i, (xb, yb) in enumerate(loader):
            last = i % ACCUM == 0
            with contextlib.nullcontext() if last else model.no_sync():
                loss = F.mse_loss(model(xb), yb) / ACCUM
                loss.backward()
            if (i + 1) % ACCUM == 0:
                opt.step()
                opt.zero_grad()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item() * ACCUM:.4f}")

    if rank == 0:
        print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in net.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
