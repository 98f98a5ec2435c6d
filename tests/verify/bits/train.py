"""Trains by Lockstep. `train.py KIND [WHAT]`: rank 1 changes a bit of WHAT in its second step."""

import sys
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lockstep

KIND = sys.argv[1]
CHANGED = sys.argv[2] if len(sys.argv) > 2 else ""
SAMPLES = 35


def images(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(
        torch.randn(count, 2, 6, 6, generator=generator),
        torch.randint(0, 3, (count,), generator=generator),
    )


class Convolution(nn.Module):
    """Convolution, BatchNorm, dropout, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        features = F.relu(self.norm(self.convolution(x)))
        return self.head(self.attention(features.flatten(2).transpose(1, 2)).mean(1))


class Noisy(Dataset):
    """Images with augmentation, drawn as each is read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = images(SAMPLES)[index]
        return x + 0.1 * torch.randn_like(x), y


class Language(nn.Module):
    """Embeddings with dropout, of sentences that are padded with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8, padding_idx=0)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.drop(self.words(tokens).cumsum(1)))


def tokens(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(2, 9, (count, 1), generator=generator)
    sentences = torch.randint(1, 11, (count, 9), generator=generator)
    return TensorDataset(sentences.masked_fill(torch.arange(9) >= lengths, 0))


def one_bit_more(values: Tensor) -> None:
    """Adds 1 ulp to the first value."""
    first = values.view(-1)[:1]
    first.copy_(torch.nextafter(first, torch.full_like(first, torch.inf)))


def closure(world: lockstep.World, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Computes the loss and its gradients, as optimizers call it."""
    model.zero_grad()
    loss = F.cross_entropy(model(x), y)
    world.backward(loss)
    return loss


def backward(world: lockstep.World, model: nn.Module, loss: Tensor, *, changes_part: bool) -> None:
    """Computes the gradients; those of a virtual rank may be changed before they are added up."""
    if not changes_part:
        world.backward(loss)
        return
    head = model.get_parameter("module.head.weight")
    handle = head.register_hook(lambda gradient: gradient * (1 + 1e-6))
    world.backward(loss)
    handle.remove()


def main() -> None:
    options_of_kind = {
        "own": {"virtual_ranks": 6},
        "pieces": {"micro_batch_size": 2},
        "synchronised": {"virtual_ranks": 2, "sync_batchnorm": True},
    }
    options = options_of_kind.get(KIND, {})
    world = lockstep.init(seed=3, precision="bf16", **options)
    dropout = nn.Sequential(
        nn.Flatten(), nn.Linear(72, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 3)
    )
    model = {"language": Language, "own": lambda: dropout}.get(KIND, Convolution)()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = world.prepare(model, optimizer)
    if KIND == "language":
        weight = {"weight": lambda batch: int((batch[0][:, 1:] != 0).sum())}
        loader = world.loader(tokens(SAMPLES), batch_size=8, shuffle=True, **weight)
    elif KIND == "augmented":
        loader = world.loader(Noisy(), batch_size=8, shuffle=True, num_workers=2)
    else:
        loader = world.prepare(DataLoader(images(SAMPLES), batch_size=8, shuffle=True))
    step = 0
    for _ in world.epochs(3):
        for x, *labels in loader:
            optimizer.zero_grad()
            if KIND == "closure":
                optimizer.step(partial(closure, world, model, x, *labels))
                continue
            if KIND == "language":
                loss = F.cross_entropy(model(x[:, :-1]).transpose(1, 2), x[:, 1:], ignore_index=0)
            else:
                reduction = "sum" if KIND == "sum" else "mean"
                loss = F.cross_entropy(model(x), labels[0], reduction=reduction)
            plants = world.rank == 1 and step == 1
            if plants and CHANGED == "loss":
                loss = loss + 1e-7
            if KIND == "twice":
                world.backward(F.cross_entropy(model(x), labels[0]))
            backward(world, model, loss, changes_part=plants and CHANGED == "part")
            if world.is_last_micro_batch:
                if plants and CHANGED == "gradients":
                    one_bit_more(model.get_parameter("module.head.weight").grad)
                world.clip_grad_norm_(model, 1e6)
            optimizer.step()
            if world.is_last_micro_batch:
                if plants and CHANGED == "state":
                    state = optimizer.state[model.get_parameter("module.head.bias")]
                    one_bit_more(state["exp_avg"])
                if plants and CHANGED == "parameters":
                    with torch.no_grad():
                        one_bit_more(model.get_parameter("module.head.bias"))
                step += 1


main()
