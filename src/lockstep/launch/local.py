"""Processes of one machine, started and watched by torch elastic (torchrun's own engine)."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep.errors import SettingError
from lockstep.launch import spec as pure
from lockstep.launch.machine import read_machine
from lockstep.launch.signals import Terminated, sigterm_raises
from lockstep.launch.spec import LaunchSpec, Plan

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import ProcessFailure
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

_ASKED_WORDS = {"auto", "gpu", "cpu"}


def torchrun_flags() -> dict[str, bool]:
    """Every flag of torchrun, read from its own parser, and whether a value follows it."""
    from torch.distributed.run import get_args_parser

    return {
        name: action.nargs != 0
        for action in get_args_parser()._actions
        for name in action.option_strings
        if name not in ("-h", "--help")
    }


def plan(spec: LaunchSpec, environ: Mapping[str, str] = os.environ) -> Plan:
    """What `run` would start on this machine.

    Raises:
        SettingError: a flag's value that torchrun refuses, or a number of processes that is none.
    """
    return _prepare(spec, environ)[0]


def run(spec: LaunchSpec, say: Callable[[str], None] | None = None) -> int:
    """Starts the processes, waits for them and ends them all when one fails.

    Args:
        spec: what to start.
        say: called with each line that the user should read (default: standard error).

    Returns:
        The exit code: 0; 130 or 143 after SIGINT or SIGTERM; else that of the first process that
        failed (128 + number where a signal ended it).

    Raises:
        SettingError: as `plan`.
    """
    say = say or _to_stderr
    try:
        with sigterm_raises():
            prepared, namespace = _prepare(spec, os.environ)
            if prepared.notes:
                say(f"{prepared.nproc} x {spec.script}: " + "; ".join(prepared.notes))
            # torchrun makes a folder for logs and error files and leaves it behind.
            with (
                tempfile.TemporaryDirectory(prefix="lockstep-") as folder,
                _variables(prepared.environment),
            ):
                namespace.log_dir = namespace.log_dir or folder
                return _run_elastic(namespace, say)
    except KeyboardInterrupt:
        return _ended_by(signal.SIGINT, say)
    except Terminated:
        return _ended_by(signal.SIGTERM, say)


def _prepare(spec: LaunchSpec, environ: Mapping[str, str]) -> tuple[Plan, argparse.Namespace]:
    given = [f"--nproc-per-node={spec.nproc}"] if spec.nproc is not None else []
    asked = _parse([*spec.torchrun, *given, spec.script])
    machine = read_machine()
    if asked.nproc_per_node in _ASKED_WORDS or asked.nproc_per_node.lstrip("-").isdigit():
        nproc = pure.choose_nproc(asked.nproc_per_node, machine.cores, machine.gpus)
    else:
        nproc = _nproc_by_torchrun(asked.nproc_per_node)
    made = pure.plan(spec, machine, environ, nproc, one_node=_max_nodes(asked.nnodes) == 1)
    namespace = _parse(list(made.arguments))
    # argparse swallows a `--` that belongs to the script.
    namespace.training_script_args = list(spec.arguments)
    return made, namespace


def _max_nodes(asked: str) -> int:
    from torch.distributed.run import parse_min_max_nnodes

    try:
        return int(parse_min_max_nnodes(asked)[1])
    except (ValueError, RuntimeError):
        raise SettingError(
            f"--nnodes {asked}", "not a number of machines", "write a number, or MIN:MAX"
        ) from None


def _nproc_by_torchrun(asked: str) -> int:
    """For the names of other devices that torchrun knows, such as `xpu`."""
    from torch.distributed.run import determine_local_world_size

    try:
        return int(determine_local_world_size(asked))
    except ValueError as error:
        raise SettingError(
            f"--nproc {asked}", str(error), "give 1 or more, auto, gpu or cpu"
        ) from None


def _parse(arguments: list[str]) -> argparse.Namespace:
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.exit_on_error = False
    try:
        return parser.parse_args(arguments)
    except argparse.ArgumentError as error:
        raise SettingError(
            f"{error.argument_name}", error.message, "torchrun --help says what it takes"
        ) from None


def _run_elastic(namespace: argparse.Namespace, say: Callable[[str], None]) -> int:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import run as run_torchrun

    try:
        with _handlers_restored():
            run_torchrun(namespace)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        return _report(error, say)
    except SignalException as error:
        return _ended_by(error.sigval, say)
    return 0


def _report(error: ChildFailedError, say: Callable[[str], None]) -> int:
    """Closes with the failure that came first; torch elastic's times are whole seconds.

    What torch elastic itself has ended in the same second died by SIGTERM, so any other way to die
    goes before; several such within one second cannot be put in order.
    """
    rank, failure = error.get_first_failure()
    rivals = {
        r: f
        for r, f in sorted(error.failures.items())
        if f.timestamp == failure.timestamp and f.exitcode != -signal.SIGTERM
    }
    if len(rivals) > 1:
        deaths = ", ".join(f"rank {r} ({_death(f)})" for r, f in rivals.items())
        say(f"failed first, within one second: {deaths}")
    else:
        rank, failure = next(iter(rivals.items()), (rank, failure))
        say(f"rank {rank} failed first ({_death(failure)})")
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


def _death(failure: ProcessFailure) -> str:
    how = f"exit code {failure.exitcode}" if failure.exitcode > 0 else failure.signal_name()
    recorded = failure.error_file_data.get("message")
    if isinstance(recorded, dict) and recorded.get("message"):
        how += f": {recorded['message']}"
    return how


def _ended_by(number: int, say: Callable[[str], None]) -> int:
    say(f"ended by {signal.Signals(number).name}, with every process of the run")
    return 128 + number


@contextmanager
def _handlers_restored() -> Iterator[None]:
    """Puts back the signal handlers that torch elastic replaces."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not set from Python
                signal.signal(number, handler)


@contextmanager
def _variables(added: Mapping[str, str]) -> Iterator[None]:
    """Sets variables for the processes started within, which inherit them."""
    before = dict(os.environ)
    os.environ.update(added)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"lockstep: {line}\n")
    sys.stderr.flush()
