"""Predicts a house's price from twelve figures; torchrun starts it on any number of processes."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 24


def houses(count: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(1)
    figures = torch.randn(count, 12, generator=drawn)
    price = figures @ torch.randn(12, 1, generator=drawn) + figures[:, :1] * figures[:, 1:2]
    return TensorDataset(figures, price)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16))
        self.head = nn.Linear(16, 1)

    def forward(self, figures: torch.Tensor) -> torch.Tensor:
        return self.head(F.gelu(self.body(figures)))


def main() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = houses(96)
    sampler = DistributedSampler(data, shuffle=True, seed=0)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // size, sampler=sampler)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for figures, price in loader:
            loss = F.mse_loss(model(figures), price, reduction="mean")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
