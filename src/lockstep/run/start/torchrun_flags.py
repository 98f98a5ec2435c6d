"""Parses torchrun's flags with torchrun's own parser, and checks them before anything is started.

The flags and their `PET_` variables mean the same as for torchrun. Values at which torchrun would
fail with a traceback, or only while the run is under way, raise a SettingError here. *Rendezvous*
is torch elastic's word for how the machines (*nodes*) of a run meet.
"""

from __future__ import annotations

import argparse
import os
import signal
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.errors import SettingError
from lockstep.file_paths import check_path_of_this_system
from lockstep.run.start.console_flags import choose_streams

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

_RENDEZVOUS_FLAGS = (
    "--standalone",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
)
_FLAGS_OF_ONE_NODE = (
    "--nnodes",
    "--node-rank",
    "--standalone",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--local-addr",
)
ON_OFF_FLAGS = ("--standalone", "--module", "--no-python", "--run-path", "--virtual-local-rank")
"""Flags that are on or off. Their variables are numbers: with PET_STANDALONE=0, --standalone is not
given."""
_DEFAULT_MASTER_PORT = 29500
"""torchrun's own default."""
_MAX_PORT = (1 << 16) - 1
_DEFAULTS_OF_NEWER_FLAGS: dict[str, Any] = {
    "event_log_handler": "null",
    "numa_binding": None,
    "shutdown_timeout": None,
    "signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    "virtual_local_rank": False,
}
"""Flags that older versions of torchrun do not have, with their defaults: torch 2.6 has none of
them, torch 2.9 has the first two."""
_SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_DEFAULT_SHUTDOWN_TIMEOUT_S = 10.0


def is_torchrun_variable(variable: str) -> bool:
    """Returns True for torchrun's own variables, such as PET_NNODES for the flag --nnodes."""
    return variable.startswith("PET_")


def variable_of_flag(flag: str) -> str:
    """Returns torchrun's variable for a flag: PET_NODE_RANK for --node-rank."""
    return "PET_" + flag.removeprefix("--").replace("-", "_").upper()


def flag_of_variable(variable: str) -> str:
    """Returns the flag for one of torchrun's variables: --node-rank for PET_NODE_RANK."""
    return "--" + variable.removeprefix("PET_").replace("_", "-").lower()


class _GivenFlag(NamedTuple):
    """A flag on a command line."""

    name: str
    """The name with hyphens, such as `--node-rank`, even if it was given with underscores."""
    value: str
    """The value; empty if the flag has none."""
    words: tuple[str, ...]
    """The words with which the flag and its value were given."""


@dataclass(frozen=True)
class TorchrunFlags:
    """The flags of torchrun that are given, on a command line and by variables.

    A flag is named with hyphens here. It is found however it was given: `--node-rank 1`,
    `--node-rank=1`, `--node_rank 1`, or PET_NODE_RANK=1, over which a command line takes
    precedence.
    """

    words: Sequence[str]
    """The words of the command line: flags and their values, without the script."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the launcher; empty where torchrun's variables do not count."""

    def get(self, name: str) -> str | None:
        """Returns the value of a flag, which is empty if it takes none; None if it is not given."""
        value = self._value_of_variable(name)
        for flag in self._flags_of_words():
            if flag.name == name:  # of several on the command line, the last one counts
                value = flag.value
        return value

    def _value_of_variable(self, name: str) -> str | None:
        """Returns the value that the variable of a flag gives it; None if it does not give it."""
        value = self.environ.get(variable_of_flag(name))
        if value is None or name not in ON_OFF_FLAGS:
            return value
        return None if _is_zero(value) else ""

    def is_given(self, *names: str) -> bool:
        """Returns True if one of the flags is given."""
        return any(self.get(name) is not None for name in names)

    @property
    def is_any_given(self) -> bool:
        """True if any flag is given."""
        flags_of_variables = [
            flag_of_variable(name) for name in self.environ if is_torchrun_variable(name)
        ]
        return bool(self.words) or self.is_given(*flags_of_variables)

    @property
    def say_how_nodes_meet(self) -> bool:
        """True if one of the flags says how the nodes meet."""
        return self.is_given(*_RENDEZVOUS_FLAGS)

    @property
    def describe_nodes(self) -> bool:
        """True if one of the flags says how many nodes there are, or how they meet."""
        return self.is_given("--nnodes") or self.say_how_nodes_meet

    def words_without(self, *names: str) -> list[str]:
        """Returns the words of the command line, without some of the flags and their values."""
        words: list[str] = []
        for flag in self._flags_of_words():
            if flag.name not in names:
                words += flag.words
        return words

    def words_with(self, name: str, value: str) -> list[str]:
        """Returns the words of the command line, with another value of a flag."""
        return [*self.words_without(name), name, value]

    def _flags_of_words(self) -> list[_GivenFlag]:
        """Splits the command line into flags: `--nnodes 2 --rdzv-id=7` has two.

        Each word that begins with two hyphens begins a flag, as the first word does. Another word
        is the value of the flag before it.
        """
        flags: list[_GivenFlag] = []
        for word in self.words:
            if word.startswith("--"):
                name, _, value = word.partition("=")
                flags.append(_GivenFlag(name=name.replace("_", "-"), value=value, words=(word,)))
            else:
                flag = flags.pop()
                flags.append(flag._replace(value=word, words=(*flag.words, word)))
        return flags


def _is_zero(value: str) -> bool:
    """Returns True if a text is the number 0, which switches a flag off in its variable."""
    try:
        return int(value) == 0
    except ValueError:  # torchrun's parser will refuse it
        return False


def parse_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses torchrun's flags with torchrun's own parser.

    Args:
        arguments: the flags, the script, and the script's own arguments.

    Raises:
        SettingError: the parser refuses them.
    """
    from torch.distributed.run import get_args_parser

    # torch's parser reads its defaults from PET_ variables. Those of flags without a value, such as
    # PET_STANDALONE, must be numbers: the parser calls int() on them, which raises ValueError.
    try:
        parser = get_args_parser()
    except ValueError:
        texts = [
            f"{name}={os.environ[name]}"
            for name in sorted(os.environ)
            if is_torchrun_variable(name)
        ]
        raise SettingError(
            "torchrun's variables " + ", ".join(texts),
            "a variable of an on/off flag is neither 0 nor 1",
            "set it to 1, or unset it",
        ) from None

    parser.exit_on_error = False
    if "PET_MASTER_PORT" not in os.environ:
        # The default of torch 2.11 is 29500, which two runs on one machine would both use.
        parser.set_defaults(master_port=None)

    try:
        flags = parser.parse_args(list(arguments))
    except argparse.ArgumentError as error:
        raise SettingError(
            f"{error.argument_name}", error.message, "torchrun --help says what it takes"
        ) from None

    for name, default in _DEFAULTS_OF_NEWER_FLAGS.items():
        if not hasattr(flags, name):
            setattr(flags, name, default)
    return flags


# How the machines meet


def check_flags_usable_with(option: str, torchrun: Sequence[str]) -> None:
    """Refuses torchrun's flags that say how nodes meet, such as --node-rank, and a wrong port.

    With --hosts, --ray and --slurm, Lockstep itself passes these flags to the launcher of each
    node.

    Args:
        option: `--hosts`, `--ray` or `--slurm`.
        torchrun: torchrun's flags and their values, each as a word of its own.

    Raises:
        SettingError: such a flag is given, or torchrun does not accept a flag's value.
    """
    flags = TorchrunFlags(torchrun)
    for flag in _FLAGS_OF_ONE_NODE:
        if flags.is_given(flag):
            raise SettingError(
                f"{flag} with {option}",
                f"{option} numbers the machines, and says how they meet",
                "leave it out; --master-addr and --master-port may say where the first one is "
                "reached",
            )

    if not torchrun:
        return

    # torchrun's parser requires a script, so any word is given as one.
    port = parse_flags([*torchrun, "script"]).master_port
    is_valid_port = port is None or 0 < port <= _MAX_PORT
    if not is_valid_port:
        raise SettingError(
            f"--master-port {port}", "there is no such port", f"give a number from 1 to {_MAX_PORT}"
        )


def node_numbers(nnodes: str) -> tuple[int, int]:
    """Parses a value of `--nnodes`: `"2:4"` -> `(2, 4)`, `"3"` -> `(3, 3)`.

    Returns:
        The smallest and the largest number of machines.

    Raises:
        SettingError: the value is neither a number nor a range.
    """
    parts = nnodes.split(":")
    # A part that is not a number becomes 0, which is refused below.
    numbers = [int(part) if part.strip().isdigit() else 0 for part in parts]
    min_nodes = numbers[0]
    max_nodes = numbers[-1]
    if len(parts) > 2 or min_nodes < 1 or min_nodes > max_nodes:
        raise SettingError(f"--nnodes {nnodes}", "not a number of machines", "write N or MIN:MAX")
    return min_nodes, max_nodes


def may_restart(flags: argparse.Namespace) -> bool:
    """Returns True if ranks are restarted when one fails, or when machines join or leave.

    Args:
        flags: the result of `parse_flags`.
    """
    min_nodes, max_nodes = node_numbers(flags.nnodes)
    return flags.max_restarts > 0 or min_nodes < max_nodes


def rendezvous_parameters(flags: argparse.Namespace) -> RendezvousParameters:
    """Returns the parameters of the rendezvous that torchrun's flags ask for.

    Raises:
        SettingError: the value of `--nnodes` or `--rdzv-conf` is not valid.
    """
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    min_nodes, max_nodes = node_numbers(flags.nnodes)
    options = _rendezvous_options(flags.rdzv_conf)
    if flags.rdzv_backend == "static":  # torchrun's default
        options["rank"] = flags.node_rank

    # A run on one machine whose port does not matter becomes a c10d run, whatever the backend. It
    # gets any free port (0), so that two runs on the machine do not meet.
    if flags.standalone or _any_port_will_do(flags, max_nodes):
        backend = "c10d"
        endpoint = "localhost:0"
        run_id = str(uuid.uuid4())
    else:
        backend = flags.rdzv_backend
        endpoint = flags.rdzv_endpoint
        if _uses_master_flags(flags):
            endpoint = f"{flags.master_addr}:{flags.master_port or _DEFAULT_MASTER_PORT}"
        run_id = flags.rdzv_id or "none"  # torchrun's default

    return RendezvousParameters(
        backend, endpoint, run_id, min_nodes, max_nodes, flags.local_addr, **options
    )


def _uses_master_flags(flags: argparse.Namespace) -> bool:
    """Returns True if --master-addr and --master-port, or their defaults, say where nodes meet."""
    return flags.rdzv_backend == "static" and not flags.rdzv_endpoint


def _any_port_will_do(flags: argparse.Namespace, max_nodes: int) -> bool:
    """Returns True for a run on a single machine for which the user has given no port."""
    return max_nodes == 1 and _uses_master_flags(flags) and flags.master_port is None


def _rendezvous_options(text: str) -> dict[str, Any]:
    """Parses a value of `--rdzv-conf`: `"timeout=3,join_timeout=4"`."""
    options: dict[str, Any] = {}
    if not text.strip():
        return options

    for part in text.strip().split(","):
        key, _, value = part.partition("=")
        if not key.strip() or not value.strip():
            raise SettingError(
                f"--rdzv-conf {text}",
                f"{part.strip() or 'an empty part'} has no value or no name",
                "write KEY=VALUE, with commas between several",
            )
        options[key.strip()] = value.strip()
    return options


# What cannot be honoured


def check_flags(flags: argparse.Namespace, nproc: int) -> None:
    """Refuses values with which nothing can be started, or which Lockstep does not support.

    Args:
        flags: the result of `parse_flags`.
        nproc: number of ranks on this machine.

    Raises:
        SettingError: there is such a value.
    """
    _check_program(flags)
    _check_numbers(flags)
    _check_names(flags)
    _check_folder(flags)

    # Parse the flags of the rendezvous and of the output, only to raise an error for a wrong value.
    rendezvous_parameters(flags)
    choose_streams(nproc, flags.redirects, flags.tee, flags.local_ranks_filter)

    _check_devices(flags, nproc)


def _check_program(flags: argparse.Namespace) -> None:
    """Checks flags on the program to start, and features of torchrun that are not supported."""
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


def _check_numbers(flags: argparse.Namespace) -> None:
    """Checks the ranges of numbers, which torchrun's parser does not do."""
    out_of_range = "out of range"
    if flags.max_restarts < 0:
        raise SettingError(
            f"--max-restarts {flags.max_restarts}", out_of_range, "give a number 0 or more"
        )

    if not flags.monitor_interval > 0:  # also refuses nan
        raise SettingError(
            f"--monitor-interval {flags.monitor_interval}", out_of_range, "give a number above 0"
        )

    timeout = flags.shutdown_timeout
    if timeout is not None and not timeout >= 0:
        raise SettingError(f"--shutdown-timeout {timeout}", out_of_range, "give a number 0 or more")


def shutdown_timeout(flag: float | str | None, environ: Mapping[str, str]) -> float:
    """Returns how long a rank that was asked to end may take before it is killed, in seconds.

    Args:
        flag: torchrun's --shutdown-timeout, which exists since torch 2.12; None if not given.
        environ: environment variables; torchrun's variable is read if the flag is not given.

    Raises:
        SettingError: the value is not a number.
    """
    if flag is None:
        name = _SHUTDOWN_TIMEOUT
        value = environ.get(_SHUTDOWN_TIMEOUT, _DEFAULT_SHUTDOWN_TIMEOUT_S)
    else:
        name = "--shutdown-timeout"
        value = flag

    try:
        return float(value)
    except ValueError:
        raise SettingError(f"{name}={value}", "it is not a number", "give seconds") from None


def _check_names(flags: argparse.Namespace) -> None:
    """Checks the names of signals and of the event handler."""
    from torch.distributed.elastic.events.handlers import get_logging_handler

    for text in flags.signals_to_handle.split(","):
        name = text.strip()
        if not name:
            continue

        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
            raise SettingError(
                f"--signals-to-handle {flags.signals_to_handle}",
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
    """Checks that --log-dir is neither a file nor a path of another system, such as Windows."""
    folder = flags.log_dir
    if folder is None:
        return

    check_path_of_this_system(f"--log-dir {folder}", folder)
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise SettingError(
            f"--log-dir {folder}",
            "it is no folder, and Lockstep keeps the ranks' logs and evidence in one",
            "name a folder, or leave the flag out: they then go to the temporary folder",
        )


def _check_devices(flags: argparse.Namespace, nproc: int) -> None:
    """Checks that there is a GPU for each process if --virtual-local-rank is given.

    With this flag, each rank sees only its own GPU. The GPUs are those that CUDA_VISIBLE_DEVICES
    lists. If it is not set, nothing is checked.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not flags.virtual_local_rank or visible is None:
        return

    num_visible = len(visible.split(","))
    if num_visible < nproc:
        raise SettingError(
            f"--virtual-local-rank with {nproc} processes",
            f"CUDA_VISIBLE_DEVICES={visible} has no device for each of them",
            "start no more processes than devices, or make more devices visible",
        )
