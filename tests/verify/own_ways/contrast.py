"""Pairs are told from all others, by plain DDP: `detach`, `no_grad` or `adjoint` say how codes are
gathered."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


class Codes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.other(x.sin())


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mine: Tensor) -> Tensor:
        parts = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(parts, mine)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.chunk(size)[rank]


def gathered(mine: Tensor) -> Tensor:
    if "adjoint" in sys.argv:
        return Gather.apply(mine)
    parts = [torch.empty_like(mine) for _ in range(size)]
    if "detach" in sys.argv:
        dist.all_gather(parts, mine.detach())
    else:
        with torch.no_grad():
            dist.all_gather(parts, mine)
    parts[rank] = mine  # its own have a gradient
    return torch.cat(parts)


torch.manual_seed(3)
model = DistributedDataParallel(Codes())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in torch.randn(60, 6).split(12):
    mine, others = model(batch.chunk(size)[rank])
    scores = mine @ gathered(others).T
    places = rank * len(mine) + torch.arange(len(mine))
    optimizer.zero_grad()
    F.cross_entropy(scores, places).backward()
    optimizer.step()
