import argparse
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def mlp(i, h, o):
    return nn.Sequential(nn.Linear(i, h), nn.LeakyReLU(0.2), nn.Linear(h, h), nn.LeakyReLU(0.2), nn.Linear(h, o))


def real_batch(n, gen):
    angle = torch.randint(8, (n,), generator=gen) * (2 * math.pi / 8)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.02 * torch.randn(n, 2, generator=gen)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--global_batch", type=int, default=64)
    ap.add_argument("--steps", type=int, default=6)
    ap.add_argument("--zdim", type=int, default=4)
    cfg = ap.parse_args()

    dist.init_process_group("gloo")
    r, w = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    G, D = DDP(mlp(cfg.zdim, 32, 2)), DDP(mlp(2, 32, 1))
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.9))
    bce = nn.BCEWithLogitsLoss()
    gen = torch.Generator().manual_seed(33)
    per = cfg.global_batch // w
    part = slice(r * per, (r + 1) * per)

    for step in range(cfg.steps):
        # everything random is drawn for the whole batch, each rank keeps its part
        real = real_batch(cfg.global_batch, gen)[part]
        z1 = torch.randn(cfg.global_batch, cfg.zdim, generator=gen)[part]
        z2 = torch.randn(cfg.global_batch, cfg.zdim, generator=gen)[part]

        with torch.no_grad():
            fake = G(z1)
        scores = D(torch.cat([real, fake]))
        target = torch.cat([torch.full((per, 1), 0.9), torch.zeros(per, 1)])
        d_loss = bce(scores, target)
        opt_d.zero_grad()
        d_loss.backward()
        opt_d.step()

        g_loss = bce(D(G(z2)), torch.ones(per, 1))
        opt_g.zero_grad()
        g_loss.backward()
        opt_g.step()
        if r == 0:
            print(f"{step:02d} D {d_loss.item():.4f} G {g_loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
