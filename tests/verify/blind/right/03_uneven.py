"""Regression where the global batch (25) does not divide by the number of processes."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

GLOBAL_BATCH = 25


class StridedBatches:
    """Yields this rank's part of every global batch; the parts may differ in length by one."""

    def __init__(self, n, rank, world, seed=0):
        self.n, self.rank, self.world, self.seed, self.epoch = n, rank, world, seed, 0

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        for batch in torch.randperm(self.n, generator=g).split(GLOBAL_BATCH):
            yield batch[self.rank::self.world].tolist()

    def __len__(self):
        return -(-self.n // GLOBAL_BATCH)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(10)
    g = torch.Generator().manual_seed(10)
    x = torch.randn(410, 9, generator=g)
    y = (x ** 2).sum(1, keepdim=True).sqrt() + 0.1 * torch.randn(410, 1, generator=g)
    batches = StridedBatches(410, rank, world)
    loader = DataLoader(TensorDataset(x, y), batch_sampler=batches)

    model = DDP(nn.Sequential(nn.Linear(9, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(3):
        batches.epoch = epoch
        for xb, yb in loader:
            count = torch.tensor(float(len(xb)))
            dist.all_reduce(count)
            squared = (model(xb) - yb).square().sum()
            loss = squared * world / count  # DDP divides by world
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
