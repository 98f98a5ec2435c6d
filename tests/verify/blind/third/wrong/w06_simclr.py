import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class TwoCrops(Dataset):
    def __init__(self, n):
        x = torch.tensor(load_digits().data[:n] / 16).float()
        g = torch.Generator().manual_seed(123)
        self.a = x + 0.1 * torch.randn(x.shape, generator=g)
        self.b = x + 0.1 * torch.randn(x.shape, generator=g)

    def __len__(self):
        return len(self.a)

    def __getitem__(self, i):
        return self.a[i], self.b[i]


class Projector(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 16))

    def forward(self, a, b):
        return F.normalize(self.net(a), dim=1), F.normalize(self.net(b), dim=1)


def gather_features(z):
    bucket = [torch.zeros_like(z) for _ in range(dist.get_world_size())]
    dist.all_gather(bucket, z)
    bucket[dist.get_rank()] = z
    return torch.cat(bucket, dim=0)


def info_nce(za, zb, temperature=0.2):
    """Local anchors against the candidates of all processes, both directions."""
    n = za.size(0)
    labels = torch.arange(n) + dist.get_rank() * n
    loss_a = F.cross_entropy(za @ gather_features(zb).t() / temperature, labels)
    loss_b = F.cross_entropy(zb @ gather_features(za).t() / temperature, labels)
    return (loss_a + loss_b) / 2


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(4)
    ds = TwoCrops(320)
    sampler = DistributedSampler(ds, shuffle=True, seed=4)
    loader = DataLoader(ds, batch_size=64 // world, sampler=sampler)
    model = DDP(Projector())
    opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step, (a, b) in enumerate(loader):
        loss = info_nce(*model(a, b))
        opt.zero_grad()
        loss.backward()
        opt.step()
        avg = loss.detach().clone()
        dist.all_reduce(avg)
        if rank == 0:
            print(f"step {step} nce {avg.item() / world:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
