"""Tells pictures apart with convolutions and batch normalisation."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lockstep import SyncBatchNorm

GLOBAL_BATCH = 24


def pictures(count: int) -> TensorDataset:
    """Ten kinds of pictures of eight by eight points, with noise."""
    drawn = torch.Generator().manual_seed(10)
    kinds = torch.rand(10, 1, 8, 8, generator=drawn)
    kind = torch.randint(10, (count,), generator=drawn)
    noise = 0.3 * torch.randn(count, 1, 8, 8, generator=drawn)
    return TensorDataset(kinds[kind] + noise, kind)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.norm1, self.norm2 = SyncBatchNorm(8), SyncBatchNorm(16)
        self.head = nn.Linear(16 * 4 * 4, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm1(self.conv1(images)))
        x = F.relu(self.norm2(self.conv2(x)))
        return self.head(F.max_pool2d(x, 2).flatten(1))


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = pictures(96)
sampler = DistributedSampler(data, seed=0)
loader = DataLoader(data, batch_size=GLOBAL_BATCH // size, sampler=sampler)
model = DistributedDataParallel(Net())
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

for epoch in range(2):
    sampler.set_epoch(epoch)
    model.train()
    for images, labels in loader:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = (model.module(data.tensors[0]).argmax(1) == data.tensors[1]).sum()
    if rank == 0:
        print(f"epoch {epoch}: {int(right)} of {len(data)} right")
dist.destroy_process_group()
