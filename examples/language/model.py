"""A small language model: what comes after each character of a text."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Attention to what came before, and a small network, each with a connection around it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.net = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[2]
        parts = self.attend(self.norm1(x)).unflatten(2, (3, self.heads, width // self.heads))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(found.transpose(1, 2).flatten(2))
        return x + self.net(self.norm2(x))


class Language(nn.Module):
    """From `(samples, length)` characters to `(samples, length, characters)` logits."""

    def __init__(self, characters: int, longest: int, width: int, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, width)
        self.position = nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, width // 32) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        x = self.embed(text) + self.position(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_sum(model: nn.Module, text: Tensor) -> Tensor:
    """The cross entropy of all characters that are to be predicted, added up."""
    logits, wanted = model(text)[:, :-1], text[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=0, reduction="sum")
