"""Learns codes that agree between two views, centred by a running mean as in DINO."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 24


def views(count: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(6)
    things = torch.randn(count, 16, generator=drawn)
    noise = torch.randn(2, count, 16, generator=drawn)
    return TensorDataset(things + 0.3 * noise[0], things + 0.3 * noise[1])


class Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 12))
        self.register_buffer("centre", torch.zeros(12))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        codes = self.body(one)
        with torch.no_grad():
            wanted = self.body(other)
            target = ((wanted - self.centre) / 0.3).softmax(1)
            mean = wanted.mean(0)
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
            self.centre.lerp_(mean, 0.2)
        return F.cross_entropy(codes, target)


def main() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = views(96)
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // size, sampler=sampler)
    model = DistributedDataParallel(Student())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for one, other in loader:
            loss = model(one, other)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
