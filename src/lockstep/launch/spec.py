"""What to start, as values: a request becomes a plan; nothing is started or read here."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from lockstep.errors import SettingError
from lockstep.launch.machine import Machine

_RENDEZVOUS = {"standalone", "node_rank", "master_addr", "master_port"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Arguments of `lockstep.init` given on the command line; None: left to the script."""

    strategy: str | None = None
    precision: str | None = None
    shares: str | None = None
    micro_batch: int | str | None = None
    """Samples per device and micro-batch, or `auto`."""
    backend: str | None = None
    device: str | None = None
    timeout: float | None = None
    """Seconds to wait for all ranks to join."""
    seed: int | None = None
    ledger: str | None = None
    """Folder for the sample ledger."""


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

    script: str
    """Path of the script, or the module's name with `module`."""
    arguments: tuple[str, ...] = ()
    """The script's own arguments, passed on as they are."""
    nproc: str | None = None
    """Processes on this machine: a number, `auto`, `gpu`, `cpu`; None: torchrun's default."""
    module: bool = False
    settings: Settings = Settings()
    torchrun: tuple[str, ...] = ()
    """Other flags of torchrun and their values, as given."""
    warm: bool = True
    """Whether ranks are copies of a process that has imported torch."""
    hang: HangRules = HangRules()
    local_rank_argument: str | None = None
    """`local_rank` or `local-rank`: the script is given that argument; `none`: it is not; None: it
    is where its source asks for it."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be started on this machine."""

    nproc: int
    one_node: bool
    environment: Mapping[str, str]
    """Variables that every process gets in addition to the launcher's own."""
    notes: tuple[str, ...]
    """The choices made automatically, each with its reason."""
    flags: tuple[str, ...]
    """For torch's elastic launcher."""
    script: tuple[str, ...]
    """The script or module, and its own arguments."""
    own_processes: bool = False
    """The one process started here starts the ranks itself; it is not told that it is one."""
    local_rank_flag: str | None = None
    """The argument in which the script wants its local rank."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """What would follow `torchrun`."""
        return (*self.flags, *self.script)

    def describe(self) -> str:
        """The plan as text, for `--dry-run`."""
        where = "on this machine" if self.one_node else "on this machine, one of several"
        lines = [f"{_count(self.nproc, 'process', 'processes')} {where}"]
        lines += [f"  {note}" for note in self.notes]
        if self.environment:
            lines.append("variables for every process:")
            lines += [f"  {name}={value}" for name, value in sorted(self.environment.items())]
        command = self._plainly()
        lines += [f"the same with {command.partition(' ')[0]}:", f"  {command}"]
        return "\n".join(lines)

    def _plainly(self) -> str:
        name, *arguments = self.script
        if self.own_processes:
            module = ["-m"] if "--module" in self.flags else []
            return shlex.join(["python", *module, *self.script])
        if self.local_rank_flag:
            arguments.insert(0, f"{self.local_rank_flag}=${{local_rank}}")  # torchrun fills it in
        return shlex.join(["torchrun", *self.flags, name, *arguments])


def settings_environment(settings: Settings) -> dict[str, str]:
    """The variables that carry the given settings to `lockstep.init` in every process."""
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return {f"LOCKSTEP_{k.upper()}": str(v) for k, v in values.items() if v is not None}


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
    if asked == "auto":
        return gpus
    if asked == "gpu":
        if gpus == 0:
            raise SettingError(
                "--nproc gpu", "no GPU is visible", "give a number, or --nproc cpu (one a core)"
            )
        return gpus
    try:
        number = int(asked)
    except ValueError:
        number = 0
    if number < 1:
        raise SettingError(
            f"--nproc {asked}", "not a number of processes", "give 1 or more, auto, gpu or cpu"
        )
    return number


def threads_per_process(cores: int, nproc: int) -> int:
    """Threads each of `nproc` processes may run so that together they fill `cores`; at least 1."""
    return max(1, cores // nproc)


def split_arguments(
    argv: Sequence[str], takes_value: Mapping[str, bool]
) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """Cuts a command line into the flags before the script, and the script with its arguments.

    Args:
        argv: what follows `lockstep run`.
        takes_value: every flag that may stand before the script, and whether a value follows it.

    Returns:
        Each flag's name with its words as they stood (`["--nproc", "2"]` or `["--nproc=2"]`);
        the script and its arguments.

    Raises:
        SettingError: an unknown flag, with the nearest known one; a flag without its value.
    """
    flags: list[tuple[str, list[str]]] = []
    rest = list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        flag = rest.pop(0)
        if flag == "--":
            break
        name, joined = _known_name(flag, takes_value)
        if joined or not takes_value[name]:
            flags.append((name, [flag]))
        elif rest:
            flags.append((name, [flag, rest.pop(0)]))
        else:
            raise SettingError(flag, "no value follows it", f"write {flag} VALUE")
    return flags, rest


def names_given(torchrun: Sequence[str]) -> set[str]:
    """The names of the flags among torchrun's flags and their values, such as `rdzv_backend`.

    They are spelt as in the namespace of torchrun's parser, whichever way they were written. What
    `PET_` variables say is not among them.
    """
    flags = {text.partition("=")[0] for text in torchrun if text.startswith("--")}
    return {flag.removeprefix("--").replace("-", "_") for flag in flags}


def _known_name(flag: str, takes_value: Mapping[str, bool]) -> tuple[str, bool]:
    """The flag's name, and whether its value is joined to it (`--nnodes=2`, `-r3`)."""
    name, equals, _ = flag.partition("=")
    if flag in takes_value:
        return flag, False
    if equals and takes_value.get(name):
        return name, True
    if equals and name in takes_value:
        raise SettingError(flag, f"{name} takes no value", f"write {name} alone")
    if not flag.startswith("--") and takes_value.get(flag[:2]):
        return flag[:2], True
    near = difflib.get_close_matches(name, takes_value, n=1)
    raise SettingError(
        name,
        "neither Lockstep nor torchrun has this flag",
        (f"did you mean {near[0]}? Or " if near else "")
        + "put it after the script, if it is the script's own",
    )


def plan(
    spec: LaunchSpec, machine: Machine, environ: Mapping[str, str], nproc: int, *, one_node: bool
) -> Plan:
    """What `spec` means on `machine`.

    Args:
        spec: the request.
        machine: cores, GPUs and loopback of this machine.
        environ: the launcher's environment; what the user has set there is left alone.
        nproc: processes on this machine.
        one_node: whether the run is on this machine alone.
    """
    notes = []
    environment = settings_environment(spec.settings)
    if "OMP_NUM_THREADS" not in environ:
        threads = threads_per_process(machine.cores, nproc)
        environment["OMP_NUM_THREADS"] = str(threads)
        notes.append(
            f"{_count(threads, 'thread')} a process (OMP_NUM_THREADS: "
            f"{_count(machine.cores, 'core')} for {_count(nproc, 'process', 'processes')})"
        )
    if one_node and machine.loopback and "GLOO_SOCKET_IFNAME" not in environ:
        environment["GLOO_SOCKET_IFNAME"] = machine.loopback
        notes.append(f"Gloo on {machine.loopback} alone (GLOO_SOCKET_IFNAME: one machine)")
    return Plan(
        nproc=nproc,
        one_node=one_node,
        environment=environment,
        notes=tuple(notes),
        flags=(
            *(["--standalone"] if one_node and not _rendezvous_given(spec, environ) else []),
            *spec.torchrun,
            f"--nproc-per-node={nproc}",
            *(["--module"] if spec.module else []),
        ),
        script=(spec.script, *spec.arguments),
    )


def _rendezvous_given(spec: LaunchSpec, environ: Mapping[str, str]) -> bool:
    """Whether the user says how the nodes meet, by flag or by torchrun's `PET_` variables."""
    given = names_given(spec.torchrun)
    given |= {name.removeprefix("PET_").lower() for name in environ if name.startswith("PET_")}
    return any(name in _RENDEZVOUS or name.startswith("rdzv_") for name in given)


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
