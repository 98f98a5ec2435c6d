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
    torch.manual_seed(140)
    model = nn.Sequential(nn.Embedding(25, 12), nn.Flatten(), nn.Linear(72, 32), nn.ReLU(), nn.Linear(32, 5))
    if world > 1:
        model = DDP(model)
    g = torch.Generator().manual_seed(141)
    tokens = torch.randint(0, 25, (128, 6), generator=g)
    labels = tokens.sum(1) % 5
    ds = TensorDataset(tokens, labels)
    loader = DataLoader(ds, batch_size=16 // world, sampler=DistributedSampler(ds, world, rank, shuffle=True))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    global_batch = 16
    for step, (t, y) in enumerate(loader):
        per_sample = nn.functional.cross_entropy(model(t), y, reduction="none")
        loss = per_sample.sum() / global_batch
        opt.zero_grad()
        loss.backward()
        opt.step()
        whole = loss.detach().clone()
        if world > 1:
            dist.all_reduce(whole)
        if rank == 0:
            print("step", step, "loss", round(whole.item(), 4))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
