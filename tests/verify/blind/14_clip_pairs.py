"""Contrastive training of two encoders (CLIP style) with negatives from all processes."""
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Pair(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, d))
        self.text = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, d))
        self.scale = nn.Parameter(torch.tensor(math.log(5.0)))

    def forward(self, a, b):
        return F.normalize(self.image(a), dim=-1), F.normalize(self.text(b), dim=-1), self.scale.exp()


def gather(z):
    parts = [torch.empty_like(z) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, z)
    parts[dist.get_rank()] = z
    return torch.cat(parts)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    g = torch.Generator().manual_seed(6)
    latent = torch.randn(512, 8, generator=g)
    a = torch.tanh(latent @ torch.randn(8, 32, generator=g))
    b = torch.tanh(latent @ torch.randn(8, 20, generator=g))
    data = TensorDataset(a, b)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64 // world, sampler=sampler, drop_last=True)
    model = DDP(Pair())
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        for ab, bb in loader:
            za, zb, scale = model(ab, bb)
            all_a, all_b = gather(za), gather(zb)
            labels = torch.arange(len(za)) + rank * len(za)
            loss_a = F.cross_entropy(scale * za @ all_b.t(), labels)
            loss_b = F.cross_entropy(scale * zb @ all_a.t(), labels)
            loss = (loss_a + loss_b) / 2
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")

    if rank == 0:
        print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in model.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
