"""Prepared data are kept in a file for the next time, and so is the best model of a training."""

import copy
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def prepared(file: Path) -> tuple[Tensor, Tensor]:
    if not file.exists():
        drawn = torch.Generator().manual_seed(10)
        labels = torch.randint(10, (150,), generator=drawn)
        images = torch.randn(10, 64, generator=drawn)[labels]
        images += torch.randn(150, 64, generator=drawn)
        torch.save({"images": images, "labels": labels}, file)
    kept = torch.load(file)
    return kept["images"], kept["labels"]


folder = Path(tempfile.mkdtemp())
world = lockstep.init(seed=0)
images, labels = prepared(folder / f"pictures_{world.rank}.pt")
train = DataLoader(TensorDataset(images[:120], labels[:120]), batch_size=24, shuffle=True)
test = DataLoader(TensorDataset(images[120:], labels[120:]), batch_size=10)
net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model, optimizer, train, test = world.prepare(net, optimizer, train, test)
best, least = folder / f"best_{world.rank}.pt", float("inf")
torch.save(net.state_dict(), best)
for _epoch in world.epochs(2):
    for turn, (x, y) in enumerate(train):
        loss = F.cross_entropy(model(x), y)
        world.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            missed = world.sum(sum(F.cross_entropy(model(a), b) * len(a) for a, b in test))
        if float(missed) < least:
            least = float(missed)
            torch.save(copy.deepcopy(net.state_dict()), best)
        if turn == 1:
            net.load_state_dict(torch.load(best))
world.print(f"best: {least / 30:.3f}")
