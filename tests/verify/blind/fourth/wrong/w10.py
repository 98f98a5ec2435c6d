import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Transfer(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.head = nn.Linear(16, 3)

    def set_backbone_trainable(self, flag):
        for p in self.backbone.parameters():
            p.requires_grad_(flag)

    def forward(self, x):
        return self.head(self.backbone(x))


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(10)
    net = Transfer()
    net.set_backbone_trainable(False)
    model = DDP(net) if world > 1 else net
    opt = torch.optim.SGD([
        {"params": net.head.parameters(), "lr": 0.1},
        {"params": net.backbone.parameters(), "lr": 0.05},
    ], momentum=0.9)
    g = torch.Generator().manual_seed(101)
    x = torch.randn(80, 12, generator=g)
    y = (x[:, :3] + x[:, 3:6]).argmax(1)
    ds = TensorDataset(x, y)
    sampler = DistributedSampler(ds, world, rank, shuffle=True)
    loader = DataLoader(ds, batch_size=16 // world, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        if epoch == 1:
            net.set_backbone_trainable(True)
        for xb, yb in loader:
            loss = nn.functional.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print("epoch", epoch, "loss", round(loss.item(), 4))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
