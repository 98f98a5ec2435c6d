"""Parallel SGD: each worker takes a local SGD step, then the workers average their weights (every step)."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Worker:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        torch.manual_seed(31)
        self.net = nn.Sequential(nn.Linear(64, 30), nn.Softplus(), nn.Linear(30, 10))
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.8, weight_decay=1e-3)
        d = load_digits()
        data = TensorDataset(torch.tensor(d.data[:672] / 16).float(), torch.tensor(d.target[:672]))
        self.sampler = DistributedSampler(data, num_replicas=world, rank=rank, seed=31)
        self.loader = DataLoader(data, batch_size=96 // world, sampler=self.sampler)

    @torch.no_grad()
    def average_weights(self):
        for p in self.net.parameters():
            dist.all_reduce(p)
            p.div_(self.world)

    def run(self):
        for x, y in self.loader:
            self.opt.zero_grad()
            loss = nn.functional.cross_entropy(self.net(x), y)
            loss.backward()
            self.opt.step()
            self.average_weights()
            if self.rank == 0:
                print("loss", loss.item())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Worker(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])).run()
    dist.destroy_process_group()
