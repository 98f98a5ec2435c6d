"""Every process holds its own part of the data, cut out before there is a data set."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

GLOBAL_BATCH = 24


def main() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    drawn = torch.Generator().manual_seed(18)
    points = torch.randn(120, 5, generator=drawn)
    inside = (points.square().sum(1) < 4.0).float()
    mine = TensorDataset(points[rank::size], inside[rank::size])
    loader = DataLoader(mine, GLOBAL_BATCH // size)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 24), nn.ELU(), nn.Linear(24, 1)))
    optimizer = torch.optim.NAdam(model.parameters(), lr=5e-3)
    for epoch in range(2):
        for x, y in loader:
            loss = F.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
            model.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
