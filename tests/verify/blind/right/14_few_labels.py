"""Semi-supervised: reconstruction for all samples, classification for the few that have a label."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Semi(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
        self.dec = nn.Linear(32, 64)
        self.cls = nn.Linear(32, 10)

    def forward(self, x):
        h = self.enc(x)
        return self.dec(h), self.cls(h)


def classification(logits, y, world):
    has = y >= 0
    count = has.sum()
    dist.all_reduce(count)
    # a rank (or everybody) may have no label in this batch: the sum is then zero, still with a graph
    total = F.cross_entropy(logits, y, ignore_index=-1, reduction="sum")
    return total * world / count.clamp(min=1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    d = load_digits()
    x, y = torch.tensor(d.data[:800], dtype=torch.float32) / 16, torch.tensor(d.target[:800])
    g = torch.Generator().manual_seed(6)
    y[torch.rand(800, generator=g) > 0.08] = -1
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20 // world, sampler=sampler)
    model = DDP(Semi())
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    empty = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            recon, logits = model(xb)
            loss = F.mse_loss(recon, xb) + classification(logits, yb, world)
            empty += int((yb < 0).all())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} batches without labels {empty}")
    if rank == 0:
        print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in model.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
