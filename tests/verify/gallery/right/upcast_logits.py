"""A library's model returns its logits in float32; padded sentences are weighed by their tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 16)
        self.reads = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 30)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.reads(self.words(tokens))[0]).float()


def padded(sentences: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(sentences, batch_first=True)


world = lockstep.init(seed=0)
torch.manual_seed(1)
text = [torch.randint(1, 30, (int(torch.randint(3, 9, ())),)) for _ in range(36)]
train = world.loader(
    text,
    batch_size=13,
    shuffle=True,
    collate_fn=padded,
    weight=lambda tokens: (tokens[:, 1:] != 0).sum(),
)
model = Language()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model, optimizer = world.prepare(model, optimizer)
for _epoch in world.epochs(2):
    for tokens in train:
        logits = model(tokens[:, :-1]).transpose(1, 2)
        loss = F.cross_entropy(logits, tokens[:, 1:], ignore_index=0)
        world.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
