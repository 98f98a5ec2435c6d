import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class VAE(nn.Module):
    def __init__(self, d=12, z=3):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d, 24), nn.ReLU(), nn.Linear(24, 2 * z))
        self.dec = nn.Sequential(nn.Linear(z, 24), nn.ReLU(), nn.Linear(24, d))

    def forward(self, x):
        mu, logvar = self.enc(x).chunk(2, 1)
        return self.dec(mu), mu, logvar

    def training_loss(self, x):
        rec, mu, logvar = self(x)
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
        return (rec - x).pow(2).sum(1).mean() + 0.1 * kl


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(7)
    model = VAE()
    if world > 1:
        model = DDP(model)
    g = torch.Generator().manual_seed(72)
    ds = TensorDataset(torch.randn(120, 12, generator=g))
    sampler = DistributedSampler(ds, world, rank, shuffle=True)
    loader = DataLoader(ds, batch_size=20 // world, sampler=sampler)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3, eps=1e-6)
    inner = model.module if hasattr(model, "module") else model
    for step, (x,) in enumerate(loader):
        loss = inner.training_loss(x)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0:
            print(step, f"elbo loss {loss.item():.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
