"""Proxy-based metric learning on the digits; the network is wrapped, proxies live inside it, the temperature is learned too."""
import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ProxyNet(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, d))
        self.proxies = nn.Parameter(torch.randn(10, d))

    def forward(self, x):
        return F.normalize(self.f(x), dim=1) @ F.normalize(self.proxies, dim=1).T


class TemperedCE(nn.Module):
    """cross entropy with a learned temperature"""

    def __init__(self, init=0.5):
        super().__init__()
        self.log_t = nn.Parameter(torch.tensor(init).log())

    def forward(self, cos, y):
        return F.cross_entropy(cos / self.log_t.exp(), y)


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    d = load_digits()
    ds = TensorDataset(torch.tensor(d.data / 16, dtype=torch.get_default_dtype())[:1600], torch.tensor(d.target)[:1600])
    sampler = DistributedSampler(ds, shuffle=True, seed=2)
    loader = DataLoader(ds, batch_size=100 // world, sampler=sampler)

    torch.manual_seed(3)
    net = DDP(ProxyNet())
    criterion = TemperedCE()
    opt = torch.optim.Adam([
        {"params": net.parameters()},
        {"params": criterion.parameters(), "lr": 2e-2},
    ], lr=2e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = criterion(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} temperature {criterion.log_t.exp().item():.4f}")
    export(list(net.parameters()) + list(criterion.parameters()), rank)
    dist.destroy_process_group()


def export(params, rank):
    if os.environ.get("DUMP"):
        torch.save([p.detach().double() for p in params], f"{os.environ['DUMP']}.rank{rank}.pt")


if __name__ == "__main__":
    main()
