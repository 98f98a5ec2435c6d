import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

T = 50


class Noisy(Dataset):
    def __init__(self, n=96, dim=6):
        g = torch.Generator().manual_seed(1)
        self.clean = torch.randn(n, dim, generator=g) * 0.5 + 1
        self.alpha = torch.cumprod(1 - torch.linspace(1e-3, 0.1, T), 0)
        self.epoch = 0

    def __len__(self):
        return len(self.clean)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.epoch * 100003 + i)
        t = int(torch.randint(0, T, (1,), generator=g))
        eps = torch.randn(self.clean.size(1), generator=g)
        a = self.alpha[t]
        return a.sqrt() * self.clean[i] + (1 - a).sqrt() * eps, torch.tensor(t / T), eps


class Denoiser(nn.Module):
    def __init__(self, dim=6):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim + 1, 48), nn.SiLU(), nn.Linear(48, dim))

    def forward(self, x, t):
        return self.net(torch.cat([x, t[:, None]], 1))


@torch.no_grad()
def update_average(avg, model, decay):
    for a, p in zip(avg.parameters(), model.parameters()):
        a.lerp_(p, 1 - decay)


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(100 + rank)
    raw = Denoiser()
    model = DDP(raw) if world > 1 else raw
    avg = copy.deepcopy(raw).requires_grad_(False)
    opt = torch.optim.AdamW(raw.parameters(), lr=4e-3, eps=1e-6)
    data = Noisy()
    sampler = DistributedSampler(data, num_replicas=world, rank=rank)
    loader = DataLoader(data, batch_size=24 // world, sampler=sampler)
    for epoch in range(2):
        data.epoch = epoch
        sampler.set_epoch(epoch)
        for x, t, eps in loader:
            loss = (model(x, t) - eps).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            update_average(avg, raw, 0.9)
    with torch.no_grad():
        x, t, eps = next(iter(loader))
        final = (avg(x, t) - eps).square().mean()
    if rank == 0:
        print(f"loss {loss.item():.4f} averaged model {final.item():.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
