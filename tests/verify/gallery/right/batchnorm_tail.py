"""Batch normalisation after a convolution with a bias; short last batch; evaluation in between."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def pictures(count: int) -> TensorDataset:
    """Ten kinds of pictures of eight by eight points, with noise."""
    drawn = torch.Generator().manual_seed(10)
    kinds = torch.rand(10, 1, 8, 8, generator=drawn)
    kind = torch.randint(10, (count,), generator=drawn)
    noise = 0.3 * torch.randn(count, 1, 8, 8, generator=drawn)
    return TensorDataset(kinds[kind] + noise, kind)


def main() -> None:
    world = lockstep.init(seed=0)
    train = DataLoader(pictures(65), batch_size=24, shuffle=True)
    test = DataLoader(pictures(31), batch_size=8)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 24),
        nn.BatchNorm1d(24, momentum=None),
        nn.Dropout(0.2),
        nn.Linear(24, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model, optimizer, train, test = world.prepare(model, optimizer, train, test)
    for epoch in world.epochs(2):
        for images, labels in train:
            model.train()
            loss = F.cross_entropy(model(images), labels)
            world.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                right = sum((model(x).argmax(1) == y).sum() for x, y in test)
        world.print(f"epoch {epoch}: {int(world.sum(right))} of 31 right")


if __name__ == "__main__":
    main()
