"""Every strategy computes what one device computes.

Strategies x precision x accumulation x tails x clipping, on a small transformer and on a small
residual network with BatchNorm.

In float64 the weights agree to 1e-9. In bf16 each layer rounds to 8 bits (an error of up to 2 ** -9
of its output), and two strategies may round sums of other parts. So each gradient differs by no
more than some layers times 2 ** -8 of the largest gradient, and a weight by what the steps add up.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from saved import full_state_dict
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.strategies import DP, HSDP, Pipeline

pytestmark = pytest.mark.ranks

BATCH, STEPS, RATE, WORDS, LENGTH, WIDTH = 18, 5, 0.1, 11, 4, 8
LAYERS = 12
"""More than either model has one after the other."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attend, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.attend(self.norm(x)).chunk(3, -1)
        x = x + self.join(((query @ key.transpose(1, 2)) / 3).softmax(-1) @ value)
        return x + self.net(x)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean(1)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv(x)).tanh()


def residual() -> nn.Module:
    stem = [nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Tanh()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, WORDS)]
    return nn.Sequential(*stem, Residual(), Residual(), *head)


def data(model: str, samples: int, dtype: torch.dtype) -> TensorDataset:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(samples, 2, 5, 5, generator=generator, dtype=torch.float64).to(dtype)
    if model == "transformer":
        x = torch.randint(WORDS, (samples, LENGTH), generator=generator)
    return TensorDataset(x, torch.randint(WORDS, (samples,), generator=generator))


MODELS: dict[str, Any] = {"transformer": Transformer, "residual": residual}
CELLS = list(product(MODELS, ("float64", "bf16"), (1, 3), ("even", "uneven tail"), (False, True)))
HALVES = tuple(
    [cell for number, cell in enumerate(CELLS) if number.bit_count() % 2 == half] for half in (0, 1)
)
"""Each has all combinations of any four of the five."""
STRATEGIES: dict[str, tuple[int, Any]] = {
    "dp": (1, lambda pieces: DP(replicas=2)),
    "ddp": (2, lambda pieces: "ddp"),
    "ddp, 3 ranks": (3, lambda pieces: "ddp"),
    "fsdp": (2, lambda pieces: "fsdp"),
    "hsdp": (4, lambda pieces: HSDP(shard_size=2)),
    "pipeline": (2, lambda pieces: Pipeline(num_micro_batches=pieces)),
    "pipeline x data parallel": (4, lambda pieces: Pipeline(stages=2, num_micro_batches=pieces)),
}


RARE = ("ddp", "hsdp", "pipeline x data parallel")
"""Four ranks, or two where three do the same."""


def train(cell: tuple[Any, ...], strategy: str | None) -> dict[str, Tensor]:
    """The weights after some steps, and how far the steps may have gone."""
    kind, precision, pieces, tail, clips = cell
    dtype = torch.float64 if precision == "float64" else torch.float32
    options = STRATEGIES[strategy][1](pieces) if strategy else None
    with lockstep.init(
        options, seed=6, precision="fp32" if precision == "float64" else precision
    ) as world:
        torch.manual_seed(2)
        model = MODELS[kind]().to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        samples = data(kind, 36 if tail == "even" else 31, dtype)
        model, optimizer, _ = world.prepare(model, optimizer, DataLoader(samples, 4))
        parts = len(world._plan.shares) * (2 if strategy == "dp" else 1)
        micro = None if pieces == 1 or "pipeline" in str(strategy) else -(-BATCH // pieces // parts)
        loader = world.loader(samples, BATCH, shuffle=True, micro_batch_size=micro)
        assert loader.micro_batches == pieces
        moved = 0.0
        while world._run.step.number < STEPS:
            for x, y in loader:
                world.backward(F.cross_entropy(model(x), y))
                if clips:
                    world.clip_grad_norm_(model, 0.2)
                if strategy is None and loader.current.last:
                    gradients = [p.grad for p in model.parameters() if p.grad is not None]
                    moved += RATE * max(float(g.abs().max()) for g in gradients)
                optimizer.step()
                optimizer.zero_grad()
                if world._run.step.number == STEPS:
                    break
        found = {
            name.removeprefix("module."): value.detach().clone()
            for name, value in full_state_dict(model.state_dict()).items()
            if not value.is_meta
        }
        return {**found, "moved": torch.tensor(moved)}


def train_all(strategy: str | None, half: int) -> list[dict[str, Tensor]]:
    return [train(cell, strategy) for cell in HALVES[half]]


@cache
def alone(half: int) -> list[dict[str, Tensor]]:
    return run_ranks(train_all, 1, None, half)[0]


@pytest.mark.parametrize(
    ("strategy", "half"),
    [
        pytest.param(name, half, marks=pytest.mark.thorough if half or name in RARE else ())
        for name, half in product(STRATEGIES, (0, 1))
    ],
)
def test_it_computes_what_one_device_computes(strategy, half):
    ranks = run_ranks(train_all, STRATEGIES[strategy][0], strategy, half)
    for number, (cell, expected) in enumerate(zip(HALVES[half], alone(half), strict=True)):
        found: dict[str, Tensor] = {}
        for rank in ranks:
            found |= rank[number]
        assert found.keys() == expected.keys(), cell
        bound = LAYERS * 2**-8 * float(expected["moved"])
        for name in expected.keys() - {"moved"}:
            difference = float((found[name].double() - expected[name].double()).abs().max())
            if cell[1] == "bf16" and "running" not in name:
                assert difference <= bound, (cell, name)
            elif cell[1] == "float64":
                scale = max(1.0, float(expected[name].abs().max()))
                assert difference <= 1e-9 * scale, (cell, name)


@pytest.mark.thorough
def test_the_cells_differ_from_each_other():
    """A comparison of things that are all the same would prove nothing."""
    weights = dict(zip([*HALVES[0], *HALVES[1]], [*alone(0), *alone(1)], strict=True))
    for i, j in product(range(len(CELLS)), repeat=2):
        if i < j and CELLS[i][0] == CELLS[j][0]:
            a, b = weights[CELLS[i]], weights[CELLS[j]]
            distance = max(float((a[n].double() - b[n].double()).abs().max()) for n in a)
            accumulated_alike = (
                CELLS[i][0] == "transformer" and CELLS[i][1] == "float64" == CELLS[j][1]
                and CELLS[i][3:] == CELLS[j][3:]
            )  # fmt: skip
            assert (distance < 1e-9) == accumulated_alike, (CELLS[i], CELLS[j])
