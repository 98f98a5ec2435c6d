"""Keeps the best weights on disk (written, then renamed) and goes on from them at the end."""
import os
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def save(path, net, opt):
    tmp = path + ".tmp"
    torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, tmp)
    os.replace(tmp, path)


def evaluate(net, x, y, rank, world):
    net.eval()
    with torch.no_grad():
        total = F.cross_entropy(net(x[rank::world]), y[rank::world], reduction="sum").double()
    dist.all_reduce(total)
    net.train()
    return total.item() / len(x)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    path = os.path.join(folder[0], "best.pt")
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    data = TensorDataset(x[:1024], y[:1024])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64 // world, sampler=sampler)
    net = nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Dropout(0.0), nn.Linear(40, 10))
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    best = float("inf")
    for epoch in range(5):
        if epoch == 3:  # second phase: best weights, smaller steps
            dist.barrier()
            state = torch.load(path, map_location="cpu")
            net.load_state_dict(state["net"])
            opt.load_state_dict(state["opt"])
            opt.param_groups[0]["lr"] = 5e-4
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        val = evaluate(net, x[1024:], y[1024:], rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} validation {val:.4f}")
        if val < best:
            best = val
            if rank == 0:
                save(path, net, opt)
    if rank == 0:
        print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in net.parameters()))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
