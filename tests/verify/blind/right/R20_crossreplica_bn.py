"""CPU-friendly cross-replica batch norm, plus input statistics and class weights computed over all shards."""
import os
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dfn
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class CrossReplicaBN(nn.Module):
    def __init__(self, c, eps=1e-3, momentum=0.1):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(c)), nn.Parameter(torch.zeros(c))
        self.register_buffer("running_mean", torch.zeros(c))
        self.register_buffer("running_var", torch.ones(c))
        self.eps, self.momentum = eps, momentum

    def forward(self, x):
        if self.training:
            c = x.shape[1]
            packed = torch.cat([x.sum(0), x.pow(2).sum(0), x.new_tensor([float(len(x))])])
            packed = dfn.all_reduce(packed)
            n = packed[-1].detach()
            mean = packed[:c] / n
            var = packed[c:2 * c] / n - mean.pow(2)
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(var * n / (n - 1), self.momentum)
        else:
            mean, var = self.running_mean, self.running_var
        return (x - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias


def local_rows(rank, world, n=1000):
    """each process only ever loads its rows; row i is the same whoever loads it"""
    rows, labels = [], []
    for i in range(rank, n, world):
        g = torch.Generator().manual_seed(i)
        lab = int(torch.multinomial(torch.tensor([0.6, 0.3, 0.1]), 1, generator=g))
        rows.append(torch.randn(6, generator=g) * torch.tensor([1.0, 5, 0.2, 1, 3, 1]) + lab * 0.8)
        labels.append(lab)
    return torch.stack(rows), torch.tensor(labels)


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = local_rows(rank, world)

    # global mean / std from sums
    stats = torch.stack([torch.full((6,), float(len(x))), x.sum(0), x.pow(2).sum(0)]).double()
    dist.all_reduce(stats)
    mean = stats[1] / stats[0]
    std = (stats[2] / stats[0] - mean ** 2).sqrt()
    x = ((x - mean) / std).to(x.dtype)
    counts = torch.bincount(y, minlength=3)
    dist.all_reduce(counts)
    cw = (counts.sum() / (3 * counts)).to(x.dtype)

    torch.manual_seed(77)
    model = DDP(nn.Sequential(nn.Linear(6, 24, bias=False), CrossReplicaBN(24), nn.ReLU(),
                              nn.Linear(24, 24, bias=False), CrossReplicaBN(24), nn.ReLU(), nn.Linear(24, 3)))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    per = 100 // world
    for step in range(30):
        lo = (step * per) % len(x)
        xb, yb = x[lo:lo + per], y[lo:lo + per]
        denom = cw[yb].sum()
        dist.all_reduce(denom)
        loss = F.cross_entropy(model(xb), yb, weight=cw, reduction="sum") * world / denom
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 0 and rank == 0:
            print(f"step {step}: {loss.item():.4f}")
    model.eval()
    if rank == 0:
        with torch.no_grad():
            print("rank 0 rows, accuracy", (model.module(x).argmax(1) == y).double().mean().item())
    if os.environ.get("DUMP"):
        keep = list(model.module.parameters()) + list(model.module.buffers())
        torch.save([t.detach().double() for t in keep], f"{os.environ['DUMP']}.rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
