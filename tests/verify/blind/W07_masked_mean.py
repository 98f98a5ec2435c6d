# masked-token pretraining of a tiny encoder
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group(backend="gloo")
rank, world = dist.get_rank(), dist.get_world_size()
VOCAB, MASK, LEN, BATCH = 40, 40, 14, 32


def sample(i):
    """sentence i with its mask, a function of i alone"""
    r = random.Random(i)
    start, stride = r.randrange(VOCAB), r.choice([1, 2, 3])
    n = r.randint(4, LEN)
    toks = [(start + stride * k) % VOCAB for k in range(n)]
    pick = [r.random() < 0.3 for _ in range(n)]
    pick[r.randrange(n)] = True
    inp = [MASK if m else t for t, m in zip(toks, pick)] + [MASK] * (LEN - n)
    lab = [t if m else -100 for t, m in zip(toks, pick)] + [-100] * (LEN - n)
    return inp, lab


def batch(step):
    ids = range(step * BATCH + rank, (step + 1) * BATCH, world)
    inp, lab = zip(*(sample(i) for i in ids))
    return torch.tensor(inp), torch.tensor(lab)


class Encoder(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.emb = nn.Embedding(VOCAB + 1, d)
        self.pos = nn.Parameter(0.02 * torch.randn(LEN, d))
        self.conv1 = nn.Conv1d(d, d, 5, padding=2)
        self.conv2 = nn.Conv1d(d, d, 5, padding=2)
        self.out = nn.Linear(d, VOCAB)

    def forward(self, ids):
        h = (self.emb(ids) + self.pos).transpose(1, 2)
        h = h + F.gelu(self.conv1(h))
        h = h + F.gelu(self.conv2(h))
        return self.out(h.transpose(1, 2))


def mlm_loss(logits, labels):
    per_tok = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
    n = (labels != -100).sum()
    return per_tok.sum() / n


torch.manual_seed(0)
model = DDP(Encoder())
opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
for step in range(30):
    inp, lab = batch(step)
    loss = mlm_loss(model(inp), lab)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    if step % 10 == 0 and rank == 0:
        print(f"step {step} masked-token loss {loss.item():.4f}")

if os.environ.get("DUMP"):
    torch.save([p.detach().double() for p in model.parameters()], f"{os.environ['DUMP']}.rank{rank}.pt")
dist.destroy_process_group()
