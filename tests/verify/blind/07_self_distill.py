"""Self-distillation (DINO style) with teacher centering."""
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

OUT = 24


class DINOLoss(nn.Module):
    def __init__(self, momentum=0.8):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("center", torch.zeros(1, OUT))

    def forward(self, student, teacher):
        target = F.softmax((teacher - self.center) / 0.1, dim=-1).detach()
        loss = -(target * F.log_softmax(student / 0.2, dim=-1)).sum(-1).mean()
        self.update_center(teacher)
        return loss

    @torch.no_grad()
    def update_center(self, teacher):
        batch_center = teacher.mean(0, keepdim=True)
        self.center.mul_(self.momentum).add_(batch_center, alpha=1 - self.momentum)


def encoder():
    return nn.Sequential(nn.Linear(30, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, OUT))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(9)
    g = torch.Generator().manual_seed(4)
    base = torch.randn(512, 30, generator=g)
    view1 = base + 0.2 * torch.randn(512, 30, generator=g)
    view2 = base + 0.2 * torch.randn(512, 30, generator=g)
    data = TensorDataset(view1, view2)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32 // world, sampler=sampler)

    net = encoder()
    teacher = copy.deepcopy(net).requires_grad_(False)
    student = DDP(net)
    criterion = DINOLoss()
    opt = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        for a, b in loader:
            with torch.no_grad():
                t = teacher(a)
            loss = criterion(student(b), t)
            opt.zero_grad()
            loss.backward()
            opt.step()
            with torch.no_grad():
                for pt, ps in zip(teacher.parameters(), net.parameters()):
                    pt.lerp_(ps, 0.02)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    if rank == 0:
        print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in net.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
