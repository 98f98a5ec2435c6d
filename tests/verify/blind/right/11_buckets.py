"""LSTM classifier on sequences of different length with a length-bucketing sampler."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

N, GLOBAL_BATCH = 320, 16


class Waves(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(1)
        self.length = torch.randint(5, 25, (N,), generator=g).tolist()
        self.y = torch.randint(0, 3, (N,), generator=g)
        self.x = [torch.sin(torch.arange(n) * (0.3 + 0.4 * c))[:, None] + 0.2 * torch.randn(n, 1, generator=g)
                  for n, c in zip(self.length, self.y.tolist())]

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class BucketSampler(Sampler):
    def __init__(self, lengths, rank, world):
        self.by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.rank, self.world, self.epoch = rank, world, 0

    def __len__(self):
        return N // GLOBAL_BATCH

    def __iter__(self):
        g = torch.Generator().manual_seed(self.epoch)
        for b in torch.randperm(len(self), generator=g).tolist():
            yield self.by_length[b * GLOBAL_BATCH:(b + 1) * GLOBAL_BATCH][self.rank::self.world]


def collate(batch):
    return pack_sequence([x for x, _ in batch], enforce_sorted=False), torch.stack([y for _, y in batch])


class Net(nn.Module):
    def __init__(self, h=24):
        super().__init__()
        self.rnn, self.out = nn.LSTM(1, h), nn.Linear(h, 3)

    def forward(self, packed):
        return self.out(self.rnn(packed)[1][0][-1])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = Waves()
    sampler = BucketSampler(data.length, rank, world)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)
    model = DDP(Net())
    opt = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for sampler.epoch in range(3):
        for packed, y in loader:
            loss = F.cross_entropy(model(packed), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
    if rank == 0:
        print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in model.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
