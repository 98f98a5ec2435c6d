"""GAN on a ring of gaussians. Two networks, two optimizers, two DDP wrappers."""
import os
import math
import torch
import torch.nn as nn
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group(backend="gloo")
rank = dist.get_rank()
world_size = dist.get_world_size()

torch.manual_seed(42)
batch_size = 64            # over all GPUs
local = batch_size // world_size
nz = 8
n_iter = 40


def mlp(i, h, o):
    return nn.Sequential(nn.Linear(i, h), nn.LeakyReLU(0.2), nn.Linear(h, h), nn.LeakyReLU(0.2), nn.Linear(h, o))


netG = DDP(mlp(nz, 32, 2))
netD = DDP(mlp(2, 32, 1))
optD = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999), eps=1e-6)
optG = torch.optim.Adam(netG.parameters(), lr=5e-4, betas=(0.5, 0.999), eps=1e-6)
bce = nn.BCEWithLogitsLoss()

# same stream of random numbers everywhere; every process keeps its own rows
stream = torch.Generator()
stream.manual_seed(777)


def mine(t):
    return t[rank * local:(rank + 1) * local]


def sample_real():
    k = torch.randint(0, 8, (batch_size,), generator=stream)
    ang = k * (2 * math.pi / 8)
    pts = torch.stack([ang.cos(), ang.sin()], 1).to(torch.get_default_dtype())
    pts = pts + 0.05 * torch.randn(batch_size, 2, generator=stream)
    return mine(pts)


def sample_noise():
    return mine(torch.randn(batch_size, nz, generator=stream))


for it in range(n_iter):
    # ---- discriminator ----
    for p in netD.parameters():
        p.requires_grad_(True)
    real, z = sample_real(), sample_noise()
    with torch.no_grad():
        fake = netG(z)
    both = netD(torch.cat([real, fake]))
    target = torch.cat([torch.full((local, 1), 0.9), torch.zeros(local, 1)])
    lossD = bce(both, target)
    optD.zero_grad()
    lossD.backward()
    optD.step()

    # ---- generator: the discriminator only passes gradients through ----
    z = sample_noise()
    frozen = netD.module
    for p in frozen.parameters():
        p.requires_grad_(False)
    lossG = bce(frozen(netG(z)), torch.ones(local, 1))
    optG.zero_grad()
    lossG.backward()
    optG.step()

    if it % 10 == 0:
        logs = torch.stack([lossD.detach(), lossG.detach()])
        dist.reduce(logs, dst=0)
        if rank == 0:
            logs /= world_size
            print(f"iter {it} D {logs[0].item():.4f} G {logs[1].item():.4f}")

if rank == 0:
    with torch.no_grad():
        pts = netG.module(torch.randn(256, nz))
    print("mean radius", pts.norm(dim=1).mean().item())

if os.environ.get("DUMP") is not None:
    everything = list(netG.module.parameters()) + list(netD.module.parameters())
    torch.save([p.detach().double() for p in everything], f"{os.environ['DUMP']}.rank{rank}.pt")
dist.destroy_process_group()
