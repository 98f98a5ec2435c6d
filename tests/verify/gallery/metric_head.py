"""Learns an embedding, and a small head of its own that guesses the class from it."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 24


def points(count: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(8)
    figures = torch.randn(count, 10, generator=drawn)
    return TensorDataset(figures, figures[:, :4].argmax(dim=1))


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = points(96)
sampler = DistributedSampler(data, shuffle=True, seed=0)
loader = DataLoader(data, batch_size=GLOBAL_BATCH // size, sampler=sampler)
body = DistributedDataParallel(nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 8)))
head = DistributedDataParallel(nn.Linear(8, 4))
of_body = torch.optim.AdamW(body.parameters(), lr=1e-2)
of_head = torch.optim.SGD(head.parameters(), lr=0.1)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for figures, kind in loader:
        of_body.zero_grad()
        of_head.zero_grad()
        loss = F.cross_entropy(head(F.normalize(body(figures))), kind)
        loss.backward()
        of_head.step()
        of_body.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}")
dist.destroy_process_group()
