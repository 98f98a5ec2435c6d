"""Training loops that count batches, while a global batch has several micro-batches."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
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


def in_the_first_of_two(world: lockstep.World, model: Any, optimizer: Any, loader: Any) -> None:
    for i, (x, y) in enumerate(loader):
        backward(world, model, x, y)
        if i % 2 == 0:
            optimizer.step()  # counted
            optimizer.zero_grad()


# Honest


def one_step_less(world: lockstep.World, model: Any, optimizer: Any, loader: Any) -> None:
    for i, (x, y) in enumerate(loader):
        backward(world, model, x, y)
        is_finite = world.step > 2 or i not in (1, 3)  # as a loss may not be
        if is_finite:
            optimizer.step()
        optimizer.zero_grad()


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
    one_step_less,
    every_fourth,
    every_second,
    in_every_iteration,
    in_the_last,
    skips_by_the_norm,
    leaves_in_the_middle,
    skips_micro_batches,
    none_at_all,
]


WRONG_NAMES = [
    *[loop.__name__ for loop in WRONG],
    *("2 in_the_first_of_two", "3 before_the_others"),
]
"""With the number of micro-batches, if it is another one."""


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
    for loop in (in_the_first_of_two, every_second, one_step_less, skips_by_the_norm):
        found[f"2 {loop.__name__}"] = told_of(loop, 2, strategy)
    found["3 before_the_others"] = told_of(before_the_others, 3, strategy)
    return found


def check(size: int, strategy: str | None = None) -> None:
    first, *others = run_ranks(told_of_all, size, strategy)
    for name, lines in first.items():
        is_wrong = name in WRONG_NAMES
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


SCHEDULES = torch.optim.lr_scheduler
ALL_SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: SCHEDULES.StepLR(o, 2),
    "MultiStepLR": lambda o: SCHEDULES.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: SCHEDULES.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: SCHEDULES.LinearLR(o, 0.5),
    "PolynomialLR": lambda o: SCHEDULES.PolynomialLR(o, 6),
    "ExponentialLR": lambda o: SCHEDULES.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: SCHEDULES.CosineAnnealingLR(o, 20),
    "CosineAnnealingWarmRestarts": lambda o: SCHEDULES.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: SCHEDULES.OneCycleLR(o, 0.1, total_steps=10),
    "CyclicLR": lambda o: SCHEDULES.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "LambdaLR": lambda o: SCHEDULES.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: SCHEDULES.MultiplicativeLR(o, lambda step: 0.9),
    "ReduceLROnPlateau": lambda o: SCHEDULES.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: SCHEDULES.SequentialLR(
        o, [SCHEDULES.LinearLR(o), SCHEDULES.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: SCHEDULES.ChainedScheduler(
        [SCHEDULES.ConstantLR(o, 0.5, 3), SCHEDULES.ExponentialLR(o, 0.9)], o
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, 3),
}


def step_of(schedule: Any, name: str) -> None:
    """A step of a schedule; the metric of a ReduceLROnPlateau is always the same."""
    schedule.step(1.0) if name == "ReduceLROnPlateau" else schedule.step()


def rates_in_two_epochs() -> dict[str, list[float]]:
    """The learning rates of each of torch's schedules, after each of the global batches."""
    rates: dict[str, list[float]] = {name: [] for name in ALL_SCHEDULES}
    with lockstep.init(seed=0, num_micro_batches=2) as world:
        layers = torch.nn.ModuleDict({name: torch.nn.Linear(6, 3) for name in ALL_SCHEDULES})
        plain = [torch.optim.SGD(layer.parameters(), 0.1, 0.9) for layer in layers.values()]
        schedules = [
            make(optimizer) for make, optimizer in zip(ALL_SCHEDULES.values(), plain, strict=True)
        ]
        loader = DataLoader(tensors(90), 24)
        _, loader, *prepared = world.prepare(layers, loader, *plain, *schedules)
        optimizers, schedules = prepared[: len(plain)], prepared[len(plain) :]
        for _ in range(2):
            for x, _ in loader:
                outputs = [layer(x[:, :6].float()) for layer in layers.values()]
                world.backward(sum(output.square().mean() for output in outputs))
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                for name, optimizer, schedule in zip(rates, plain, schedules, strict=True):
                    step_of(schedule, name)
                    if world.is_last_micro_batch:
                        rates[name].append(float(optimizer.param_groups[0]["lr"]))
    return rates


def rates_of_plain_torch(name: str, num_steps: int) -> list[float]:
    optimizer = torch.optim.SGD(torch.nn.Linear(6, 3).parameters(), 0.1, 0.9)
    schedule = ALL_SCHEDULES[name](optimizer)
    rates = []
    for _ in range(num_steps):
        optimizer.step()
        step_of(schedule, name)
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return rates


def test_all_of_torchs_schedules_step_once_per_global_batch() -> None:
    [rates] = run_ranks(rates_in_two_epochs, 1)
    for name, rates_of_schedule in rates.items():
        assert rates_of_schedule == rates_of_plain_torch(name, 8), name


# Schedules in plain loops over epochs

EPOCHS = 3
SETTINGS = SimpleNamespace(epochs=EPOCHS, config={"epochs": EPOCHS})


class Training:
    """A model, an optimizer and a loader of 4 global batches, in 4 micro-batches each."""

    def __init__(self, world: lockstep.World) -> None:
        model = mlp()
        self.world = world
        self.model, self.optimizer, self.train = world.prepare(
            model, sgd(model), DataLoader(tensors(90), 24)
        )
        self.schedule: Any = None

    def cosine(self, length: int) -> None:
        self.schedule = cosine(self.world, self.optimizer, length)

    def step(self, x: Any, y: Any) -> None:
        backward(self.world, self.model, x, y)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def one_epoch(self, max_batches: int = 10**9) -> None:
        for number, (x, y) in enumerate(self.train):
            if number == max_batches:
                break
            self.step(x, y)
            self.schedule.step()


def range_of_number(t: Training) -> None:
    t.cosine(3 * len(t.train))
    for _ in range(3):
        for x, y in t.train:
            t.step(x, y)
            t.schedule.step()


def range_of_attribute(t: Training) -> None:
    t.cosine(SETTINGS.epochs * len(t.train))
    first = 1
    for _ in range(first, SETTINGS.epochs):
        t.one_epoch()


def range_from_one(t: Training) -> None:
    epochs = SETTINGS.config["epochs"]
    t.cosine(epochs * len(t.train))
    for _ in range(1, epochs + 1):
        t.one_epoch()


def epochs_as_steps(t: Training) -> None:
    t.cosine(SETTINGS.epochs)
    for _ in range(SETTINGS.config["epochs"]):
        t.one_epoch()


def epochs_as_steps_of_world(t: Training) -> None:
    t.cosine(EPOCHS)
    for _ in t.world.epochs(EPOCHS):
        t.one_epoch()


def once_in_an_epoch(t: Training) -> None:
    t.cosine(EPOCHS)
    for _ in range(EPOCHS):
        for x, y in t.train:
            t.step(x, y)
        t.schedule.step()


def of_all_steps(t: Training) -> None:
    assert len(t.train) == 15
    t.cosine(EPOCHS * t.train.steps)
    for _ in range(EPOCHS):
        t.one_epoch()


def two_passes_in_an_iteration(t: Training) -> None:
    t.cosine(EPOCHS * len(t.train))
    for _ in range(EPOCHS):
        t.one_epoch()
        t.one_epoch()


def folds(t: Training) -> None:
    for _ in range(EPOCHS):
        t.cosine(EPOCHS * len(t.train))
        for _ in range(4):
            t.one_epoch()


def until_it_is_good(t: Training) -> None:
    t.cosine(EPOCHS * len(t.train))
    epoch = 0
    while epoch < EPOCHS:
        t.one_epoch()
        epoch += 1


def over_a_list(t: Training) -> None:
    t.cosine(EPOCHS * len(t.train))
    for _ in ["first", "second", "third"]:
        t.one_epoch()


def ends_later(t: Training) -> None:
    t.cosine(2 * EPOCHS * len(t.train))
    for _ in range(EPOCHS):
        t.one_epoch()


def short_epochs(t: Training) -> None:
    t.cosine(EPOCHS * len(t.train))
    for _ in range(EPOCHS):
        t.one_epoch(max_batches=MICRO_BATCHES)


def warm_up_of_as_many_steps(t: Training) -> None:
    t.schedule = t.world.prepare(torch.optim.lr_scheduler.LinearLR(t.optimizer, total_iters=EPOCHS))
    for _ in range(EPOCHS):
        t.one_epoch()


def cosine_that_swings(t: Training) -> None:
    t.cosine(2 * t.train.steps)
    for _ in range(EPOCHS):
        t.one_epoch()


def changed_by_hand(t: Training) -> None:
    epochs = EPOCHS
    t.cosine(EPOCHS * len(t.train))
    for _ in range(epochs):
        epochs += 1
        t.one_epoch()


AS_LONG_AS_MICRO_BATCHES = [range_of_number, range_of_attribute, range_from_one]
AS_LONG_AS_EPOCHS = [epochs_as_steps, epochs_as_steps_of_world]
HONEST_SCHEDULES = [
    once_in_an_epoch,
    of_all_steps,
    two_passes_in_an_iteration,
    folds,
    until_it_is_good,
    over_a_list,
    ends_later,
    short_epochs,
    warm_up_of_as_many_steps,
    cosine_that_swings,
    changed_by_hand,
]


def told_of_plain_loop(use: Callable[[Training], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with lockstep.init(seed=0, num_micro_batches=MICRO_BATCHES) as world:
            use(Training(world))
    return [str(warning.message) for warning in caught]


def told_of_plain_loops() -> dict[str, list[str]]:
    uses = [*AS_LONG_AS_MICRO_BATCHES, *AS_LONG_AS_EPOCHS, *HONEST_SCHEDULES]
    # Not in a loop, which would be one more around those of the programs.
    return dict(zip([use.__name__ for use in uses], map(told_of_plain_loop, uses), strict=True))


@pytest.mark.thorough
def test_the_lengths_of_schedules_in_plain_loops_are_told_and_honest_ones_are_not() -> None:
    first, second = run_ranks(told_of_plain_loops, 2)
    for name, told in first.items():
        expected = []
        if name in [use.__name__ for use in AS_LONG_AS_MICRO_BATCHES]:
            expected = [MESSAGES["schedule of micro-batches"]]
        elif name in [use.__name__ for use in AS_LONG_AS_EPOCHS]:
            expected = [MESSAGES["schedule of epochs"]]
        assert told == expected, name
    assert not any(second.values())


# Schedules that are prepared when passes have ended already


def second_schedule_after_one_epoch(t: Training) -> None:
    t.cosine(EPOCHS * t.train.steps)
    for epoch in range(EPOCHS):
        if epoch == 1:
            t.cosine(EPOCHS * len(t.train))
        t.one_epoch()


def second_schedule_in_last_epoch_of_world(t: Training) -> None:
    t.cosine(EPOCHS * t.train.steps)
    for epoch in t.world.epochs(EPOCHS):
        if epoch == EPOCHS - 1:
            t.cosine(EPOCHS * len(t.train))
        t.one_epoch()


def second_schedule_for_second_loop(t: Training) -> None:
    t.cosine(EPOCHS * t.train.steps)
    for _ in range(EPOCHS):
        t.one_epoch()
    t.optimizer.param_groups[0]["lr"] = 0.1  # the first schedule has ended at 0
    t.cosine(EPOCHS * len(t.train))
    for _ in range(EPOCHS):
        t.one_epoch()


def second_schedule_of_all_steps(t: Training) -> None:
    t.cosine(EPOCHS * t.train.steps)
    for epoch in range(EPOCHS):
        if epoch == 1:
            t.cosine(EPOCHS * t.train.steps)
        t.one_epoch()


def told_of_second_schedules() -> list[list[str]]:
    return list(
        map(
            told_of_plain_loop,
            [
                second_schedule_after_one_epoch,
                second_schedule_in_last_epoch_of_world,
                second_schedule_for_second_loop,
                second_schedule_of_all_steps,
            ],
        )
    )


def test_a_schedule_that_is_prepared_after_the_first_epochs_is_told_too() -> None:
    (told,) = run_ranks(told_of_second_schedules, 1)
    message = MESSAGES["schedule of micro-batches"]
    assert told == [[message], [message], [message], []]


# Schedules beside two loaders, in loops over `world.epochs`


class Split(Training):
    """Also has a validation loader, of as many micro-batches as the other has global batches."""

    def __init__(self, world: lockstep.World, num_micro_batches: int) -> None:
        self.world = world
        self.num_micro_batches = num_micro_batches
        self.train_before = DataLoader(tensors(24 * 2 * num_micro_batches), 24)
        self.val_before = DataLoader(tensors(24 * 2), 24)
        model = mlp()
        self.model, self.optimizer, self.train, self.val = world.prepare(
            model, sgd(model), self.train_before, self.val_before
        )
        assert len(self.val_before) * num_micro_batches == len(self.train_before)

    def run(self, epochs: int = EPOCHS, stop_after: int = EPOCHS) -> None:
        for epoch in self.world.epochs(epochs):
            self.one_epoch()
            with torch.no_grad():
                for x, _ in self.val:
                    self.model(x)
            if epoch + 1 == stop_after:
                break


def printed_and_planned_for_longer(t: Split) -> None:
    sys.stdout.write(str(len(t.train)))
    text = f"{len(t.train)} batches, {len(t.val)} to validate"
    t.cosine(EPOCHS * len(t.train_before) * t.num_micro_batches)
    assert text
    t.run()


def as_long_as_the_other_loader(t: Split) -> None:
    batches_to_validate = len(t.val)
    assert batches_to_validate == t.train.steps
    t.cosine(EPOCHS * t.train.steps)
    t.run()


def only_the_other_loader_is_asked(t: Split) -> None:
    length = EPOCHS * len(t.val)
    t.cosine(length)
    t.run()


def asked_later(t: Split) -> None:
    t.cosine(EPOCHS * len(t.train_before) * t.num_micro_batches)
    in_all = EPOCHS * len(t.train)
    t.run()
    assert in_all


def asked_in_the_head_of_a_loop(t: Split) -> None:
    for _ in range(len(t.train)):
        pass
    t.cosine(EPOCHS * len(t.train_before) * t.num_micro_batches)
    t.run()


def steps_of_the_loader(t: Split) -> None:
    batches_of_epoch = len(t.train)
    t.cosine(EPOCHS * t.train.steps)
    assert batches_of_epoch > t.train.steps
    t.run()


def stops_early(t: Split) -> None:
    batches_of_epoch = len(t.train)
    t.cosine(EPOCHS * t.train.steps)
    t.run(stop_after=1)
    assert batches_of_epoch


def resumed(t: Split) -> None:
    batches_of_epoch = len(t.train)
    t.cosine(EPOCHS * t.train.steps)
    t.run(1)
    t.run(EPOCHS)
    assert batches_of_epoch


def one_cycle(t: Split) -> None:
    length = EPOCHS * len(t.train_before)
    logging.getLogger().info(len(t.train))
    cycle = torch.optim.lr_scheduler.OneCycleLR(t.optimizer, 0.1, total_steps=length)
    t.schedule = t.world.prepare(cycle)
    t.run()


def chained(t: Split) -> None:
    """A ChainedScheduler, which does not have torch's `last_epoch`."""
    batches_of_epoch = len(t.train)
    halves = torch.optim.lr_scheduler.ConstantLR(t.optimizer, 0.5, t.train.steps)
    chain = torch.optim.lr_scheduler.ChainedScheduler([halves], t.optimizer)
    t.schedule = t.world.prepare(chain)
    t.run()
    assert batches_of_epoch
    assert chain.get_last_lr() == [0.1]


def in_each_epoch(t: Split) -> None:
    batches_of_epoch = len(t.train)
    t.cosine(EPOCHS)
    for _ in t.world.epochs(EPOCHS):
        for x, y in t.train:
            t.step(x, y)
        t.schedule.step()
    assert batches_of_epoch


def of_micro_batches(t: Split) -> None:
    length = EPOCHS * len(t.train)
    t.cosine(length)
    t.run()


def of_micro_batches_in_the_call(t: Split) -> None:
    t.cosine(EPOCHS * len(t.train))
    logging.getLogger().info((len(t.train), len(t.val)))
    t.run()


WRONG_SPLITS = [of_micro_batches, of_micro_batches_in_the_call]
HONEST_SPLITS = [
    printed_and_planned_for_longer,
    as_long_as_the_other_loader,
    only_the_other_loader_is_asked,
    asked_later,
    asked_in_the_head_of_a_loop,
    steps_of_the_loader,
    stops_early,
    resumed,
    one_cycle,
    chained,
    in_each_epoch,
]


def told_of_split(use: Callable[[Split], None], num_micro_batches: int) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with lockstep.init(seed=0, num_micro_batches=num_micro_batches) as world:
            use(Split(world, num_micro_batches))
    return len([warning for warning in caught if "T_max" in str(warning.message)])


def told_of_splits() -> dict[str, int]:
    told = {}
    for use in [*WRONG_SPLITS, *HONEST_SPLITS]:
        for num_micro_batches in (2, 3, 4):
            told[f"{use.__name__} {num_micro_batches}"] = told_of_split(use, num_micro_batches)
    return told


@pytest.mark.thorough
def test_a_schedule_is_not_told_for_what_was_printed_or_belongs_to_another_loader() -> None:
    first, second = run_ranks(told_of_splits, 2)
    wrong_names = [use.__name__ for use in WRONG_SPLITS]
    for name, num_told in first.items():
        is_wrong = name.split()[0] in wrong_names
        assert num_told == (1 if is_wrong else 0), name
    assert not any(second.values())
