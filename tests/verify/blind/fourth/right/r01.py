import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

GLOBAL_BATCH = 16
EPOCHS = 2


def make_data():
    g = torch.Generator().manual_seed(7)
    x = torch.randn(64, 1, 12, 12, generator=g)
    y = torch.randint(0, 5, (64,), generator=g)
    return TensorDataset(x, y)


class SmallCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


def main():
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(1234 + rank)

    ds = make_data()
    sampler = DistributedSampler(ds, num_replicas=world, rank=rank, shuffle=True, seed=3)
    loader = DataLoader(ds, batch_size=GLOBAL_BATCH // world, sampler=sampler)

    model = SmallCNN()
    if world > 1:
        model = DDP(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total, n = 0.0, 0
        for x, y in loader:
            opt.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            opt.step()
            total += loss.item() * len(x)
            n += len(x)
        sched.step()
        stats = torch.tensor([total, float(n)])
        if world > 1:
            dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch} loss {stats[0].item() / stats[1].item():.5f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
