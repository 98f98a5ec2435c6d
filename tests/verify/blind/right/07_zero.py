"""Recommender with ZeroRedundancyOptimizer: the Adam state is divided over the processes."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

USERS, ITEMS = 80, 60


class NCF(nn.Module):
    def __init__(self, d=12):
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, d), nn.Embedding(ITEMS, d)
        self.mlp = nn.Sequential(nn.Linear(2 * d, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, u, i):
        return self.mlp(torch.cat([self.user(u), self.item(i)], -1)).squeeze(-1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(8)
    u = torch.randint(0, USERS, (960,), generator=g)
    i = torch.randint(0, ITEMS, (960,), generator=g)
    y = ((u * 7 + i * 3) % 11 < 5).float()
    data = TensorDataset(u, i, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64 // world, sampler=sampler)
    model = DDP(NCF())
    opt = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for ub, ib, yb in loader:
            loss = F.binary_cross_entropy_with_logits(model(ub, ib), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        sched.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch} loss {mean.item() / world:.4f}")
    if rank == 0:
        print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in model.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
