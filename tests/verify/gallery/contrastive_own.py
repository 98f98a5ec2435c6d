"""Brings two views of a thing together, with Lockstep."""

import torch
import torch.distributed.nn.functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def couples(count: int) -> TensorDataset:
    """Two views of each thing: 16 numbers of the one kind and 10 of the other."""
    drawn = torch.Generator().manual_seed(3)
    things = torch.randn(count, 6, generator=drawn)
    one = things @ torch.randn(6, 16, generator=drawn)
    other = things @ torch.randn(6, 10, generator=drawn)
    return TensorDataset(one + 0.1 * torch.randn(one.shape, generator=drawn), other.tanh())


class TwoTowers(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.images = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, width))
        self.texts = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, width))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        image = F.normalize(self.images(images), dim=1)
        return image, F.normalize(self.texts(texts), dim=1), self.scale.exp()


def gather(codes: Tensor) -> Tensor:
    if world.size == 1:
        return codes
    return torch.cat(torch.distributed.nn.functional.all_gather(codes))


def contrast(one: Tensor, other: Tensor, scale: Tensor) -> Tensor:
    logits = scale * one @ other.T
    partner = torch.arange(len(one))
    return (F.cross_entropy(logits, partner) + F.cross_entropy(logits.T, partner)) / 2


world = lockstep.init(seed=0)
train = DataLoader(couples(96), batch_size=24, shuffle=True, drop_last=True)
model = TwoTowers()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, train = world.prepare(model, optimizer, train)

for epoch in world.epochs(2):
    for images, texts in train:
        one, other, scale = model(images, texts)
        loss = contrast(gather(one), gather(other), scale)
        world.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    world.print(f"epoch {epoch}: loss {loss.item():.3f}")
