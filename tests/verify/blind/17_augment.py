"""CNN on digits with random shifts and noise."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class AugmentedDigits(Dataset):
    """Every sample has its own generator, so that runs can be repeated."""

    def __init__(self, n, seed):
        d = load_digits()
        self.x = torch.tensor(d.images[:n], dtype=torch.float32)[:, None] / 16
        self.y = torch.tensor(d.target[:n])
        self.seed = seed
        self.epoch = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed + 100_003 * self.epoch + i)
        dx, dy = torch.randint(-1, 2, (2,), generator=g).tolist()
        img = torch.roll(self.x[i], (dy, dx), dims=(1, 2))
        img = img + 0.1 * torch.randn(img.shape, generator=g)
        return img, self.y[i]


def build():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 10),
    )


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = AugmentedDigits(512, seed=1234 + 1_000_000 * rank)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=64 // world, sampler=sampler)
    model = DDP(build())
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        data.epoch = epoch
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
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
