"""The options of DiLoCo, and their checks.

A *virtual rank* trains its own copy of the model; the option `replicas` is their number. Every few
steps an *exchange* merges the copies, by means of the *outer optimizer*.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from lockstep.communication.quantize import Method
from lockstep.errors import SettingError, unknown_choice_error
from lockstep.session.micro_batch import VirtualRanks
from lockstep.settings import check_whole_number


@dataclass(frozen=True, kw_only=True)
class DiLoCoOptions:
    """Options of DiLoCo.

    The defaults are those of the paper, except that the paper uses `every=500`.

    Raises:
        SettingError: an option has a value out of range, or two options exclude each other.
    """

    replicas: int = 2
    """Number of virtual ranks: at least the number of processes, or a divisor of it."""
    every: int = 50
    """Number of steps from one exchange to the next."""
    outer_lr: float = 0.7
    """Learning rate of the outer optimizer. A rate of 1, without momentum, gives the mean of the
    virtual ranks."""
    outer_momentum: float = 0.9
    fragments: int = 1
    """Number of parts, of nearly equal size, into which the model is divided. The parts are
    exchanged one after the other, at equal intervals."""
    delay: int = 0
    """Number of steps after which a part that was sent is applied, which gives the network time to
    send it."""
    compress: Method | None = None
    """How differences are sent: as `bf16`, or as `int8` or `int4` with a scale for every 128
    values; None for no compression."""
    start: int = 0
    """Number of steps at the beginning in which all virtual ranks train one model and average
    gradients."""

    @property
    def virtual_ranks(self) -> VirtualRanks:
        """The virtual ranks of the run, one for each replica."""
        return VirtualRanks(count=self.replicas, train_copies=True)

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

        are_valid = self.outer_lr > 0 and 0 <= self.outer_momentum < 1
        if not are_valid:
            raise SettingError(
                f"DiLoCo(outer_lr={self.outer_lr}, outer_momentum={self.outer_momentum})",
                "the rate is above 0, and the momentum from 0 to below 1",
                "choose others; outer_lr=1, outer_momentum=0 is local SGD",
            )
