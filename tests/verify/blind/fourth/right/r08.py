import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

Z = 6


class Ring(Dataset):
    def __init__(self, n=96):
        g = torch.Generator().manual_seed(31)
        a = torch.rand(n, generator=g) * 6.2832
        self.points = torch.stack([a.cos(), a.sin()], 1) + 0.02 * torch.randn(n, 2, generator=g)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(9000 + i)
        return self.points[i], torch.randn(Z, generator=g)


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 24), nn.LeakyReLU(0.2), nn.Linear(24, 24), nn.LeakyReLU(0.2), nn.Linear(24, o))


def main():
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    gen, disc = mlp(Z, 2), mlp(2, 1)
    if world > 1:
        gen, disc = DDP(gen), DDP(disc)
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.9), eps=1e-5)
    opt_d = torch.optim.Adam(disc.parameters(), lr=1e-3, betas=(0.5, 0.9), eps=1e-5)
    bce = nn.BCEWithLogitsLoss()
    ds = Ring()
    loader = DataLoader(ds, batch_size=16 // world, sampler=DistributedSampler(ds, world, rank, shuffle=False))

    for step, (real, z) in enumerate(loader):
        n = len(real)
        with torch.no_grad():
            fake = gen(z)
        scores = disc(torch.cat([real, fake]))
        target = torch.cat([torch.ones(n, 1), torch.zeros(n, 1)])
        d_loss = bce(scores, target)
        opt_d.zero_grad()
        d_loss.backward()
        opt_d.step()

        g_loss = bce(disc(gen(z)), torch.ones(n, 1))
        opt_g.zero_grad()
        g_loss.backward()
        opt_g.step()
        if rank == 0:
            print(f"{step}: d {d_loss.item():.4f} g {g_loss.item():.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
