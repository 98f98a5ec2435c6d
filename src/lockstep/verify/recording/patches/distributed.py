"""Patches of what ranks do together: collectives, DDP, and processes that the script starts.

The collectives and DDP inform the `Recorder`. A script that starts ranks of its own is refused,
since these would not be recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from multiprocessing.process import BaseProcess
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lockstep.batch.pytree import tensors
from lockstep.run.watch.script_processes import replace_start_processes
from lockstep.torch_compat import on_shadowed_iteration
from lockstep.user_code import is_user_file, user_line
from lockstep.verify.recording.determinism import Determinism
from lockstep.verify.recording.patches.wrapping import (
    UNKNOWN_LINE,
    lockstep_called_patched_function,
    wrap,
)
from lockstep.verify.recording.recorder import Recorder
from lockstep.verify.unsupported import (
    forbid_larger_groups,
    raise_own_ranks_error,
    run_without_larger_groups,
)
from lockstep.world import World

# Since torch 2.13 some collectives have a second name.
GATHERING_FUNCTIONS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_gather_object",
)
REDUCING_FUNCTIONS = (
    "all_reduce",
    "all_reduce_coalesced",
    "reduce",
    "broadcast",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
)
MOVING_FUNCTIONS = (
    "send",
    "recv",
    "isend",
    "irecv",
    "scatter",
    "gather",
    "all_to_all",
    "all_to_all_single",
)
WORLD_COLLECTIVES = ("sum", "mean", "max", "min", "broadcast", "gather")


# Collectives


def watch_collectives(recorder: Recorder) -> None:
    """Patches the collectives of torch and of `World`, to see what the ranks exchange."""
    for name in (*GATHERING_FUNCTIONS, *REDUCING_FUNCTIONS, *MOVING_FUNCTIONS):
        if hasattr(dist, name):
            _watch_torch_collective(recorder, name)
    for name in WORLD_COLLECTIVES:
        _watch_world_collective(recorder, name)
    on_shadowed_iteration(recorder.foreign_steps.record_shadowed_iteration)


def _watch_torch_collective(recorder: Recorder, name: str) -> None:
    """Patches a collective of `torch.distributed`, to see its input and an all-reduce's result."""

    def before_collective(*args: Any, **kwargs: Any) -> None:
        """Records the call and its input, unless Lockstep itself has made the call."""
        if not lockstep_called_patched_function():
            _record_torch_collective(recorder, name, args, kwargs)

    def after_collective(*args: Any, **kwargs: Any) -> None:
        """Records the result of an all-reduce, unless it is still running in the background.

        Unlike `before_collective`, this includes calls of Lockstep itself, whose optimizers may
        reduce gradients during their steps. `record_reduced` ignores any other tensor.
        """
        if name == "all_reduce" and not kwargs.get("async_op"):
            tensor = args[0] if args else kwargs.get("tensor")
            recorder.gradients.record_reduced(tensor)

    wrap(dist, name, before=before_collective, after=after_collective)


def _record_torch_collective(
    recorder: Recorder, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Records a call of a collective of `torch.distributed`, with its input.

    Args:
        recorder: recorder that is informed of the call.
        name: name of the collective, such as "all_reduce".
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
    """
    if name in GATHERING_FUNCTIONS:
        # all_gather(tensor_list, tensor) and all_gather_into_tensor(output_tensor, input_tensor)
        # fill their first argument.
        gathered = args[0] if args else kwargs.get("tensor_list", kwargs.get("output_tensor"))
        tensor = args[1] if len(args) > 1 else _input_by_name(kwargs)
        recorder.calls.record_collective(name, tensor, gathered)
    else:  # all_reduce(tensor)
        tensor = args[0] if args else _input_by_name(kwargs)
        recorder.calls.record_collective(name, tensor)


def _input_by_name(kwargs: dict[str, Any]) -> Any:
    """Returns the input of a collective that is passed by keyword; None if there is none."""
    return kwargs.get("tensor", kwargs.get("input_tensor"))


def _watch_world_collective(recorder: Recorder, name: str) -> None:
    """Patches a collective of `World`, which may exchange data without `torch.distributed`."""
    original = getattr(World, name)

    @wraps(original)
    def collective(world: World, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Replaces `World.sum`, for example: calls `original`, and tells `recorder` of it."""
        call_original = partial(original, world, value, *args, **kwargs)
        return _record_world_collective(
            recorder,
            world,
            name,
            value,
            call_original,
            loses_gradient=_loses_gradient(name, kwargs),
        )

    setattr(World, name, collective)


def _loses_gradient(name: str, kwargs: dict[str, Any]) -> bool:
    """True if no gradient flows through a collective of `World`, as the script may not expect.

    That is a gather, unless the script asks for gradients: `world.gather(value, gradient=True)`.
    """
    return name == "gather" and not kwargs.get("gradient")


def _record_world_collective(
    recorder: Recorder,
    world: World,
    name: str,
    value: Any,
    call_original: Callable[[], Any],
    *,
    loses_gradient: bool,
) -> Any:
    """Calls a collective of `World`, and records one call for each exchanged tensor.

    Args:
        recorder: recorder that is informed of the calls.
        world: world whose collective the script has called.
        name: name of the collective, such as "gather".
        value: nest of tensors that the script exchanges.
        call_original: calls the original collective with the arguments of the script.
        loses_gradient: whether no gradient flows from the result to `value`.

    Returns:
        The result of the collective.
    """
    calls = []
    for tensor in tensors(value):
        calls.append(recorder.calls.record_collective(f"world.{name}", tensor))

    result = call_original()

    # Marks on a tensor tell from which samples it was computed. With several ranks, the result
    # combines the samples of all ranks, so `end_collective` removes the marks of `value` from it.
    if world.size > 1:
        recorder.calls.end_collective(calls, result, loses_gradient=loses_gradient)

    return result


# DDP


def watch_ddp(recorder: Recorder, determinism: Determinism) -> None:
    """Patches DDP, to see which modules it wraps and whether it gets a communication hook."""

    def before_init(_: Any, module: Any, *_args: Any, **_kwargs: Any) -> None:
        # Switches off dropout, and converts the module if the run computes in float64. DDP keeps
        # references to the parameters, so this must be done before.
        determinism.prepare_module(module)

    def after_init(wrapper: DistributedDataParallel, *_args: Any, **_kwargs: Any) -> None:
        recorder.forwards.add_ddp(wrapper)

    def before_comm_hook(*_args: Any, **_kwargs: Any) -> None:
        """Called before `register_comm_hook`: tells `recorder` the line of the script that calls.

        Lockstep's own hook averages gradients as DDP does, so it explains no difference.
        """
        if not lockstep_called_patched_function():
            recorder.state.models.comm_hook_line = user_line() or UNKNOWN_LINE

    wrap(DistributedDataParallel, "__init__", before=before_init, after=after_init)
    wrap(DistributedDataParallel, "register_comm_hook", before=before_comm_hook)


# Processes of the script


def forbid_own_ranks(note_own_process: Callable[[str], None], nproc: int) -> None:
    """Patches the start of processes: it becomes an error if a script starts ranks of its own.

    They would not be recorded. Other processes of the script are allowed, such as helpers that
    prepare data.

    Args:
        note_own_process: called with the line of the script that starts a process.
        nproc: number of ranks that `lockstep verify` has started.
    """
    # `torch.multiprocessing.spawn` and `start_processes` always start ranks.
    replace_start_processes(raise_own_ranks_error)

    # A script that starts 4 processes itself may open a group of 5, of which this process is one.
    forbid_larger_groups(nproc)

    original_start = BaseProcess.start

    def start(process: BaseProcess) -> None:
        """Replaces `Process.start`. The new process may not open a larger group either."""
        caller = sys._getframe(1)
        if is_user_file(caller.f_code.co_filename):
            note_own_process(user_line() or "")
            _start_and_forbid_larger_groups(process, original_start, nproc)
        else:  # a library has called it, such as a DataLoader that starts its workers
            original_start(process)

    BaseProcess.start = start  # type: ignore


def _start_and_forbid_larger_groups(
    process: BaseProcess, original_start: Callable[[BaseProcess], None], nproc: int
) -> None:
    """Starts a process of the script, which gets an error if it turns out to be a rank.

    A rank of the script opens a process group together with other ranks. If the group has more than
    `nproc` ranks, the script has started some of them itself, and the error is raised.

    Args:
        process: process to start.
        original_start: Python's own `Process.start`.
        nproc: number of ranks that `lockstep verify` has started.
    """
    # The new process will call `process.run`. Replace this method, for this object only, by a
    # function that first forbids such process groups and then calls the original method.
    run = partial(run_without_larger_groups, nproc, process.run)
    process.run = run  # type: ignore[method-assign]

    original_start(process)

    # The new process has its own copy of `process`. Here, the replaced method is removed: it refers
    # to `process`, so it would keep the object alive. `lockstep.run.watch`, which patches `start`
    # too, may have removed it already.
    vars(process).pop("run", None)
