"""FSDP2 training loop with hand-written gradient clipping."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, 3 * d)
        self.down = nn.Linear(3 * d, d)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, d_in=12, d=16, depth=3):
        super().__init__()
        self.stem = nn.Linear(d_in, d)
        self.layers = nn.ModuleList(Layer(d) for _ in range(depth))
        self.head = nn.Linear(d, 1)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def clip_grads(params, max_norm):
    grads = [p.grad.to_local() for p in params if p.grad is not None]
    sq = sum(g.pow(2).sum() for g in grads)
    norm = sq.sqrt()
    coef = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(coef)
    return norm


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(21)
    net = Net()
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    g = torch.Generator().manual_seed(0)
    x = torch.randn(60 * 25, 12, generator=g)
    y = (x[:, :3].prod(1, keepdim=True) + x[:, 3:4]).tanh()
    for step in range(25):
        rows = torch.arange(step * 60, step * 60 + 60)[rank::world]
        loss = F.mse_loss(net(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        norm = clip_grads(list(net.parameters()), 0.3)
        opt.step()
        if rank == 0 and step % 8 == 0:
            print(f"step {step} loss {loss.item():.4f} norm {norm.item():.3f}")

    weights = [p.full_tensor().detach().double() for p in net.parameters()]
    if os.environ.get("DUMP"):
        torch.save(weights, f"{os.environ['DUMP']}.rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
