# mixture density network; the module knows its own loss
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class MDN(nn.Module):
    def __init__(self, k=4, hidden=32):
        super().__init__()
        self.k = k
        self.trunk = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.params = nn.Linear(hidden, 3 * k)

    def forward(self, x):
        logit, mu, logsig = self.params(self.trunk(x)).chunk(3, dim=1)
        return logit.log_softmax(1), mu, logsig.clamp(-3, 3)

    def training_loss(self, x, y):
        logpi, mu, logsig = self(x)
        logn = -0.5 * ((y - mu) / logsig.exp()) ** 2 - logsig - 0.5 * math.log(2 * math.pi)
        return -torch.logsumexp(logpi + logn, dim=1).mean()


def toy(n=1024):
    g = torch.Generator().manual_seed(7)
    t = torch.rand(n, 1, generator=g) * 2 - 1
    x = t + 0.3 * torch.sin(2 * math.pi * t) + 0.05 * torch.randn(n, 1, generator=g)
    return TensorDataset(x, t)


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    ds = toy()
    sampler = DistributedSampler(ds, shuffle=True, seed=0)
    loader = DataLoader(ds, batch_size=128 // world, sampler=sampler)
    model = DDP(MDN())
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for x, y in loader:
            opt.zero_grad()
            loss = model.module.training_loss(x, y)
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} nll {total.item() / world / len(loader):.4f}")
    archive(model.module.parameters(), rank)
    dist.destroy_process_group()


def archive(params, rank):
    if os.environ.get("DUMP"):
        torch.save([p.detach().double() for p in params], f"{os.environ['DUMP']}.rank{rank}.pt")


if __name__ == "__main__":
    main()
