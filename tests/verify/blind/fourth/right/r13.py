import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Adapter(nn.Module):
    def __init__(self, base, r=2, alpha=4.0):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(r, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, r))
        self.scale = alpha / r

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.down.t()) @ self.up.t()


def add_adapters(module):
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, Adapter(child))
        else:
            add_adapters(child)


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    ddp = world > 1
    if ddp:
        dist.init_process_group("gloo")
    torch.manual_seed(19)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    for p in model.parameters():
        p.requires_grad = False
    add_adapters(model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    if rank == 0:
        print("trainable", sum(p.numel() for p in trainable), "frozen", frozen)
    net = DDP(model) if ddp else model
    opt = torch.optim.AdamW(trainable, lr=1e-2, eps=1e-5)

    g = torch.Generator().manual_seed(20)
    x = torch.randn(128, 16, generator=g)
    y = (x[:, :4] * 2).argmax(1)
    ds = TensorDataset(x, y)
    loader = DataLoader(ds, 16 // world, sampler=DistributedSampler(ds, world, rank, shuffle=True, seed=0))
    for step, (xb, yb) in enumerate(loader):
        loss = nn.functional.cross_entropy(net(xb), yb)
        loss.backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            shown = loss.clone()
            if ddp:
                dist.reduce(shown, dst=0)
                shown /= world
        if rank == 0:
            print(f"step {step} loss {shown.item():.4f}")
    if ddp:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
