"""What a loader asks autotuning for: its shares or its micro-batch size may be `"auto"`.

*Shares* say how a global batch is divided over the ranks, one whole number a rank. A value is
*open* until it was measured. `extensions.autotune` measures it, in the first global batch that is
trained on, and writes it into an `AutotuneResult`, which all loaders of the run read.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any


@dataclass
class AutotuneResult:
    """What was measured in a run, for all loaders that ask for it."""

    shares: tuple[int, ...] | None = None
    """None: not measured yet."""
    micro_batch_size: int | None = None
    """The most samples that fit into memory at a time. None: a rank's whole part fits, or it was
    not measured yet."""
    micro_batch_size_is_known: bool = False


@dataclass(frozen=True, kw_only=True)
class AutotuneRequest:
    """What one loader asks for."""

    result: AutotuneResult
    wants_shares: bool
    wants_micro_batch_size: bool
    recording_context: Callable[[Any, int], AbstractContextManager[None]]
    """Returns a context in which a micro-batch is computed and measured. Its arguments are the
    loader's `MicroBatchPlan` and the number of samples of this rank."""
    must_keep_plan: Callable[[], bool]
    """Returns True if the model must be called with micro-batches as they are planned."""

    @property
    def shares_are_open(self) -> bool:
        """True if the shares are wanted and not known yet."""
        return self.wants_shares and self.result.shares is None

    @property
    def micro_batch_size_is_open(self) -> bool:
        """True if the micro-batch size is wanted and not known yet."""
        return self.wants_micro_batch_size and not self.result.micro_batch_size_is_known

    @property
    def is_open(self) -> bool:
        """True if something is wanted and not known yet."""
        return self.shares_are_open or self.micro_batch_size_is_open
