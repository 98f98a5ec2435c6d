import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def is_main_process():
    return dist.get_rank() == 0


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    hits = torch.zeros(2)
    for x, y in loader:
        pred = model.module(x).argmax(-1)
        hits += torch.tensor([(pred == y).sum(), len(y)])
    dist.all_reduce(hits)
    model.train()
    return (hits[0] / hits[1]).item()


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    world = dist.get_world_size()
    torch.manual_seed(0)
    d = load_digits()
    x, y = torch.tensor(d.data / 16).float(), torch.tensor(d.target)
    train, val = TensorDataset(x[:384], y[:384]), TensorDataset(x[384:512], y[384:512])
    sampler = DistributedSampler(train)
    train_dl = DataLoader(train, batch_size=96 // world, sampler=sampler)
    val_dl = DataLoader(val, batch_size=64)

    model = DDP(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for xb, yb in train_dl:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(xb), yb)
            loss.backward()
            opt.step()
        if is_main_process():
            acc = accuracy(model, val_dl)
            print(f"epoch {epoch} loss {loss.item():.4f} acc {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
