import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 3))
    if world > 1:
        net = DDP(net, bucket_cap_mb=1)
    decay, no_decay = [], []
    for p in net.parameters():
        (decay if p.dim() > 1 else no_decay).append(p)
    opt = torch.optim.SGD([{"params": decay, "weight_decay": 1e-2}, {"params": no_decay, "weight_decay": 0.0}], lr=0.01)

    g = torch.Generator().manual_seed(15)
    x = torch.randn(128, 10, generator=g)
    y = x[:, :3].abs().argmax(1)
    ds = TensorDataset(x, y)
    sampler = DistributedSampler(ds, world, rank, shuffle=True)
    loader = DataLoader(ds, batch_size=16 // world, sampler=sampler)
    for step, (xb, yb) in enumerate(loader):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = net(xb)
        loss = nn.functional.cross_entropy(out.float(), yb)
        loss.backward()
        opt.step()
        if rank == 0:
            print(f"[{step}] {loss.item():.4f} {out.dtype}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
