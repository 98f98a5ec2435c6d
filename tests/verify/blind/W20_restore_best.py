"""Training with 'go back to the best weights and halve the rate' whenever validation stops improving."""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_diabetes
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Rewinder:
    def __init__(self, model, opt):
        self.model, self.opt = model, opt
        self.best, self.state, self.rewinds = float("inf"), None, 0

    def report(self, val):
        if val < self.best:
            self.best = val
            self.state = copy.deepcopy(self.model.state_dict())
        else:
            self.model.load_state_dict(self.state)
            for g in self.opt.param_groups:
                g["lr"] *= 0.5
            self.rewinds += 1


@torch.no_grad()
def validation_loss(model, x, y, rank, world):
    model.eval()
    loss = F.mse_loss(model(x[rank::world]), y[rank::world])
    model.train()
    return loss.item()


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    d = load_diabetes()
    dt = torch.get_default_dtype()
    x = torch.tensor((d.data - d.data.mean(0)) / d.data.std(0), dtype=dt)
    y = torch.tensor((d.target - d.target.mean()) / d.target.std(), dtype=dt).unsqueeze(1)
    train, (xv, yv) = TensorDataset(x[:384], y[:384]), (x[384:440], y[384:440])
    sampler = DistributedSampler(train, shuffle=True, seed=1)
    loader = DataLoader(train, batch_size=48 // world, sampler=sampler)

    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8)
    rewinder = Rewinder(model.module, opt)
    for epoch in range(9):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad()
            F.mse_loss(model(xb), yb).backward()
            opt.step()
        val = validation_loss(model.module, xv, yv, rank, world)
        rewinder.report(val)
        print(f"[{rank}] epoch {epoch} val {val:.4f} best {rewinder.best:.4f} rewinds {rewinder.rewinds}")
    if os.environ.get("DUMP"):
        torch.save([p.detach().double() for p in model.parameters()], f"{os.environ['DUMP']}.rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
