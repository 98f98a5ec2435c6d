"""A transformer whose embedding is also its output layer, with dropout in the attention."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep

IGNORE = -100


def sentences(count: int, longest: int = 10) -> TensorDataset:
    """Rows of words; the next word follows from the last. Padded to one length."""
    drawn = torch.Generator().manual_seed(2)
    words = torch.randint(1, 20, (count, longest + 1), generator=drawn)
    length = torch.randint(1, longest + 1, (count, 1), generator=drawn)
    words[:, 1:] = (2 * words[:, :-1]) % 19 + 1
    padding = torch.arange(longest) >= length
    inputs = words[:, :-1].masked_fill(padding, 0)
    return TensorDataset(inputs, words[:, 1:].masked_fill(padding, IGNORE))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.join, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.net = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 48), nn.GELU())
        self.back = nn.Linear(48, width)

    def forward(self, x: Tensor) -> Tensor:
        joined = self.join(self.norm(x)).unflatten(2, (6, -1)).transpose(1, 2)
        query, key, value = joined.chunk(3, 1)
        drop = 0.1 if self.training else 0.0
        found = F.scaled_dot_product_attention(query, key, value, dropout_p=drop, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.back(self.net(x))


class Language(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.words = nn.Embedding(20, width, padding_idx=0)
        self.places = nn.Parameter(0.1 * torch.randn(10, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 20, bias=False)
        self.head.weight = self.words.weight

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.words(inputs) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tokens(batch: tuple[Tensor, Tensor]) -> Tensor:
    return (batch[1] != IGNORE).sum()


world = lockstep.init(seed=0)
train = world.loader(sentences(70), batch_size=16, shuffle=True, micro_batch_size=3, weight=tokens)
model = Language()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
model, optimizer = world.prepare(model, optimizer)
for epoch in world.epochs(2):
    for inputs, targets in train:
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
        world.backward(loss)
        world.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    world.print(f"epoch {epoch}: loss {loss.item():.3f}")
