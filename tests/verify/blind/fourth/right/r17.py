import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Mixed(Dataset):
    def __init__(self, n=120):
        g = torch.Generator().manual_seed(17)
        self.x = torch.randn(n, 9, generator=g)
        self.cls = (self.x[:, 0] > 0).long()
        self.reg = self.x[:, 1:3].sum(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.cls[i], self.reg[i]


class Multi(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(9, 20), nn.ReLU())
        self.experts = nn.ModuleList([nn.Linear(20, 20) for _ in range(2)])
        self.gate = nn.Linear(20, 2)
        self.cls_head = nn.Linear(20, 2)
        self.reg_head = nn.Linear(20, 1)

    def forward(self, x, task):
        h = self.body(x)
        pick = self.gate(h).argmax(1)
        out = torch.zeros_like(h)
        for k, expert in enumerate(self.experts):
            mask = pick == k
            if mask.any():
                out = out.index_add(0, mask.nonzero().flatten(), expert(h[mask]))
        w = self.gate(h).softmax(1).gather(1, pick[:, None])
        h = h + w * out
        return self.cls_head(h) if task == "cls" else self.reg_head(h).squeeze(1)


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(4)
    net = Multi()
    if world > 1:
        net = DistributedDataParallel(net, find_unused_parameters=True)
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    ds = Mixed()
    loader = DataLoader(ds, batch_size=12 // world, sampler=DistributedSampler(ds, world, rank, shuffle=True, seed=5))
    for step, (x, c, r) in enumerate(loader):
        opt.zero_grad(set_to_none=False)
        if step % 3 != 2:
            loss = F.cross_entropy(net(x, "cls"), c)
        else:
            loss = 0.5 * F.mse_loss(net(x, "reg"), r)
        loss.backward()
        opt.step()
        if rank == 0:
            print(step, "cls" if step % 3 != 2 else "reg", f"{loss.item():.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
