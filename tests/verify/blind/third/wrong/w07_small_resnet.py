import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def conv_bn(cin, cout, stride=1):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout))


class BasicBlock(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.a, self.b = conv_bn(cin, cout, stride), conv_bn(cout, cout)
        self.skip = nn.Identity() if stride == 1 and cin == cout else conv_bn(cin, cout, stride)

    def forward(self, x):
        return torch.relu(self.b(torch.relu(self.a(x))) + self.skip(x))


class SmallResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = conv_bn(1, 8)
        self.blocks = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 16, 2))
        self.fc = nn.Linear(16, 10)

    def forward(self, x):
        x = self.blocks(torch.relu(self.stem(x)))
        return self.fc(x.mean((2, 3)))


def main(args):
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(args.seed)
    d = load_digits()
    ds = TensorDataset(torch.tensor(d.images[:240], dtype=torch.float32)[:, None] / 16, torch.tensor(d.target[:240]))
    sampler = DistributedSampler(ds, seed=args.seed)
    loader = DataLoader(ds, batch_size=args.batch_size // world, sampler=sampler, drop_last=True)
    model = DDP(SmallResNet())
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs * len(loader))
    ce = nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            loss = ce(model(x), y)
            loss.backward()
            opt.step()
            sched.step()
            loss = loss.detach()
            dist.all_reduce(loss)
            if os.environ["RANK"] == "0":
                print(f"epoch {epoch} loss {loss.item() / world:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--batch-size", type=int, default=48, help="total over all processes")
    p.add_argument("--epochs", type=int, default=1)
    p.add_argument("--seed", type=int, default=10)
    main(p.parse_args())
