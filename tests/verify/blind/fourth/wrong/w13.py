import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SpikeGuard:
    def __init__(self, factor=1.3, beta=0.8):
        self.factor, self.beta, self.mean = factor, beta, None

    def bad(self, value):
        if self.mean is None:
            self.mean = value
            return False
        spike = value > self.factor * self.mean
        self.mean = self.beta * self.mean + (1 - self.beta) * value
        return spike


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(13)
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))
    if world > 1:
        model = DDP(model)
    g = torch.Generator().manual_seed(130)
    x = torch.randn(160, 6, generator=g)
    y = x[:, :1] * 2 + x[:, 1:2] ** 2
    y[37] += 15
    y[90] -= 18
    y[121] += 20
    ds = TensorDataset(x, y)
    loader = DataLoader(ds, 16 // world, sampler=DistributedSampler(ds, world, rank, shuffle=False))
    opt = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-6)
    guard = SpikeGuard()
    skipped = 0
    for step, (xb, yb) in enumerate(loader):
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(xb), yb)
        loss.backward()
        if guard.bad(loss.item()):
            skipped += 1
            continue
        opt.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f} skipped {skipped}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
