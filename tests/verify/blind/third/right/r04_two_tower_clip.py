"""CLIP-style training: left half of a digit image against the right half."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class GatherLayer(torch.autograd.Function):
    """all_gather whose backward brings the gradients home."""

    @staticmethod
    def forward(ctx, x):
        out = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        return tuple(out)

    @staticmethod
    def backward(ctx, *grads):
        g = torch.stack(grads)
        dist.all_reduce(g)
        return g[dist.get_rank()]


def tower(out_dim):
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, out_dim))


class TwoTower(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.left, self.right = tower(dim), tower(dim)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, a, b):
        za = F.normalize(self.left(a), dim=-1)
        zb = F.normalize(self.right(b), dim=-1)
        return za, zb, self.logit_scale.exp()


def clip_loss(za, zb, scale):
    za = torch.cat(GatherLayer.apply(za))
    zb = torch.cat(GatherLayer.apply(zb))
    logits = scale * za @ zb.t()
    target = torch.arange(len(za))
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--global-batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=2e-3)
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, ws = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)

    img = torch.tensor(load_digits().images[:384], dtype=torch.float32) / 16
    ds = TensorDataset(img[:, :, :4].flatten(1), img[:, :, 4:].flatten(1))
    sampler = DistributedSampler(ds, seed=11)
    dl = DataLoader(ds, a.global_batch // ws, sampler=sampler)

    model = DistributedDataParallel(TwoTower())
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=a.lr)
    for i, (l, r) in enumerate(dl):
        loss = clip_loss(*model(l, r))
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            model.module.logit_scale.clamp_(0, 4.6)
        if rank == 0:
            print(i, round(loss.item(), 5))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
