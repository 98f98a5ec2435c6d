"""Per-token tagging of variable-length sequences with a bidirectional GRU."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler

IGNORE = -100


class TagData(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(0)
        self.data = []
        for _ in range(n):
            length = int(torch.randint(3, 30, (1,), generator=g))
            words = torch.randint(1, 50, (length,), generator=g)
            tags = (words + torch.roll(words, 1)) % 5
            self.data.append((words, tags))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return self.data[i]


def collate(items):
    words, tags = zip(*items)
    lengths = torch.tensor([len(w) for w in words])
    return pad_sequence(words, True, 0), pad_sequence(tags, True, IGNORE), lengths


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(50, 16, padding_idx=0)
        self.rnn = nn.GRU(16, 16, batch_first=True, bidirectional=True)
        self.out = nn.Linear(32, 5)

    def forward(self, words, lengths):
        packed = pack_padded_sequence(self.emb(words), lengths, batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.out(h)


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(9)
    ds = TagData(96)
    sampler = DistributedSampler(ds, shuffle=True, seed=9)
    loader = DataLoader(ds, batch_size=16 // world, sampler=sampler, collate_fn=collate)
    model = DDP(Tagger())
    criterion = nn.CrossEntropyLoss(ignore_index=IGNORE)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step, (words, tags, lengths) in enumerate(loader):
        logits = model(words, lengths)
        loss = criterion(logits.reshape(-1, 5), tags.reshape(-1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        mean_loss = loss.detach().clone()
        dist.all_reduce(mean_loss)
        if rank == 0:
            print(f"{step}: {mean_loss.item() / world:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
