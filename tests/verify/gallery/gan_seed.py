"""Two networks against each other, over several processes: one makes points, one judges."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

GLOBAL_BATCH, NOISE = 24, 4


def ring(count: int) -> Tensor:
    """Points near a circle."""
    drawn = torch.Generator().manual_seed(14)
    angle = 6.2832 * torch.rand(count, generator=drawn)
    circle = torch.stack([angle.cos(), angle.sin()], dim=1)
    return 2 * circle + 0.1 * torch.randn(count, 2, generator=drawn)


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


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = ring(96)
sampler = DistributedSampler(data, seed=0)
loader = DataLoader(data, batch_size=GLOBAL_BATCH // size, sampler=sampler)
maker = DistributedDataParallel(Generator())
critic = DistributedDataParallel(Critic())
maker_optimizer = torch.optim.RMSprop(maker.parameters(), lr=1e-3)
critic_optimizer = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
drawn = torch.Generator().manual_seed(100)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for points in loader:
        noise = torch.randn(GLOBAL_BATCH, NOISE, generator=drawn)[rank::size]
        made = maker(noise)
        judged = critic(torch.cat([points, made.detach()]))
        real = torch.cat([torch.ones(len(points)), torch.zeros(len(made))])
        critic_optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(judged, real).backward()
        critic_optimizer.step()
        maker_optimizer.zero_grad()
        loss = F.softplus(-critic(made)).mean()
        loss.backward()
        maker_optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}")
dist.destroy_process_group()
