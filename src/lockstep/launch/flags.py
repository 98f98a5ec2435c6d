"""Torchrun's flags and its `PET_` variables: which there are, and what cannot be honoured.

They are read by torchrun's own parser. What torchrun answers with a traceback, or notices when the
run is under way, is refused here before anything is started.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Mapping, Sequence

from lockstep.errors import SettingError
from lockstep.launch.logs import choose_streams
from lockstep.launch.spec import names_given


def torchrun_flags() -> dict[str, bool]:
    """Every flag of torchrun, read from its own parser, and whether a value follows it."""
    from torch.distributed.run import get_args_parser

    return {
        name: action.nargs != 0
        for action in get_args_parser()._actions
        for name in action.option_strings
        if name not in ("-h", "--help")
    }


def is_asked(flag: str, given: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether a flag without a value is set, on the command line or by its `PET_` variable.

    Args:
        flag: as torchrun spells it, with dashes.
        given: torchrun's flags and their values.
        environ: the launcher's environment.
    """
    (name,) = names_given([flag])
    if name in names_given(given):
        return True
    value = environ.get(f"PET_{name.upper()}", "0")
    return value.strip().isdigit() and int(value) != 0  # another value is refused by `parse_flags`


def parse_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Torchrun's flags, read by its own parser.

    Args:
        arguments: the flags, the script and what follows it.

    Raises:
        SettingError: the parser refuses them.
    """
    from torch.distributed.run import get_args_parser

    try:
        parser = get_args_parser()
    except ValueError:  # it reads these variables by int()
        names = [name for name in os.environ if name.startswith("PET_")]
        raise SettingError(
            "torchrun's variables " + ", ".join(f"{n}={os.environ[n]}" for n in sorted(names)),
            "one that stands for a flag without a value is neither 0 nor 1",
            "set it to 1, or unset it",
        ) from None
    parser.exit_on_error = False
    try:
        return parser.parse_args(list(arguments))
    except argparse.ArgumentError as error:
        raise SettingError(
            f"{error.argument_name}", error.message, "torchrun --help says what it takes"
        ) from None


def check_flags(flags: argparse.Namespace, nproc: int) -> None:
    """Refuses what cannot be honoured.

    Args:
        flags: as `parse_flags` gives them.
        nproc: ranks on this machine.

    Raises:
        SettingError: a value with which nothing can be started, or which Lockstep does not honour.
    """
    for check in (_check_program, _check_counts, _check_rendezvous, _check_names, _check_folder):
        check(flags)
    choose_streams(nproc, flags.redirects, flags.tee, flags.local_ranks_filter)
    _check_devices(flags, nproc)


def max_nodes(asked: str) -> int:
    """The most machines that a value of `--nnodes` stands for.

    Raises:
        SettingError: it stands for no number of machines.
    """
    parts = asked.split(":")
    numbers = [int(part) if part.strip().isdigit() else 0 for part in parts]
    if len(parts) > 2 or not 0 < numbers[0] <= numbers[-1]:
        raise SettingError(
            f"--nnodes {asked}", "not a number of machines", "write a number, or MIN:MAX"
        )
    return numbers[-1]


def _check_program(flags: argparse.Namespace) -> None:
    if flags.module and flags.run_path:
        raise SettingError("-m with --run-path", "a module has no path", "leave one of them out")
    if flags.module and flags.no_python:
        raise SettingError("-m with --no-python", "a module needs Python", "leave one of them out")
    if os.environ.get("TORCHELASTIC_ENABLE_FILE_TIMER") == "1":
        raise SettingError(
            "TORCHELASTIC_ENABLE_FILE_TIMER=1",
            "Lockstep does not serve the timers of torch.distributed.elastic.timer",
            "unset it; --on-hang and --hang-after say what happens to a run that hangs",
        )
    if flags.logs_specs is not None:
        raise SettingError(
            f"--logs-specs {flags.logs_specs}",
            "the ranks' streams are read by Lockstep, which keeps a file for each",
            "leave the flag out; --log-dir, --redirects and --tee say where the streams go",
        )


def _check_counts(flags: argparse.Namespace) -> None:
    shutdown = getattr(flags, "shutdown_timeout", None)
    for flag, value, right, least in (
        ("--max-restarts", flags.max_restarts, flags.max_restarts >= 0, "0 or more"),
        ("--monitor-interval", flags.monitor_interval, flags.monitor_interval > 0, "above 0"),
        ("--shutdown-timeout", shutdown, shutdown is None or shutdown >= 0, "0 or more"),
    ):
        if not right:
            raise SettingError(f"{flag} {value}", "out of range", f"give a number {least}")


def _check_rendezvous(flags: argparse.Namespace) -> None:
    max_nodes(flags.nnodes)
    for part in flags.rdzv_conf.strip().split(",") if flags.rdzv_conf.strip() else ():
        key, _, value = part.partition("=")
        if not key.strip() or not value.strip():
            raise SettingError(
                f"--rdzv-conf {flags.rdzv_conf}",
                f"{part.strip() or 'an empty part'} has no value or no name",
                "write KEY=VALUE, with commas between several",
            )


def _check_names(flags: argparse.Namespace) -> None:
    from torch.distributed.elastic.events.handlers import get_logging_handler

    names = getattr(flags, "signals_to_handle", "")
    for name in filter(None, map(str.strip, names.split(","))):
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
            raise SettingError(
                f"--signals-to-handle {names}",
                f"{name} is no signal that can be passed on",
                "write names such as SIGTERM,SIGINT,SIGUSR1",
            )
    try:
        get_logging_handler(flags.event_log_handler)
    except KeyError:
        raise SettingError(
            f"--event-log-handler {flags.event_log_handler}",
            "no handler of this name is registered with torch",
            "give null, console, or one that your installation registers",
        ) from None


def _check_folder(flags: argparse.Namespace) -> None:
    folder = flags.log_dir
    if folder is not None and os.path.exists(folder) and not os.path.isdir(folder):
        raise SettingError(
            f"--log-dir {folder}",
            "it is no folder, and Lockstep keeps the ranks' logs and evidence in one",
            "name a folder, or leave the flag out: they then go to the temporary folder",
        )


def _check_devices(flags: argparse.Namespace, nproc: int) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not getattr(flags, "virtual_local_rank", False) or visible is None:
        return
    if len(visible.split(",")) < nproc:
        raise SettingError(
            f"--virtual-local-rank with {nproc} processes",
            f"CUDA_VISIBLE_DEVICES={visible} has no device for each of them",
            "start no more processes than devices, or make more devices visible",
        )
