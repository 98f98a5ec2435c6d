"""An LSTM with dropout between its layers; saves and may resume; shows its progress."""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def waves(count: int, length: int = 12) -> TensorDataset:
    drawn = torch.Generator().manual_seed(8)
    speed, phase = torch.rand(2, count, 1, 2, generator=drawn)
    time = torch.arange(length + 1).view(1, -1, 1)
    value = torch.sin(time * (0.3 + speed) + 6 * phase).sum(2)
    return TensorDataset(value[:, :-1, None], value[:, -1])


class Forecast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(1, 16, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(16, 1)

    def forward(self, past: Tensor) -> Tensor:
        return self.head(self.cells(past)[0][:, -1]).squeeze(1)


parser = argparse.ArgumentParser()
parser.add_argument("--folder", default="runs/forecast")
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()
with lockstep.init(seed=0) as world:
    train = DataLoader(waves(80), batch_size=20, shuffle=True)
    model = Forecast()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    model, optimizer, train = world.prepare(model, optimizer, train)
    checkpoint = world.checkpoint(args.folder, model=model, optimizer=optimizer, loader=train)
    checkpoint.resume()
    for _epoch in world.epochs(args.epochs):
        for past, future in world.progress(train):
            loss = F.mse_loss(model(past), future)
            world.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            world.log(loss=loss)
        checkpoint.save()
