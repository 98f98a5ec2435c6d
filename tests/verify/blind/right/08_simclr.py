"""SimCLR with negatives from all processes (differentiable gather)."""
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class TwoViews(Dataset):
    def __init__(self, n=384):
        self.x = torch.randn(n, 24, generator=torch.Generator().manual_seed(0))
        self.epoch = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.epoch * len(self) + i)
        a, b = 0.3 * torch.randn(2, 24, generator=g)
        return self.x[i] + a, self.x[i] + b


def nt_xent(za, zb, rank, world, tau=0.3):
    if world > 1:
        all_a, all_b = torch.cat(dist_nn.all_gather(za)), torch.cat(dist_nn.all_gather(zb))
    else:
        all_a, all_b = za, zb
    n = len(za)
    own = torch.arange(n) + rank * n
    same = torch.zeros(n, len(all_a), dtype=torch.bool)
    same[torch.arange(n), own] = True
    aa = (za @ all_a.t() / tau).masked_fill(same, float("-inf"))
    bb = (zb @ all_b.t() / tau).masked_fill(same, float("-inf"))
    la = F.cross_entropy(torch.cat([za @ all_b.t() / tau, aa], 1), own)
    lb = F.cross_entropy(torch.cat([zb @ all_a.t() / tau, bb], 1), own)
    return (la + lb) / 2


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = TwoViews()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=48 // world, sampler=sampler, drop_last=True)
    model = DDP(nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 16)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(3):
        data.epoch = epoch
        sampler.set_epoch(epoch)
        for a, b in loader:
            z = F.normalize(model(torch.cat([a, b])), dim=-1)
            za, zb = z.chunk(2)
            loss = nt_xent(za, zb, rank, world)
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
