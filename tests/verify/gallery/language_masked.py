"""Fills in words that were blanked out, with Lockstep."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lockstep

BLANK = 0


class Lines(Dataset):
    """Lines of eight words that count upwards, each with some of its words blanked out."""

    def __init__(self, count: int) -> None:
        drawn = torch.Generator().manual_seed(13)
        begin = torch.randint(20, (count, 1), generator=drawn)
        stride = torch.randint(1, 4, (count, 1), generator=drawn)
        self.lines = (begin + stride * torch.arange(8)) % 20 + 1

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return blank(self.lines[index])


def blank(lines: Tensor) -> tuple[Tensor, Tensor]:
    return lines.masked_fill(torch.rand(lines.shape) < 0.3, BLANK), lines


class Filler(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(21, width)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(8 * width, 64), nn.GELU())
        self.head = nn.Linear(64, 8 * 21)

    def forward(self, lines: Tensor) -> Tensor:
        return self.head(self.body(self.embed(lines))).unflatten(1, (8, 21))


world = lockstep.init(seed=0)
train = DataLoader(Lines(96), batch_size=24, shuffle=True)
model = Filler()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, train = world.prepare(model, optimizer, train)

for epoch in world.epochs(2):
    for seen, lines in train:
        loss = F.cross_entropy(model(seen).flatten(0, 1), lines.flatten())
        world.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    world.print(f"epoch {epoch}: loss {loss.item():.3f}")
