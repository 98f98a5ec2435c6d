"""Sentence-pair retrieval with in-batch negatives (InfoNCE)."""
import os
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Pairs(Dataset):
    """bags of words: question and answer share a topic vector"""

    def __init__(self, n=640, vocab=50):
        rs = np.random.RandomState(1)
        topic = rs.dirichlet(np.full(vocab, 0.2), size=n)
        self.q = np.stack([rs.multinomial(12, t) for t in topic])
        self.a = np.stack([rs.multinomial(30, t) for t in topic])

    def __len__(self):
        return len(self.q)

    def __getitem__(self, i):
        dt = torch.get_default_dtype()
        return torch.tensor(self.q[i], dtype=dt), torch.tensor(self.a[i], dtype=dt)


class BiEncoder(nn.Module):
    def __init__(self, vocab=50, d=16):
        super().__init__()
        self.q = nn.Sequential(nn.Linear(vocab, 32), nn.Tanh(), nn.Linear(32, d))
        self.a = nn.Sequential(nn.Linear(vocab, 32), nn.Tanh(), nn.Linear(32, d))

    def forward(self, q, a):
        return F.normalize(self.q(q), dim=1), F.normalize(self.a(a), dim=1)


def info_nce(q, a, tau=0.1):
    scores = q @ a.T / tau
    return F.cross_entropy(scores, torch.arange(len(q)))


def recall_at_1(net, ds):
    q, a = map(torch.stack, zip(*[ds[i] for i in range(100)]))
    with torch.no_grad():
        q, a = net(q, a)
    return (q @ a.T).argmax(1).eq(torch.arange(100)).double().mean().item()


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    ds = Pairs()
    sampler = DistributedSampler(ds, seed=5)
    loader = DataLoader(ds, batch_size=64 // world, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(BiEncoder())
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for q, a in loader:
            loss = info_nce(*model(q, a))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} R@1 {recall_at_1(model.module, ds):.2f}")
    if os.environ.get("DUMP"):
        torch.save([p.detach().double() for p in model.parameters()], f"{os.environ['DUMP']}.rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
