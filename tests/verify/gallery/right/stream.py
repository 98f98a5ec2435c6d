"""A stream of windows of a text; Lockstep divides it."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import lockstep

TEXT = "the cat sat on the mat and the dog sat on the log while the rain fell on the roof. " * 9


class Windows(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        letters = torch.tensor([ord(letter) - 32 for letter in TEXT])
        for window in letters.unfold(0, 10, 7):
            yield window[:9], window[9]


world = lockstep.init(seed=0)
train = world.loader(Windows(), batch_size=24)
model = nn.Sequential(
    nn.Embedding(96, 8), nn.Flatten(), nn.Linear(72, 32), nn.GELU(), nn.Linear(32, 96)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer = world.prepare(model, optimizer)
for epoch in world.epochs(2):
    for letters, following in train:
        loss = F.cross_entropy(model(letters), following)
        world.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    world.print(f"epoch {epoch}: loss {loss.item():.3f}")
