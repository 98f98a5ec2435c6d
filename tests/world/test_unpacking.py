"""Results of `world.prepare` that are mixed up: refused, or told with Python's own error."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from messages import MESSAGES
from ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.errors import UsageError

pytestmark = pytest.mark.ranks


def parts() -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
    return model, optimizer, DataLoader(data, batch_size=4), DataLoader(data, batch_size=2)


def model_and_optimizer(world: lockstep.World) -> Any:
    model, optimizer, _, _ = parts()
    optimizer, model = world.prepare(model, optimizer)


def two_loaders(world: lockstep.World) -> Any:
    model, optimizer, train, test = parts()
    # fmt: off
    model, optimizer, test, train = world.prepare(
        model,
        optimizer,
        train,
        test,
    )
    # fmt: on


def attributes(world: lockstep.World) -> Any:
    model, optimizer, _, _ = parts()
    module = nn.Module()
    module.net = model
    trainer = SimpleNamespace(optimizer=optimizer)
    trainer.optimizer, module.net = world.prepare(module.net, trainer.optimizer)


def too_few_variables(world: lockstep.World) -> Any:
    model, optimizer, train, _ = parts()
    model, optimizer = world.prepare(model, optimizer, train)


def too_many_variables(world: lockstep.World) -> Any:
    model, optimizer, _, _ = parts()
    model, optimizer, _train = world.prepare(model, optimizer)


def in_order(world: lockstep.World) -> Any:
    model, optimizer, train, test = parts()
    trainer = SimpleNamespace(model=model)
    trainer.model, optimizer, loader = world.prepare(model, optimizer, train)
    results = world.prepare(test)
    other = nn.Linear(2, 1)
    other, optimizer = world.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    assert isinstance(trainer.model, nn.Module)
    model, *others = world.prepare(nn.Linear(2, 1), train, test)
    assert len(others) == 2
    return results, loader


def given_twice(world: lockstep.World) -> Any:
    model, _, _, _ = parts()
    teacher = model
    model, teacher = world.prepare(model, teacher)
    assert teacher is model


def refused(mistake: Callable[[lockstep.World], Any]) -> str:
    with lockstep.init() as world, pytest.raises(UsageError) as caught:
        mistake(world)
    return caught.value.message


def check_refused() -> None:
    assert refused(model_and_optimizer) == MESSAGES["results in another order"]
    assert refused(two_loaders).startswith(
        "model, optimizer, test, train = world.prepare(model, optimizer, train, test)\n"
    )
    assert refused(attributes).startswith(
        "trainer.optimizer, module.net = world.prepare(module.net, trainer.optimizer)\n"
    )
    assert refused(too_few_variables) == MESSAGES["too few variables for the results"]
    assert "3 variables for the results of 2 objects" in refused(too_many_variables)
    for honest in (in_order, given_twice):
        with lockstep.init() as world:
            honest(world)


def call_optimizer(model: Any, optimizer: Any, loader: Any) -> None:
    optimizer(torch.zeros(1, 2))


def step_model(model: Any, optimizer: Any, loader: Any) -> None:
    model.step()


def call_loader(model: Any, optimizer: Any, loader: Any) -> None:
    loader(torch.zeros(1, 2))


def iterate_model(model: Any, optimizer: Any, loader: Any) -> None:
    for _ in model:
        pass


def set_optimizer_to_train(model: Any, optimizer: Any, loader: Any) -> None:
    optimizer.train()


def own_mistake(model: Any, optimizer: Any, loader: Any) -> None:
    model.no_such_name  # noqa: B018


def foreign_mistake(model: Any, optimizer: Any, loader: Any) -> None:
    "text".no_such_name()  # type: ignore[attr-defined]


def told_of(use: Callable[..., None]) -> str:
    def get(world: lockstep.World) -> Any:  # results that no statement names
        return world.prepare(*parts()[:3])

    try:
        with lockstep.init() as world:
            use(*get(world))
    except (TypeError, AttributeError) as error:
        return "".join(traceback.format_exception_only(error))
    raise AssertionError("no error")


def check_notes() -> None:
    note = (
        "lockstep: world.prepare returned, in the order in which they were given: "
        "the model Linear, the optimizer SGD, the loader. Unpack them in this order.\n"
    )
    for use in (call_optimizer, step_model, call_loader, iterate_model, set_optimizer_to_train):
        assert told_of(use).endswith(note), (use, told_of(use))
    for use in (own_mistake, foreign_mistake):
        assert "lockstep" not in told_of(use)


def mixed_up() -> None:
    check_refused()
    check_notes()


@pytest.mark.parametrize("size", [1, 2])
def test_results_that_are_mixed_up_are_told(size: int) -> None:
    run_ranks(mixed_up, size)
