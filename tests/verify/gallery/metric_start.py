"""Metric learning with one proxy a kind; the process group averages gradients."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 24


def kinds(count: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(5)
    kind = torch.randint(6, (count,), generator=drawn)
    middle = 2 * torch.randn(6, 20, generator=drawn)
    return TensorDataset(middle[kind] + torch.randn(count, 20, generator=drawn), kind)


class Proxies(nn.Module):
    """A code for each thing, and one to compare with for each kind."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, width))
        self.proxies = nn.Parameter(torch.randn(6, width))

    def forward(self, things: Tensor) -> Tensor:
        codes = F.normalize(self.encoder(things), dim=1)
        return 8.0 * codes @ F.normalize(self.proxies, dim=1).T


def average(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(11 + rank)
data = kinds(96)
sampler = DistributedSampler(data, seed=0)
loader = DataLoader(data, batch_size=GLOBAL_BATCH // size, sampler=sampler)
model = Proxies()
for parameter in model.parameters():
    dist.broadcast(parameter.data, src=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for things, kind in loader:
        loss = F.cross_entropy(model(things), kind)
        optimizer.zero_grad()
        loss.backward()
        average(model)
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}")
dist.destroy_process_group()
