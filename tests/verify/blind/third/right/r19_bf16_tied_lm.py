import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

TEXT = (
    "it was the best of times, it was the worst of times, it was the age of wisdom, it was the age of "
    "foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of light, "
    "it was the season of darkness, it was the spring of hope, it was the winter of despair, we had everything "
    "before us, we had nothing before us, we were all going direct to heaven, we were all going direct the other way. "
)
CTX = 24


def dataset():
    chars = sorted(set(TEXT))
    lut = {c: i for i, c in enumerate(chars)}
    ids = torch.tensor([lut[c] for c in TEXT])
    windows = ids.unfold(0, CTX + 1, 2)[:160]
    return TensorDataset(windows[:, :-1].clone(), windows[:, 1:].clone()), len(chars)


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.att = nn.MultiheadAttention(d, 2, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        mask = torch.triu(torch.ones(x.size(1), x.size(1), dtype=torch.bool), 1)
        h = self.n1(x)
        x = x + self.att(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.ff(self.n2(x))


class TiedLM(nn.Module):
    def __init__(self, vocab, d=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.pos = nn.Embedding(CTX, d)
        self.layers = nn.ModuleList(Layer(d) for _ in range(2))
        self.head = nn.Linear(d, vocab, bias=False)
        self.head.weight = self.emb.weight
        nn.init.normal_(self.emb.weight, std=0.1)

    def forward(self, x):
        h = self.emb(x) + self.pos.weight
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False)
        return self.head(h)


def main():
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(1337)
    ds, vocab = dataset()
    sampler = DistributedSampler(ds, shuffle=True, seed=1337)
    loader = DataLoader(ds, batch_size=32 // world_size, sampler=sampler)
    model = DDP(TiedLM(vocab))
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for it, (x, y) in enumerate(loader):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), label_smoothing=0.1)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if rank == 0:
            print(f"iter {it} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
