import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Codebook(nn.Module):
    def __init__(self, k=6, d=4, decay=0.8):
        super().__init__()
        self.decay = decay
        self.register_buffer("codes", torch.randn(k, d))
        self.register_buffer("count", torch.ones(k))
        self.register_buffer("total", self.codes.clone())

    def forward(self, z):
        idx = torch.cdist(z, self.codes).argmin(1)
        q = self.codes[idx]
        if self.training:
            with torch.no_grad():
                onehot = F.one_hot(idx, len(self.codes)).float()
                self.count.mul_(self.decay).add_(onehot.sum(0), alpha=1 - self.decay)
                self.total.mul_(self.decay).add_(onehot.t() @ z, alpha=1 - self.decay)
                self.codes.copy_(self.total / self.count.clamp(min=0.1).unsqueeze(1))
        commit = F.mse_loss(z, q.detach())
        return z + (q - z).detach(), commit


class VQ(nn.Module):
    def __init__(self, d=10):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d, 16), nn.ReLU(), nn.Linear(16, 4))
        self.book = Codebook()
        self.dec = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, d))

    def forward(self, x):
        q, commit = self.book(self.enc(x))
        return self.dec(q), commit


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(160)
    model = VQ()
    if world > 1:
        model = DDP(model)
    g = torch.Generator().manual_seed(161)
    ds = TensorDataset(torch.randn(128, 10, generator=g))
    loader = DataLoader(ds, 16 // world, sampler=DistributedSampler(ds, world, rank, shuffle=False))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x,) in enumerate(loader):
        rec, commit = model(x)
        loss = F.mse_loss(rec, x) + 0.25 * commit
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0:
            print(step, f"loss {loss.item():.4f} commit {commit.item():.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
