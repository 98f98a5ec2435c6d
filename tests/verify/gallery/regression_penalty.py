"""Predicts prices from few of many figures: a penalty keeps the hidden values small."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 24


def houses(count: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(6)
    figures = torch.randn(count, 20, generator=drawn)
    return TensorDataset(figures, figures[:, :3].sum(dim=1, keepdim=True).tanh())


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hide, self.price = nn.Linear(20, 16), nn.Linear(16, 1)

    def forward(self, figures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = F.relu(self.hide(figures))
        return self.price(hidden), hidden


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = houses(96)
sampler = DistributedSampler(data, shuffle=True, seed=0)
loader = DataLoader(data, batch_size=GLOBAL_BATCH // size, sampler=sampler)
model = DistributedDataParallel(Sparse())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for figures, price in loader:
        predicted, hidden = model(figures)
        loss = F.mse_loss(predicted, price) + 1e-3 * hidden.abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}")
dist.destroy_process_group()
