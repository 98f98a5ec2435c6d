import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def setup():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29752")
    rank = int(os.environ.setdefault("RANK", "0"))
    world = int(os.environ.setdefault("WORLD_SIZE", "1"))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    return rank, world


def lr_at(step):
    return min(1.0, (step + 1) / 3)


def main():
    rank, world = setup()
    torch.manual_seed(3)
    model = DDP(nn.Sequential(nn.Linear(8, 40), nn.SiLU(), nn.Linear(40, 40), nn.SiLU(), nn.Linear(40, 2)),
                gradient_as_bucket_view=True)
    opt = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW,
                                  lr=5e-3, weight_decay=0.01, eps=1e-6)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lr_at)

    g = torch.Generator().manual_seed(6)
    x = torch.randn(144, 8, generator=g)
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2:].sum(1)], 1)
    ds = TensorDataset(x, y)
    sampler = DistributedSampler(ds, shuffle=True, seed=4)
    loader = DataLoader(ds, batch_size=24 // world, sampler=sampler, num_workers=0)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad()
            loss = nn.functional.smooth_l1_loss(model(xb), yb)
            loss.backward()
            opt.step()
            sched.step()
        if rank == 0:
            print("epoch", epoch, "local loss", loss.item(), "lr", sched.get_last_lr()[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
