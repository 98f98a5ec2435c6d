import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class DigitStream(IterableDataset):
    """Streams the records in a fixed shuffled order, split over the loader workers."""

    def __init__(self, limit):
        d = load_digits()
        self.x = torch.tensor(d.data / 16).float()
        self.y = torch.tensor(d.target)
        self.order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(0))[:limit]

    def __iter__(self):
        info = get_worker_info()
        worker, n = (info.id, info.num_workers) if info is not None else (0, 1)
        for i in self.order[worker::n].tolist():
            yield self.x[i], self.y[i]


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(1)
    global_batch, steps = 64, 6
    loader = DataLoader(DigitStream(global_batch * steps), batch_size=global_batch // world)
    model = DDP(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step, (x, y) in enumerate(loader):
        if step == steps:
            break
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0:
            print(step, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
