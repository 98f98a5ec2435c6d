"""SyncBatchNorm needs a GPU, so here is a small one that works on gloo."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class AllSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        t = t.clone()
        dist.all_reduce(t)
        return t

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g


class GlobalBatchNorm(nn.Module):
    def __init__(self, c, eps=1e-5, momentum=0.1):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(c)), nn.Parameter(torch.zeros(c))
        self.register_buffer("running_mean", torch.zeros(c))
        self.register_buffer("running_var", torch.ones(c))
        self.eps, self.momentum = eps, momentum

    def forward(self, x):
        dims = [0, 2, 3] if x.dim() == 4 else [0]
        shape = [1, -1] + [1] * (x.dim() - 2)
        if self.training:
            n_local = x.numel() / x.shape[1]
            packed = torch.cat([x.sum(dims), x.new_tensor([n_local])])
            packed = AllSum.apply(packed)
            n = packed[-1].detach()
            mean = packed[:-1] / n
            var = AllSum.apply((x - mean.view(shape)).pow(2).sum(dims)) / n
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(var * n / (n - 1), self.momentum)
        else:
            mean, var = self.running_mean, self.running_var
        x = (x - mean.view(shape)) * torch.rsqrt(var.view(shape) + self.eps)
        return x * self.weight.view(shape) + self.bias.view(shape)


def build():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), GlobalBatchNorm(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False), GlobalBatchNorm(8), nn.ReLU(),
        nn.Flatten(), nn.Linear(128, 32, bias=False), GlobalBatchNorm(32), nn.ReLU(), nn.Linear(32, 10))


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(3)
    d = load_digits()
    ds = TensorDataset(torch.tensor(d.images[:320]).float().unsqueeze(1) / 16, torch.tensor(d.target[:320]))
    dl = DataLoader(ds, batch_size=64 // world, sampler=DistributedSampler(ds, seed=3))
    model = DDP(build(), broadcast_buffers=False)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for x, y in dl:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        if rank == 0:
            print(f"{loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        acc = (model.module(ds.tensors[0]).argmax(1) == ds.tensors[1]).float().mean()
    if rank == 0:
        print("train accuracy", acc.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
