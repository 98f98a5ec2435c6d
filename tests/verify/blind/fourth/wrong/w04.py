import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Text(Dataset):
    def __init__(self, n=96):
        g = torch.Generator().manual_seed(44)
        self.rows = []
        for _ in range(n):
            k = int(torch.randint(2, 25, (1,), generator=g))
            self.rows.append(torch.randint(1, 30, (k,), generator=g))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(30, 16)
        self.rnn = nn.GRU(16, 24, batch_first=True)
        self.fc = nn.Linear(24, 30)

    def forward(self, t):
        return self.fc(self.rnn(self.emb(t))[0])


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(45)
    model = Tagger()
    if world > 1:
        model = DDP(model)
    ds = Text()
    loader = DataLoader(ds, 12 // world, collate_fn=collate, sampler=DistributedSampler(ds, world, rank, shuffle=False))
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    seen = torch.zeros(1)
    for step, t in enumerate(loader):
        logits = model(t[:, :-1])
        target = t[:, 1:]
        mask = (target != 0).float()
        nll = F.cross_entropy(logits.transpose(1, 2), target, reduction="none")
        loss = (nll * mask).sum() / mask.sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
        seen += mask.sum()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    if world > 1:
        dist.all_reduce(seen)
    if rank == 0:
        print("tokens", int(seen))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
