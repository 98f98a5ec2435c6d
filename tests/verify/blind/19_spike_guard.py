"""GRU forecaster; updates are skipped when the loss spikes."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Forecaster(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0])


class SpikeGuard:
    def __init__(self, limit):
        self.limit = limit

    def is_spike(self, value):
        return value > self.limit


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    g = torch.Generator().manual_seed(40)
    phase = 6.28 * torch.rand(384, 1, generator=g)
    series = torch.sin(phase + torch.arange(21) * 0.4) + 0.1 * torch.randn(384, 21, generator=g)
    bad = torch.randperm(384, generator=g)[:12]
    series[bad] *= 6  # broken sensors
    series = series.unsqueeze(-1)
    data = TensorDataset(series[:, :-1], series[:, 1:])
    sampler = DistributedSampler(data, seed=2)
    loader = DataLoader(data, batch_size=32 // world, sampler=sampler)
    model = DDP(Forecaster())
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    guard = SpikeGuard(limit=0.9)
    skipped = 0

    for epoch in range(3):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = F.mse_loss(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            current = loss.detach()
            if guard.is_spike(current.item()):
                skipped += 1
                continue
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} skipped {skipped}")

    if rank == 0:
        print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in model.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
