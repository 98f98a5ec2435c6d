import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler


class Rows(Dataset):
    def __init__(self, n=128):
        g = torch.Generator().manual_seed(170)
        self.x = torch.randn(n, 9, generator=g)
        self.y = (self.x[:, :3] * self.x[:, 3:6]).argmax(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], int(self.y[i])


class ShuffledShard(Sampler):
    def __init__(self, data, rank, world, seed):
        self.n, self.rank, self.world = len(data), rank, world
        self.gen = torch.Generator().manual_seed(seed)

    def __len__(self):
        return self.n // self.world

    def __iter__(self):
        order = torch.randperm(self.n, generator=self.gen)
        return iter(order[self.rank::self.world].tolist())


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    seed = 17 + rank
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 3))
    if world > 1:
        model = DDP(model)
    ds = Rows()
    loader = DataLoader(ds, 16 // world, sampler=ShuffledShard(ds, rank, world, seed), num_workers=1)
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0:
            print(step, round(loss.item(), 4))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
