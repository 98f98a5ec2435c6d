"""Forecasts waves with an LSTM; each process takes every size-th sample of a batch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

GLOBAL_BATCH = 15


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


def main() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = waves(70)
    model = DistributedDataParallel(Forecast())
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    for epoch in range(2):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(GLOBAL_BATCH):
            past, future = data[batch[rank::size]]
            loss = F.mse_loss(model(past), future) * len(past) * size / len(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
