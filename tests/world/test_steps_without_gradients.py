"""A loop whose optimizer steps without any gradient is told so; one that trains later is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import mlp, tensors
from torch import nn
from warned import warnings_of

import lockstep
from lockstep.errors import UsageError

pytestmark = pytest.mark.unit

NO_BACKWARD = "SGD.step() without a gradient\n  found: in the first 3 steps no parameter had a"


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def no_backward(world: lockstep.World) -> None:
    model = mlp()
    model, optimizer = world.prepare(model, sgd(model))
    for x, y in world.loader(tensors(64), 8):
        F.cross_entropy(model(x), y)
        optimizer.step()
        optimizer.zero_grad()


def cleared_before_step(world: lockstep.World) -> None:
    model = mlp()
    model, optimizer = world.prepare(model, sgd(model))
    for x, y in world.loader(tensors(64), 8):
        world.backward(F.cross_entropy(model(x), y))
        optimizer.zero_grad()
        optimizer.step()


def second_training_without_backward(world: lockstep.World) -> None:
    trains(world)
    no_backward(world)


def trains(world: lockstep.World) -> None:
    model = mlp()
    model, optimizer = world.prepare(model, sgd(model))
    optimizer.step()  # creates the state
    optimizer.step()
    for x, y in world.loader(tensors(32), 8):
        optimizer.zero_grad()
        world.backward(F.cross_entropy(model(x), y))
        optimizer.step()
    for _ in range(4):  # a phase without gradients
        optimizer.zero_grad()
        optimizer.step()


def one_of_two_rests(world: lockstep.World) -> None:
    critic, generator = mlp(), mlp()
    critic, critic_optimizer = world.prepare(critic, sgd(critic))
    generator, generator_optimizer = world.prepare(generator, sgd(generator))
    for number, (x, y) in enumerate(world.loader(tensors(64), 8)):
        world.backward(F.cross_entropy(critic(x), y))
        if number >= 5:
            world.backward(F.cross_entropy(generator(x), y))
        for optimizer in (generator_optimizer, critic_optimizer):
            optimizer.step()
            optimizer.zero_grad()


def frozen(world: lockstep.World) -> None:
    model = mlp().requires_grad_(False)
    _, optimizer = world.prepare(model, sgd(model))
    for _ in world.loader(tensors(64), 8):
        optimizer.step()


def closure(world: lockstep.World) -> None:
    model = mlp()
    model, optimizer = world.prepare(model, torch.optim.LBFGS(model.parameters(), max_iter=1))
    for x, y in world.loader(tensors(32), 8):

        def evaluate(x: Any = x, y: Any = y) -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            world.backward(loss)
            return loss

        optimizer.step(evaluate)


class EvolutionStrategy(torch.optim.SGD):
    """Trains without gradients."""


def without_gradients_on_purpose(world: lockstep.World) -> None:
    model = mlp()
    _, optimizer = world.prepare(model, EvolutionStrategy(model.parameters(), lr=0.1))
    for _ in world.loader(tensors(64), 8):
        optimizer.step()


def gradients_set_in_a_hook(world: lockstep.World) -> None:
    model = mlp()
    optimizer = sgd(model)

    def set_gradients(*_: Any) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)

    optimizer.register_step_pre_hook(set_gradients)
    _, optimizer = world.prepare(model, optimizer)
    for _ in world.loader(tensors(64), 8):
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "use", [no_backward, cleared_before_step, second_training_without_backward]
)
def test_a_training_without_gradients_is_told_once(use):
    [(message, line)] = warnings_of(use)
    assert message.startswith(NO_BACKWARD)
    assert "LS409" in message
    assert ("world.backward was not called" in message) == (use is not cleared_before_step)
    assert ("zero_grad() has cleared" in message) == (use is cleared_before_step)
    assert line == "optimizer.step()"


@pytest.mark.parametrize(
    "use",
    [
        trains,
        one_of_two_rests,
        frozen,
        closure,
        without_gradients_on_purpose,
        gradients_set_in_a_hook,
    ],
)
def test_an_honest_training_is_not_warned(use):
    assert warnings_of(use) == []


@pytest.mark.parametrize("settings", [{"strategy": "fsdp"}, {"virtual_ranks": 2}])
def test_strategies_that_keep_gradients_elsewhere_are_not_warned(settings):
    assert warnings_of(trains, **settings) == []


def test_a_step_without_a_gradient_is_no_loss_backward():
    def use(world: lockstep.World) -> None:
        model = mlp()
        model, optimizer = world.prepare(model, sgd(model))
        for x, y in world.loader(tensors(64), 8, micro_batch_size=3):
            F.cross_entropy(model(x), y)
            optimizer.step()

    with pytest.raises(UsageError, match=r"optimizer\.step\(\) without a gradient"):
        warnings_of(use)
