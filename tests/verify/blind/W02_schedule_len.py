"""MLP on two-moons with linear warmup and cosine decay."""
import argparse
import math
import os

import torch
import torch.distributed as dist
from sklearn.datasets import make_moons
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--total-batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--warmup-frac", type=float, default=0.2)
    return p.parse_args()


def cosine_with_warmup(opt, warmup, total):
    def f(step):
        if step < warmup:
            return (step + 1) / (warmup + 1)
        t = (step - warmup) / max(1, total - warmup)
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, t)))

    return torch.optim.lr_scheduler.LambdaLR(opt, f)


def main():
    args = get_args()
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    X, Y = make_moons(640, noise=0.2, random_state=1)
    ds = TensorDataset(torch.tensor(X, dtype=torch.get_default_dtype()), torch.tensor(Y))
    sampler = DistributedSampler(ds, seed=2)
    batch_size = args.total_batch // world
    dl = DataLoader(ds, batch_size=batch_size, sampler=sampler)

    model = DDP(nn.Sequential(nn.Linear(2, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 2)))
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    steps_per_epoch = len(ds) // batch_size
    total_steps = steps_per_epoch * args.epochs
    sched = cosine_with_warmup(opt, int(args.warmup_frac * total_steps), total_steps)
    lossf = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        s = torch.zeros(2)
        for x, y in dl:
            opt.zero_grad()
            loss = lossf(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            s += torch.tensor([loss.item() * len(y), len(y)])
        dist.all_reduce(s)
        if rank == 0:
            print(f"epoch {epoch + 1}/{args.epochs} train loss {(s[0] / s[1]).item():.4f}")

    if os.environ.get("DUMP"):
        torch.save([p.detach().double() for p in model.module.parameters()], f"{os.environ['DUMP']}.rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
