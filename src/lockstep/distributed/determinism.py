"""Sets torch's threads and kernels so that every process computes the same bits.

The number of threads decides in which order the additions of a matrix product are made. So it is
part of the recipe, like the number of virtual ranks, and must not follow from the number of
processes, or from the cores to which a scheduler has bound them. It is what the user has set in
OMP_NUM_THREADS, and otherwise 1: the only number that suits any number of processes and cores, and
the one that torchrun sets.

Kernels that add in no fixed order (atomic additions on GPUs) are refused by torch's deterministic
mode.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.deterministic
from torch import nn
from torch.optim import Optimizer

from lockstep.distributed.collectives import Collectives
from lockstep.distributed.numerics import compare_ranks, read_numerics
from lockstep.errors import LockstepError, UsageError, add_note_once, warn
from lockstep.machine import process_copy
from lockstep.machine.process_copy import WAY_TO_SEVERAL_THREADS
from lockstep.machine.topology import threads_set_by_user
from lockstep.session.extension import Extension
from lockstep.settings import Choice
from lockstep.wording import count_noun

deterministic: Any = torch.utils.deterministic
"""Not all of its attributes are in torch's type annotations."""
CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
REFUSED_BY_TORCH = " does not have a deterministic implementation"
"""What follows the name of an operation in the error of torch's deterministic mode."""
DEFAULT_NUM_THREADS = 1

_pinned_threads: int | None = None
"""The number of threads that `pin_threads` has set; None if it has set none. Torch's number also
belongs to the process, not to a run."""


def pin_threads(number: int) -> None:
    """Sets torch's number of threads; `Determinism` warns if the script changes it afterwards."""
    global _pinned_threads
    _pinned_threads = number
    torch.set_num_threads(number)


class Determinism(Extension):
    """Computes with a fixed number of threads and in torch's deterministic mode.

    The former settings are restored when the run ends. All ranks create this object together.

    Args:
        collectives: the collectives of the run.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._threads_before = torch.get_num_threads()
        self._was_deterministic = torch.are_deterministic_algorithms_enabled()
        self._warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
        self._fill_before: bool = deterministic.fill_uninitialized_memory
        self._benchmark_before = torch.backends.cudnn.benchmark
        self._cublas_before = os.environ.get(CUBLAS_VARIABLE)
        self._num_local_processes = collectives.topology.local_size
        self._computes_on_cpu = collectives.device.type == "cpu"

        # All ranks have the same number from the user: they compare it when they join.
        if process_copy.is_copy():
            self._users_threads = process_copy.threads_asked_for()
            pin_threads(process_copy.THREADS_OF_COPY)
            self._warn_if_copy_ignores_threads()
        else:
            self._users_threads = threads_set_by_user(os.environ)
            pin_threads(self._users_threads or DEFAULT_NUM_THREADS)

        # In torch's deterministic mode, cuBLAS refuses to compute without a fixed workspace.
        os.environ.setdefault(CUBLAS_VARIABLE, ":4096:8")
        torch.use_deterministic_algorithms(True)

        # Otherwise torch would fill uninitialised tensors, which takes time. Their values are not
        # used.
        deterministic.fill_uninitialized_memory = False
        torch.backends.cudnn.benchmark = False

        self.differences = compare_ranks(collectives, read_numerics(collectives.device))
        """The numerics that differ between ranks, as a text; "" if all are equal."""

    def _warn_if_copy_ignores_threads(self) -> None:
        """Warns if the user has asked for several threads. Called in a copy of a process only.

        A copy, which `lockstep.launch` has made with `fork`, can only compute with one thread.
        """
        if self._users_threads is None or self._users_threads == process_copy.THREADS_OF_COPY:
            return
        warn(
            f"OMP_NUM_THREADS={self._users_threads} with virtual_ranks",
            found=f"this process computes with one thread, so the bits are those of one: "
            f"{process_copy.WHY_ONE_THREAD}",
            do=WAY_TO_SEVERAL_THREADS,
        )

    def choice(self) -> Choice:
        """Returns the number of threads and the reason for it, for the startup summary."""
        if process_copy.is_copy():
            return Choice("threads", str(process_copy.THREADS_OF_COPY), process_copy.WHY_ONE_THREAD)

        if self._users_threads is not None:
            return Choice(
                "threads",
                str(self._users_threads),
                "OMP_NUM_THREADS; it decides the order of sums, so another number changes the bits",
            )

        reason = "pinned: the same on any machine, because it decides the order of sums"
        num_cores = self._cores_per_process()
        if num_cores > DEFAULT_NUM_THREADS and self._computes_on_cpu:
            reason = (
                "pinned: the same on any machine, because it decides the order of sums; each "
                f"process could use {num_cores} cores: start more processes, or set "
                "OMP_NUM_THREADS, which changes the bits"
            )
        return Choice("threads", str(DEFAULT_NUM_THREADS), reason)

    def _cores_per_process(self) -> int:
        """Returns how many cores each process of this machine could use."""
        if not hasattr(os, "sched_getaffinity"):
            return 1
        return len(os.sched_getaffinity(0)) // self._num_local_processes

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Warns if the script has set another number of threads, once for each number.

        Every rank warns, because the script may have set it on some of them only.
        """
        del optimizer, modules
        number = torch.get_num_threads()
        num_before = _pinned_threads
        if number == num_before or num_before is None:
            return

        pin_threads(number)  # this also remembers the number, so the next step does not warn again
        advice = f"set OMP_NUM_THREADS={number} in all runs that should have the same bits"
        if process_copy.is_copy():  # a copy of a process begins with one thread in any case
            advice = WAY_TO_SEVERAL_THREADS
        warn(
            f"torch.set_num_threads({number}) with virtual_ranks",
            found=f"the run began with {count_noun(num_before, 'thread')}; the number decides the "
            "order of sums, so the bits differ from here on",
            do=advice,
            on_this_rank=True,
        )

    def close(self, failed: bool) -> None:
        """Restores the settings that were in use before the run."""
        del failed
        global _pinned_threads
        _pinned_threads = None
        torch.set_num_threads(self._threads_before)
        torch.use_deterministic_algorithms(self._was_deterministic, warn_only=self._warned_only)
        deterministic.fill_uninitialized_memory = self._fill_before
        torch.backends.cudnn.benchmark = self._benchmark_before
        if self._cublas_before is None:  # the user had not set the variable, so this object did
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
    add_note_once(error, "determinism", nondeterministic_error(operation).translated_message)
