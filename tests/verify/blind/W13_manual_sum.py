"""Matrix factorisation with hand-made data parallelism (flattened buffers, asynchronous reduction)."""
import os
import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


class MF(nn.Module):
    def __init__(self, users, items, d=6):
        super().__init__()
        self.P = nn.Parameter(0.1 * torch.randn(users, d))
        self.Q = nn.Parameter(0.1 * torch.randn(items, d))
        self.bu, self.bi = nn.Parameter(torch.zeros(users)), nn.Parameter(torch.zeros(items))
        self.mu = nn.Parameter(torch.zeros(()))

    def forward(self, u, i):
        return self.mu + self.bu[u] + self.bi[i] + (self.P[u] * self.Q[i]).sum(-1)


class GradReducer:
    def __init__(self, module):
        self.params = list(module.parameters())
        self.world = dist.get_world_size()
        for p in self.params:
            dist.broadcast(p.data, src=0)

    def start(self):
        self.flat = _flatten_dense_tensors([p.grad for p in self.params])
        self.work = dist.all_reduce(self.flat, op=dist.ReduceOp.SUM, async_op=True)

    def finish(self):
        self.work.wait()
        for p, g in zip(self.params, _unflatten_dense_tensors(self.flat, [p.grad for p in self.params])):
            p.grad.copy_(g)


def ratings(n=3000, users=60, items=40):
    g = torch.Generator().manual_seed(2)
    A, B = torch.randn(users, 3, generator=g), torch.randn(items, 3, generator=g)
    u = torch.randint(users, (n,), generator=g)
    i = torch.randint(items, (n,), generator=g)
    return u, i, (A[u] * B[i]).sum(1) + 3 + 0.1 * torch.randn(n, generator=g)


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    net = MF(60, 40)
    red = GradReducer(net)
    opt = torch.optim.SGD(net.parameters(), lr=0.25, momentum=0.5)
    u, i, r = ratings()
    for step in range(30):
        sel = slice(step * 100 + rank, (step + 1) * 100, world)
        loss = (net(u[sel], i[sel]) - r[sel]).pow(2).mean()
        reg = 1e-3 * (net.P.pow(2).sum() + net.Q.pow(2).sum())
        opt.zero_grad()
        (loss + reg).backward()
        red.start()
        shown = loss.item()            # overlaps with the reduction
        red.finish()
        opt.step()
        if rank == 0 and step % 10 == 0:
            print(f"{step}: rmse {shown ** 0.5:.4f}")
    if os.environ.get("DUMP"):
        torch.save([p.detach().double() for p in net.parameters()], f"{os.environ['DUMP']}.rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
