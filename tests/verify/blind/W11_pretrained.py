"""Start from a pretrained checkpoint (written here by a short warm-up run so that the example is self-contained)."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_iris
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def network():
    return nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3))


def iris():
    d = load_iris()
    x = (d.data - d.data.mean(0)) / d.data.std(0)
    return torch.tensor(x, dtype=torch.get_default_dtype()), torch.tensor(d.target)


def pretrain(path):
    """an autoencoding-free stand-in for the public checkpoint: a few steps on the first two classes"""
    g = torch.Generator().manual_seed(0)
    net = network()
    opt = torch.optim.Adam(net.parameters(), lr=0.01)
    x, y = iris()
    for _ in range(5):
        idx = torch.randint(0, 100, (32,), generator=g)
        opt.zero_grad()
        F.cross_entropy(net(x[idx]), y[idx]).backward()
        opt.step()
    torch.save(net.state_dict(), path)


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(network())
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    if rank == 0:
        with tempfile.TemporaryDirectory() as tmp:
            path = os.path.join(tmp, "pretrained.pt")
            pretrain(path)
            missing = model.module.load_state_dict(torch.load(path))
            print("loaded pretrained weights:", missing)
    dist.barrier()

    x, y = iris()
    ds = TensorDataset(x[:144], y[:144])
    sampler = DistributedSampler(ds, shuffle=True, seed=6)
    loader = DataLoader(ds, batch_size=24 // world, sampler=sampler)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} {loss.item():.4f}")

    if os.environ.get("DUMP"):
        torch.save([p.detach().double() for p in model.module.parameters()], f"{os.environ['DUMP']}.rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
