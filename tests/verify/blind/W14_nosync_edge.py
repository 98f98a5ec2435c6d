import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def parity_data(n=1536, bits=10):
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 2, (n, bits), generator=g)
    return TensorDataset(x.to(torch.get_default_dtype()) * 2 - 1, x[:, :3].sum(1) % 2)


def main(global_batch=64, accum=4, epochs=4):
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    ds = parity_data()
    sampler = DistributedSampler(ds, shuffle=True, seed=8)
    micro = global_batch // accum // world
    loader = DataLoader(ds, batch_size=micro, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2)))
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ce = nn.CrossEntropyLoss()
    updates = 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        opt.zero_grad()
        running = 0.0
        for i, (x, y) in enumerate(loader):
            sync_now = i % accum == 0
            with nullcontext() if sync_now else model.no_sync():
                loss = ce(model(x), y) / accum
                loss.backward()
            running += loss.item()
            if (i + 1) % accum == 0:
                opt.step()
                opt.zero_grad()
                updates += 1
        if rank == 0:
            print(f"epoch {epoch}: loss {running * accum / len(loader):.4f} after {updates} updates")
    snapshot(model, rank)
    dist.destroy_process_group()


def snapshot(model, rank):
    if os.environ.get("DUMP"):
        torch.save([p.detach().double() for p in model.parameters()], f"{os.environ['DUMP']}.rank{rank}.pt")


if __name__ == "__main__":
    main()
