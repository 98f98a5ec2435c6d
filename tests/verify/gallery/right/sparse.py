"""Sparse gradients of an embedding bag, averaged by DDP; a second optimizer for the rest."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def baskets(count: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(17)
    things = torch.randint(40, (count, 5), generator=drawn)
    return TensorDataset(things, (things % 7).sum(1) % 3)


class Shopper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(40, 12, mode="mean", sparse=True)
        self.head = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, things: Tensor) -> Tensor:
        return self.head(self.bag(things))


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = baskets(96)
sampler = DistributedSampler(data, seed=0)
loader = DataLoader(data, batch_size=24 // size, sampler=sampler)
net = Shopper()
model = DistributedDataParallel(net)
of_bag = torch.optim.SGD(net.bag.parameters(), lr=0.5)
of_head = torch.optim.AdamW(net.head.parameters(), lr=5e-3)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for things, bought in loader:
        loss = F.cross_entropy(model(things), bought)
        of_bag.zero_grad()
        of_head.zero_grad()
        loss.backward()
        of_bag.step()
        of_head.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}")
dist.destroy_process_group()
