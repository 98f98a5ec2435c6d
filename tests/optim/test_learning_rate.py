from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch
from torch.optim import SGD, Optimizer, lr_scheduler as schedules
from torch.optim.lr_scheduler import LRScheduler

from lockstep.errors import SettingError, UsageError
from lockstep.optim.learning_rate import scale_learning_rate, warmup

pytestmark = pytest.mark.unit


def two_groups() -> Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.02)]
    return SGD(groups)


def rates(optimizer: Optimizer, scheduler: LRScheduler, steps: int) -> list[list[float]]:
    """The rates that `steps` optimizer steps use."""
    found = []
    for _ in range(steps):
        found.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return found


def test_a_number_comes_back_scaled() -> None:
    assert scale_learning_rate(0.1, batch_size=8192, base_batch_size=256) == pytest.approx(3.2)
    assert scale_learning_rate(0.1, batch_size=64, base_batch_size=256) == pytest.approx(0.025)
    rule = {"batch_size": 1024, "base_batch_size": 256, "rule": "sqrt"}
    assert scale_learning_rate(0.1, **rule) == pytest.approx(0.2)
    assert scale_learning_rate(0, **rule) == 0


def test_an_optimizer_comes_back_with_every_group_scaled() -> None:
    optimizer = two_groups()
    optimizer.param_groups[1]["lr"] = rate = torch.tensor(0.02)
    assert scale_learning_rate(optimizer, batch_size=96, base_batch_size=32) is optimizer
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.3)
    assert optimizer.param_groups[1]["lr"] is rate
    assert float(rate) == pytest.approx(0.06)
    assert optimizer.defaults["lr"] == SGD([torch.nn.Parameter(torch.ones(1))]).defaults["lr"]


def test_an_optimizer_with_a_scheduler_is_refused() -> None:
    optimizer = two_groups()
    schedules.StepLR(optimizer, 3)
    with pytest.raises(UsageError, match="before building the scheduler"):
        scale_learning_rate(optimizer, batch_size=64, base_batch_size=32)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.02]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 32.0}, r"batch_size=32\.0"),
        ({"batch_size": True}, "batch_size=True"),
        ({"base_batch_size": -1}, "base_batch_size=-1"),
        ({"rule": "square"}, "did you mean 'sqrt'"),
        ({"rule": "cubic"}, "the rules are linear, sqrt"),
        ({"optimizer_or_lr": -0.1}, r"found: -0\.1"),
        ({"optimizer_or_lr": math.nan}, "found: nan"),
        ({"optimizer_or_lr": math.inf}, "found: inf"),
        ({"optimizer_or_lr": "0.1"}, "found: a str"),
    ],
)
def test_what_cannot_be_scaled(change: dict[str, object], message: str) -> None:
    arguments = {"optimizer_or_lr": 0.1, "batch_size": 64, "base_batch_size": 32, **change}
    lr = arguments.pop("optimizer_or_lr")
    with pytest.raises(SettingError, match=message):
        scale_learning_rate(lr, **arguments)


def test_warmup_alone_grows_to_the_whole_rate_and_stays() -> None:
    optimizer = two_groups()
    found = rates(optimizer, warmup(optimizer, 4, start=0.2), 7)
    wanted = [0.2, 0.4, 0.6, 0.8, 1, 1, 1]
    assert found == [pytest.approx([0.1 * f, 0.02 * f]) for f in wanted]


FOLLOWERS: list[Callable[[Optimizer], LRScheduler]] = [
    lambda o: schedules.StepLR(o, 2, gamma=0.5),
    lambda o: schedules.MultiStepLR(o, [1, 3]),
    lambda o: schedules.LambdaLR(o, lambda step: 0.7**step + 0.5),
    lambda o: schedules.LinearLR(o, 1.0, 0.2, total_iters=4),
    lambda o: schedules.ExponentialLR(o, 0.9),
    lambda o: schedules.PolynomialLR(o, 6, power=2.0),
    lambda o: schedules.ConstantLR(o, 0.5, total_iters=3),
    lambda o: schedules.CosineAnnealingLR(o, 6),
    lambda o: schedules.CosineAnnealingWarmRestarts(o, 3),
]


@pytest.mark.parametrize("follower", FOLLOWERS, ids=lambda f: type(f(two_groups())).__name__)
@pytest.mark.parametrize("steps", [1, 3])
def test_the_schedule_begins_where_the_warmup_ends(
    follower: Callable[[Optimizer], LRScheduler], steps: int
) -> None:
    alone = two_groups()
    wanted = rates(alone, follower(alone), 8)
    optimizer = two_groups()
    found = rates(optimizer, warmup(follower(optimizer), steps, start=0.25), steps + 8)
    ramp = [0.25 + 0.75 * step / steps for step in range(steps)]
    assert found[:steps] == [pytest.approx([0.1 * f, 0.02 * f]) for f in ramp]
    assert found[steps:] == [pytest.approx(rates) for rates in wanted]


# Not MultiStepLR: torch keeps its milestones as integer keys, which bare JSON makes strings.
@pytest.mark.parametrize("follower", [None, FOLLOWERS[0], *FOLLOWERS[2:]])
@pytest.mark.parametrize("done", [2, 5])
def test_its_state_goes_through_json(
    follower: Callable[[Optimizer], LRScheduler] | None, done: int
) -> None:
    def build() -> tuple[Optimizer, LRScheduler]:
        optimizer = two_groups()
        return optimizer, warmup(follower(optimizer) if follower else optimizer, 4)

    optimizer, scheduler = build()
    rates(optimizer, scheduler, done)
    state = json.loads(json.dumps(scheduler.state_dict()))
    resumed_optimizer, resumed = build()
    resumed_optimizer.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(state)
    assert rates(resumed_optimizer, resumed, 6) == rates(optimizer, scheduler, 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "warm-up steps=0"),
        ((2.5,), r"warm-up steps=2\.5"),
        ((5, 0.0), r"warm-up start=0\.0"),
        ((5, 1.5), r"warm-up start=1\.5"),
        ((5, math.nan), "warm-up start=nan"),
        ((5, "0.1"), "warm-up start='0.1'"),
    ],
)
def test_a_warmup_that_cannot_be(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        warmup(two_groups(), *arguments)


@pytest.mark.parametrize(
    "follower",
    [
        schedules.ReduceLROnPlateau,
        lambda o: schedules.OneCycleLR(o, 0.1, total_steps=9, cycle_momentum=False),
        lambda o: schedules.CyclicLR(o, 0.1, 0.2, cycle_momentum=False),
        lambda o: schedules.MultiplicativeLR(o, lambda _: 0.9),
        lambda o: schedules.ChainedScheduler([schedules.StepLR(o, 2)]),
        lambda o: warmup(schedules.StepLR(o, 2), 3),
    ],
)
def test_a_schedule_that_cannot_follow(follower: Callable[[Optimizer], LRScheduler]) -> None:
    scheduler = follower(two_groups())
    with pytest.raises(SettingError, match=f"warm-up followed by {type(scheduler).__name__}"):
        warmup(scheduler, 3)


def test_a_schedule_that_has_begun_and_something_else() -> None:
    optimizer = two_groups()
    scheduler = schedules.StepLR(optimizer, 2)
    rates(optimizer, scheduler, 2)
    with pytest.raises(UsageError, match="has already made 2 steps"):
        warmup(scheduler, 3)
    with pytest.raises(SettingError, match="a float"):
        warmup(0.1, 3)
