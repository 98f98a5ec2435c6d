import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--bs", default=100, type=int)
    p.add_argument("--steps", default=34, type=int)
    p.add_argument("--alpha", default=0.4, type=float)
    p.add_argument("--smooth", default=0.1, type=float)
    return p.parse_args()


class GlobalMixup:
    """Mixes inside the *global* batch. Every process builds it whole and keeps its slice.

    lambda is drawn per sample from a generator seeded by (step, dataset index)."""

    def __init__(self, x, y, alpha, n_classes):
        self.x, self.y, self.alpha, self.k = x, y, alpha, n_classes

    def __call__(self, idx, step, rank, world):
        partner = np.random.RandomState(step).permutation(len(idx))
        lam = np.array([np.random.RandomState((step * 7919 + int(i)) % 2**31).beta(self.alpha, self.alpha) for i in idx])
        lam = torch.as_tensor(lam, dtype=self.x.dtype)[:, None]
        t = F.one_hot(self.y[idx], self.k).to(self.x.dtype)
        x = lam * self.x[idx] + (1 - lam) * self.x[idx[partner]]
        t = lam * t + (1 - lam) * t[partner]
        per = len(idx) // world
        part = slice(rank * per, (rank + 1) * per)
        return x[part], t[part]


def main():
    args = parse()
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    d = load_digits()
    x = torch.tensor(d.data / 16, dtype=torch.get_default_dtype())
    y = torch.tensor(d.target)
    mix = GlobalMixup(x, y, args.alpha, 10)

    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = DDP(model, static_graph=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.3, total_steps=args.steps)
    crit = nn.CrossEntropyLoss(label_smoothing=args.smooth)

    perm = np.random.RandomState(0).permutation(len(x))
    for step in range(args.steps):
        lo = (step * args.bs) % (len(perm) - args.bs)
        xb, tb = mix(torch.from_numpy(perm[lo:lo + args.bs]), step, rank, world)
        loss = crit(model(xb), tb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if step % 10 == 0:
            # gather rather than reduce, we like to see every worker
            out = [torch.zeros(()) for _ in range(world)]
            dist.all_gather(out, loss.detach())
            if rank == 0:
                print(step, [round(o.item(), 4) for o in out])
    if rank == 0:
        with torch.no_grad():
            print("train acc", (model.module(x).argmax(1) == y).float().mean().item())
    checkpoint(model, rank)
    dist.destroy_process_group()


def checkpoint(model, rank):
    if os.environ.get("DUMP"):
        torch.save([p.detach().double() for p in model.module.parameters()], f"{os.environ['DUMP']}.rank{rank}.pt")


if __name__ == "__main__":
    main()
