"""A small residual network on pictures, at most so many images at a time, with Lockstep."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep


def pictures(count: int) -> TensorDataset:
    """Ten kinds of pictures of eight by eight points, with noise."""
    drawn = torch.Generator().manual_seed(10)
    kinds = torch.rand(10, 1, 8, 8, generator=drawn)
    kind = torch.randint(10, (count,), generator=drawn)
    noise = 0.3 * torch.randn(count, 1, 8, 8, generator=drawn)
    return TensorDataset(kinds[kind] + noise, kind)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        Residual(8),
        Residual(8),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


world = lockstep.init(seed=0)
train = world.loader(pictures(120), batch_size=24, shuffle=True, micro_batch_size=6 // world.size)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = world.prepare(model, optimizer)

for epoch in world.epochs(2):
    for images, labels in train:
        loss = F.cross_entropy(model(images), labels)
        world.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    world.print(f"epoch {epoch}: loss {loss.item():.3f}")
