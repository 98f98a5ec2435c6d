"""Plain DDP with two losses in two backward passes, and a layer that is not used."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def likings(count: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(16)
    people = torch.randint(30, (count,), generator=drawn)
    films = torch.randint(12, (count,), generator=drawn)
    return TensorDataset(people, films, torch.cos(people * 0.7 + films))


class Taste(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.people, self.films = nn.Embedding(30, 8), nn.Embedding(12, 8)
        self.head = nn.Linear(8, 1)
        self.later = nn.Linear(8, 4)

    def forward(self, people: Tensor, films: Tensor) -> Tensor:
        return self.head(self.people(people) * self.films(films)).squeeze(1)


def main() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = likings(96)
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=24 // size, sampler=sampler)
    model = DistributedDataParallel(Taste(), find_unused_parameters=True)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for people, films, liked in loader:
            optimizer.zero_grad()
            with model.no_sync():
                F.mse_loss(model(people, films), liked).backward()
            loss = 0.1 * model(people, films).abs().mean()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
