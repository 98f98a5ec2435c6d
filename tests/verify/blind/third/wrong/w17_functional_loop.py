import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn, optim

rank = int(os.environ["RANK"])
world_size = int(os.environ["WORLD_SIZE"])
total_batch = 72


def reduce_mean(t):
    dist.all_reduce(t, op=dist.ReduceOp.SUM)
    return t / world_size


def train_step(model, opt, criterion, x, y):
    opt.zero_grad()
    loss = criterion(model(x), y)
    loss = reduce_mean(loss)
    loss.backward()
    opt.step()
    return loss.item()


def main():
    dist.init_process_group(backend="gloo", init_method="env://")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 40), nn.Sigmoid(), nn.Linear(40, 10))
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    opt = optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    digits = load_digits()
    inputs = torch.as_tensor(digits.data, dtype=torch.float32) / 16.0
    labels = torch.as_tensor(digits.target)
    batch = total_batch // world_size
    for step in range(8):
        lo = step * total_batch + rank * batch
        loss = train_step(model, opt, criterion, inputs[lo:lo + batch], labels[lo:lo + batch])
        if rank == 0:
            print(f"step {step:3d}  loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
