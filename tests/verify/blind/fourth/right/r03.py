import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

MICRO_GLOBAL = 8
ACCUM = 3


class Curve(Dataset):
    def __init__(self, n=8 * 20):
        g = torch.Generator().manual_seed(5)
        self.x = torch.rand(n, 4, generator=g) * 4 - 2
        self.y = torch.sin(self.x).sum(1, keepdim=True) + 0.05 * torch.randn(n, 1, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, idx):
        return self.x[idx], self.y[idx]


def train():
    distributed = "WORLD_SIZE" in os.environ and int(os.environ["WORLD_SIZE"]) > 1
    if distributed:
        dist.init_process_group(backend="gloo", init_method="env://")
    rank = dist.get_rank() if distributed else 0
    world = dist.get_world_size() if distributed else 1

    torch.manual_seed(42)
    net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    if distributed:
        net = DDP(net)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3, eps=1e-6)
    ds = Curve()
    sampler = DistributedSampler(ds, world, rank, shuffle=True, seed=1, drop_last=True)
    loader = DataLoader(ds, MICRO_GLOBAL // world, sampler=sampler)
    n_micro = len(loader)

    opt.zero_grad()
    done = 0
    window = 0.0
    for i, (x, y) in enumerate(loader):
        last = i + 1 == n_micro
        boundary = (i + 1) % ACCUM == 0 or last
        size = ACCUM if i < n_micro - n_micro % ACCUM else n_micro % ACCUM
        ctx = net.no_sync() if distributed and not boundary else contextlib.nullcontext()
        with ctx:
            loss = nn.functional.mse_loss(net(x), y) / size
            loss.backward()
        window += loss.item()
        if boundary:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            done += 1
            if rank == 0:
                print("update", done, "loss on this rank", round(window, 4))
            window = 0.0
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    train()
