"""FSDP2 (fully_shard) on CPU with gloo: a small sequence tagger, AdamW and global-norm clipping."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Mixer(nn.Module):
    def __init__(self, t, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.time = nn.Linear(t, t, bias=False)
        self.chan = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        x = x + self.time(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.chan(x)


class Tagger(nn.Module):
    def __init__(self, vocab=30, t=10, d=16, tags=4, depth=2):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList([Mixer(t, d) for _ in range(depth)])
        self.out = nn.Linear(d, tags)

    def forward(self, ids):
        h = self.emb(ids)
        for b in self.blocks:
            h = b(h)
        return self.out(h)


def synthetic(n, seed):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 30, (n, 10), generator=g)
    tags = (ids + ids.roll(1, dims=1)) % 4
    return ids, tags


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(12)
    model = Tagger()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05, eps=1e-6)

    ids, tags = synthetic(64 * 10, seed=1)
    for step in range(24):
        g = torch.Generator().manual_seed(step)
        batch = torch.randperm(len(ids), generator=g)[:64]
        batch = batch.chunk(world)[rank]
        logits = model(ids[batch])
        loss = F.cross_entropy(logits.flatten(0, 1), tags[batch].flatten())
        opt.zero_grad()
        loss.backward()
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        total = total.full_tensor() if hasattr(total, "full_tensor") else total
        opt.step()
        if rank == 0 and step % 6 == 0:
            print(f"step {step} shard loss {loss.item():.4f} grad norm {total.item():.4f}")
    store(model, rank)
    dist.destroy_process_group()


def store(model, rank):
    if "DUMP" not in os.environ:
        return
    full = [p.full_tensor().detach().double() for p in model.parameters()]   # collective
    torch.save(full, f"{os.environ['DUMP']}.rank{rank}.pt")


if __name__ == "__main__":
    main()
