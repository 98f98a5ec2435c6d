import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TwoTower(nn.Module):
    def __init__(self, a=12, b=9, dim=8):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(a, 24), nn.GELU(), nn.Linear(24, dim))
        self.right = nn.Sequential(nn.Linear(b, 24), nn.GELU(), nn.Linear(24, dim))
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, a, b):
        return F.normalize(self.left(a), dim=-1), F.normalize(self.right(b), dim=-1), self.log_scale.exp()


def clip_loss(u, v, scale, world):
    if world > 1:
        u = torch.cat(all_gather(u))
        v = torch.cat(all_gather(v))
    logits = scale * u @ v.t()
    target = torch.arange(len(u))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(10)
    model = TwoTower()
    if world > 1:
        model = DDP(model)
    g = torch.Generator().manual_seed(12)
    base = torch.randn(112, 5, generator=g)
    a = base @ torch.randn(5, 12, generator=g)
    b = base @ torch.randn(5, 9, generator=g)
    ds = TensorDataset(a, b)
    loader = DataLoader(ds, batch_size=16 // world,
                        sampler=DistributedSampler(ds, world, rank, shuffle=False), drop_last=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step, (xa, xb) in enumerate(loader):
        u, v, s = model(xa, xb)
        loss = clip_loss(u, v, s, world)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0:
            print(f"step {step} contrastive {loss.item():.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
