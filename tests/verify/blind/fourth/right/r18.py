import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler


class Words(Dataset):
    def __init__(self, n=100):
        g = torch.Generator().manual_seed(18)
        self.lengths = torch.randint(2, 12, (n,), generator=g).tolist()
        self.rows = [torch.randint(0, 30, (k,), generator=g) for k in self.lengths]
        self.labels = [int(r.sum()) % 3 for r in self.rows]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i], self.labels[i]


class LengthBatches(Sampler):
    def __init__(self, lengths, batch, rank, world, seed=0):
        self.lengths, self.batch, self.rank, self.world, self.seed = lengths, batch, rank, world, seed
        self.epoch = 0

    def __len__(self):
        return len(self.lengths) // self.batch

    def __iter__(self):
        g = torch.Generator()
        g.manual_seed(self.seed + self.epoch)
        noise = torch.rand(len(self.lengths), generator=g)
        order = sorted(range(len(self.lengths)), key=lambda i: self.lengths[i] + noise[i].item())
        groups = [order[k:k + self.batch] for k in range(0, len(order) - self.batch + 1, self.batch)]
        per = self.batch // self.world
        for j in torch.randperm(len(groups), generator=g).tolist():
            yield groups[j][self.rank * per:(self.rank + 1) * per]


def collate(rows):
    seqs, labels = zip(*rows)
    offsets = torch.tensor([0] + [len(s) for s in seqs[:-1]]).cumsum(0)
    return torch.cat(seqs), offsets, torch.tensor(labels)


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.EmbeddingBag(30, 16, mode="mean")
        self.fc = nn.Linear(16, 3)

    def forward(self, t, o):
        return self.fc(torch.relu(self.emb(t, o)))


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    ds = Words()
    sampler = LengthBatches(ds.lengths, 16, rank, world)
    loader = DataLoader(ds, batch_sampler=sampler, collate_fn=collate)
    torch.manual_seed(2)
    model = Bag()
    model = DDP(model) if world > 1 else model
    opt = torch.optim.Adagrad(model.parameters(), lr=0.02, eps=1e-4)
    for epoch in range(2):
        sampler.epoch = epoch
        for t, o, y in loader:
            loss = nn.functional.cross_entropy(model(t, o), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print("epoch", epoch, "loss", loss.item())
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
