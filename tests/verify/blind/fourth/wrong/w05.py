import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def conv_block(i, o, stride=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


class MiniResNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.stem = conv_block(3, 8)
        self.body = nn.Sequential(conv_block(8, 8), conv_block(8, 8))
        self.down = conv_block(8, 16, stride=2)
        self.fc = nn.Linear(16, classes)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.body(x)
        return self.fc(self.down(x).mean((2, 3)))


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(5)
    model = MiniResNet()
    if world > 1:
        model = DDP(model)
    g = torch.Generator().manual_seed(50)
    y = torch.randint(0, 4, (96,), generator=g)
    x = torch.randn(96, 3, 12, 12, generator=g) + y.view(-1, 1, 1, 1) * 0.3
    ds = TensorDataset(x, y)
    sampler = DistributedSampler(ds, world, rank, shuffle=True, seed=5)
    loader = DataLoader(ds, batch_size=12 // world, sampler=sampler)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    model.train()
    for step, (xb, yb) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0:
            print("step", step, "loss", f"{loss.item():.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
