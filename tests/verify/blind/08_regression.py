"""Tabular regression. --batch-size is the total over all processes."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--batch-size", type=int, default=64)
    p.add_argument("--lr", type=float, default=0.02)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--momentum", type=float, default=0.9)
    return p.parse_args()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(17)

    g = torch.Generator().manual_seed(17)
    x = torch.randn(640, 12, generator=g)
    y = (x[:, :1] * x[:, 1:2] + x[:, 2:3].abs()) + 0.05 * torch.randn(640, 1, generator=g)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=args.batch_size // world, sampler=sampler)

    model = DDP(nn.Sequential(nn.Linear(12, 64), nn.SiLU(), nn.LayerNorm(64), nn.Linear(64, 1)))
    lr = args.lr * world  # linear scaling rule
    opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=args.momentum)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        running = 0.0
        for xb, yb in loader:
            opt.zero_grad()
            loss = F.smooth_l1_loss(model(xb), yb)
            loss.backward()
            opt.step()
            running += loss.item()
        if rank == 0:
            print(f"epoch {epoch} lr {lr} loss {running / len(loader):.5f}")

    if rank == 0:
        print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in model.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
