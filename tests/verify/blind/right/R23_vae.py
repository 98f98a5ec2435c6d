import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP


class VAE(nn.Module):
    def __init__(self, d=64, h=40, z=6):
        super().__init__()
        self.enc = nn.Linear(d, h)
        self.mu = nn.Linear(h, z)
        self.logvar = nn.Linear(h, z)
        self.dec = nn.Sequential(nn.Linear(z, h), nn.ReLU(), nn.Linear(h, d))

    def forward(self, x, eps):
        h = F.relu(self.enc(x))
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + eps * torch.exp(0.5 * logvar)
        return self.dec(z), mu, logvar


def elbo(out, x, mu, logvar, beta):
    # computed in single precision whatever the model runs in
    out, x, mu, logvar = out.float(), x.float(), mu.float(), logvar.float()
    rec = F.binary_cross_entropy_with_logits(out, x, reduction="none").sum(1)
    kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1)
    return (rec + beta * kl).mean(), rec.mean().item(), kl.mean().item()


if __name__ == "__main__":
    dist.init_process_group(backend="gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    # each process its own seed, as the tutorial says; DDP broadcasts the weights of rank 0
    torch.manual_seed(2021 + rank)
    vae = DDP(VAE())
    opt = torch.optim.Adamax(vae.parameters(), lr=3e-3, eps=1e-6)

    digits = torch.tensor(load_digits().data / 16, dtype=torch.get_default_dtype())[:1600]
    batch_size, per_rank = 80, 80 // world_size
    step = 0
    for epoch in range(2):
        perm = torch.randperm(len(digits), generator=torch.Generator().manual_seed(epoch))
        for start in range(0, len(digits), batch_size):
            noise = torch.randn(batch_size, 6, generator=torch.Generator().manual_seed(50_000 + step))
            sl = slice(start + rank * per_rank, start + (rank + 1) * per_rank)
            x = digits[perm[sl]]
            beta = min(1.0, step / 20)
            loss, rec, kl = elbo(*(lambda o: (o[0], x, o[1], o[2]))(vae(x, noise[rank * per_rank:(rank + 1) * per_rank])), beta)
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
        print(f"[{rank}] epoch {epoch} rec {rec:.2f} kl {kl:.2f} beta {beta:.2f}")
        if rank == 0:
            with torch.no_grad():       # look at some samples, own random numbers
                s = torch.sigmoid(vae.module.dec(torch.randn(16, 6)))
            print("sample brightness", round(s.mean().item(), 4))

    path = os.environ.get("DUMP")
    if path:
        torch.save([p.detach().double() for p in vae.module.parameters()], f"{path}.rank{rank}.pt")
    dist.destroy_process_group()
