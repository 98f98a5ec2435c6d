"""CNN on digits; the last batch of an epoch is shorter (600 = 12 * 48 + 24)."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # DDP sends the weights of rank 0 to everybody
    d = load_digits()
    x = torch.tensor(d.images[:600], dtype=torch.float32)[:, None] / 16
    data = TensorDataset(x, torch.tensor(d.target[:600]))
    sampler = DistributedSampler(data, shuffle=True, seed=12)
    loader = DataLoader(data, batch_size=48 // world, sampler=sampler, drop_last=False)
    model = DDP(nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10),
    ))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        seen = 0
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            seen += len(xb)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} seen by rank 0: {seen}")
    if rank == 0:
        print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in model.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
