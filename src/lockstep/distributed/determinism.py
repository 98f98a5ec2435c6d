"""Sets torch's threads and kernels so that every process computes the same bits.

The number of threads decides in which order the additions of a matrix product are made, so it must
not depend on the number of processes. Kernels that add in no fixed order (atomic additions on GPUs)
are refused by torch's deterministic mode.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.utils.deterministic

from lockstep.distributed.collectives import Collectives
from lockstep.distributed.numerics import compare_ranks, read_numerics
from lockstep.errors import LockstepError, UsageError, add_note_once
from lockstep.session.extension import Extension
from lockstep.settings import Choice

deterministic: Any = torch.utils.deterministic
"""Not all of its attributes are in torch's type annotations."""
CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
REFUSED_BY_TORCH = " does not have a deterministic implementation"
"""What follows the name of an operation in the error of torch's deterministic mode."""
NOTE_BEGINNING = "lockstep: "


class Determinism(Extension):
    """Computes with a fixed number of threads and in torch's deterministic mode.

    The former settings are restored when the run ends. All ranks create this object together.

    Args:
        collectives: the collectives of the run.
        num_virtual_ranks: number of virtual ranks of the run. Each process gets as many threads as
            it would have if every virtual rank had a process on this machine.
    """

    def __init__(self, collectives: Collectives, num_virtual_ranks: int) -> None:
        self._threads_before = torch.get_num_threads()
        self._was_deterministic = torch.are_deterministic_algorithms_enabled()
        self._only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
        self._fill_before: bool = deterministic.fill_uninitialized_memory
        self._benchmark_before = torch.backends.cudnn.benchmark
        self._cublas_before = os.environ.get(CUBLAS_VARIABLE)

        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        num_threads_here = max(1, num_cores // num_virtual_ranks)

        # Machines may have different numbers of cores, so all processes use the smallest number.
        self.num_threads = min(int(number) for number in collectives.exchange(num_threads_here))
        torch.set_num_threads(self.num_threads)

        # In torch's deterministic mode, cuBLAS refuses to compute without a fixed workspace.
        os.environ.setdefault(CUBLAS_VARIABLE, ":4096:8")
        torch.use_deterministic_algorithms(True)

        # Otherwise torch would fill uninitialised tensors, which takes time. Their values are not
        # used.
        deterministic.fill_uninitialized_memory = False
        torch.backends.cudnn.benchmark = False

        self.differences = compare_ranks(collectives, read_numerics(collectives.device))
        """The numerics that differ between ranks, as a text; "" if all are equal."""

    def choice(self) -> Choice:
        """Returns the number of threads and the reason for it, for the startup summary."""
        reason = "pinned: the same on any number of processes, because it decides the order of sums"
        return Choice("threads", str(self.num_threads), reason)

    def close(self, failed: bool) -> None:
        """Restores the settings that were in use before the run."""
        torch.set_num_threads(self._threads_before)
        torch.use_deterministic_algorithms(self._was_deterministic, warn_only=self._only_warned)
        deterministic.fill_uninitialized_memory = self._fill_before
        torch.backends.cudnn.benchmark = self._benchmark_before
        if self._cublas_before is None:
            os.environ.pop(CUBLAS_VARIABLE, None)


def find_refused_operation(error: BaseException | None) -> str | None:
    """Returns the operation that torch's deterministic mode has refused, or None for other errors.

    "put_ does not have a deterministic implementation, ..." -> "put_"
    """
    if not isinstance(error, RuntimeError) or isinstance(error, LockstepError):
        return None
    operation, refused, _ = str(error).partition(REFUSED_BY_TORCH)
    return operation if refused else None


def nondeterministic_error(operation: str) -> UsageError:
    """Builds the error for an operation that torch's deterministic mode has refused.

    The mode may be turned off around code that does not affect the weights, such as a metric.

    Args:
        operation: name of the operation, as torch's error gives it.
    """
    return UsageError(
        "virtual_ranks, which promise the same bits on any number of processes",
        f"torch computes {operation} in no fixed order, so its bits may differ from run to run",
        "use another operation (the documentation of torch.use_deterministic_algorithms lists "
        "those that have a fixed order), or leave virtual_ranks out; for code that does not affect "
        "the weights, such as a metric, turn torch.use_deterministic_algorithms off",
    )


def add_determinism_note(error: BaseException | None) -> None:
    """Adds a note with advice to an error of torch's deterministic mode, if it has none yet."""
    operation = find_refused_operation(error)
    if error is None or operation is None:
        return
    add_note_once(error, NOTE_BEGINNING, nondeterministic_error(operation).message)
