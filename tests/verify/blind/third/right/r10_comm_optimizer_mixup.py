"""The optimizer does the communication, the way Horovod's DistributedOptimizer does. Mixup on the global batch."""
import argparse

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class DistributedLion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            ps = [p for p in group["params"] if p.grad is not None]
            for p in ps:
                g = p.grad.clone()
                dist.all_reduce(g)
                g /= dist.get_world_size()
                st = self.state[p]
                if "m" not in st:
                    st["m"] = torch.zeros_like(p)
                update = st["m"] * b1 + g * (1 - b1)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                # smooth form of sign(): tiny updates keep their size
                p.add_(torch.tanh(update * 50), alpha=-group["lr"])
                st["m"].mul_(b2).add_(g, alpha=1 - b2)


def mixup(x, y, alpha, rng):
    lam = rng.beta(alpha, alpha)
    perm = torch.from_numpy(rng.permutation(len(x)))
    return lam * x + (1 - lam) * x[perm], lam * y + (1 - lam) * y[perm]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch", default=100, type=int, help="over all processes")
    ap.add_argument("--steps", default=7, type=int)
    opts = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    data = load_digits()
    X = torch.tensor(data.data / 16, dtype=torch.float32)
    Y = F.one_hot(torch.tensor(data.target), 10).float()
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
    opt = DistributedLion(model.parameters(), lr=5e-3, weight_decay=0.1)
    rng = np.random.default_rng(0)
    per = opts.batch // world

    for step in range(opts.steps):
        idx = torch.from_numpy(rng.integers(0, len(X), opts.batch))
        xb, yb = mixup(X[idx], Y[idx], 0.4, rng)
        xb, yb = xb[rank * per:(rank + 1) * per], yb[rank * per:(rank + 1) * per]
        model.zero_grad()
        loss = -(yb * F.log_softmax(model(xb), -1)).sum(-1).mean()
        loss.backward()
        opt.step()
        if rank == 0:
            print("step", step, "local loss", round(loss.item(), 4))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
