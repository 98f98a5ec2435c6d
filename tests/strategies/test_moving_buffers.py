"""Buffers that forward changes: what is said of them, and their mean over the ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from problems import CLASSES, FEATURES, mean_loss, tensors
from ranks import run_ranks
from torch import Tensor, nn

import lockstep
from lockstep.errors import LockstepWarning
from lockstep.strategies import DDP, FSDP, HSDP, Pipeline

pytestmark = pytest.mark.ranks


class Statistics(nn.Module):
    """Keeps a running mean of its samples, counts its passes, and has a table that stays."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(3.0))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return self.layer(x)


def train(
    strategy: Any, samples: int, virtual_ranks: int | None = None
) -> tuple[list[float], int, list[str]]:
    """The running mean, the number of passes, and what was said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LockstepWarning)
        with lockstep.init(strategy, seed=1, virtual_ranks=virtual_ranks) as world:
            model = Statistics()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = world.prepare(model, optimizer)
            for batch in world.loader(tensors(samples), 8):
                world.backward(mean_loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            bare = getattr(model, "module", model)
            said = [str(each.message) for each in caught if "buffers" in str(each.message)]
            return bare.mean.tolist(), int(bare.passes), said


CASES: dict[str, tuple[Any, int]] = {
    "ddp": (DDP(), 24),
    "fsdp": (FSDP(), 24),
    "averaged": (DDP(average_buffers="mean"), 21),
    "averaged under fsdp": (FSDP(average_buffers=["me*"]), 24),
    "a misspelled name": (DDP(average_buffers=["mean", "maen"]), 24),
    "a misspelled name under fsdp": (FSDP(average_buffers=["mean", "maen"]), 24),
    # The last batch has one sample, so a rank has a mean of nothing.
    "a rank without samples": (DDP(average_buffers=("mean",)), 17),
    # Each virtual rank counts its passes alike, also on processes that do not compute the first.
    "virtual ranks": (DDP(), 24),
}
MORE = {
    "virtual ranks under fsdp": (FSDP(), 24),
    "virtual ranks without samples": (DDP(), 17),
    "hsdp": (HSDP(shard_size=1), 24),
    "averaged under hsdp": (HSDP(shard_size=1, average_buffers="mean"), 21),
}


def in_cases(cases: dict[str, tuple[Any, int]]) -> dict[str, Any]:
    found = {}
    for name, (strategy, samples) in cases.items():
        virtual_ranks = 6 if name.startswith("virtual ranks") else None
        found[name] = train(strategy, samples, virtual_ranks)
    return found


def alone() -> dict[int, Any]:
    return {samples: train("single", samples) for samples in (17, 21, 24)}


def check(size: int, cases: dict[str, tuple[Any, int]]) -> None:
    [expected] = run_ranks(alone, 1)
    for rank, found in enumerate(run_ranks(in_cases, size, cases)):
        for name, (strategy, samples) in cases.items():
            mean, passes, said = found[name]
            exact = torch.allclose(torch.tensor(mean), torch.tensor(expected[samples][0]))
            assert passes == expected[samples][1], name
            if strategy.average_buffers:
                assert exact, name
                if "misspelled" not in name:
                    assert said == [], name
                elif rank == 0:
                    [text] = said
                    assert text.startswith("average_buffers='maen'\n")
                    assert "has this name: [mean, table]" in text
                continue
            assert not exact, name
            assert len(said) == (1 if rank == 0 else 0), name
            for text in said:
                assert "found: the values of mean differ between ranks" in text
                assert f"{type(strategy).__name__}(average_buffers=['mean'])" in text


def test_moving_buffers_are_named_once_and_can_be_averaged():
    check(2, CASES)


@pytest.mark.thorough
def test_moving_buffers_on_three_ranks():
    check(3, {**CASES, **MORE})


class InPieces(nn.Module):
    """Two stages. One keeps a running mean; the other fills a cache once, and has BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = Statistics()
        self.second = Cached()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Cached(nn.Module):
    """Fills a buffer in its first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(CLASSES)
        self.layer = nn.Linear(CLASSES, CLASSES)
        self.register_buffer("table", torch.zeros(4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.table.fill_(7.0)
        return self.layer(self.norm(x))


def said_of_micro_batches(strategy: Any, size: int | None, steps: int = 3) -> list[str]:
    """What a training in micro-batches says of buffers on this rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LockstepWarning)
        with lockstep.init(strategy, seed=1) as world:
            model: Any = InPieces()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = world.prepare(model, optimizer)
            for batch in world.loader(tensors(8 * steps), 8, num_micro_batches=size):
                world.backward(mean_loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
    texts = [str(each.message) for each in caught]
    return [text for text in texts if "a global batch in micro-batches" in text]


def test_buffers_that_change_once_per_micro_batch_are_named_once():
    [said] = said_of_micro_batches("single", 2)
    assert "found: first.mean, first.passes changed from one micro-batch to the next" in said
    assert "updated 2 times per optimizer step" in said
    assert "without micro-batches there is one update" in said
    assert said_of_micro_batches("single", None) == []
    # What changes in one step alone may be a cache that was filled.
    assert said_of_micro_batches("single", 2, steps=1) == []


def test_a_pipeline_names_them_on_the_rank_that_has_them():
    pipeline = Pipeline(split=["second"], num_micro_batches=2)
    said = run_ranks(said_of_micro_batches, 2, pipeline, None)
    of_stage = [texts for texts in said if texts]
    assert len(of_stage) == 1
    [[text]] = of_stage
    assert "first.mean, first.passes changed" in text
    assert "without micro-batches" not in text


@pytest.mark.thorough
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_replicas_name_them_on_rank_0_alone(strategy, size):
    first, *others = run_ranks(said_of_micro_batches, size, strategy, 2)
    assert len(first) == 1
    assert others == [[]] * (size - 1)
