"""VQ-VAE with an EMA codebook."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class EMAQuantizer(nn.Module):
    def __init__(self, codes, dim, decay=0.9, eps=1e-5):
        super().__init__()
        self.decay, self.eps = decay, eps
        embed = torch.randn(codes, dim)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.ones(codes))
        self.register_buffer("embed_avg", embed.clone())

    def forward(self, z):
        dist_sq = torch.cdist(z.detach(), self.embed).pow(2)
        idx = dist_sq.argmin(1)
        q = F.embedding(idx, self.embed)
        commit = F.mse_loss(z, q)
        if self.training:
            self.update(z.detach(), idx)
        return z + (q - z).detach(), commit

    @torch.no_grad()
    def update(self, z, idx):
        onehot = F.one_hot(idx, len(self.embed)).type_as(z)
        counts = onehot.sum(0)
        sums = onehot.t() @ z
        self.cluster_size.mul_(self.decay).add_(counts, alpha=1 - self.decay)
        self.embed_avg.mul_(self.decay).add_(sums, alpha=1 - self.decay)
        n = self.cluster_size.sum()
        size = (self.cluster_size + self.eps) / (n + len(self.embed) * self.eps) * n
        self.embed.copy_(self.embed_avg / size.unsqueeze(1))


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8))
        self.vq = EMAQuantizer(16, 8)
        self.dec = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 64))

    def forward(self, x):
        q, commit = self.vq(self.enc(x))
        return self.dec(q), commit


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(6)
    ds = TensorDataset(torch.tensor(load_digits().data[:480] / 16).float())
    sampler = DistributedSampler(ds, shuffle=True, seed=6)
    loader = DataLoader(ds, batch_size=80 // world, sampler=sampler)
    model = DDP(VQVAE())
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step, (x,) in enumerate(loader):
        rec, commit = model(x)
        loss = F.mse_loss(rec, x) + 0.25 * commit
        opt.zero_grad()
        loss.backward()
        opt.step()
        avg = loss.detach().clone()
        dist.all_reduce(avg)
        if rank == 0:
            print(f"{step} {avg.item() / world:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
