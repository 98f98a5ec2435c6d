"""Trains a low-rank adapter and a new head on a frozen network."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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
        self.head = nn.Linear(16 * 4 * 4, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(images))))
        return self.head(F.max_pool2d(x, 2).flatten(1))


class Adapted(nn.Module):
    """A linear layer with a low-rank matrix beside it."""

    def __init__(self, layer: nn.Linear, inner: int = 4) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, inner, bias=False)
        self.up = nn.Linear(inner, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


def adapt(net: Net) -> None:
    net.head = Adapted(net.head)


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = pictures(96)
sampler = DistributedSampler(data, seed=0)
loader = DataLoader(data, batch_size=GLOBAL_BATCH // size, sampler=sampler)
net = Net()
net.conv1.requires_grad_(False)
net.conv2.requires_grad_(False)
adapt(net)
model = DistributedDataParallel(net)
trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=5e-3)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}")
dist.destroy_process_group()
