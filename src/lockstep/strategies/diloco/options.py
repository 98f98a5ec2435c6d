"""The options of DiLoCo, and their checks.

A *virtual rank* trains its own copy of the model; the option `replicas` is their number. An
*exchange* merges them. The *outer optimizer* is the one that does so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from lockstep.communication.quantize import Method
from lockstep.errors import SettingError, unknown_choice_error
from lockstep.settings import check_whole_number


@dataclass(frozen=True, kw_only=True)
class DiLoCoOptions:
    """Options of DiLoCo. The defaults are those of the paper, except that it uses `every=500`.

    Raises:
        SettingError: a value out of range, or two that do not go together.
    """

    replicas: int = 2
    """Number of virtual ranks: at least as many as processes, or a divisor of their number."""
    every: int = 50
    """Steps from one exchange to the next."""
    outer_lr: float = 0.7
    """Learning rate of the outer optimizer; 1 without momentum is the mean of the virtual ranks."""
    outer_momentum: float = 0.9
    fragments: int = 1
    """Parts of nearly equal size into which the model is divided; they are exchanged at equal
    intervals."""
    delay: int = 0
    """Steps after which what was sent is applied: the time that the network has to send it."""
    compress: Method | None = None
    """How differences are sent: as `bf16`, or as `int8` or `int4` with a scale for every 128
    values; None: as they are."""
    start: int = 0
    """Steps at the beginning in which all virtual ranks train one model, averaging gradients."""

    def __post_init__(self) -> None:
        minimums = {"replicas": 1, "every": 1, "fragments": 1, "delay": 0, "start": 0}
        for option, minimum in minimums.items():
            value = getattr(self, option)
            check_whole_number(f"DiLoCo({option}={value!r})", value, minimum)

        maximums = {"fragments": self.every, "delay": self.every - 1}
        for option, maximum in maximums.items():
            value = getattr(self, option)
            if value > maximum:
                raise SettingError(
                    f"DiLoCo({option}={value}, every={self.every})",
                    f"with every={self.every} it is at most {maximum}: a fragment is exchanged, "
                    "and has come, before it is sent again",
                    "choose a smaller one, or a larger every",
                )

        methods = get_args(Method)
        if self.compress is not None and self.compress not in methods:
            raise unknown_choice_error(
                f"DiLoCo(compress={self.compress!r})", self.compress, "compressions", methods
            )

        lr_is_valid = self.outer_lr > 0
        momentum_is_valid = 0 <= self.outer_momentum < 1
        if not lr_is_valid or not momentum_is_valid:
            raise SettingError(
                f"DiLoCo(outer_lr={self.outer_lr}, outer_momentum={self.outer_momentum})",
                "the rate is above 0, and the momentum from 0 to below 1",
                "choose others; outer_lr=1, outer_momentum=0 is local SGD",
            )
