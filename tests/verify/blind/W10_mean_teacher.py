"""Semi-supervised mean teacher on the moons data."""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_moons
from torch.nn.parallel import DistributedDataParallel as DDP


class MeanTeacher:
    def __init__(self, student, decay=0.9):
        self.net = copy.deepcopy(student)
        self.net.requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, student):
        for t, s in zip(self.net.parameters(), student.parameters()):
            t.mul_(self.decay).add_(s, alpha=1 - self.decay)

    @torch.no_grad()
    def soft_targets(self, x):
        return F.softmax(self.net(x) / 0.5, dim=-1)


def data(n=1200):
    x, y = make_moons(n, noise=0.15, random_state=0)
    x, y = torch.tensor(x, dtype=torch.get_default_dtype()), torch.tensor(y)
    labelled = torch.arange(n) % 6 == 0
    return x, y, labelled


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y, labelled = data()
    xl, yl, xu = x[labelled], y[labelled], x[~labelled]          # 200 / 1000
    torch.manual_seed(1)
    student = DDP(nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)))
    teacher = MeanTeacher(student.module)
    opt = torch.optim.Adam(student.parameters(), lr=5e-3)

    n_l, n_u = 20, 100
    for step in range(40):
        il = (torch.arange(n_l) + step * n_l)[rank::world] % len(xl)
        iu = (torch.arange(n_u) + step * n_u)[rank::world] % len(xu)
        g = torch.Generator().manual_seed(step)
        jitter = 0.1 * torch.randn(n_u, 2, generator=g)[rank::world]
        out = student(torch.cat([xl[il], xu[iu] + jitter]))
        sup = F.cross_entropy(out[:len(il)], yl[il])
        cons = F.kl_div(F.log_softmax(out[len(il):], -1), teacher.soft_targets(xu[iu]), reduction="batchmean")
        loss = sup + min(1.0, step / 15) * cons
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0:
            teacher.update(student.module)
            if step % 10 == 0:
                acc = (teacher.net(x).argmax(1) == y).double().mean().item()
                print(f"step {step} sup {sup.item():.4f} cons {cons.item():.4f} teacher acc {acc:.3f}")
    keep(student.module, rank)
    dist.destroy_process_group()


def keep(net, rank):
    if os.environ.get("DUMP"):
        torch.save([p.detach().double() for p in net.parameters()], f"{os.environ['DUMP']}.rank{rank}.pt")


if __name__ == "__main__":
    main()
