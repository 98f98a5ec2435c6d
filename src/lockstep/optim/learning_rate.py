"""Learning rates for large batches: scaling with the batch size, and gradual warm-up.

Learning rates and warm-up count in global batches: `batch_size` is the number of samples of one
optimizer step, over all devices and micro-batches, and a step is one optimizer step. So neither
changes with the number of devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar, overload

from torch.optim import Optimizer, lr_scheduler

from lockstep.errors import SettingError, UsageError, unknown_choice_error
from lockstep.optim.layerwise import is_real_number
from lockstep.settings import check_whole_number
from lockstep.wording import describe_type, with_article

SCALING_RULES: dict[str, Callable[[float], float]] = {"linear": lambda k: k, "sqrt": math.sqrt}
"""The factor by which the learning rate grows if the batch becomes k times as large."""

# Schedulers that cannot begin after a warm-up. The text gives the reason, and mostly what to do
# instead.
_ADVICE_IF_CANNOT_FOLLOW: dict[type, str] = {
    lr_scheduler.ReduceLROnPlateau: "it steps on a metric: warm up the optimizer, step it by hand",
    lr_scheduler.OneCycleLR: "it warms up by itself: use its pct_start",
    lr_scheduler.CyclicLR: "it moves between rates of its own",
    lr_scheduler.MultiplicativeLR: "it multiplies whatever rate it meets: use LambdaLR",
    lr_scheduler.SequentialLR: "it cannot start inside another: add LinearLR to its list",
    lr_scheduler.ChainedScheduler: "it cannot start inside a sequence: add LinearLR to its list",
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
    """Scales a learning rate that was tuned for `base_batch_size` to `batch_size`.

    For a number it returns the scaled number. For an optimizer it changes the rate of every
    parameter group in place and returns the optimizer. An optimizer must be scaled before its
    scheduler is built, because schedulers remember the initial rates.

    Args:
        optimizer_or_lr: a learning rate, or an optimizer.
        batch_size: the number of samples in one optimizer step, over all devices and micro-batches.
        base_batch_size: the batch size for which the learning rate was tuned.
        rule: `linear` (times batch_size / base_batch_size: Goyal et al., "Accurate, Large Minibatch
            SGD", arXiv 1706.02677) or `sqrt` (times the square root of it: Krizhevsky, "One weird
            trick for parallelizing convolutional neural networks", arXiv 1404.5997).

    Raises:
        SettingError: a batch size is not a whole number above 0, the learning rate is not a finite
            number of at least 0, or the rule is unknown.
        UsageError: the optimizer already has a scheduler.
    """
    for name, size in (("batch_size", batch_size), ("base_batch_size", base_batch_size)):
        check_whole_number(f"{name}={size!r}", size)

    if rule not in SCALING_RULES:
        raise unknown_choice_error(f"rule={rule!r}", rule, "the rules", SCALING_RULES)

    factor = SCALING_RULES[rule](batch_size / base_batch_size)
    if isinstance(optimizer_or_lr, Optimizer):
        # Torch's schedulers store the initial rate of each group in it.
        has_scheduler = any("initial_lr" in group for group in optimizer_or_lr.param_groups)
        if has_scheduler:
            raise UsageError(
                "scale_learning_rate of an optimizer",
                "it already has a scheduler, which would go on from the rates before scaling",
                "call scale_learning_rate before building the scheduler",
            )

        for group in optimizer_or_lr.param_groups:
            group["lr"] *= factor  # in place, so a rate that is a tensor stays the same object

        return optimizer_or_lr

    advice = "pass an optimizer, or a finite learning rate from 0 up"
    if not is_real_number(optimizer_or_lr):
        kind = type(optimizer_or_lr).__name__
        raise SettingError("scale_learning_rate", with_article(kind), advice)

    if not 0 <= optimizer_or_lr < math.inf:
        raise SettingError("scale_learning_rate", str(optimizer_or_lr), advice)

    return optimizer_or_lr * factor


def warmup(
    scheduler_or_optimizer: lr_scheduler.LRScheduler | Optimizer, steps: int, start: float = 0.01
) -> lr_scheduler.LRScheduler:
    """Lets the learning rate grow linearly for `steps` steps, before the schedule begins.

    With 100 steps of warm-up, step 0 uses `start` times the optimizer's learning rate, and step 100
    the full rate. A given scheduler begins with its own step 0 at that point, so if it needs to
    know its length, it should be built for 100 steps less than the training. After every optimizer
    step, call `step()` of the result, and no longer that of the given scheduler.

    See Goyal et al., "Accurate, Large Minibatch SGD" (arXiv 1706.02677, section 2.2), who start at
    1/k of the rate if the batch is k times as large.

    The result is a `torch.optim.lr_scheduler.SequentialLR` (for an optimizer: a `LinearLR`).

    Args:
        scheduler_or_optimizer: the schedule that follows the warm-up, newly built; or an optimizer,
            whose rate stays constant after the warm-up.
        steps: the number of optimizer steps (global batches) of the warm-up.
        start: the fraction of the learning rate in the first step, above 0 and at most 1.

    Raises:
        SettingError: `steps` or `start` is invalid, or this kind of scheduler is not supported.
        UsageError: the scheduler has already made steps.
    """
    check_whole_number(f"warm-up steps={steps!r}", steps)
    if not is_real_number(start) or not 0 < start <= 1:
        raise SettingError(
            f"warm-up start={start!r}",
            "it is the fraction of the learning rate in the first step",
            "choose a number above 0 and at most 1",
        )

    if isinstance(scheduler_or_optimizer, Optimizer):
        # After `total_iters` steps LinearLR keeps the rate constant.
        return lr_scheduler.LinearLR(scheduler_or_optimizer, start, total_iters=steps)

    scheduler = scheduler_or_optimizer
    if not isinstance(scheduler, lr_scheduler.LRScheduler):
        raise SettingError(
            "warm-up",
            describe_type(scheduler),
            "pass an optimizer or a scheduler of torch.optim.lr_scheduler",
        )

    was_set = f"warm-up followed by {type(scheduler).__name__}"
    for kind, advice in _ADVICE_IF_CANNOT_FOLLOW.items():
        if isinstance(scheduler, kind):
            raise SettingError(was_set, "it cannot begin after a warm-up", advice)

    if scheduler.last_epoch != 0:  # in torch this is the number of steps made
        raise UsageError(
            was_set,
            f"the scheduler has already made {scheduler.last_epoch} steps",
            "build it, wrap it in warmup, and only then load a saved state or step",
        )

    # The rate grows from `start` times the optimizer's rate to that rate; then the schedule begins.
    ramp = lr_scheduler.LinearLR(scheduler.optimizer, start, total_iters=steps)
    return lr_scheduler.SequentialLR(scheduler.optimizer, [ramp, scheduler], [steps])
