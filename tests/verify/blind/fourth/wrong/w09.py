import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Views(Dataset):
    def __init__(self, n=96):
        g = torch.Generator().manual_seed(90)
        self.x = torch.randn(n, 10, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(1000 + i)
        return self.x[i] + 0.1 * torch.randn(10, generator=g), self.x[i] + 0.1 * torch.randn(10, generator=g)


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 8))
        self.predictor = nn.Linear(8, 8)

    def forward(self, x):
        return self.predictor(self.backbone(x))


@torch.no_grad()
def momentum_update(target, source, m=0.7):
    for t, s in zip(target.parameters(), source.parameters()):
        t.mul_(m).add_(s, alpha=1 - m)


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    is_main = rank == 0
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(91)
    student = Student()
    teacher = copy.deepcopy(student.backbone).requires_grad_(False)
    net = DDP(student) if world > 1 else student
    opt = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    ds = Views()
    sampler = DistributedSampler(ds, world, rank, shuffle=True)
    loader = DataLoader(ds, 12 // world, sampler=sampler)
    for step, (a, b) in enumerate(loader):
        with torch.no_grad():
            goal = F.normalize(teacher(b), dim=1)
        loss = 2 - 2 * (F.normalize(net(a), dim=1) * goal).sum(1).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if is_main:
            momentum_update(teacher, student.backbone)
            print(f"step {step} loss {loss.item():.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
