"""Learning rates for large batches: scaling with the batch size, and gradual warm-up.

Both count in global batches (`batch_size` is the samples, and one step the duration, of one
optimizer step), so neither changes with the number of devices.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from typing import TypeVar, overload

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CyclicLR,
    LinearLR,
    LRScheduler,
    MultiplicativeLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from lockstep.errors import SettingError, UsageError

RULES: dict[str, Callable[[float], float]] = {"linear": lambda k: k, "sqrt": math.sqrt}
"""How the learning rate grows when the batch grows k times."""

_CANNOT_FOLLOW: dict[type, str] = {
    ReduceLROnPlateau: "it steps on a metric; warm up the optimizer, then step it by hand",
    OneCycleLR: "it warms up by itself: use its pct_start",
    CyclicLR: "it moves between rates of its own",
    MultiplicativeLR: "it multiplies whatever rate it meets: use LambdaLR",
    SequentialLR: "torch cannot start one sequence inside another: add LinearLR to its list",
    ChainedScheduler: "torch cannot start a chain inside a sequence: add LinearLR to its list",
}

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


@overload
def scale_learning_rate(
    optimizer_or_lr: float, *, batch_size: int, base_batch_size: int, rule: str = "linear"
) -> float: ...


@overload
def scale_learning_rate(
    optimizer_or_lr: OptimizerT, *, batch_size: int, base_batch_size: int, rule: str = "linear"
) -> OptimizerT: ...


def scale_learning_rate(
    optimizer_or_lr: Optimizer | float,
    *,
    batch_size: int,
    base_batch_size: int,
    rule: str = "linear",
) -> Optimizer | float:
    """Scales a learning rate that was found at `base_batch_size` to `batch_size`.

    Returns what it was given, scaled: for a number the scaled number, for an optimizer that
    optimizer, with the rate of every parameter group changed in place. Scale an optimizer before
    its scheduler is built: schedulers remember the rates that they begin with.

    Args:
        optimizer_or_lr: a learning rate, or an optimizer.
        batch_size: samples of one optimizer step, over all devices and micro-batches.
        base_batch_size: the same, where the learning rate was found.
        rule: `linear` (times batch_size / base_batch_size: Goyal et al., "Accurate, Large Minibatch
            SGD", arXiv 1706.02677) or `sqrt` (times its square root: Krizhevsky, "One weird trick
            for parallelizing convolutional neural networks", arXiv 1404.5997).

    Raises:
        SettingError: a batch size that is no whole number above 0, a learning rate that is no
            finite number from 0 up, or an unknown rule.
        UsageError: the optimizer already has a scheduler.
    """
    for name, size in (("batch_size", batch_size), ("base_batch_size", base_batch_size)):
        _check_count(name, size, "samples of one optimizer step")
    if rule not in RULES:
        near = difflib.get_close_matches(str(rule), RULES, n=1, cutoff=0.3)
        raise SettingError(
            f"rule={rule!r}",
            f"the rules are {', '.join(RULES)}",
            f"did you mean {near[0]!r}?" if near else "choose one of them",
        )
    factor = RULES[rule](batch_size / base_batch_size)
    if isinstance(optimizer_or_lr, Optimizer):
        _scale_groups(optimizer_or_lr, factor)
        return optimizer_or_lr
    if isinstance(optimizer_or_lr, bool) or not isinstance(optimizer_or_lr, int | float):
        found = f"a {type(optimizer_or_lr).__name__}"
    elif not 0 <= optimizer_or_lr < math.inf:
        found = str(optimizer_or_lr)
    else:
        return optimizer_or_lr * factor
    raise SettingError(
        "scale_learning_rate", found, "pass an optimizer, or a finite learning rate from 0 up"
    )


def _scale_groups(optimizer: Optimizer, factor: float) -> None:
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise UsageError(
            "scale_learning_rate of an optimizer",
            "it already has a scheduler, which would go on from the rates before scaling",
            "call scale_learning_rate before building the scheduler",
        )
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].mul_(factor)
        else:
            group["lr"] *= factor


def warmup(
    scheduler_or_optimizer: LRScheduler | Optimizer, steps: int, start: float = 0.01
) -> LRScheduler:
    """Gradual warm-up: the rate grows linearly for `steps` steps, then the schedule begins.

    The first step uses `start` times the optimizer's learning rate, step `steps` (counted from 0)
    the whole of it. A scheduler that is given begins with its own step 0 at that point, so it
    covers what is left: give it `total - steps` steps where it wants to know its length. Step the
    result once after every optimizer step, and the scheduler that it was made from no more.

    After Goyal et al., "Accurate, Large Minibatch SGD" (arXiv 1706.02677, section 2.2), who start
    at 1/k of the rate when the batch is k times as large.

    The result is a `torch.optim.lr_scheduler.SequentialLR` (for an optimizer: a `LinearLR`), whose
    `state_dict` holds numbers and lists and no functions, as far as the given scheduler's does.

    Args:
        scheduler_or_optimizer: the schedule that follows, newly built; or an optimizer, whose
            rate then stays as it is.
        steps: optimizer steps (global batches).
        start: fraction of the learning rate in the first step, above 0 and at most 1.

    Raises:
        SettingError: `steps`, `start` or the kind of scheduler cannot be honoured.
        UsageError: the scheduler has been stepped before.
    """
    _check_count("warm-up steps", steps, "optimizer steps")
    if isinstance(start, bool) or not isinstance(start, int | float) or not 0 < start <= 1:
        raise SettingError(
            f"warm-up start={start!r}",
            "it is the fraction of the learning rate in the first step",
            "choose a number above 0 and at most 1",
        )
    if isinstance(scheduler_or_optimizer, Optimizer):
        return LinearLR(scheduler_or_optimizer, start, total_iters=steps)
    _check_can_follow(scheduler_or_optimizer)
    optimizer = scheduler_or_optimizer.optimizer
    ramp = LinearLR(optimizer, start, total_iters=steps)
    return SequentialLR(optimizer, [ramp, scheduler_or_optimizer], [steps])


def _check_can_follow(scheduler: LRScheduler) -> None:
    if not isinstance(scheduler, LRScheduler):
        raise SettingError(
            "warm-up",
            f"a {type(scheduler).__name__}",
            "pass an optimizer or a scheduler of torch.optim.lr_scheduler",
        )
    for kind, reason in _CANNOT_FOLLOW.items():
        if isinstance(scheduler, kind):
            raise SettingError(
                f"warm-up followed by {type(scheduler).__name__}",
                "it cannot begin after a warm-up",
                reason,
            )
    if scheduler.last_epoch != 0:
        raise UsageError(
            f"warm-up followed by {type(scheduler).__name__}",
            f"the scheduler has already made {scheduler.last_epoch} steps",
            "build it, wrap it in warmup, and only then load a saved state or step",
        )


def _check_count(name: str, value: int, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingError(
            f"{name}={value!r}", f"it counts {unit}", "choose a whole number from 1 up"
        )
