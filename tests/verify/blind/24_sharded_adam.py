"""Adam with its state divided over the processes (a small ZeRO-1)."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ShardedAdam:
    def __init__(self, params, lr):
        self.params = list(params)
        rank, world = dist.get_rank(), dist.get_world_size()
        per_rank = len(self.params) // world
        self.owner = {r: self.params[r * per_rank:(r + 1) * per_rank] for r in range(world)}
        self.inner = torch.optim.Adam(self.owner[rank], lr=lr)

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self):
        self.inner.step()
        for r, shard in self.owner.items():
            for p in shard:
                dist.broadcast(p, src=r)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(15, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 6))
        self.temperature = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return self.layers(x) * self.temperature

    def parameters_in_order(self):
        return [*self.layers.parameters(), self.temperature]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(14)
    g = torch.Generator().manual_seed(14)
    x = torch.randn(640, 15, generator=g)
    y = (x @ torch.randn(15, 6, generator=g)).argmax(1)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64 // world, sampler=sampler)
    net = Net()
    model = DDP(net)
    opt = ShardedAdam(net.parameters_in_order(), lr=5e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    if rank == 0:
        print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in net.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
