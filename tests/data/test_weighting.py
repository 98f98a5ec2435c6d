"""`weight=`: loops that are left early, on all ranks and on one alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import difference, mlp, tensors, weights
from ranks import RankFailed, run_ranks
from torch import Tensor
from torch.nn.functional import cross_entropy

import lockstep

pytestmark = pytest.mark.ranks

LEAVE_AT = 2


def heavy(batch: Any) -> Tensor:
    return (batch[1] + 1).sum()


def loss_of(model: Any, batch: Any) -> Tensor:
    """The mean over what the samples weigh; 0 for a batch without samples."""
    x, y = batch
    each = cross_entropy(model(x), y, reduction="none") * (y + 1)
    return each.sum() / (y + 1).sum().clamp(min=1)


def trained(world: lockstep.World, place: str, micro_batch_size: int | None = None) -> Any:
    """Three passes, each left in its middle; something is summed up between them."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = world.prepare(model, optimizer)
    train = world.loader(
        tensors(), 7, shuffle=True, micro_batch_size=micro_batch_size, weight=heavy
    )
    sums = []
    for epoch in range(3):
        try:
            for number, batch in enumerate(train):
                if place == "top" and number == LEAVE_AT:
                    break
                world.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
                alone = place == "alone" and world.rank == 1
                if (place == "end" or alone) and number == LEAVE_AT:
                    break
                if place == "error" and number == LEAVE_AT:
                    raise ArithmeticError
        except ArithmeticError:
            pass
        sums.append(0.0 if place == "alone" else world.sum(float(epoch + world.rank)))
    return weights(model), sums


PLACES = ("top", "end", "error")


def all_places() -> Any:
    with lockstep.init(seed=1) as world:
        found = [trained(world, place) for place in PLACES]
        return [*found, trained(world, "end", micro_batch_size=2)]


@pytest.fixture(scope="module")
def on_one() -> Any:
    return all_places()


@pytest.mark.parametrize("size", [2, 3])
def test_a_loop_that_all_ranks_leave_early_counts_as_on_one_device(on_one, size):
    for found in run_ranks(all_places, size):
        for place, (one, _), (own, sums) in zip((*PLACES, "parts"), on_one, found, strict=True):
            if place != "parts":  # there the loop is left in the middle of a global batch
                assert difference(one, own) < 1e-12, place
            between = sum(range(size))
            assert sums == [between, between + size, between + 2 * size]


def leave_alone() -> None:
    with lockstep.init(seed=1, strategy="ddp") as world:
        trained(world, "alone")


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_leaves_its_loop_alone_is_told_so(size):
    with pytest.raises(RankFailed) as raised:
        run_ranks(leave_alone, size)
    assert "RanksDifferError: the same global batch on every rank" in raised.value.errors[1]
    assert "rank 1 is at number 0 of epoch 1, and another rank is elsewhere" in str(raised.value)
