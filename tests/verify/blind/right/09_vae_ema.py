"""VAE with warmup, EMA weights (kept on rank 0 only, for sampling) and noise from a private generator."""
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LATENT, GLOBAL_BATCH, WARMUP = 6, 64, 10


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 2 * LATENT))
        self.dec = nn.Sequential(nn.Linear(LATENT, 48), nn.ReLU(), nn.Linear(48, 64))

    def forward(self, x, eps):
        mu, logvar = self.enc(x).chunk(2, -1)
        return self.dec(mu + eps * (logvar / 2).exp()), mu, logvar


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = TensorDataset(torch.tensor(load_digits().data[:896], dtype=torch.float32) / 16)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // world, sampler=sampler)
    net = VAE()
    model = DDP(net)
    ema = copy.deepcopy(net).requires_grad_(False) if rank == 0 else None
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / WARMUP))
    noise = torch.Generator().manual_seed(55)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            # the same numbers on all ranks; the sampler deals the samples out in turn
            eps = torch.randn(len(x) * world, LATENT, generator=noise)[rank::world]
            recon, mu, logvar = model(x, eps)
            kld = -0.5 * (1 + logvar - mu.square() - logvar.exp()).sum(1).mean()
            loss = F.mse_loss(recon, x, reduction="none").sum(1).mean() + 0.5 * kld
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            if ema is not None:
                with torch.no_grad():
                    for e, p in zip(ema.parameters(), net.parameters()):
                        e.lerp_(p, 0.05)
        if rank == 0:
            with torch.no_grad():
                picture = ema.dec(torch.randn(4, LATENT, generator=torch.Generator().manual_seed(epoch)))
            print(f"epoch {epoch} loss {loss.item():.4f} sample mean {picture.mean():.4f}")
    if rank == 0:
        print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in net.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
