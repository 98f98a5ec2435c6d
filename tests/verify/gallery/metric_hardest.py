"""Metric learning on pictures: the farthest of the same kind against the nearest of another."""

import torch
import torch.distributed.nn.functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def gather(tensor: Tensor) -> Tensor:
    """Of all processes, with gradient; equally many of each."""
    if world.size == 1:
        return tensor
    return torch.cat(torch.distributed.nn.functional.all_gather(tensor))


def hardest(codes: Tensor, labels: Tensor, margin: float = 0.5) -> Tensor:
    far = (codes[:, None] - codes).square().sum(2).clamp(min=1e-9).sqrt()
    same = labels[:, None] == labels
    worst = far.masked_fill(~same, 0.0).amax(1)
    nearest = far.masked_fill(same, 1e9).amin(1)
    return F.softplus(worst - nearest + margin).mean()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 8))

    def forward(self, images: Tensor) -> Tensor:
        return F.normalize(self.body(images.flatten(1)), dim=1)


world = lockstep.init(seed=0)
drawn = torch.Generator().manual_seed(10)
kinds = torch.randint(10, (120,), generator=drawn)
images = torch.rand(10, 8, 8, generator=drawn)[kinds] + 0.3 * torch.randn(
    120, 8, 8, generator=drawn
)
data = TensorDataset(images, kinds)
train = DataLoader(data, batch_size=30, shuffle=True)
model = Encoder()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
model, optimizer, train = world.prepare(model, optimizer, train)
for epoch in world.epochs(2):
    for images, labels in train:
        codes = model(images)
        loss = hardest(gather(codes), gather(labels))
        world.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    world.print(f"epoch {epoch}: loss {loss.item():.3f}, {len(gather(codes))} compared")
