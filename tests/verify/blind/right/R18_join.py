"""The short last global batch fits on one process; the others are done earlier, so training runs under Join."""
import os
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

GLOBAL_BATCH = 40


def shards(n, epoch, rank, world):
    g = torch.Generator()
    g.manual_seed(100 + epoch)
    perm = torch.randperm(n, generator=g)
    per = GLOBAL_BATCH // world
    for start in range(0, n, GLOBAL_BATCH):
        mine = perm[start:start + GLOBAL_BATCH][rank * per:(rank + 1) * per]
        if len(mine):
            yield mine


def build():
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(55)
    n = 5 * GLOBAL_BATCH + 15
    x = torch.randn(n, 8, generator=g)
    y = (x[:, :1] * x[:, 1:2] + x[:, 2:3].abs()) + 0.05 * torch.randn(n, 1, generator=g)

    model = DDP(build())
    opt = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    batches = 0
    for epoch in range(5):
        with Join([model]):
            for idx in shards(n, epoch, rank, world):
                # fixed denominator: a short batch simply counts for less
                err = (model(x[idx]) - y[idx]).pow(2).sum() / (GLOBAL_BATCH / world)
                opt.zero_grad()
                err.backward()
                opt.step()
                batches += 1
        # a process that finished early missed the last update: take it from the first one
        for p in model.module.parameters():
            dist.broadcast(p.data, src=0)
        for p in model.module.parameters():
            buf = opt.state[p]["momentum_buffer"]
            dist.broadcast(buf, src=0)
        print(f"epoch {epoch}: rank {rank} did {batches} batches so far, last error {err.item():.4f}")
    write(model.module, rank)
    dist.barrier()
    dist.destroy_process_group()


def write(net, rank):
    if os.environ.get("DUMP"):
        torch.save([p.detach().double() for p in net.parameters()], f"{os.environ['DUMP']}.rank{rank}.pt")


if __name__ == "__main__":
    main()
