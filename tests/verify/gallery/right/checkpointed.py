"""Activations are computed twice to save memory; several losses are added; ranks share evenly."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def pictures(count: int) -> TensorDataset:
    """Ten kinds of pictures of eight by eight points, with noise."""
    drawn = torch.Generator().manual_seed(10)
    kinds = torch.rand(10, 1, 8, 8, generator=drawn)
    kind = torch.randint(10, (count,), generator=drawn)
    noise = 0.3 * torch.randn(count, 1, 8, 8, generator=drawn)
    return TensorDataset(kinds[kind] + noise, kind)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Linear(64, 32)
        self.blocks = nn.Sequential(*(Block(32) for _ in range(3)))
        self.kind, self.ink = nn.Linear(32, 10), nn.Linear(32, 1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = self.blocks(self.begin(images.flatten(1)))
        return self.kind(x), self.ink(x).squeeze(1)


world = lockstep.init(seed=0)
train = DataLoader(pictures(96), batch_size=24, shuffle=True)
net = Net()
lockstep.checkpoint_activations(net, Block)
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, amsgrad=True)
model, optimizer, train = world.prepare(net, optimizer, train)
for epoch in world.epochs(2):
    for images, labels in train:
        kind, ink = model(images)
        small = sum(parameter.square().sum() for parameter in net.parameters())
        wrong = F.cross_entropy(kind, labels) + F.mse_loss(ink, images.mean((1, 2, 3)))
        world.backward(wrong + 1e-4 * small)
        optimizer.step()
        optimizer.zero_grad()
    world.print(f"epoch {epoch}: loss {wrong.item():.3f}")
