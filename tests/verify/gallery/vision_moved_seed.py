"""Tells pictures apart that are moved about at every look; a seed for each process."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

GLOBAL_BATCH = 24


class Moved(Dataset):
    """Pictures, each moved by up to two pixels and made a little brighter or darker."""

    def __init__(self, count: int) -> None:
        drawn = torch.Generator().manual_seed(10)
        self.labels = torch.randint(10, (count,), generator=drawn)
        self.images = torch.rand(10, 1, 8, 8, generator=drawn)[self.labels]
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(1000 * self.epoch + index)
        down, right = torch.randint(-2, 3, (2,), generator=drawn).tolist()
        light = 0.8 + 0.4 * torch.rand((), generator=drawn)
        image = self.images[index].roll((down, right), (1, 2))
        return light * image, self.labels[index]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 12, 3, padding=1)
        self.head = nn.Linear(12 * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(F.max_pool2d(F.relu(self.conv(images)), 2).flatten(1))


def main() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = Moved(96)
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // size, sampler=sampler)
    model = DistributedDataParallel(Net())
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        data.epoch = epoch
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
