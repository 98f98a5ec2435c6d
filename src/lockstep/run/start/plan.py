"""What to start, as values: a request becomes a plan; nothing is started or read here.

Torchrun's flags and its `PET_` variables are read by torchrun's own parser. What torchrun answers
with a traceback, or notices when the run is under way, is refused here before anything is started.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lockstep.errors import SettingError
from lockstep.run.start.machine import Machine
from lockstep.run.start.output import choose_streams
from lockstep.run.start.worker import MACRO, Command, Script
from lockstep.wording import count_noun

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

_RENDEZVOUS = ("--standalone", "--node-rank", "--master-addr", "--master-port", "--rdzv-")
"""How the flags begin that say how nodes meet."""
_OF_ONE_NODE = (
    "--nnodes",
    "--node-rank",
    "--standalone",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--local-addr",
)
_MASTER_PORT = 29500
"""Torchrun's, where --master-port does not say."""
_SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_NOTHING = Command((), {})


@dataclass(frozen=True)
class HangRules:
    """When a run counts as hanging, and what happens then."""

    on_hang: str = "stop"
    """`stop`: a run that cannot go on is ended; `report`: it is told and left alone."""
    after: float = 5.0
    """Seconds without a step before the ranks are looked at closely."""


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """What `lockstep run` was asked to start."""

    script: Script
    nproc: str | None = None
    """Processes on this machine: a number, `auto`, `gpu`, `cpu`; None: torchrun's default."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Arguments of `lockstep.init`, by name; the others are left to the script."""
    torchrun: tuple[str, ...] = ()
    """Other flags of torchrun and their values, as given."""
    warm: bool = True
    """Whether ranks are copies of a process that has imported torch."""
    hang: HangRules = HangRules()
    local_rank_argument: str | None = None
    """`local_rank` or `local-rank`: the script is given that argument; `none`: it is not; None: it
    is where its source asks for it."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What will be started on this machine, and how it is watched."""

    nproc: int
    one_node: bool
    environment: Mapping[str, str]
    """Variables that every process gets in addition to the launcher's own."""
    notes: tuple[str, ...]
    """The choices made automatically, each with its reason."""
    flags: tuple[str, ...]
    """For torch's elastic launcher."""
    script: Script
    own_processes: bool = False
    """The one process started here starts the ranks itself; it is not told that it is one."""
    command: Command = _NOTHING
    """What a rank executes; empty: it is a copy of a process that knows its work."""
    hang: HangRules = HangRules()
    timeout: float | None = None
    """Seconds from the start of the ranks after which they are ended; None: no limit."""
    keyboard: bool = True
    """A rank that is alone gets the terminal's keys while it runs."""
    launcher: str = "lockstep run"
    """What the ranks are told of who gave them their ranks."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """What would follow `torchrun`."""
        return (*self.flags, self.script.path, *self.script.arguments)

    def describe(self) -> str:
        """The plan as text, for `--dry-run`."""
        where = "on this machine" if self.one_node else "on this machine, one of several"
        lines = [f"{count_noun(self.nproc, 'process')} {where}"]
        lines += [f"  {note}" for note in self.notes]
        if self.environment:
            lines.append("variables for every process:")
            lines += [f"  {name}={value}" for name, value in sorted(self.environment.items())]
        command = self._plainly()
        lines += [f"the same with {command.partition(' ')[0]}:", f"  {command}"]
        return "\n".join(lines)

    def _plainly(self) -> str:
        script, flag = self.script, self.script.local_rank_flag
        if self.own_processes:
            module = ["-m"] if script.module else []
            return shlex.join(["python", *module, script.path, *script.arguments])
        given = [f"{flag}={MACRO}"] if flag else []  # torchrun fills it in
        return shlex.join(["torchrun", *self.flags, script.path, *given, *script.arguments])


def choose_nproc(asked: int | str, cores: int, gpus: int) -> int:
    """Processes to start on one machine.

    Args:
        asked: a number, `gpu` (one a GPU), `cpu` (one a core) or `auto` (GPUs if any, else cores).
        cores: cores this process may use.
        gpus: visible accelerators.

    Raises:
        SettingError: not one of these, below 1, or `gpu` where there is none.
    """
    if asked == "cpu" or (asked == "auto" and gpus == 0):
        return cores
    if asked == "auto" or (asked == "gpu" and gpus > 0):
        return gpus
    found, do = "not a number of processes", "give 1 or more, auto, gpu or cpu"
    if asked == "gpu":
        found, do = "no GPU is visible", "give a number, or --nproc cpu (one a core)"
    try:
        number = int(asked)
    except ValueError:
        from torch.distributed.run import determine_local_world_size

        number = 0
        with suppress(ValueError):  # the names of other devices that torchrun knows, such as `xpu`
            number = int(determine_local_world_size(str(asked)))
    if number < 1:
        raise SettingError(f"--nproc {asked}", found, do)
    return number


def threads_per_process(cores: int, nproc: int) -> int:
    """Threads each of `nproc` processes may run so that together they fill `cores`; at least 1."""
    return max(1, cores // nproc)


def plan(
    spec: LaunchSpec, machine: Machine, environ: Mapping[str, str], nproc: int, *, one_node: bool
) -> LaunchPlan:
    """What `spec` means on `machine`.

    Args:
        spec: the request.
        machine: cores, GPUs and loopback of this machine.
        environ: the launcher's environment; what the user has set there is left alone.
        nproc: processes on this machine.
        one_node: whether the run is on this machine alone.
    """
    notes = []
    environment = {f"LOCKSTEP_{name.upper()}": str(v) for name, v in spec.settings.items()}
    if "OMP_NUM_THREADS" not in environ:
        threads = threads_per_process(machine.cores, nproc)
        environment["OMP_NUM_THREADS"] = str(threads)
        notes.append(
            f"{count_noun(threads, 'thread')} per process (OMP_NUM_THREADS: "
            f"{count_noun(machine.cores, 'core')} for {count_noun(nproc, 'process')})"
        )
    if one_node and machine.loopback and "GLOO_SOCKET_IFNAME" not in environ:
        environment["GLOO_SOCKET_IFNAME"] = machine.loopback
        notes.append(f"Gloo on {machine.loopback} alone (GLOO_SOCKET_IFNAME: one machine)")
    return LaunchPlan(
        nproc=nproc,
        one_node=one_node,
        environment=environment,
        notes=tuple(notes),
        flags=(
            *(
                ["--standalone"]
                if one_node and not _rendezvous_given(spec.torchrun, environ)
                else []
            ),
            *spec.torchrun,
            f"--nproc-per-node={nproc}",
            *(["--module"] if spec.script.module else []),
        ),
        script=spec.script,
        hang=spec.hang,
    )


def _rendezvous_given(torchrun: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether the user says how the nodes meet, by flag or by torchrun's `PET_` variables."""
    named = [f"--{name[4:].lower()}" for name in environ if name.startswith("PET_")]
    given = (word.replace("_", "-") for word in (*torchrun, *named))
    return any(word.startswith(_RENDEZVOUS) for word in given)


def meeting_given(torchrun: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether the user says how many nodes there are, or how they meet."""
    return "--nnodes" in torchrun or "PET_NNODES" in environ or _rendezvous_given(torchrun, environ)


def check_flags_elsewhere(torchrun: Sequence[str], option: str) -> None:
    """Refuses torchrun's flags that say which node this is, where `option` says that.

    Raises:
        SettingError: one of them is given, or a value is none that torchrun takes.
    """
    given = next((flag for flag in torchrun if flag.replace("_", "-") in _OF_ONE_NODE), None)
    if given:
        raise SettingError(
            f"{given} with {option}",
            f"{option} numbers the machines, and says how they meet",
            "leave it out; --master-addr and --master-port may say where the first one is reached",
        )
    port = parse_flags([*torchrun, "script"]).master_port if torchrun else None
    if port is not None and not 0 < port < 1 << 16:
        do = "give a number from 1 to 65535"
        raise SettingError(f"--master-port {port}", "there is no such port", do)


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
    if "PET_MASTER_PORT" not in os.environ:
        parser.set_defaults(master_port=None)  # torch 2.11's is 29500, where two runs would meet
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
    for check in (_check_program, _check_counts, _check_names, _check_folder):
        check(flags)
    rendezvous_parameters(flags)
    choose_streams(nproc, flags.redirects, flags.tee, flags.local_ranks_filter)
    _check_devices(flags, nproc)


def node_numbers(asked: str) -> tuple[int, int]:
    """The fewest and the most machines that a value of `--nnodes` stands for.

    Raises:
        SettingError: it stands for no number of machines.
    """
    parts = asked.split(":")
    numbers = [int(part) if part.strip().isdigit() else 0 for part in parts]
    if len(parts) > 2 or not 0 < numbers[0] <= numbers[-1]:
        raise SettingError(f"--nnodes {asked}", "not a number of machines", "write N or MIN:MAX")
    return numbers[0], numbers[-1]


def rendezvous_parameters(flags: argparse.Namespace) -> RendezvousParameters:
    """What torchrun makes of its flags.

    Raises:
        SettingError: a value of `--nnodes` or `--rdzv-conf` that stands for nothing.
    """
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    least, most = node_numbers(flags.nnodes)
    backend, endpoint, run_id = flags.rdzv_backend, flags.rdzv_endpoint, flags.rdzv_id
    options = _rendezvous_options(flags.rdzv_conf)
    if backend == "static":
        options["rank"] = flags.node_rank
    unset = backend == "static" and not endpoint
    if flags.standalone or (unset and flags.master_port is None and most == 1):
        backend, endpoint, run_id = "c10d", "localhost:0", str(uuid.uuid4())
    elif unset:
        endpoint = f"{flags.master_addr}:{flags.master_port or _MASTER_PORT}"
    return RendezvousParameters(
        backend, endpoint, run_id or "none", least, most, flags.local_addr, **options
    )


def _rendezvous_options(text: str) -> dict[str, Any]:
    options = {}
    for part in text.strip().split(",") if text.strip() else ():
        key, _, value = map(str.strip, part.partition("="))
        if not key or not value:
            raise SettingError(
                f"--rdzv-conf {text}",
                f"{part.strip() or 'an empty part'} has no value or no name",
                "write KEY=VALUE, with commas between several",
            )
        options[key] = value
    return options


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


def shutdown_timeout(flag: float | str | None, environ: Mapping[str, str]) -> float:
    """Seconds between asking a rank to end and killing it.

    Args:
        flag: torchrun's --shutdown-timeout (since torch 2.12); None: it is not given.
        environ: has torchrun's variable where the flag is not given.

    Raises:
        SettingError: the value of one of them is no number.
    """
    given = environ.get(_SHUTDOWN_TIMEOUT, 10.0) if flag is None else flag
    try:
        return float(given)
    except ValueError:
        name = _SHUTDOWN_TIMEOUT if flag is None else "--shutdown-timeout"
        raise SettingError(f"{name}={given}", "it is not a number", "give seconds") from None


def _check_names(flags: argparse.Namespace) -> None:
    from torch.distributed.elastic.events.handlers import get_logging_handler

    names = flags.signals_to_handle
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
    if flags.virtual_local_rank and visible is not None and len(visible.split(",")) < nproc:
        raise SettingError(
            f"--virtual-local-rank with {nproc} processes",
            f"CUDA_VISIBLE_DEVICES={visible} has no device for each of them",
            "start no more processes than devices, or make more devices visible",
        )


@contextmanager
def variables(added: Mapping[str, str]) -> Iterator[None]:
    """Sets variables for what is imported and started within; then all are as before."""
    before = dict(os.environ)
    os.environ.update(added)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
