"""GAN on a ring of Gaussians."""
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NZ, GLOBAL_BATCH = 8, 64


def ring(n=640):
    g = torch.Generator().manual_seed(99)
    a = torch.randint(0, 8, (n,), generator=g) * (2 * math.pi / 8)
    return torch.stack([a.cos(), a.sin()], 1) + 0.05 * torch.randn(n, 2, generator=g)


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, o))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    data = TensorDataset(ring())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // world, sampler=sampler)
    gen, disc = DDP(mlp(NZ, 2)), DDP(mlp(2, 1))
    opt_g = torch.optim.SGD(gen.parameters(), lr=0.2)
    opt_d = torch.optim.SGD(disc.parameters(), lr=0.2)
    noise = torch.Generator().manual_seed(2024)

    for epoch in range(4):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            z = torch.randn(real.size(0), NZ, generator=noise)
            fake = gen(z)
            both = disc(torch.cat([real, fake.detach()]))
            want = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
            loss_d = F.binary_cross_entropy_with_logits(both, want)
            opt_d.zero_grad()
            loss_d.backward()
            opt_d.step()

            disc.requires_grad_(False)
            loss_g = F.softplus(-disc.module(fake)).mean()
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
            disc.requires_grad_(True)
        if rank == 0:
            print(f"epoch {epoch} d {loss_d.item():.4f} g {loss_g.item():.4f}")

    if rank == 0:
        both = list(gen.parameters()) + list(disc.parameters())
        print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in both))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
