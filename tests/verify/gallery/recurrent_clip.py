"""Forecasts waves with an LSTM, whose gradients are clipped."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 24


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
        self.cells = nn.LSTM(1, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, 1)

    def forward(self, past: Tensor) -> Tensor:
        states, _ = self.cells(past)
        return self.head(states[:, -1]).squeeze(1)


def average(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = waves(96)
sampler = DistributedSampler(data, seed=0)
loader = DataLoader(data, batch_size=GLOBAL_BATCH // size, sampler=sampler)
model = Forecast()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for past, future in loader:
        loss = F.mse_loss(model(past), future)
        optimizer.zero_grad()
        loss.backward()
        average(model)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")
dist.destroy_process_group()
