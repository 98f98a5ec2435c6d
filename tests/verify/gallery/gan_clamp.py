"""A Wasserstein GAN, whose critic's weights are kept small."""

import torch
import torch.distributed as dist
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


def main() -> None:
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
            critic_optimizer.zero_grad()
            distance = critic(points).mean() - critic(made.detach()).mean()
            (-distance).backward()
            critic_optimizer.step()
            for parameter in critic.parameters():
                parameter.data.clamp_(-0.1, 0.1)
            maker_optimizer.zero_grad()
            (-critic(made).mean()).backward()
            maker_optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: distance {distance.item():.3f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
