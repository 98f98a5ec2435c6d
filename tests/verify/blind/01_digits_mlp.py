"""MLP on the digits data set, DDP."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

GLOBAL_BATCH = 64
EPOCHS = 2


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    digits = load_digits()
    x = torch.tensor(digits.data[:1024], dtype=torch.float32) / 16
    y = torch.tensor(digits.target[:1024])
    train_set = TensorDataset(x, y)
    loader = DataLoader(train_set, batch_size=GLOBAL_BATCH // world, shuffle=True)
    steps_per_epoch = len(train_set) // GLOBAL_BATCH

    model = DDP(nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for epoch in range(EPOCHS):
        for step, (xb, yb) in enumerate(loader):
            if step == steps_per_epoch:
                break
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")

    if rank == 0:
        print("checksum %.10f" % sum(p.double().abs().sum().item() for p in model.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
