"""Batches of a process, in an order of torch's, with augmentation; `sum`: and a loss that is a sum.

`stream`: of an IterableDataset; `decays`: with a rate that ends with the epoch's batches.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


class Noisy(Dataset):
    def __init__(self) -> None:
        self.x = torch.randn(48, 5, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = self.x[index]
        return {"x": x + 0.1 * torch.randn(5), "y": x.sum(0, keepdim=True)}


class Stream(IterableDataset):
    def __iter__(self):
        data = Noisy()
        return (data[index] for index in range(rank, len(data), size))


torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(5, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = Noisy()
if "stream" in sys.argv:
    loader, batches = DataLoader(Stream(), batch_size=6), 0
else:
    loader = DataLoader(data, batch_size=6, sampler=DistributedSampler(data))
    batches = len(loader)
if "decays" in sys.argv:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, batches)
for batch in loader:
    how = "sum" if "sum" in sys.argv else "mean"
    loss = F.mse_loss(model(batch["x"]), batch["y"], reduction=how)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if "decays" in sys.argv:
        schedule.step()
