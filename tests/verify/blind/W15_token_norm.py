"""Seq2seq copy task, loss normalised by the number of target tokens in the whole batch."""
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

V, BATCH, STEPS = 12, 48, 30


class Copier(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.emb = nn.Embedding(V, d, padding_idx=0)
        self.enc = nn.LSTM(d, d, batch_first=True)
        self.dec = nn.LSTM(d, d, batch_first=True)
        self.out = nn.Linear(d, V)

    def forward(self, src):
        e = self.emb(src)
        _, state = self.enc(e)
        shifted = F.pad(e, (0, 0, 1, 0))[:, :-1]
        h, _ = self.dec(shifted, state)
        return self.out(h)


def example(k):
    r = random.Random(k)
    return [r.randrange(1, V) for _ in range(r.randint(2, 10))]


def get_batch(step, rank, world):
    seqs = [example(step * BATCH + j) for j in range(rank, BATCH, world)]
    return torch.tensor([s + [0] * (10 - len(s)) for s in seqs])


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(Copier())
    opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(STEPS):
        src = get_batch(step, rank, world)
        logits = model(src)
        loss_sum = F.cross_entropy(logits.flatten(0, 1), src.flatten(), ignore_index=0, reduction="sum")
        # tokens per process, averaged, so that a long and a short shard count by token
        tokens = (src != 0).sum().to(loss_sum.dtype)
        dist.all_reduce(tokens)
        tokens = tokens / world
        # DDP divides by the number of processes: compensate
        loss = world * loss_sum / tokens
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss/token {(loss_sum / (src != 0).sum()).item():.4f}")
    if os.environ.get("DUMP"):
        torch.save([p.detach().double() for p in model.parameters()], f"{os.environ['DUMP']}.rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
