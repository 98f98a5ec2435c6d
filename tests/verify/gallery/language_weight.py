"""A language model with Lockstep, on sentences of different lengths."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep

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
    world = lockstep.init(seed=0)
    train = world.loader(
        sentences(96), batch_size=24, shuffle=True, weight=lambda batch: (batch[1] != IGNORE).sum()
    )
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = world.prepare(model, optimizer)
    for epoch in world.epochs(2):
        for inputs, targets in train:
            logits = model(inputs).flatten(0, 1)
            loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE)
            world.backward(loss)
            world.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        world.print(f"epoch {epoch}: loss {loss.item():.3f}")
    world.close()


if __name__ == "__main__":
    main()
