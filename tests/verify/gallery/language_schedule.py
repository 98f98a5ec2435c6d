"""A language model with warm-up; at most eight sentences are computed at a time."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

IGNORE = -100


def sentences(count: int, longest: int = 10) -> TensorDataset:
    """Rows of words; the next word follows from the last two. Padded to one length."""
    drawn = torch.Generator().manual_seed(2)
    words = torch.randint(1, 20, (count, longest + 1), generator=drawn)
    for place in range(2, longest + 1):
        words[:, place] = (words[:, place - 1] + 2 * words[:, place - 2]) % 19 + 1
    length = torch.randint(2, longest + 1, (count, 1), generator=drawn)
    padding = torch.arange(longest) >= length
    inputs = words[:, :-1].masked_fill(padding, 0)
    return TensorDataset(inputs, words[:, 1:].masked_fill(padding, IGNORE))


class Language(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, width), nn.Embedding(10, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 48, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 20)

    def forward(self, inputs: Tensor) -> Tensor:
        length = inputs.shape[1]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        x = self.words(inputs) + self.places(torch.arange(length))
        return self.head(self.block(x, src_mask=later))


def main() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = sentences(96)
    local = 24 // size
    accumulate = -(-local // 8)
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=local // accumulate, sampler=sampler)
    model = DistributedDataParallel(Language())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=16)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for turn, (inputs, targets) in enumerate(loader, start=1):
            closes = turn % accumulate == 0
            with nullcontext() if closes else model.no_sync():
                losses = F.cross_entropy(
                    model(inputs).transpose(1, 2), targets, reduction="none", ignore_index=IGNORE
                )
                (losses.mean() / accumulate).backward()
            if closes:
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
        if rank == 0:
            print(f"epoch {epoch}: rate {schedule.get_last_lr()[0]:.2e}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
