"""Streaming click-through model: an IterableDataset that each process strides over."""
import os
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class ClickStream(IterableDataset):
    def __init__(self, n_events, rank, world, n_users=50, n_items=80):
        self.n_events, self.rank, self.world = n_events, rank, world
        self.n_users, self.n_items = n_users, n_items

    def event(self, k):
        g = torch.Generator().manual_seed(k)
        u = int(torch.randint(self.n_users, (1,), generator=g))
        i = int(torch.randint(self.n_items, (1,), generator=g))
        dense = torch.randn(4, generator=g)
        p = torch.sigmoid(dense[0] + 0.1 * ((u * 7 + i * 3) % 11 - 5))
        return u, i, dense, (torch.rand((), generator=g) < p).to(dense.dtype)

    def __iter__(self):
        for k in range(self.n_events):
            if k % self.world == self.rank:
                yield self.event(k)


class Tower(nn.Module):
    def __init__(self, n_users=50, n_items=80, d=8):
        super().__init__()
        self.user = nn.EmbeddingBag(n_users, d, mode="sum")
        self.item = nn.Embedding(n_items, d)
        self.bias_item = nn.Embedding(n_items, 1)
        nn.init.zeros_(self.bias_item.weight)
        self.mlp = nn.Sequential(nn.Linear(2 * d + 4, 32), nn.PReLU(), nn.Linear(32, 1))

    def forward(self, u, i, dense):
        e = torch.cat([self.user(u.unsqueeze(1)), self.item(i), dense], 1)
        return (self.mlp(e) + self.bias_item(i)).squeeze(1)


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    total_batch, n_steps = 80, 30
    # a bit more than needed; the incomplete tail is dropped everywhere
    stream = ClickStream(total_batch * n_steps + 17, rank, world)
    loader = DataLoader(stream, batch_size=total_batch // world, drop_last=True)
    net = DDP(Tower())
    opt = torch.optim.Adagrad(net.parameters(), lr=0.05, eps=1e-6)
    seen, correct, step = 0, 0, 0
    for u, i, dense, y in loader:
        logit = net(u, i, dense)
        loss = nn.functional.binary_cross_entropy_with_logits(logit, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        seen += len(y)
        correct += int(((logit > 0) == (y > 0.5)).sum())
        step += 1
        if step % 10 == 0:
            print(f"[worker {rank}/{world}] {step} batches, {seen} events, acc so far {correct / seen:.3f}", flush=True)
        if step == n_steps:
            break
    stats = torch.tensor([seen, correct])
    dist.all_reduce(stats)
    if rank == 0:
        print("events", stats[0].item(), "accuracy", stats[1].item() / stats[0].item())
    maybe_dump(net)
    dist.destroy_process_group()


def maybe_dump(net):
    if "DUMP" in os.environ:
        name = f"{os.environ['DUMP']}.rank{dist.get_rank()}.pt"
        torch.save([p.detach().double() for p in net.parameters()], name)


if __name__ == "__main__":
    main()
