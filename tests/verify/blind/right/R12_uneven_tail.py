"""Wine classifier; the last batch of every epoch is smaller and splits unevenly, the loss is weighted accordingly."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_wine
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset

GLOBAL = 32


class SplitBatchSampler(Sampler):
    """Yields this rank's part of every global batch (sizes may differ by one)."""

    def __init__(self, n, batch, rank, world, seed=0):
        self.n, self.batch, self.rank, self.world, self.seed, self.epoch = n, batch, rank, world, seed, 0

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        perm = torch.randperm(self.n, generator=g).tolist()
        for s in range(0, self.n, self.batch):
            yield perm[s:s + self.batch][self.rank::self.world]

    def __len__(self):
        return (self.n + self.batch - 1) // self.batch


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    wine = load_wine()
    X = (wine.data - wine.data.mean(0)) / wine.data.std(0)
    data = TensorDataset(torch.tensor(X, dtype=torch.get_default_dtype()), torch.tensor(wine.target))
    assert len(data) % GLOBAL == 18
    data = torch.utils.data.Subset(data, range(177))         # 5 full batches and 17 left over: 9 + 8

    bs = SplitBatchSampler(len(data), GLOBAL, rank, world, seed=5)
    loader = DataLoader(data, batch_sampler=bs)

    torch.manual_seed(17)
    net = nn.Sequential(nn.Linear(13, 20), nn.ELU(), nn.Linear(20, 3))
    net = DDP(net)

    # plain SUM instead of DDP's mean
    def sum_hook(state, bucket):
        fut = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return fut.then(lambda f: f.value()[0])

    net.register_comm_hook(None, sum_hook)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    crit = nn.CrossEntropyLoss(reduction="sum")

    for epoch in range(5):
        bs.epoch = epoch
        epoch_loss = torch.zeros(2, dtype=torch.float64)
        for x, y in loader:
            n = torch.tensor([len(y)])
            dist.all_reduce(n)
            loss = crit(net(x), y)
            opt.zero_grad()
            (loss / n.item()).backward()
            opt.step()
            epoch_loss += torch.tensor([loss.item(), len(y)], dtype=torch.float64)
        dist.all_reduce(epoch_loss)
        if rank == 0:
            print(f"epoch {epoch} loss {(epoch_loss[0] / epoch_loss[1]).item():.4f} over {int(epoch_loss[1])} samples")
    save_for_check(net, rank)
    dist.destroy_process_group()


def save_for_check(net, rank):
    if os.environ.get("DUMP"):
        torch.save([p.detach().double() for p in net.module.parameters()], f"{os.environ['DUMP']}.rank{rank}.pt")


main()
