import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def gather_features(t, world):
    if world == 1:
        return t
    parts = [torch.zeros_like(t) for _ in range(world)]
    dist.all_gather(parts, t.detach().contiguous())
    return torch.cat(parts)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 8))
        self.g = nn.Sequential(nn.Linear(14, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, a, b):
        return F.normalize(self.f(a), dim=1), F.normalize(self.g(b), dim=1)


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(80)
    model = Pair()
    if world > 1:
        model = DDP(model)
    g = torch.Generator().manual_seed(81)
    z = torch.randn(128, 4, generator=g)
    ds = TensorDataset(z @ torch.randn(4, 10, generator=g), z @ torch.randn(4, 14, generator=g))
    loader = DataLoader(ds, 16 // world, sampler=DistributedSampler(ds, world, rank, shuffle=False))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, (a, b) in enumerate(loader):
        u, v = model(a, b)
        all_u, all_v = gather_features(u, world), gather_features(v, world)
        target = torch.arange(len(u)) + rank * len(u)
        loss = 0.5 * (F.cross_entropy(u @ all_v.t() / 0.1, target) + F.cross_entropy(v @ all_u.t() / 0.1, target))
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0:
            print(step, round(loss.item(), 4))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
