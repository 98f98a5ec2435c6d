"""Masked-token pretraining of a toy encoder; sequences are padded to the longest length."""
import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PAD, MASK, VOCAB = 0, 1, 30


@dataclass
class Config:
    global_batch: int = 16
    steps: int = 6
    dim: int = 32
    lr: float = 2e-3
    max_len: int = 24


class ToyCorpus(Dataset):
    def __init__(self, n, max_len):
        g = torch.Generator().manual_seed(5)
        self.items = []
        for _ in range(n):
            length = int(torch.randint(5, max_len + 1, (1,), generator=g))
            start = int(torch.randint(0, 28, (1,), generator=g))
            seq = (start + 3 * torch.arange(length)) % 28 + 2
            inp, tgt = torch.full((max_len,), PAD), torch.full((max_len,), -100)
            hide = torch.rand(length, generator=g) < 0.25
            hide[0] = True
            inp[:length] = torch.where(hide, torch.tensor(MASK), seq)
            tgt[:length] = torch.where(hide, seq, torch.tensor(-100))
            self.items.append((inp, tgt))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class Encoder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, cfg.dim, padding_idx=PAD)
        self.pos = nn.Parameter(torch.randn(cfg.max_len, cfg.dim) * 0.02)
        layer = nn.TransformerEncoderLayer(cfg.dim, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(cfg.dim, VOCAB)

    def forward(self, ids):
        h = self.tok(ids) * math.sqrt(self.tok.embedding_dim) + self.pos
        return self.out(self.body(h, src_key_padding_mask=ids.eq(PAD)))


def main(cfg=Config()):
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    ds = ToyCorpus(cfg.global_batch * cfg.steps, cfg.max_len)
    sampler = DistributedSampler(ds, shuffle=True, seed=3)
    dl = DataLoader(ds, batch_size=cfg.global_batch // world, sampler=sampler)
    model = DDP(Encoder(cfg))
    opt = torch.optim.Adam(model.parameters(), lr=cfg.lr, betas=(0.9, 0.98))

    for it, (ids, tgt) in enumerate(dl):
        logits = model(ids)
        total = F.cross_entropy(logits.flatten(0, 1), tgt.flatten(), ignore_index=-100, reduction="sum")
        count = (tgt != -100).sum().float()
        dist.all_reduce(count)
        # DDP takes the mean over ranks, hence the factor
        loss = total * world / count
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()

        log_loss = total.detach().clone()
        dist.all_reduce(log_loss)
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"it {it}: loss {log_loss.item() / count.item():.4f} over {int(count)} tokens")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
