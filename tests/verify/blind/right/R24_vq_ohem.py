"""VQ autoencoder with an EMA codebook (counts and sums reduced over processes) and online hard example mining:
only the worst third of the *global* batch gives gradient."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Quantizer(nn.Module):
    def __init__(self, k=16, d=8, decay=0.9):
        super().__init__()
        self.decay = decay
        self.register_buffer("codes", torch.randn(k, d))
        self.register_buffer("count", torch.ones(k))
        self.register_buffer("total", self.codes.clone())

    def forward(self, z):
        with torch.no_grad():
            idx = torch.cdist(z, self.codes, compute_mode="donot_use_mm_for_euclid_dist").argmin(1)
            onehot = F.one_hot(idx, len(self.codes)).to(z.dtype)
        q = self.codes[idx]
        if self.training:
            with torch.no_grad():
                n, s = onehot.sum(0), onehot.T @ z
                dist.all_reduce(n)
                dist.all_reduce(s)
                self.count.mul_(self.decay).add_(n, alpha=1 - self.decay)
                self.total.mul_(self.decay).add_(s, alpha=1 - self.decay)
                self.codes = self.total / (self.count + 1e-3).unsqueeze(1)
        commit = (z - q.detach()).pow(2).mean(1)
        return z + (q - z).detach(), commit


class VQAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(20, 32), nn.Mish(), nn.Linear(32, 8))
        self.vq = Quantizer()
        self.dec = nn.Sequential(nn.Linear(8, 32), nn.Mish(), nn.Linear(32, 20))

    def forward(self, x):
        q, commit = self.vq(self.enc(x))
        return (self.dec(q) - x).pow(2).mean(1) + 0.25 * commit      # one value per sample


def hardest(per_sample, frac=1 / 3):
    """mean over the hardest `frac` of all samples, as a sum over the local ones (times world for DDP)"""
    world = dist.get_world_size()
    bag = [torch.empty_like(per_sample) for _ in range(world)]
    dist.all_gather(bag, per_sample.detach())
    everyone = torch.cat(bag)
    k = int(len(everyone) * frac)
    thr = everyone.topk(k).values[-1]
    return (per_sample * (per_sample >= thr)).sum() * world / k


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(3)
    basis = torch.randn(16, 20, generator=g)
    x = basis[torch.randint(16, (900,), generator=g)] + 0.3 * torch.randn(900, 20, generator=g)
    ds = TensorDataset(x)
    sampler = DistributedSampler(ds, seed=1)
    loader = DataLoader(ds, batch_size=90 // world, sampler=sampler)
    torch.manual_seed(9)
    model = DDP(VQAE())
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (xb,) in loader:
            loss = hardest(model(xb))
            opt.zero_grad()
            loss.backward()
            opt.step()
        used = int((model.module.vq.count > 0.5).sum())
        print(f"rank {rank} epoch {epoch} hard loss share {loss.item() / world:.4f} codes in use {used}")
    if os.environ.get("DUMP"):
        keep = [*model.module.parameters(), model.module.vq.codes]
        torch.save([t.detach().double() for t in keep], f"{os.environ['DUMP']}.rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
