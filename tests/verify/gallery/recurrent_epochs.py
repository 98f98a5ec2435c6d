"""Forecasts waves with a GRU for a number of steps."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, SAMPLES = 24, 96


def waves(count: int, length: int = 12) -> TensorDataset:
    """Sums of two sines with noise, and the value that comes next."""
    drawn = torch.Generator().manual_seed(8)
    speed, phase = torch.rand(2, count, 1, 2, generator=drawn)
    time = torch.arange(length + 1).view(1, -1, 1)
    value = torch.sin(time * (0.3 + speed) + 6 * phase).sum(2)
    value = value + 0.05 * torch.randn(value.shape, generator=drawn)
    return TensorDataset(value[:, :-1, None], value[:, -1])


class Forecast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(1, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, 1)

    def forward(self, past: Tensor) -> Tensor:
        states, _ = self.cells(past)
        return self.head(states[:, -1]).squeeze(1)


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = waves(48)
sampler = DistributedSampler(data, seed=0)
loader = DataLoader(data, batch_size=GLOBAL_BATCH // size, sampler=sampler)
model = DistributedDataParallel(Forecast())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

done, epoch = 0, 0
while done < SAMPLES:
    sampler.set_epoch(epoch)
    for past, future in loader:
        loss = F.mse_loss(model(past), future)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done += GLOBAL_BATCH
    epoch += 1
if rank == 0:
    print(f"{epoch} epochs: loss {loss.item():.4f}")
dist.destroy_process_group()
