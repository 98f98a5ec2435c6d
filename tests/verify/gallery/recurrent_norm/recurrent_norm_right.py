"""Sums up digits read one after another with a GRU, with Lockstep."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep


def sums(count: int, length: int = 8) -> TensorDataset:
    drawn = torch.Generator().manual_seed(12)
    read = torch.randint(5, (count, length), generator=drawn)
    return TensorDataset(read, read.sum(1) % 5)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 8)
        self.cells = nn.GRU(8, 16, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, read: Tensor) -> Tensor:
        return self.head(self.cells(self.embed(read))[0][:, -1])


world = lockstep.init(seed=0)
train = world.loader(sums(96), batch_size=24, shuffle=True, micro_batch=4)
model = Reader()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
model, optimizer = world.prepare(model, optimizer)

for epoch in world.epochs(2):
    for read, wanted in train:
        loss = F.cross_entropy(model(read), wanted)
        world.backward(loss)
        world.clip_grad_norm(model, 0.05)
        optimizer.step()
        optimizer.zero_grad()
    world.print(f"epoch {epoch}: loss {loss.item():.3f}")
