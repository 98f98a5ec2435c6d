import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Masked(nn.Module):
    def __init__(self, d=12):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, 32), nn.ReLU(), nn.Linear(32, d))
        self.register_buffer("mask", (torch.arange(d) % 3 != 0).float())

    def forward(self, x):
        if self.training:
            x = x * self.mask
        return self.net(x)


@torch.no_grad()
def validate(net, x):
    net.eval()
    return nn.functional.mse_loss(net(x), x).item()


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(210)
    net = Masked()
    model = DDP(net) if world > 1 else net
    g = torch.Generator().manual_seed(211)
    train, val = torch.randn(80, 12, generator=g), torch.randn(30, 12, generator=g)
    ds = TensorDataset(train)
    sampler = DistributedSampler(ds, world, rank, shuffle=True)
    loader = DataLoader(ds, 16 // world, sampler=sampler)
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    model.train()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            loss = nn.functional.mse_loss(model(x), x)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} val {validate(net, val):.4f}")
        if world > 1:
            dist.barrier()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
