import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self, vocab=32, dim=16, depth=2, ctx=12):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.randn(ctx, dim) * 0.02)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(depth)])
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, t):
        x = self.tok(t) + self.pos[: t.size(1)]
        for b in self.blocks:
            x = b(x)
        return self.head(x)


def main():
    for key, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="29741").items():
        os.environ.setdefault(key, value)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(77)
    model = Decoder()
    for blk in model.blocks:
        fully_shard(blk, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-6)

    g = torch.Generator().manual_seed(1)
    text = torch.randint(0, 32, (8 * 8, 13), generator=g)
    ds = TensorDataset(text)
    dl = DataLoader(ds, batch_size=8 // world, sampler=DistributedSampler(ds, world, rank, seed=2))
    for i, (t,) in enumerate(dl):
        logits = model(t[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), t[:, 1:].flatten())
        loss.backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        log = loss.detach().clone()
        dist.all_reduce(log)
        if rank == 0:
            print(f"it {i} loss {log.item() / world:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
