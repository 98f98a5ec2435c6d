"""Decides how to start a run on this machine: a request (`LaunchSpec`) becomes a `LaunchPlan`.

Nothing is started here, and nothing is read from the system: the machine and the environment are
passed as arguments. Every automatic choice (threads per process, network interface) gets a *note*
with its reason, which the launcher prints. `torchrun_flags` describes the flags that Lockstep
shares with torchrun.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from lockstep.errors import SettingError
from lockstep.language import translate
from lockstep.machine.network import means_loopback
from lockstep.machine.topology import THREADS_VARIABLE
from lockstep.run.start.machine import Machine
from lockstep.run.start.torchrun_flags import TorchrunFlags
from lockstep.run.start.worker import LOCAL_RANK_MACRO, Command, Script
from lockstep.wording import count_noun

URL_OF_MEETING = re.compile(r"tcp://(?P<host>\[[^\]]+\]|[^\s:/\[\]]+):\d+")

_NO_COMMAND = Command((), {})


@dataclass(frozen=True)
class HangRules:
    """After how long a run counts as hanging, and what happens then."""

    on_hang: str = "stop"
    """`stop`: a run that cannot go on is ended; `report`: it is reported and left alone."""
    after: float = 5.0
    """The seconds without a step after which the ranks are examined closely."""


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """What `lockstep run` was asked to start."""

    script: Script
    nproc: str | None = None
    """Processes on this machine: a number, `auto`, `gpu` or `cpu`; None for torchrun's default."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Arguments of `lockstep.init` that were given, by name."""
    torchrun: tuple[str, ...] = ()
    """Other flags of torchrun and their values, as given."""
    warm: bool = True
    """True if ranks may be copies of a process that has imported torch."""
    hang: HangRules = HangRules()
    keep_in_memory: bool | None = None
    """Whether each step is kept in memory; None to keep steps as often as that costs little, if the
    ranks may be restarted."""
    local_rank_argument: str | None = None
    """The argument by which the script is given its local rank: `local_rank` or `local-rank`, or
    `none` if it takes none; None for the one that its source defines."""
    from_file: str = ""
    """The options that come from a launch file, such as "lockstep.toml: nproc, precision"."""
    quiet: bool = False
    """True if only the script's output and failures are printed."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What will be started on this machine, and how it is watched."""

    nproc: int
    """Processes on this machine."""
    gpus: int
    """Visible accelerators of this machine."""
    one_node: bool
    """True if the run is on this machine only."""
    environment: Mapping[str, str]
    """Variables that every process gets in addition to the launcher's own."""
    notes: tuple[str, ...]
    """The choices made automatically, each with its reason."""
    flags: tuple[str, ...]
    """The flags for torch's elastic launcher."""
    script: Script
    quiet: bool = False
    """True if only the script's output and failures are printed (--quiet)."""
    chooses_threads: bool = False
    """True if `environment` has an OMP_NUM_THREADS because the user has set none."""
    script_spawns_ranks: bool = False
    """True if the script spawns the ranks itself. The one process that is started is then not told
    that it is a rank."""
    command: Command = _NO_COMMAND
    """The command that a rank executes; empty if ranks are copies of a process that knows their
    work."""
    hang: HangRules = HangRules()
    keep_in_memory: bool | None = None
    """See `LaunchSpec`."""
    timeout: float | None = None
    """The seconds after which the ranks are ended; None for no limit."""
    keyboard: bool = True
    """True if the only rank of a run gets the terminal's keyboard."""
    launcher: str = "lockstep run"
    """The name of the launcher, as passed to the ranks."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments with which torchrun would start the same run."""
        return (*self.flags, self.script.path, *self.script.arguments)

    def describe(self) -> str:
        """Describes the plan for `--dry-run`, in the language of this process."""
        first_line = f"{count_noun(self.nproc, 'process')} on this machine"
        if not self.one_node:
            first_line = f"{count_noun(self.nproc, 'process')} on this machine, one of several"
        lines = [translate(first_line)]
        for note in self.notes:
            lines.append(f"  {translate(note)}")

        if self.environment:
            lines.append(translate("variables for every process:"))
            for name, value in sorted(self.environment.items()):
                lines.append(f"  {name}={value}")

        # The command with which the user could start the same run without Lockstep.
        command = self._command_without_lockstep()
        program = command.partition(" ")[0]  # "torchrun" or "python"
        lines.append(translate(f"the same with {program}:"))
        lines.append(f"  {command}")
        return "\n".join(lines)

    def _command_without_lockstep(self) -> str:
        """Returns a command that starts the same run with torchrun, or with plain Python."""
        script = self.script
        if self.script_spawns_ranks:
            module = ["-m"] if script.module else []
            return shlex.join(["python", *module, script.path, *script.arguments])

        local_rank = []
        if script.local_rank_flag:
            # "--local_rank=${local_rank}", in which torchrun puts the local rank of each process.
            local_rank = [f"{script.local_rank_flag}={LOCAL_RANK_MACRO}"]
        flags = self.flags  # for a module, torchrun's flag --module is among them
        return shlex.join(["torchrun", *flags, script.path, *local_rank, *script.arguments])


def choose_nproc(asked: int | str, cores: int, gpus: int) -> int:
    """Returns how many processes to start on one machine.

    Args:
        asked: a number, `gpu` for one per GPU, `cpu` for one per core, or `auto` for one per GPU
            or, if there is no GPU, one per core.
        cores: number of cores that this process may use.
        gpus: number of visible accelerators.

    Raises:
        SettingError: `asked` is none of these, is below 1, or is `gpu` although no GPU is visible.
    """
    if asked == "cpu":
        return cores
    if asked == "auto":
        return gpus if gpus > 0 else cores

    if asked == "gpu":
        if gpus > 0:
            return gpus
        raise SettingError(
            f"--nproc {asked}",
            "no GPU is visible",
            "give a number, or --nproc cpu (one a core)",
        )

    number = _parse_num_processes(asked)
    if number is None or number < 1:
        raise SettingError(
            f"--nproc {asked}",
            "not a number of processes",
            "give 1 or more, auto, gpu or cpu",
        )
    return number


def _parse_num_processes(asked: int | str) -> int | None:
    """Returns how many processes a value of --nproc stands for; None if it is not valid.

    "4" stands for 4, and "gpu" for the number of GPUs.
    """
    with suppress(ValueError):
        return int(asked)

    # torchrun knows the names of other devices, such as `xpu`.
    from torch.distributed.run import determine_local_world_size

    with suppress(ValueError):
        return int(determine_local_world_size(str(asked)))
    return None


def threads_per_process(cores: int, nproc: int, settings: Mapping[str, object]) -> int:
    """Returns how many threads each process of this machine gets unless the user has set a number.

    Together they fill the cores. With virtual ranks each gets one, because the bits of the results
    depend on the number of threads and must not depend on that of processes or cores.

    Args:
        cores: number of cores that the processes may use.
        nproc: number of processes.
        settings: the settings that were given to the launcher.
    """
    if "virtual_ranks" in settings:
        return 1
    return max(1, cores // nproc)


def meeting_host(arguments: Sequence[str]) -> str | None:
    """Returns the host at which processes of several launchers meet; None if no argument names one.

    A script that numbers its processes itself takes the address of the first as an argument:
    `-im tcp://10.10.10.1:12345`, `--dist-url=tcp://[fe80::1]:12345`.
    """
    for argument in arguments:
        match = URL_OF_MEETING.search(argument)
        if match is not None:
            host = match["host"].strip("[]")
            return None if means_loopback(host) else host
    return None


def make_plan(
    spec: LaunchSpec,
    machine: Machine,
    environ: Mapping[str, str],
    nproc: int,
    *,
    one_node: bool,
    meeting_interface: str | None = None,
) -> LaunchPlan:
    """Decides how a request is started on a machine.

    Args:
        spec: the request.
        machine: cores, GPUs and loopback interface of this machine.
        environ: the launcher's environment. Variables that the user has set are not changed.
        nproc: number of processes on this machine.
        one_node: True if the run is on this machine only.
        meeting_interface: the interface that leads to the `meeting_host`, if there is one.
    """
    notes = []
    environment = {}
    for name, value in spec.settings.items():
        environment[f"LOCKSTEP_{name.upper()}"] = str(value)

    if spec.from_file:
        # "lockstep.toml: nproc, precision"
        launch_file, _, option_names = spec.from_file.rpartition(": ")
        notes.append(f"{option_names} from {launch_file}")

    chooses_threads = THREADS_VARIABLE not in environ
    if chooses_threads:
        threads = threads_per_process(machine.cores, nproc, spec.settings)
        environment[THREADS_VARIABLE] = str(threads)
        if "virtual_ranks" in spec.settings:
            notes.append("1 thread per process (OMP_NUM_THREADS: virtual ranks, on any machine)")
        else:
            notes.append(
                f"{count_noun(threads, 'thread')} per process (OMP_NUM_THREADS: "
                f"{count_noun(machine.cores, 'core')} for {count_noun(nproc, 'process')})"
            )

    if one_node and "GLOO_SOCKET_IFNAME" not in environ:
        if meeting_interface is not None:
            environment["GLOO_SOCKET_IFNAME"] = meeting_interface
            host = meeting_host(spec.script.arguments)
            notes.append(f"Gloo on {meeting_interface} (GLOO_SOCKET_IFNAME: it leads to {host})")
        elif machine.loopback:
            environment["GLOO_SOCKET_IFNAME"] = machine.loopback
            notes.append(f"Gloo on {machine.loopback} alone (GLOO_SOCKET_IFNAME: one machine)")

    flags = [*spec.torchrun, f"--nproc-per-node={nproc}"]
    if one_node and not TorchrunFlags(spec.torchrun, environ).say_how_nodes_meet:
        flags.insert(0, "--standalone")
    if spec.script.module:
        flags.append("--module")

    return LaunchPlan(
        nproc=nproc,
        gpus=machine.gpus,
        one_node=one_node,
        environment=environment,
        notes=tuple(notes),
        flags=tuple(flags),
        script=spec.script,
        hang=spec.hang,
        keep_in_memory=spec.keep_in_memory,
        quiet=spec.quiet,
        chooses_threads=chooses_threads,
    )
