"""GAN without DDP: flat gradient averaging by hand, then clipping."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

NZ, B, STEPS = 6, 32, 40


def average_(params):
    grads = [p.grad for p in params if p.grad is not None]
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    offset = 0
    for g in grads:
        g.copy_(flat[offset:offset + g.numel()].view_as(g))
        offset += g.numel()


def update(opt, params, loss, max_norm=0.2):
    opt.zero_grad()
    loss.backward()
    average_(params)
    norm = clip_grad_norm_(params, max_norm)
    opt.step()
    return norm


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(100 + rank)
    gen = nn.Sequential(nn.Linear(NZ, 40), nn.ReLU(), nn.Linear(40, 2))
    disc = nn.Sequential(nn.Linear(2, 40), nn.LeakyReLU(0.2), nn.Linear(40, 1))
    for p in [*gen.parameters(), *disc.parameters()]:
        dist.broadcast(p.data, src=0)
    gp, dp = list(gen.parameters()), list(disc.parameters())
    opt_g, opt_d = torch.optim.SGD(gp, lr=0.1), torch.optim.SGD(dp, lr=0.1)
    shared = torch.Generator().manual_seed(7)

    for step in range(STEPS):
        angle = 6.2832 * torch.rand(B, generator=shared)
        real = torch.stack([angle.cos(), angle.sin()], 1)[rank::world]
        z = torch.randn(B, NZ, generator=shared)[rank::world]
        fake = gen(z)
        loss_d = F.softplus(-disc(real)).mean() + F.softplus(disc(fake.detach())).mean()
        norm_d = update(opt_d, dp, loss_d)
        loss_g = F.softplus(-disc(fake)).mean()
        norm_g = update(opt_g, gp, loss_g)
        if rank == 0 and step % 10 == 9:
            print(f"{step} d {loss_d.item():.4f} ({norm_d:.3f}) g {loss_g.item():.4f} ({norm_g:.3f})")

    if rank == 0:
        print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in gp + dp))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
