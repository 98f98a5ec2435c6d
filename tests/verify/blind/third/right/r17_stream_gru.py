import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class WaveStream(IterableDataset):
    """Endless stream of noisy waves. Item k goes to rank k % world."""

    def __init__(self, rank, world, total, length=20):
        self.rank, self.world, self.total, self.length = rank, world, total, length

    def make(self, k):
        g = torch.Generator().manual_seed(k)
        freq, phase = torch.rand(2, generator=g)
        t = torch.linspace(0, 1, self.length + 1)
        wave = torch.sin(6.28 * (freq * 3 + 0.5) * t + 6.28 * phase)
        wave = wave + 0.05 * torch.randn(wave.shape, generator=g)
        return wave[:-1, None], wave[1:, None]

    def __iter__(self):
        for k in range(self.total):
            if k % self.world == self.rank:
                yield self.make(k)


class Forecaster(nn.Module):
    def __init__(self, hidden=20):
        super().__init__()
        self.gru = nn.GRU(1, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x):
        return self.head(self.gru(x)[0])


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    global_batch, steps, warmup = 32, 7, 3
    loader = DataLoader(WaveStream(rank, world, global_batch * steps), batch_size=global_batch // world)
    torch.manual_seed(0)
    model = DDP(Forecaster())
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / warmup))
    for step, (x, y) in enumerate(loader):
        loss = nn.functional.smooth_l1_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        opt.step()
        sched.step()
        report = loss.detach() / world
        dist.reduce(report, dst=0)
        if rank == 0:
            print(f"step {step} loss {report.item():.5f} lr {sched.get_last_lr()[0]:.4f}")
    dist.destroy_process_group()
