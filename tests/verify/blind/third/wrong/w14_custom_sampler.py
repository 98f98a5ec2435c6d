import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_diabetes
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


class ShardedRandomSampler(Sampler):
    """Shuffles the data set every epoch and hands this rank its share."""

    def __init__(self, data_source, rank, world_size, seed=0):
        self.n = len(data_source)
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.n // self.world_size

    def __iter__(self):
        g = torch.Generator()
        g.manual_seed(self.seed + self.epoch + self.rank)
        order = torch.randperm(self.n, generator=g)
        order = order[: len(self) * self.world_size]
        return iter(order[self.rank :: self.world_size].tolist())


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    X, y = load_diabetes(return_X_y=True, scaled=True)
    X, y = torch.tensor(X[:440] * 20).float(), torch.tensor((y[:440] - 152) / 77).float()
    ds = TensorDataset(X, y)
    sampler = ShardedRandomSampler(ds, rank, world, seed=1234)
    loader = DataLoader(ds, batch_size=110 // world, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = nn.functional.mse_loss(model(xb).squeeze(1), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} mse {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
