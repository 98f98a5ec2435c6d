"""Pre-train on one task, then change the classifier head and fine-tune."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU())
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        return self.head(self.body(x))


def run(model, x, y, epochs, lr, rank, world):
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=64 // world, sampler=sampler)
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    d = load_digits()
    x = torch.tensor(d.data[:1024], dtype=torch.float32) / 16
    digit = torch.tensor(d.target[:1024])

    model = DDP(Classifier(classes=2), find_unused_parameters=True)
    run(model, x, digit % 2, 1, 1e-3, rank, world)

    model.module.head = nn.Linear(32, 10)
    run(model, x, digit, 2, 1e-3, rank, world)

    if rank == 0:
        print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in model.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
