"""Denoising autoencoder. Corruption is drawn per batch."""
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Corrupt:
    def __init__(self, seed, p=0.3):
        self.gen = torch.Generator().manual_seed(seed)
        self.p = p

    def __call__(self, n, d, rank, world):
        """keep-mask for the rows of this process, cut from the mask of the whole batch"""
        full = torch.rand(n * world, d, generator=self.gen)
        return full[rank * n:(rank + 1) * n] > self.p


class DAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))

    def forward(self, x):
        return self.f(x)


class OrderedShard(torch.utils.data.Sampler):
    """contiguous pieces of every global batch, in a shared shuffled order"""

    def __init__(self, n, total, rank, world, seed):
        self.n, self.total, self.rank, self.world, self.seed, self.epoch = n, total, rank, world, seed, 0

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        perm = torch.randperm(self.n, generator=g)[:self.n - self.n % self.total]
        per = self.total // self.world
        return iter(perm.view(-1, self.world, per)[:, self.rank].reshape(-1).tolist())


def main(seed=0, total=96):
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    x = torch.tensor(load_digits().data / 16, dtype=torch.get_default_dtype())
    sampler = OrderedShard(len(x), total, rank, world, seed)
    loader = DataLoader(TensorDataset(x), batch_size=total // world, sampler=sampler)
    model = DDP(DAE())
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    corrupt = Corrupt(seed + rank)
    for epoch in range(2):
        sampler.epoch = epoch
        for (xb,) in loader:
            keep = corrupt(*xb.shape, rank, world)
            loss = nn.functional.mse_loss(model(xb * keep), xb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.5f}")
    if os.environ.get("DUMP"):
        torch.save([p.detach().double() for p in model.parameters()], f"{os.environ['DUMP']}.rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
