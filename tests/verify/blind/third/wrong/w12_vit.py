"""Tiny ViT on 8x8 digits."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TinyViT(nn.Module):
    def __init__(self, dim=32, depth=2):
        super().__init__()
        self.patch = nn.Conv2d(1, dim, 2, stride=2)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.randn(1, 17, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, activation="gelu", batch_first=True)
        self.enc = nn.TransformerEncoder(layer, depth)
        self.head = nn.Linear(dim, 10)

    def forward(self, x):
        t = self.patch(x).flatten(2).transpose(1, 2)
        t = torch.cat([self.cls.expand(len(t), -1, -1), t], 1) + self.pos
        return self.head(self.enc(t)[:, 0])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--global-batch-size", type=int, default=64)
    ap.add_argument("--base-lr", type=float, default=0.02)
    ap.add_argument("--warmup", type=int, default=2)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(99)
    d = load_digits()
    ds = TensorDataset(torch.tensor(d.images[:384]).float()[:, None] / 16, torch.tensor(d.target[:384]))
    sampler = DistributedSampler(ds, shuffle=True, seed=99)
    loader = DataLoader(ds, args.global_batch_size // world_size, sampler=sampler)
    model = DDP(TinyViT())
    lr = args.base_lr * world_size
    opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.LinearLR(opt, start_factor=0.5, total_iters=args.warmup)
    for it, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        loss = loss.detach()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"it {it} loss {loss.item() / world_size:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
