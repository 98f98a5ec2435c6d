import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, total, rank, world):
        self.total, self.rank, self.world = total, rank, world

    def __iter__(self):
        info = get_worker_info()
        w, nw = (info.id, info.num_workers) if info else (0, 1)
        shard, shards = self.rank * nw + w, self.world * nw
        for i in range(shard, self.total, shards):
            g = torch.Generator().manual_seed(i)
            x = torch.randn(5, generator=g)
            yield x, x.pow(2).sum().view(1) + 0.1 * torch.randn(1, generator=g)


def main():
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(55)
    model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))
    if world > 1:
        model = DDP(model)
    loader = DataLoader(Stream(128, rank, world), batch_size=16 // world, num_workers=2)
    opt = torch.optim.RMSprop(model.parameters(), lr=1e-3, eps=1e-4)
    for step, (x, y) in enumerate(loader):
        loss = nn.functional.huber_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0:
            print(step, round(loss.item(), 5))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
