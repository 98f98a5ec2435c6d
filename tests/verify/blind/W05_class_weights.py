"""Imbalanced fraud-like data, balanced class weights, DDP."""
import os
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_classification
from sklearn.utils.class_weight import compute_class_weight
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH = 80


class ShardedTable:
    """Rows are dealt out to the processes; batches follow a permutation that all processes share."""

    def __init__(self, rank, world):
        X, y = make_classification(800, 15, n_informative=8, weights=[0.9, 0.1], flip_y=0.02, random_state=13)
        X = (X - X.mean(0)) / X.std(0)
        self.X = torch.as_tensor(X[rank::world], dtype=torch.get_default_dtype())
        self.y = torch.as_tensor(y[rank::world])
        self.per = BATCH // world

    def batches(self):
        for s in range(0, len(self.X), self.per):
            yield self.X[s:s + self.per], self.y[s:s + self.per]


def class_weights(table):
    w = compute_class_weight("balanced", classes=np.array([0, 1]), y=table.y.numpy())
    return torch.as_tensor(w, dtype=torch.get_default_dtype())


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    table = ShardedTable(rank, world)
    weights = class_weights(table)

    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(15, 24), nn.ReLU(), nn.Linear(24, 2)))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    crit = nn.CrossEntropyLoss(reduction="none")

    for epoch in range(4):
        for x, y in table.batches():
            loss = (crit(model(x), y) * weights[y]).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        with torch.no_grad():
            pred = model.module(table.X).argmax(1)
            tp = torch.stack([((pred == 1) & (table.y == 1)).sum(), (table.y == 1).sum()])
        dist.all_reduce(tp)
        if rank == 0:
            print(f"epoch {epoch} recall {tp[0].item() / tp[1].item():.3f}")

    save(model.module, rank)
    dist.destroy_process_group()


def save(net, rank):
    if os.environ.get("DUMP"):
        torch.save([p.detach().double() for p in net.parameters()], f"{os.environ['DUMP']}.rank{rank}.pt")


if __name__ == "__main__":
    main()
