"""`world.gather(..., gradient=True)`: a loss that compares all samples of the global batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import FEATURES, difference, tensors, weights
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lockstep
from lockstep.errors import UsageError
from lockstep.strategies import DiLoCo, Pipeline
from lockstep.strategies.base import Strategy

pytestmark = pytest.mark.ranks

BATCH = 11


class Pairs(nn.Module):
    """Codes of two views of a sample, and how sharply they are compared."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.one, self.other = nn.Linear(FEATURES, 5), nn.Linear(FEATURES, 5)
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.one(x), self.other(x.cos()), self.scale * 1.0


def whole_loss(world: Any, mine: Tensor, others: Tensor, scale: Tensor) -> Tensor:
    """Every rank computes the loss of the global batch."""
    mine, others = world.gather((mine, others), gradient=True)
    scores = scale * mine @ others.T
    return F.cross_entropy(scores, torch.arange(len(scores)))


def loss_of_own_rows(world: Any, mine: Tensor, others: Tensor, scale: Tensor) -> Tensor:
    """Every rank compares its own rows with those of all."""
    before = sum(world.gather(len(mine))[: world.rank])
    others = world.gather(others, gradient=True)
    return F.cross_entropy(scale * mine @ others.T, before + torch.arange(len(mine)))


def train(strategy: str, samples: int = 3 * BATCH) -> dict[str, dict[str, Tensor]]:
    found = {}
    for loss_of in (whole_loss, loss_of_own_rows):
        with lockstep.init(strategy, device="cpu", seed=0) as world:
            model = Pairs().double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = DataLoader(tensors(samples), batch_size=BATCH)
            model, optimizer, loader = world.prepare(model, optimizer, loader)
            for x, _ in loader:
                world.backward(loss_of(world, *model(x)))
                optimizer.step()
                optimizer.zero_grad()
            found[loss_of.__name__] = weights(model) if strategy != "fsdp" else whole(model)
    return found


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def on_ranks() -> dict[str, dict[str, Tensor]]:
    return train("ddp")


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_a_contrastive_loss_is_that_of_one_process(size: int) -> None:
    expected = train("single")
    assert difference(expected["whole_loss"], expected["loss_of_own_rows"]) < 1e-12
    for found in run_ranks(on_ranks, size):
        for name, values in found.items():
            assert difference(expected[name], values) < 1e-12, name


def sharded() -> dict[str, dict[str, Tensor]]:
    return train("fsdp")


@pytest.mark.thorough
@pytest.mark.parametrize("size", [2, 3])
def test_a_contrastive_loss_of_a_sharded_model(size: int) -> None:
    expected = train("single")
    for found in run_ranks(sharded, size):
        for name, values in found.items():
            assert difference(expected[name], values) < 1e-12, name


def some_have_none() -> dict[str, Tensor]:
    """The last global batch has one sample, so that other ranks have none."""
    return train("ddp", 2 * BATCH + 1)["whole_loss"]


@pytest.mark.thorough
def test_a_rank_without_samples_takes_part() -> None:
    expected = train("single", 2 * BATCH + 1)["whole_loss"]
    for found in run_ranks(some_have_none, 3):
        assert difference(expected, found) < 1e-12


def test_it_carries_gradients_only_where_they_are_asked_for() -> None:
    with lockstep.init("single", device="cpu") as world:
        x = torch.ones(3, requires_grad=True)
        assert world.gather(x, gradient=True).requires_grad
        loader = world.loader(tensors(12), batch_size=6, micro_batch_size=3)
        for _ in loader:
            with pytest.raises(UsageError, match="one of 2 micro-batches"):
                world.gather(x, gradient=True)
            break


@pytest.mark.parametrize("strategy", [Pipeline(), DiLoCo(replicas=2)])
def test_it_is_refused_where_no_batch_is_on_all_ranks_at_once(strategy: Strategy) -> None:
    refusal = pytest.raises(UsageError, match=f"under {strategy.name} the ranks do not compute")
    with lockstep.init(strategy, device="cpu") as world, refusal:
        world.gather(torch.ones(3, requires_grad=True), gradient=True)


def gathered_from_one() -> tuple[list[float], str]:
    """The gradient of rank 0's rows, where the others have constants, and the error of no_grad."""
    with lockstep.init("ddp", device="cpu", seed=0) as world:
        rows = torch.full((2,), 1.0 + world.rank, requires_grad=world.rank == 0)
        scale = torch.ones((), requires_grad=True)
        (world.gather(rows, gradient=True).sum() * scale).backward()
        gradient = [] if rows.grad is None else rows.grad.tolist()
        with torch.set_grad_enabled(world.rank == 0), pytest.raises(UsageError) as caught:
            world.gather(rows, gradient=True)
    return gradient, str(caught.value)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_ranks_whose_tensors_need_no_gradient_take_part(size: int) -> None:
    found = run_ranks(gathered_from_one, size)
    assert [gradient for gradient, _ in found] == [[float(size)] * 2] + [[]] * (size - 1)
    silent = "rank 1" if size == 2 else "ranks 1-2"
    for _, text in found:
        assert f"{silent} called it under torch.no_grad(), the others did not" in text
