import argparse
import random

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        x = torch.relu(self.conv1(x))
        x = nn.functional.max_pool2d(torch.relu(self.conv2(x)), 2)
        return self.fc(x.flatten(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--bs", type=int, default=64, help="global batch size")
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    set_seed(args.seed + rank)

    d = load_digits()
    ds = TensorDataset(torch.tensor(d.images[:384]).float().unsqueeze(1) / 16, torch.tensor(d.target[:384]))
    sampler = DistributedSampler(ds, num_replicas=world, rank=rank, seed=args.seed)
    loader = DataLoader(ds, batch_size=args.bs // world, sampler=sampler)
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.5)

    for i, (x, y) in enumerate(loader):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        average_gradients(model)
        opt.step()
        if rank == 0:
            print(f"iteration {i} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
