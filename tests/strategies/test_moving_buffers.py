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
from lockstep.strategies import DDP, FSDP, HSDP


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


def train(strategy: Any, samples: int) -> tuple[list[float], int, list[str]]:
    """The running mean, the number of passes, and what was said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LockstepWarning)
        with lockstep.init(strategy, seed=1) as world:
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
    # The last batch has one sample, so a rank has a mean of nothing.
    "a rank without samples": (DDP(average_buffers=("mean",)), 17),
}
MORE = {
    "hsdp": (HSDP(shard_size=1), 24),
    "averaged under hsdp": (HSDP(shard_size=1, average_buffers="mean"), 21),
}


def in_cases(cases: dict[str, tuple[Any, int]]) -> dict[str, Any]:
    return {name: train(strategy, samples) for name, (strategy, samples) in cases.items()}


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
                assert said == [], name
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
