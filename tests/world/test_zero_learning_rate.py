"""A training that goes on with a learning rate of 0 is told so, and one that rises again is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from messages import MESSAGES
from problems import mlp, tensors
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
)
from warned import Use, warnings_of

import lockstep

pytestmark = pytest.mark.unit

EPOCHS = 6
BATCHES = 8
STEPS = EPOCHS * BATCHES

MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]


def linear_decay(num_steps: int) -> MakeScheduler:
    """To 0, where it stays, as `get_linear_schedule_with_warmup` of transformers does."""
    return lambda optimizer: LambdaLR(optimizer, lambda step: max(0.0, 1 - step / num_steps))


def train(
    world: lockstep.World,
    optimizer: Any,
    make_scheduler: MakeScheduler,
    *,
    micro_batch_size: int | None = None,
    steps_per_epoch: bool = False,
) -> None:
    """Trains all epochs, with a scheduler that steps in each iteration or in each epoch."""
    model, optimizer, scheduler = world.prepare(
        optimizer.model, optimizer, make_scheduler(optimizer)
    )
    train = world.loader(tensors(8 * BATCHES), 8, micro_batch_size=micro_batch_size)
    for _ in range(EPOCHS):
        for x, y in train:
            optimizer.zero_grad()
            world.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            if not steps_per_epoch:
                scheduler.step()
        if steps_per_epoch:
            scheduler.step()


def sgd(**options: Any) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
    optimizer.model = model  # type: ignore[attr-defined]
    return optimizer


def rate_warnings_of(use: Use) -> list[tuple[str, str]]:
    """The text of each warning of a learning rate of 0, and the user's line."""
    return [(text, line) for text, line in warnings_of(use) if "learning rate of 0" in text]


def test_a_schedule_divided_by_accumulation_steps_is_told_once_with_the_line() -> None:
    """`total_steps = len(loader) // accumulation * epochs`, where len counts global batches."""
    ((text, line),) = rate_warnings_of(
        lambda world: train(world, sgd(), linear_decay(STEPS // 4), micro_batch_size=2)
    )

    # The rates of the steps 1 to 12 are 0.1 * 12/12 to 0.1 * 1/12.
    assert text == MESSAGES["schedule that ends early"]
    assert line == "optimizer.step()"


def test_a_schedule_that_ends_with_an_epoch_is_told_too() -> None:
    ((text, _),) = rate_warnings_of(lambda world: train(world, sgd(), linear_decay(2 * BATCHES)))
    assert "since step 16" in text


def test_a_rate_that_is_a_tensor_on_the_cpu_is_read() -> None:
    def use(world: lockstep.World) -> None:
        optimizer = sgd()
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(0.1)
        train(world, optimizer, linear_decay(STEPS // 4))

    assert len(rate_warnings_of(use)) == 1


def warm_up_from_0(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Zero in the first 12 steps."""
    return LambdaLR(optimizer, lambda step: max(0.0, (step - 12) / STEPS))


def cosine_with_cycles(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """At 0 in the steps 3, 9, 15, ..., and in between above it."""
    return CosineAnnealingLR(optimizer, T_max=3)


def one_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1, final_div_factor=float("inf"))


def decays_then_rises(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """At 0 in 9 steps in succession, before another schedule begins."""
    second = LinearLR(optimizer, start_factor=0.1, total_iters=3)
    first = linear_decay(10)(optimizer)
    return SequentialLR(optimizer, [first, second], milestones=[19])


@pytest.mark.parametrize(
    "make_scheduler",
    [
        warm_up_from_0,
        cosine_with_cycles,
        one_cycle,
        decays_then_rises,
        linear_decay(STEPS - 9),  # was rounded down a little
        linear_decay(STEPS),
    ],
)
def test_a_rate_of_0_for_a_while_is_not_told(make_scheduler: MakeScheduler) -> None:
    assert rate_warnings_of(lambda world: train(world, sgd(), make_scheduler)) == []


@pytest.mark.parametrize("t_max", [2, 3])
def test_a_whole_epoch_at_0_is_not_told_if_the_rate_rises_again(t_max: int) -> None:
    """The cosine steps once in an epoch, and is exactly 0 in the epoch `t_max`."""

    def use(world: lockstep.World) -> None:
        train(world, sgd(), lambda each: CosineAnnealingLR(each, t_max), steps_per_epoch=True)

    assert rate_warnings_of(use) == []


def test_two_optimizers_that_are_at_0_for_an_epoch_are_not_told() -> None:
    """Both cosines step once in an epoch, and rise again. Both optimizers make each step."""

    def use(world: lockstep.World) -> None:
        models = [mlp(), mlp()]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        schedulers = [CosineAnnealingLR(optimizer, 2) for optimizer in optimizers]
        first, second, *optimizers = world.prepare(*models, *optimizers)
        loader = world.loader(tensors(8 * 20), 8)
        for _ in range(4):
            for x, y in loader:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                world.backward(F.cross_entropy(first(x) + second(x), y))
                for optimizer in optimizers:
                    optimizer.step()
            for scheduler in schedulers:
                scheduler.step()

    assert rate_warnings_of(use) == []


def test_a_frozen_group_beside_a_trained_one_is_not_told() -> None:
    def use(world: lockstep.World) -> None:
        model = mlp()
        first, *others = model.parameters()
        optimizer: Any = torch.optim.SGD(
            [{"params": [first], "lr": 0.1}, {"params": others, "lr": 0.1}]
        )
        optimizer.model = model
        factors = [lambda step: float(step < 5), lambda step: 1.0]  # freezes the first one
        train(world, optimizer, lambda each: LambdaLR(each, factors))

    assert rate_warnings_of(use) == []


def test_an_optimizer_at_0_beside_one_that_trains_is_not_told() -> None:
    """One part of a training may be meant to end before the other."""

    def use(world: lockstep.World) -> None:
        backbone, head = mlp(), mlp()
        backbone, first = world.prepare(backbone, torch.optim.SGD(backbone.parameters(), lr=0.1))
        head, second = world.prepare(head, torch.optim.SGD(head.parameters(), lr=0.1))
        for number, (x, y) in enumerate(world.loader(tensors(8 * 40), 8)):
            if number == 10:
                first.param_groups[0]["lr"] = 0.0
            first.zero_grad()
            second.zero_grad()
            world.backward(F.cross_entropy(backbone(x) + head(x), y))
            first.step()
            second.step()

    assert rate_warnings_of(use) == []


def test_a_warm_up_from_0_of_a_second_training_is_not_told() -> None:
    def use(world: lockstep.World) -> None:
        train(world, sgd(), linear_decay(STEPS))
        train(world, sgd(), warm_up_from_0)

    assert rate_warnings_of(use) == []
