"""Learns codes of things from two noisy views; a gather of its own."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 24


def views(count: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(4)
    things = torch.randn(count, 16, generator=drawn)
    noise = torch.randn(2, count, 16, generator=drawn)
    return TensorDataset(things + 0.3 * noise[0], things + 0.3 * noise[1])


class GatherLayer(torch.autograd.Function):
    """All processes' tensors; gradients go back to where they came from."""

    @staticmethod
    def forward(ctx: object, mine: Tensor) -> Tensor:
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: object, gradients: Tensor) -> Tensor:
        gradients = gradients.contiguous()
        dist.all_reduce(gradients)
        return gradients[dist.get_rank()]


def gather(codes: Tensor) -> Tensor:
    return GatherLayer.apply(codes).flatten(0, 1)


def contrast(one: Tensor, other: Tensor, heat: float = 0.2) -> Tensor:
    """Each view finds its partner among all other views of the global batch."""
    both = F.normalize(torch.cat([one, other]), dim=1)
    alike = (both @ both.T / heat).fill_diagonal_(-1e9)
    count = len(one)
    partner = torch.cat([torch.arange(count) + count, torch.arange(count)])
    return F.cross_entropy(alike, partner)


def main() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = views(96)
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // size, sampler=sampler)
    encoder = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8))
    model = DistributedDataParallel(encoder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for one, other in loader:
            half = len(one)
            codes = model(torch.cat([one, other]))
            loss = contrast(gather(codes[:half]), gather(codes[half:]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
