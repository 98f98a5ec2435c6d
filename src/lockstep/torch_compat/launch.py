"""The processes that torch starts: torch elastic's agent, `spawn`, and binding to processors."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lockstep.errors import SettingError

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent


def skip_exit_barrier(agent: SimpleElasticAgent) -> None:
    """Lets torch elastic's agent return without waiting for the agents of other machines.

    Once its workers have succeeded, the agent waits up to 300 s for the other agents
    (`SimpleElasticAgent._exit_barrier`), in C++, where signals are not handled. With a shorter
    `exit_barrier_timeout`, which is public, it would log an error.
    """
    agent._exit_barrier = lambda: None  # type: ignore[method-assign]


def bound_to_processors(command: tuple[str, ...], gpu: int, mode: str) -> tuple[str, ...]:
    """Returns a command that runs on the processors near a GPU, as torchrun's --numa-binding does.

    Args:
        command: the command line of a rank, as words.
        gpu: index of the GPU, which is the local rank of this rank.
        mode: a value of the flag, see `torch.numa.binding.AffinityMode`.

    Raises:
        SettingError: there is no such GPU or no numactl, or the kernel does not say which
            processors are near, or torch is older than 2.11.
    """
    try:
        from torch.numa import binding

        wrap: Any = binding._maybe_wrap_command_args_with_numa_binding
    except (ImportError, AttributeError):
        import torch

        raise SettingError(
            f"--numa-binding {mode}",
            f"torch {torch.__version__} cannot bind a command to processors",
            "leave the flag out, or install a newer torch",
        ) from None

    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
    try:
        with _silenced(logging.getLogger(binding.__name__)):  # it would print the traceback
            if "device_index" in inspect.signature(wrap).parameters:  # since torch 2.14
                return tuple(wrap(command, numa_options=options, device_index=gpu))
            return tuple(wrap(command, numa_options=options, gpu_index=gpu))
    except Exception as error:  # of CUDA, of the file system, of torch's own checks
        raise SettingError(
            f"--numa-binding {mode}",
            f"local rank {gpu} cannot be bound: {error}",
            "leave the flag out; it needs one GPU a process, and the command numactl",
        ) from None


@contextmanager
def _silenced(logger: logging.Logger) -> Iterator[None]:
    """Disables a logger inside this context."""
    was_disabled = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def number_among_spawned() -> int | None:
    """Returns the number that `torch.multiprocessing.spawn` has given to this process.

    `spawn(fn)` calls `_wrap(fn, i, args, ...)` in each process, which calls `fn(i, *args)`. The
    stack of this thread is searched for the frame of `_wrap`, whose variable `i` is the number.

    Returns:
        None in a process that `spawn` has not started.
    """
    # The module of this name; the attribute `torch.multiprocessing.spawn` is the function.
    file = sys.modules["torch.multiprocessing.spawn"].__file__
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "_wrap" and frame.f_code.co_filename == file:
            number: int | None = frame.f_locals.get("i")
            return number
        frame = frame.f_back
    return None


def is_in_init_process_group() -> bool:
    """Returns True if torch's `init_process_group` is running in this thread."""
    file = sys.modules["torch.distributed.distributed_c10d"].__file__
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "init_process_group" and frame.f_code.co_filename == file:
            return True
        frame = frame.f_back
    return False
