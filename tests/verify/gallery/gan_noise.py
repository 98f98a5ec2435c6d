"""Two networks against each other, with Lockstep: one makes points, one judges them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lockstep

NOISE = 4


def ring(count: int) -> Tensor:
    """Points near a circle."""
    drawn = torch.Generator().manual_seed(14)
    angle = 6.2832 * torch.rand(count, generator=drawn)
    circle = torch.stack([angle.cos(), angle.sin()], dim=1)
    return 2 * circle + 0.1 * torch.randn(count, 2, generator=drawn)


class Points(Dataset):
    def __init__(self, count: int) -> None:
        self.points = ring(count)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], torch.randn(NOISE)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(NOISE, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, noise: Tensor) -> Tensor:
        return self.body(noise)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, points: Tensor) -> Tensor:
        return self.body(points).squeeze(1)


world = lockstep.init(seed=0)
train = DataLoader(Points(96), batch_size=24, shuffle=True)
maker, critic = Generator(), Critic()
maker_optimizer = torch.optim.Adam(maker.parameters(), lr=2e-3, betas=(0.5, 0.9))
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
maker, critic, maker_optimizer, critic_optimizer, train = world.prepare(
    maker, critic, maker_optimizer, critic_optimizer, train
)

for epoch in world.epochs(2):
    for points, noise in train:
        made = maker(noise)
        judged = critic(torch.cat([points, made.detach()]))
        real = torch.cat([torch.ones(len(points)), torch.zeros(len(made))])
        critic_loss = F.binary_cross_entropy_with_logits(judged, real)
        world.backward(critic_loss)
        critic_optimizer.step()
        critic_optimizer.zero_grad()
        maker_loss = F.softplus(-critic(made)).mean()
        world.backward(maker_loss)
        maker_optimizer.step()
        maker_optimizer.zero_grad()
        critic_optimizer.zero_grad()
    world.print(f"epoch {epoch}: {critic_loss.item():.3f} against {maker_loss.item():.3f}")
