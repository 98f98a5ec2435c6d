"""A small residual network on digits, with Lockstep."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def digits(count: int) -> TensorDataset:
    bundled = load_digits()
    images = torch.tensor(bundled.images[:count] / 16.0, dtype=torch.float32).unsqueeze(1)
    return TensorDataset(images, torch.tensor(bundled.target[:count]))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        Residual(8),
        Residual(8),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def main() -> None:
    world = lockstep.init(seed=0)
    train = DataLoader(digits(120), batch_size=24, shuffle=True)
    test = DataLoader(digits(60), batch_size=60)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, train, test = world.prepare(model, optimizer, train, test)
    for epoch in world.epochs(2):
        model.train()
        for images, labels in train:
            loss = F.cross_entropy(model(images), labels)
            world.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            right = world.sum(sum((model(x).argmax(1) == y).sum() for x, y in test))
        world.print(f"epoch {epoch}: {int(right)} of 60 right")


if __name__ == "__main__":
    main()
