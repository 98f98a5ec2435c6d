"""Models and data of the measurements, where loader workers and ranks find them by name."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class GPT(nn.Module):
    """A causal transformer over tokens `(batch, length)`; gives logits `(batch, length, words)`.

    Two models of the same sizes have the same weights.
    """

    def __init__(self, words: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(words, width)
        self.positions = nn.Embedding(length, width)
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words, bias=False)
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        hidden = self.tokens(x) + self.positions(places)
        return self.head(self.blocks(hidden, mask=self.mask, is_causal=True))


class Images(Dataset[Tensor]):
    """Images of noise, of which whole batches are read at once, so that reading costs little."""

    def __init__(self, batch: int, batches: int, pixels: int) -> None:
        self.images = torch.randn(batch, 3, pixels, pixels)
        self.samples = batch * batches

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return self.images[index % len(self.images)]

    def __getitems__(self, indices: list[int]) -> Tensor:
        return self.images[torch.tensor(indices) % len(self.images)]


def unchanged(batch: Tensor) -> Tensor:
    """The batch as it was read; for `collate_fn`."""
    return batch
