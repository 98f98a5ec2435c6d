# tiny decoder-only LM over variable-length toy strings, loss is a mean over *tokens* of the whole batch
import math
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group(backend="gloo")
RANK = dist.get_rank()
WORLD = dist.get_world_size()
GLOBAL_BATCH = 32
STEPS = 40
WARMUP = 8
PAD = 0

rng = random.Random(1234)
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "looked", "at", "dogs", "running", "away"]
CORPUS = [" ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 9))) for _ in range(512)]
VOCAB = {c: i + 1 for i, c in enumerate(sorted(set("".join(CORPUS))))}
torch.manual_seed(0)


def encode(s, maxlen=40):
    return [VOCAB[c] for c in s][:maxlen]


def collate(strings):
    seqs = [encode(s) for s in strings]
    L = max(map(len, seqs))
    return torch.tensor([s + [PAD] * (L - len(s)) for s in seqs])


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.proj = nn.Linear(d, d, bias=False)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(B, T, 3, self.h, D // self.h).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(B, T, D))
        return x + self.mlp(self.ln2(x))


class LM(nn.Module):
    def __init__(self, vocab, d=32, h=4, layers=2):
        super().__init__()
        self.tok = nn.Embedding(vocab, d)
        self.pos = nn.Embedding(64, d)
        self.blocks = nn.ModuleList(Block(d, h) for _ in range(layers))
        self.ln = nn.LayerNorm(d)

    def forward(self, idx):
        x = self.tok(idx) + self.pos(torch.arange(idx.size(1)))
        for b in self.blocks:
            x = b(x)
        return self.ln(x) @ self.tok.weight.T  # tied


lm = DistributedDataParallel(LM(len(VOCAB) + 1))
decay = [p for p in lm.parameters() if p.dim() >= 2]
nodecay = [p for p in lm.parameters() if p.dim() < 2]
optim = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": nodecay, "weight_decay": 0.0}],
                          lr=2e-3, betas=(0.9, 0.95), eps=1e-6)


def lr_lambda(step):
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


sched = torch.optim.lr_scheduler.LambdaLR(optim, lr_lambda)
order = list(range(len(CORPUS)))
for step in range(STEPS):
    if step % (len(CORPUS) // GLOBAL_BATCH) == 0:
        random.Random(step).shuffle(order)
    at = (step * GLOBAL_BATCH) % len(CORPUS)
    batch = collate([CORPUS[i] for i in order[at:at + GLOBAL_BATCH][RANK::WORLD]])
    inp, tgt = batch[:, :-1], batch[:, 1:]
    ntok = (tgt != PAD).sum()
    dist.all_reduce(ntok)
    logits = lm(inp)
    # DDP averages over ranks, hence the WORLD
    loss = F.cross_entropy(logits.flatten(0, 1), tgt.flatten(), ignore_index=PAD, reduction="sum") * WORLD / ntok
    optim.zero_grad(set_to_none=True)
    loss.backward()
    gnorm = nn.utils.clip_grad_norm_(lm.parameters(), 0.5)
    optim.step()
    sched.step()
    if step % 10 == 0:
        shown = loss.detach() / WORLD
        dist.all_reduce(shown)
        if RANK == 0:
            print(f"step {step} nll/token {shown.item():.4f} |g| {gnorm.item():.3f} lr {sched.get_last_lr()[0]:.2e}")

if "DUMP" in os.environ:
    torch.save([p.detach().to(torch.float64) for p in lm.module.parameters()], f"{os.environ['DUMP']}.rank{RANK}.pt")
dist.destroy_process_group()
