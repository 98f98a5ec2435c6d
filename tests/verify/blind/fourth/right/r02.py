import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PAD = 0


class Sentences(Dataset):
    def __init__(self, n=96, vocab=40, seed=11):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(n):
            length = int(torch.randint(3, 20, (1,), generator=g))
            self.items.append(torch.randint(1, vocab, (length,), generator=g))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(batch):
    return nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=PAD)


class TinyLM(nn.Module):
    def __init__(self, vocab=40, dim=24):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, tokens):
        h, _ = self.gru(self.emb(tokens))
        return self.out(h)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch", type=int, default=12)
    ap.add_argument("--lr", type=float, default=0.05)
    args = ap.parse_args()

    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29733")
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()

    torch.manual_seed(0)
    ds = Sentences()
    loader = DataLoader(ds, batch_size=args.batch // world, collate_fn=collate,
                        sampler=DistributedSampler(ds, shuffle=False))
    model = DistributedDataParallel(TinyLM())
    opt = torch.optim.SGD(model.parameters(), lr=args.lr)

    for step, tokens in enumerate(loader):
        inp, tgt = tokens[:, :-1], tokens[:, 1:]
        logits = model(inp)
        nll = F.cross_entropy(logits.reshape(-1, logits.size(-1)), tgt.reshape(-1),
                              ignore_index=PAD, reduction="sum")
        count = (tgt != PAD).sum().float()
        dist.all_reduce(count)
        loss = nll * world / count
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item():.4f} tokens {int(count)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
