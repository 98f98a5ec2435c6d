import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import autograd, nn
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class Config:
    batch: int = 48
    n_critic: int = 3
    gen_steps: int = 12
    z: int = 6
    gp: float = 10.0
    lr: float = 1e-3


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 24)
        self.b = nn.Linear(24, 24)
        self.c = nn.Linear(24, 1, bias=False)

    def forward(self, x):
        h = nn.functional.softplus(self.a(x))
        h = nn.functional.softplus(self.b(h))
        return self.c(h).squeeze(1)


class Gen(nn.Module):
    def __init__(self, z):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(z, 24), nn.Tanh(), nn.Linear(24, 3))

    def forward(self, z):
        return self.net(z)


def gradient_penalty(critic, real, fake, eps):
    mix = (eps * real + (1 - eps) * fake).requires_grad_(True)
    out = critic(mix)
    (g,) = autograd.grad(out.sum(), mix, create_graph=True)
    return ((g.norm(2, dim=1) - 1) ** 2).mean()


def sync(module, world):
    """average the gradients of all workers in one go"""
    params = [p for p in module.parameters() if p.grad is not None]
    flat = torch.cat([p.grad.reshape(-1) for p in params])
    dist.all_reduce(flat)
    flat /= world
    for p, g in zip(params, flat.split([p.numel() for p in params])):
        p.grad.copy_(g.view_as(p))


def main(cfg=Config()):
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    critic, gen = Critic(), Gen(cfg.z)
    dgen = DDP(gen)
    c_opt = torch.optim.Adam(critic.parameters(), lr=cfg.lr, betas=(0.0, 0.9), eps=1e-6)
    g_opt = torch.optim.Adam(gen.parameters(), lr=cfg.lr, betas=(0.0, 0.9), eps=1e-6)
    shard = slice(rank, cfg.batch, world)
    A = torch.tensor([[1.0, 0.5, 0.0], [0.0, 1.0, -0.3], [0.2, 0.0, 0.7]])

    draws = 0

    def draw(*shape):
        nonlocal draws
        draws += 1
        g = torch.Generator().manual_seed(10_000 + draws)
        return g, torch.randn(cfg.batch, *shape, generator=g)[shard]

    for step in range(cfg.gen_steps):
        for _ in range(cfg.n_critic):
            _, u = draw(3)
            real = torch.tanh(u @ A) + 0.5
            g, z = draw(cfg.z)
            eps = torch.rand(cfg.batch, 1, generator=g)[shard]
            with torch.no_grad():
                fake = gen(z)
            w = critic(fake).mean() - critic(real).mean()
            gp = gradient_penalty(critic, real, fake, eps)
            c_opt.zero_grad()
            (w + cfg.gp * gp).backward()
            sync(critic, world)
            c_opt.step()
        _, z = draw(cfg.z)
        g_opt.zero_grad()
        (-critic(dgen(z)).mean()).backward()
        g_opt.step()
        if rank == world - 1 and step % 4 == 0:
            print(f"{step:3d}  W {-w.item():.4f}  gp {gp.item():.4f}")

    if os.environ.get("DUMP"):
        ps = [*gen.parameters(), *critic.parameters()]
        torch.save([p.detach().double() for p in ps], f"{os.environ['DUMP']}.rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
