"""A small model of text that comes as a stream."""

from collections.abc import Iterator
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

GLOBAL_BATCH = 24
TEXT = "the cat sat on the mat and the dog sat on the log while the rain fell on the roof. " * 40


class Windows(IterableDataset):
    """Nine letters at a time, and the letter that follows."""

    def __init__(self, text: str, rank: int, size: int) -> None:
        self.letters = torch.tensor([ord(letter) - 32 for letter in text])
        self.rank, self.size = rank, size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        windows = self.letters.unfold(0, 10, 7)
        for window in islice(windows, self.rank, None, self.size):
            yield window[:9], window[9]


class Letters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 8)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(72, 32), nn.GELU(), nn.Linear(32, 96))

    def forward(self, letters: Tensor) -> Tensor:
        return self.body(self.embed(letters))


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
loader = DataLoader(Windows(TEXT, rank, size), batch_size=GLOBAL_BATCH // size)
model = DistributedDataParallel(Letters())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for turn, (letters, following) in enumerate(islice(loader, 8)):
    loss = F.cross_entropy(model(letters), following)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and turn % 4 == 3:
        print(f"after {turn + 1} batches: loss {loss.item():.3f}")
dist.destroy_process_group()
