import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def dataset(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 7, generator=g)
    return TensorDataset(x, (x[:, 0] - x[:, 1] * x[:, 2]).unsqueeze(1))


def evaluate(net, ds):
    net.eval()
    total = 0.0
    with torch.no_grad():
        for x, y in DataLoader(ds, batch_size=16):
            total += nn.functional.mse_loss(net(x), y, reduction="sum").item()
    net.train()
    return total / len(ds)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--batch-size", type=int, default=20)
    ap.add_argument("--lr", type=float, default=0.05)
    cfg = ap.parse_args()
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(1)
    base = nn.Sequential(nn.Linear(7, 30), nn.ReLU(), nn.Linear(30, 1))
    net = torch.compile(base, backend="eager")
    if world > 1:
        net = DDP(net)
    train, test = dataset(80, 1), dataset(40, 2)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True)
    loader = DataLoader(train, batch_size=cfg.batch_size // world, sampler=sampler)
    steps = cfg.epochs * len(loader)
    opt = torch.optim.SGD(net.parameters(), lr=cfg.lr, momentum=0.9)
    sched = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda s: min((s + 1) / 2, 0.5 * (1 + math.cos(math.pi * s / steps))))
    best = float("inf")
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
        if rank == 0:
            score = evaluate(base, test)
            best = min(best, score)
            print(f"epoch {epoch} train loss {loss.item():.4f} test loss {score:.4f} best {best:.4f}")
        if world > 1:
            dist.barrier()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
