"""Runs a function on the nodes of a Ray cluster: `lockstep.launch(..., ray=...)`.

The ranks are placed and watched as with `lockstep run --ray`. Each node's launcher is the module
`ray_launcher`, which writes what its ranks have returned, or the error, into a file.

The run takes place in a thread of its own, as the kernel of a notebook already has an event loop in
the main thread.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from lockstep.errors import EXIT_SIGNAL, HostError, LockstepError, RankFailedError, SettingError
from lockstep.language import translate
from lockstep.run.machines import ray_placement
from lockstep.run.machines.hosts import HostsSpec, forwarded_environment
from lockstep.run.machines.ray_call import (
    CallFacts,
    CallOutcome,
    pack_call,
    sources_to_send,
    values_of,
)
from lockstep.run.machines.ray_placement import RUNNING_CLUSTER
from lockstep.run.machines.ray_run import MAX_RESTARTS_OPTION, RayRun
from lockstep.run.start import job_control
from lockstep.user_code import user_line
from lockstep.wording import count_noun

LAUNCHER = "lockstep.run.start.ray_launcher"
OPTION = "launch(ray=...)"


@dataclass(frozen=True, kw_only=True)
class RayRequest:
    """What `lockstep.launch` was asked for; see there."""

    address: bool | str
    """The argument `ray`."""
    name: str
    """The name of the function."""
    script_name: str
    """The name of the function as a file name, for the folder of the run."""
    nproc: str
    timeout: float | None
    environment: Mapping[str, str]
    """The argument `env`."""
    max_restarts: int
    modules: Sequence[str]
    """Names of modules that the ranks will probably import."""


def launch_on_ray(fn: Callable[..., Any], args: Sequence[Any], request: RayRequest) -> list[Any]:
    """Runs `fn(*args)` on ranks of a Ray cluster, and returns what each has returned.

    If this process is not connected to the cluster yet, it is connected for this run only.

    Raises:
        LockstepError, KeyboardInterrupt, SystemExit: see `lockstep.launch`.
    """
    setting = f"launch(ray={request.address!r})"
    address = RUNNING_CLUSTER if request.address is True else request.address
    if not isinstance(address, str) or not address:
        raise SettingError(
            setting,
            "it is not the address of a Ray cluster",
            "give True for the running one, or an address: '10.0.0.1:6379'",
        )

    was_connected = ray_placement.connect(address, setting)
    placement_group = None
    try:
        size = ray_placement.num_ranks(request.nproc, OPTION)
        launch_text = f"launch({request.name}) on {count_noun(size, 'process')} of a Ray cluster"

        # Each node reads the call from Ray's object store.
        call = pack_call(fn, args, _facts(fn, launch_text, request))
        reference_to_call = ray_placement.put_in_object_store(call)

        # Ray reserves a bundle of resources for each rank, in one placement group.
        resources_of_rank = ray_placement.bundle()
        placement_group = ray_placement.reserve([resources_of_rank] * size, _say)

        # A launcher on each node starts the ranks there, and this process waits for their end.
        run = RayRun(_launcher_request(size, request), placement_group, _say, reference_to_call)
        exit_code = _wait_in_thread(run)
        _raise_if_interrupted(run)
        return returned_values(run.outcomes, exit_code, launch_text)
    finally:
        if placement_group is not None:
            ray_placement.release(placement_group)
        if not was_connected:
            ray_placement.disconnect()


def _raise_if_interrupted(run: RayRun) -> None:
    """If a signal ended the run, raises the exception that it would have caused in this process."""
    if run.interrupted_by == signal.SIGINT:
        raise KeyboardInterrupt
    if run.interrupted_by is not None:
        raise SystemExit(EXIT_SIGNAL + run.interrupted_by)


def _facts(fn: Callable[..., Any], launch_text: str, request: RayRequest) -> CallFacts:
    """Returns what the launchers of the nodes must know.

    Args:
        fn: the function that the ranks will call.
        launch_text: text that names the launch in errors: `launch(train) on 2 processes`.
        request: what `lockstep.launch` was asked for.
    """
    return CallFacts(
        name=request.script_name,
        launch_text=launch_text,
        timeout=request.timeout,
        modules=request.modules,
        argv=sys.argv,
        path=[os.path.abspath(entry) for entry in sys.path],
        sources=sources_to_send(fn),
    )


def _launcher_request(size: int, request: RayRequest) -> HostsSpec:
    """Returns what `RayRun` starts on each node: the launcher `LAUNCHER`, and its options.

    The hosts are not known yet, and `RayRun` fills them in. There is no script, as the launcher
    reads the function from Ray's object store.

    Args:
        size: number of all ranks.
        request: what `lockstep.launch` was asked for.
    """
    forwarded_variables = forwarded_environment(os.environ, names=())
    return HostsSpec(
        hosts=(),
        arguments=(),
        script=(),
        torchrun=[MAX_RESTARTS_OPTION, str(request.max_restarts)],
        launcher=(LAUNCHER,),
        nproc=str(size),  # of all nodes together; `RayRun` says how many each of them starts
        environment={**forwarded_variables, **request.environment},
        option=OPTION,
    )


def _wait_in_thread(run: RayRun) -> int:
    """Carries out the run in a thread, while this one receives the signals.

    Returns:
        The exit code of the run.
    """
    handlers: dict[int, Callable[[int], object]] = {
        signal.SIGINT: run.interrupt,
        signal.SIGTERM: run.interrupt,
    }
    with job_control.handled(handlers), ThreadPoolExecutor(max_workers=1) as executor:
        ending = executor.submit(run.run)
        try:
            return ending.result()
        except BaseException:
            # A signal handler of the user's may have raised. End the run; on leaving the `with`
            # block, the executor waits for its end.
            run.interrupt(signal.SIGINT)
            raise


def returned_values(
    outcomes: Sequence[CallOutcome | None], exit_code: int, launch_text: str
) -> list[Any]:
    """Returns the values of all ranks, from the outcomes of all nodes in the order of the ranks.

    Args:
        outcomes: the outcome of each node; None if it has left none.
        exit_code: the exit code of the run.
        launch_text: text that names the launch in errors.

    Raises:
        LockstepError: a rank, a launcher or a node has failed.
    """
    known = [outcome for outcome in outcomes if outcome is not None]
    errors = [outcome.error for outcome in known if outcome.error is not None]
    if errors:
        error = _error_that_says_most(errors)
        error.line = user_line()  # the line that has called `launch`, which a node cannot know
        raise error

    if exit_code != 0 or len(known) < len(outcomes):
        raise HostError(
            launch_text,
            f"a launcher or its node has failed, and no rank has (exit code {exit_code})",
            "see what is printed above this error, and Ray's logs in "
            "/tmp/ray/session_latest/logs on the nodes",
        )

    try:
        return values_of(known)
    except Exception as error:  # the classes of the values may raise anything
        raise RankFailedError(
            launch_text,
            f"what the ranks returned cannot be read here: {error}",
            "return plain values, tensors, or objects of importable classes",
            rank=0,
        ) from error


def _error_that_says_most(errors: Sequence[LockstepError]) -> LockstepError:
    """Returns the error of the node whose rank failed first, or else the first error.

    All launchers know which rank that is, but only that of its own node has the traceback.
    """
    for error in errors:
        if isinstance(error, RankFailedError) and error.remote_traceback:
            return error
    return errors[0]


def _say(line: str) -> None:
    """Shows an English line to the user, in the language of this process."""
    sys.stderr.write(f"lockstep: {translate(line)}\n")
