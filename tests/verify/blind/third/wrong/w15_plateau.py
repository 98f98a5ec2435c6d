import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_loaders(global_batch, world):
    d = load_digits()
    x, y = torch.tensor(d.data / 16).float(), torch.tensor(d.target)
    train, val = TensorDataset(x[:256], y[:256]), TensorDataset(x[1000:1040], y[1000:1040])
    ts = DistributedSampler(train, shuffle=True, seed=2)
    vs = DistributedSampler(val, shuffle=False)
    return (DataLoader(train, batch_size=global_batch // world, sampler=ts), ts,
            DataLoader(val, batch_size=40 // world, sampler=vs))


def validate(model, loader, loss_fn):
    model.eval()
    total, n = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            total += loss_fn(model(x), y).item() * len(y)
            n += len(y)
    model.train()
    return total / n


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(2)
    train_dl, sampler, val_dl = make_loaders(128, world)
    model = DDP(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    loss_fn = nn.CrossEntropyLoss()
    opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, mode="min", factor=0.2, patience=0, threshold=0.04)

    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in train_dl:
            opt.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            opt.step()
        val_loss = validate(model, val_dl, loss_fn)
        sched.step(val_loss)
        if rank == 0:
            print(f"epoch {epoch} val {val_loss:.4f} lr {opt.param_groups[0]['lr']:.3g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
