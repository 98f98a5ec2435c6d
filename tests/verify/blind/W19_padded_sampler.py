"""Poisson regression of counts on a table whose length does not divide evenly."""
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ROWS = 725
BATCH = 60


def table():
    g = torch.Generator().manual_seed(12)
    x = torch.randn(ROWS, 5, generator=g)
    rate = torch.exp(0.5 * x[:, 0] - 0.4 * x[:, 1] * x[:, 2] + 0.2)
    return TensorDataset(x, torch.poisson(rate, generator=g))


class RateNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.Sequential(nn.Linear(5, 20), nn.Softplus(), nn.Linear(20, 20), nn.Softplus())
        self.o = nn.Linear(20, 1)

    def forward(self, x):
        return self.o(self.h(x)).squeeze(1)


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    data = table()
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True, seed=77)
    loader = DataLoader(data, batch_size=BATCH // world, sampler=sampler)
    model = DDP(RateNet())
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    nll = nn.PoissonNLLLoss(log_input=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        acc, n = 0.0, 0
        for x, y in loader:
            opt.zero_grad()
            loss = nll(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            acc, n = acc + loss.item() * len(y), n + len(y)
        if rank == 0:
            print(f"epoch {epoch}: {acc / n:.4f} on {n} rows")
    if os.environ.get("DUMP"):
        torch.save([p.detach().double() for p in model.module.parameters()], f"{os.environ['DUMP']}.rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
