import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class HP:
    batch: int = 64
    lr: float = 0.05
    iters: int = 26
    ch: int = 8


class ConvBlock(nn.Module):
    def __init__(self, i, o, stride, norm):
        super().__init__()
        self.conv = nn.Conv2d(i, o, 3, stride, 1, bias=False)
        self.norm = norm(o)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)))


class SmallResNet(nn.Module):
    def __init__(self, ch, norm=nn.BatchNorm2d):
        super().__init__()
        self.stem = ConvBlock(1, ch, 1, norm)
        self.b1 = ConvBlock(ch, ch, 1, norm)
        self.b2 = ConvBlock(ch, 2 * ch, 2, norm)
        self.fc = nn.Linear(2 * ch, 10)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.b1(x)
        return self.fc(self.b2(x).mean((2, 3)))


class Trainer:
    def __init__(self, hp):
        self.hp = hp
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(3)
        self.model = DDP(SmallResNet(hp.ch))
        self.opt = torch.optim.SGD(self.model.parameters(), lr=hp.lr, momentum=0.9, weight_decay=1e-4)
        d = load_digits()
        self.x = torch.tensor(d.images / 16, dtype=torch.get_default_dtype())[:, None]
        self.y = torch.tensor(d.target)
        self.gen = torch.Generator().manual_seed(0)

    def batch(self):
        idx = torch.randint(0, len(self.x), (self.hp.batch,), generator=self.gen)
        idx = idx[self.rank::self.world]
        return self.x[idx], self.y[idx]

    def train(self):
        for i in range(self.hp.iters):
            x, y = self.batch()
            loss = nn.functional.cross_entropy(self.model(x), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            if i % 5 == 0:
                avg = loss.detach().clone()
                dist.all_reduce(avg)
                if self.rank == 0:
                    print(f"iter {i} loss {avg.item() / self.world:.4f}")

    def dump(self):
        if os.environ.get("DUMP"):
            w = [p.detach().double() for p in self.model.module.parameters()]
            torch.save(w, f"{os.environ['DUMP']}.rank{self.rank}.pt")


if __name__ == "__main__":
    dist.init_process_group(backend="gloo")
    t = Trainer(HP())
    t.train()
    t.dump()
    dist.destroy_process_group()
