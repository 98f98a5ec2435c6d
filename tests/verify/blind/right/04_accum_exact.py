"""RNN tagger with gradient accumulation, weighted by the tokens of the whole window."""
import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUM, MICRO, T, WORDS, TAGS = 3, 16, 14, 30, 5


class Tagger(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.emb = nn.Embedding(WORDS, d)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.out = nn.Linear(d, TAGS)

    def forward(self, w):
        return self.out(self.rnn(self.emb(w))[0])


def windows(loader, size):
    window = []
    for batch in loader:
        window.append(batch)
        if len(window) == size:
            yield window
            window = []
    if window:
        yield window


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(3)
    words = torch.randint(0, WORDS, (320, T), generator=g)
    tags = words.cumsum(1) % TAGS
    length = torch.randint(2, T + 1, (320, 1), generator=g)
    tags[torch.arange(T) >= length] = -100
    data = TensorDataset(words, tags)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=MICRO // world, sampler=sampler)
    model = DDP(Tagger())
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for window in windows(loader, ACCUM):  # 20 micro-batches: the last window has 2
            tokens = torch.tensor(sum(int((t != -100).sum()) for _, t in window))
            dist.all_reduce(tokens)
            opt.zero_grad()
            for k, (w, t) in enumerate(window):
                sync = k == len(window) - 1
                with contextlib.nullcontext() if sync else model.no_sync():
                    total = F.cross_entropy(model(w).flatten(0, 1), t.flatten(), reduction="sum")
                    (total * world / tokens).backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} last sum {total.item():.4f}")
    if rank == 0:
        print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in model.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
