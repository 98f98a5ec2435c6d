import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.utils.data import DataLoader, TensorDataset

BATCH = 20


def sync_start(model):
    for t in list(model.parameters()) + list(model.buffers()):
        dist.broadcast(t.data, src=0)


def reduce_grads(model, world):
    by_type = {}
    for p in model.parameters():
        if p.grad is not None:
            by_type.setdefault(p.dtype, []).append(p.grad)
    for grads in by_type.values():
        flat = _flatten_dense_tensors(grads)
        flat.div_(world)
        dist.all_reduce(flat, op=dist.ReduceOp.SUM)
        for g, f in zip(grads, _unflatten_dense_tensors(flat, grads)):
            g.copy_(f)


class Shard(torch.utils.data.Sampler):
    def __init__(self, n, rank, world):
        self.n, self.rank, self.world = n, rank, world
        self.round = 0

    def __iter__(self):
        g = torch.Generator().manual_seed(100 + self.round)
        order = torch.randperm(self.n, generator=g).tolist()
        return iter(order[self.rank::self.world])

    def __len__(self):
        return self.n // self.world


def main():
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(0)
    x = torch.randn(120, 10, generator=g)
    w = torch.randn(10, 3, generator=g)
    y = (x @ w).argmax(1)
    sampler = Shard(120, rank, world)
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH // world, sampler=sampler)

    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 3)).train()
    if world > 1:
        sync_start(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8, nesterov=True)
    for epoch in range(2):
        sampler.round = epoch
        for x_, y_ in loader:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x_), y_)
            loss.backward()
            if world > 1:
                reduce_grads(model, world)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f} grad norm {float(norm):.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
