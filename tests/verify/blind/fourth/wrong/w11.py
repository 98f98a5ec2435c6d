import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS = 100


class Eps(nn.Module):
    def __init__(self, d=5):
        super().__init__()
        self.time = nn.Embedding(STEPS, 8)
        self.net = nn.Sequential(nn.Linear(d + 8, 40), nn.SiLU(), nn.Linear(40, d))

    def forward(self, x, t):
        return self.net(torch.cat([x, self.time(t)], 1))


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(111)
    model = Eps()
    if world > 1:
        model = DDP(model)
    g = torch.Generator().manual_seed(112)
    ds = TensorDataset(torch.randn(128, 5, generator=g) * 0.3 + 1.0)
    loader = DataLoader(ds, 16 // world, sampler=DistributedSampler(ds, world, rank, shuffle=False))
    bar = torch.cumprod(1 - torch.linspace(1e-4, 0.06, STEPS), 0)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    noise_gen = torch.Generator().manual_seed(113)
    for step, (x,) in enumerate(loader):
        t = torch.randint(0, STEPS, (len(x),), generator=noise_gen)
        eps = torch.randn(x.shape, generator=noise_gen)
        a = bar[t].unsqueeze(1)
        loss = nn.functional.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * eps, t), eps)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0:
            print(f"{step:02d} {loss.item():.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
