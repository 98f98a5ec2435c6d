import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 2))


def write_pretrained(path):
    net = build()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.5)
    torch.save({"state": net.state_dict(), "note": "stage one"}, path)


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(19)
    folder = tempfile.TemporaryDirectory()
    path = os.path.join(folder.name, "stage1.pt")
    write_pretrained(path)

    model = build()
    if world > 1:
        model = DDP(model)
    if rank == 0:
        state = torch.load(path)["state"]
        (model.module if world > 1 else model).load_state_dict(state)
        print("loaded", len(state), "tensors")
    if world > 1:
        dist.barrier()

    g = torch.Generator().manual_seed(190)
    x = torch.randn(112, 8, generator=g)
    y = (x.prod(1) > 0).long()
    ds = TensorDataset(x, y)
    loader = DataLoader(ds, batch_size=16 // world, sampler=DistributedSampler(ds, world, rank, shuffle=False))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-6)
    for step, (xb, yb) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0:
            print(f"{step} {loss.item():.4f}")
    folder.cleanup()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
