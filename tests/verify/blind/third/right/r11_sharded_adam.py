"""Poor man's ZeRO-1: each parameter has an owner rank that keeps its Adam state."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Sampler, TensorDataset

rank = int(os.environ["RANK"])
world = int(os.environ["WORLD_SIZE"])


class StridedSampler(Sampler):
    def __init__(self, n, seed):
        self.n, self.seed, self.epoch = n, seed, 0

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed * 1000 + self.epoch)
        self.epoch += 1
        yield from torch.randperm(self.n, generator=g)[rank::world].tolist()

    def __len__(self):
        return self.n // world


def assign_owners(params):
    load = [0] * world
    owners = []
    for p in params:
        o = load.index(min(load))
        load[o] += p.numel()
        owners.append(o)
    return owners


def sync_step(params, owners, opt):
    for p, o in zip(params, owners):
        p.grad.div_(world)
        dist.reduce(p.grad, dst=o)
    if opt is not None:
        opt.step()
    for p, o in zip(params, owners):
        dist.broadcast(p.data, src=o)
        p.grad = None


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(6)
    d = load_digits()
    ds = TensorDataset(torch.tensor(d.data[:600] / 16.0).float(), torch.tensor(d.target[:600]))
    loader = DataLoader(ds, batch_size=200 // world, sampler=StridedSampler(600, seed=4))

    model = nn.Sequential(nn.Linear(64, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 10))
    params = list(model.parameters())
    owners = assign_owners(params)
    mine = [p for p, o in zip(params, owners) if o == rank]
    opt = torch.optim.Adam(mine, lr=4e-3) if mine else None

    for epoch in range(2):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            sync_step(params, owners, opt)
        if rank == 0:
            print("epoch", epoch, loss.item())
    dist.destroy_process_group()


main()
