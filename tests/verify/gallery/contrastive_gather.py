"""Brings two views of a thing together; each process compares its own with those of all."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 24


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


def gather(features: Tensor) -> Tensor:
    return torch.cat(torch.distributed.nn.functional.all_gather(features))


def contrast(one: Tensor, other: Tensor, scale: Tensor) -> Tensor:
    """The cross entropy of finding the partner among all of the global batch."""
    partner = torch.arange(len(one)) + dist.get_rank() * len(one)
    forth = F.cross_entropy(scale * one @ gather(other).T, partner)
    back = F.cross_entropy(scale * other @ gather(one).T, partner)
    return (forth + back) / 2


def main() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = couples(96)
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // size, sampler=sampler)
    model = DistributedDataParallel(TwoTowers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, texts in loader:
            loss = contrast(*model(images, texts))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
