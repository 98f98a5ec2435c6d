"""Training loops that count batches, while a global batch has several micro-batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from messages import MESSAGES
from problems import mlp, tensors
from ranks import run_ranks
from test_mistakes import set_and_do, sgd
from torch.utils.data import DataLoader

import lockstep
from lockstep.errors import LockstepWarning

pytestmark = pytest.mark.ranks

Loop = Callable[[lockstep.World, Any, Any, Any], None]
MICRO_BATCHES = 4


def backward(world: lockstep.World, model: Any, x: Any, y: Any) -> None:
    world.backward(F.cross_entropy(model(x), y))


def every_third(world: lockstep.World, model: Any, optimizer: Any, loader: Any) -> None:
    for i, (x, y) in enumerate(loader):
        backward(world, model, x, y)
        if (i + 1) % 3 == 0:
            optimizer.step()  # counted
            optimizer.zero_grad()


def before_the_others(world: lockstep.World, model: Any, optimizer: Any, loader: Any) -> None:
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        backward(world, model, x, y)
        if i % MICRO_BATCHES == 0:
            optimizer.step()  # counted


# Honest


def every_fourth(world: lockstep.World, model: Any, optimizer: Any, loader: Any) -> None:
    for i, (x, y) in enumerate(loader):
        backward(world, model, x, y)
        if (i + 1) % MICRO_BATCHES == 0:
            optimizer.step()
            optimizer.zero_grad()


def every_second(world: lockstep.World, model: Any, optimizer: Any, loader: Any) -> None:
    for i, (x, y) in enumerate(loader):
        backward(world, model, x, y)
        if (i + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()


def in_every_iteration(world: lockstep.World, model: Any, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        backward(world, model, x, y)
        optimizer.step()
        optimizer.zero_grad()


def in_the_last(world: lockstep.World, model: Any, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        backward(world, model, x, y)
        if world.is_last_micro_batch:
            optimizer.step()
            optimizer.zero_grad()


def skips_by_the_norm(world: lockstep.World, model: Any, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        backward(world, model, x, y)
        norm = world.clip_grad_norm_(model, 1.0)  # None before the last micro-batch
        if norm is None or norm < 0.0:
            optimizer.step()
        optimizer.zero_grad()


def leaves_in_the_middle(world: lockstep.World, model: Any, optimizer: Any, loader: Any) -> None:
    for i, (x, y) in enumerate(loader):
        backward(world, model, x, y)
        if i % MICRO_BATCHES == 0:
            optimizer.step()
        if i % MICRO_BATCHES == 2:
            break


def skips_micro_batches(world: lockstep.World, model: Any, optimizer: Any, loader: Any) -> None:
    for i, (x, y) in enumerate(loader):
        if i % MICRO_BATCHES in (1, MICRO_BATCHES - 1):
            continue
        backward(world, model, x, y)
        optimizer.step()


def none_at_all(world: lockstep.World, model: Any, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        backward(world, model, x, y)
    optimizer.zero_grad()


WRONG: list[Loop] = [every_third, before_the_others]
HONEST: list[Loop] = [
    every_fourth,
    every_second,
    in_every_iteration,
    in_the_last,
    skips_by_the_norm,
    leaves_in_the_middle,
    skips_micro_batches,
    none_at_all,
]


def told_of(loop: Loop, num_micro_batches: int, strategy: str | None = None) -> list[str]:
    """What two passes of a loop are warned of on this rank: the user's lines."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with lockstep.init(strategy, seed=0) as world:
            model = mlp()
            model, optimizer = world.prepare(model, sgd(model))
            loader = world.loader(tensors(96), 24, num_micro_batches=num_micro_batches)
            for _ in range(2):
                loop(world, model, optimizer, loader)
    lines = []
    for warning in caught:
        assert warning.category is LockstepWarning
        text = str(warning.message)
        assert set_and_do(text) == set_and_do(MESSAGES["steps counted in the loop"])
        with open(warning.filename, encoding="utf-8") as file:
            lines.append(file.readlines()[warning.lineno - 1].strip())
    return lines


def told_of_all(strategy: str | None = None) -> dict[str, list[str]]:
    found = {}
    for loop in [*WRONG, *HONEST]:
        found[loop.__name__] = told_of(loop, MICRO_BATCHES, strategy)
    found["without micro-batches"] = told_of(every_third, 1, strategy)
    return found


def check(size: int, strategy: str | None = None) -> None:
    first, *others = run_ranks(told_of_all, size, strategy)
    for name, lines in first.items():
        is_wrong = name in [loop.__name__ for loop in WRONG]
        assert lines == (["optimizer.step()  # counted"] if is_wrong else []), name
    for other in others:
        assert not any(other.values())  # rank 0 alone warns


def test_steps_that_the_loop_counts_are_told_if_the_optimizer_has_not_stepped() -> None:
    check(2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("size", "strategy"), [(1, None), (3, None), (1, "dp"), (2, "fsdp"), (3, "hsdp")]
)
def test_steps_that_the_loop_counts_on_other_numbers_of_ranks(
    size: int, strategy: str | None
) -> None:
    check(size, strategy)


# Schedules


def cosine(world: lockstep.World, optimizer: Any, length: int) -> Any:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, length)
    return world.prepare(schedule)


def told_of_schedules() -> list[str]:
    """The texts of warnings, for lengths that are computed in several ways."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for way in ("len after prepare", "steps", "another length", "never asked", "len before"):
            with lockstep.init(seed=0, num_micro_batches=MICRO_BATCHES) as world:
                model = mlp()
                train = DataLoader(tensors(90), 24)
                length = 3 * len(train)
                model, optimizer, train = world.prepare(model, sgd(model), train)
                if way == "len after prepare":
                    length = 3 * len(train)
                elif way == "steps":
                    assert len(train) == 15
                    length = 3 * train.steps
                elif way == "another length":
                    length = 5 * len(train)
                elif way == "never asked":
                    length = 45
                cosine(world, optimizer, length)
                world.epochs(3)
        for num_epochs in (3, 4):  # one micro-batch in each global batch
            with lockstep.init(seed=0) as world:
                model = mlp()
                model, optimizer, train = world.prepare(
                    model, sgd(model), DataLoader(tensors(90), 24)
                )
                cosine(world, optimizer, 3 * len(train))
                world.epochs(num_epochs)
    return [str(warning.message) for warning in caught]


@pytest.mark.thorough
def test_a_schedule_as_long_as_the_micro_batches_is_told() -> None:
    first, second = run_ranks(told_of_schedules, 2)
    assert first == [MESSAGES["schedule of micro-batches"]]
    assert second == []
