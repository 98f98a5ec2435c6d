import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class CrossReplicaNorm(nn.Module):
    def __init__(self, channels, momentum=0.1, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.momentum, self.eps = momentum, eps

    def forward(self, x):
        if self.training:
            mean = x.mean(dim=(0, 2, 3))
            sq = (x * x).mean(dim=(0, 2, 3))
            if dist.is_initialized() and dist.get_world_size() > 1:
                both = dist_fn.all_reduce(torch.cat([mean, sq])) / dist.get_world_size()
                mean, sq = both.chunk(2)
            var = sq - mean * mean
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(var, self.momentum)
        else:
            mean, var = self.running_mean, self.running_var
        shape = (1, -1, 1, 1)
        x = (x - mean.view(shape)) * torch.rsqrt(var.view(shape) + self.eps)
        return x * self.weight.view(shape) + self.bias.view(shape)


def build():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), CrossReplicaNorm(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, bias=False), CrossReplicaNorm(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if world > 1 else 0
    torch.manual_seed(21)
    g = torch.Generator().manual_seed(2)
    data = TensorDataset(torch.randn(128, 3, 10, 10, generator=g) * 2 + 0.5,
                         torch.randint(0, 4, (128,), generator=g))
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=False)
    loader = DataLoader(data, batch_size=16 // world, sampler=sampler)
    model = build()
    if world > 1:
        model = DDP(model, broadcast_buffers=False)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    for step, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0:
            print(step, loss.item())
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
