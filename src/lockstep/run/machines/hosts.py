"""Describes what `lockstep run --hosts` starts: on which machines, in which folder, and with which
variables.

A *host* is a machine of the run, by the name under which ssh reaches it. A `HostsSpec` holds the
user's request. Nothing is started here: `hosts_run` starts what is described here.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shlex
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lockstep.errors import SettingError
from lockstep.language import translate
from lockstep.machine.network import is_here, resolve
from lockstep.run.machines.run_token import TOKEN_VARIABLE
from lockstep.run.machines.ssh_command import DEFAULT_SSH_COMMAND, SshCommand
from lockstep.run.start.torchrun_flags import TorchrunFlags, shutdown_timeout
from lockstep.wording import count_noun

FORWARDED_PREFIXES = (
    "CUDA_",
    "FI_",  # libfabric, which NCCL uses on EFA
    "GLOO_",
    "LOCKSTEP_",
    "MKL_",
    "NCCL_",
    "OFI_NCCL_",  # the plugin that lets NCCL use libfabric
    "OMP_",
    "PYTHON",
    "PYTORCH_",
    "RCCL_",
    "TORCH_",
    "UCX_",
)
"""Environment variables whose names begin with one of these are sent to all machines."""
FORWARDED_NAMES = ("LD_LIBRARY_PATH",)  # where NCCL finds its network plugins
NAMES_OF_ONE_MACHINE = (
    "CUDA_VISIBLE_DEVICES",  # the GPUs of another machine may be other ones
    "NCCL_HOSTID",  # NCCL takes ranks with the same one for ranks of one machine
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # set by `import lockstep`, there as here
    TOKEN_VARIABLE,  # sent by `hosts_run`, which makes one if there is none
)
"""Variables that are not sent, although their names begin with one of these prefixes."""
DEFAULT_MASTER_PORT = 29500
NUM_NEIGHBORS_TRIED = 3
"""The number of other machines that each machine tests its connection to. It is limited, so that
many machines take no longer than few."""


@dataclass(frozen=True)
class Host:
    """A machine of the run."""

    name: str
    """The name as the user wrote it: `node1`, `user@node1`, `user@[fe80::1]`."""
    nproc: str | None = None
    """Processes on this machine; None for the value of --nproc."""

    @property
    def address(self) -> str:
        """The host name or IP address, without the user name and without brackets."""
        return self.name.rpartition("@")[2].strip("[]")

    @cached_property
    def here(self) -> bool:
        """True if this is the machine, and the user, on which this process is running.

        The value is cached, because resolving a name can take seconds.
        """
        return self._is_this_machine()

    def _is_this_machine(self) -> bool:
        """Returns True if the host is this machine, and its user the present one.

        This may take seconds. Another user of this machine is reached by ssh.
        """
        user = self.name.rpartition("@")[0]  # empty if the name contains no user
        try:
            own_user = getpass.getuser()
        except (KeyError, OSError):  # the present user has no name, and is taken to be the same
            own_user = user
        if user and user != own_user:
            return False

        if self.address in ("localhost", socket.gethostname()):
            return True
        return any(is_here(ip_address) for ip_address in resolve(self.address))


def resolve_all(hosts: Iterable[Host]) -> None:
    """Computes `here` of all hosts in parallel, as each takes seconds if no name server answers."""

    def resolve_host(host: Host) -> None:
        # This writes into the cache directly. In Python 3.11 a cached_property has one lock for all
        # instances, so reading `host.here` in threads would resolve one name after the other.
        vars(host)["here"] = host._is_this_machine()

    # Daemon threads do not make Ctrl-C wait.
    threads = [threading.Thread(target=resolve_host, args=(host,), daemon=True) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@dataclass(frozen=True, kw_only=True)
class HostsSpec:
    """The request of `lockstep run --hosts`."""

    hosts: Sequence[Host]
    arguments: Sequence[str]
    """Options of `lockstep run` for every machine."""
    script: Sequence[str]
    """The script and its arguments."""
    module: bool = False
    """True if the script is given as the name of a module."""
    torchrun: Sequence[str] = ()
    """Flags of torchrun and their values, as the user gave them."""
    launcher: Sequence[str] = ("lockstep", "run")
    """The Python module that is the launcher of a machine, and its first arguments."""
    nproc: str = "1"
    """Processes on each host that has no number of its own."""
    environment: Mapping[str, str]
    """Environment variables for all machines."""
    ssh: SshCommand = DEFAULT_SSH_COMMAND
    """The ssh program and the user's options for it."""
    copy: bool = False
    """True if the working folder is first sent to all machines (--copy)."""
    keep: bool = False
    """True if ranks go on when the connection to their machine is lost (--on-lost keep)."""
    option: str = "--hosts"
    """The option that names the machines: --hosts, --ray, or launch(ray=...)."""
    quiet: bool = False
    """True if only the script's output and failures are printed (--quiet)."""

    def on_machines(self, hosts: Sequence[Host]) -> HostsSpec:
        """Returns the same request for the given machines."""
        flags = list(self.torchrun)
        if len(hosts) == 1:
            # Without this flag, a machine in a Slurm job would use the job's other machines too.
            flags.insert(0, "--standalone")
        return replace(self, hosts=hosts, torchrun=flags)

    def torchrun_flag(self, name: str) -> str | None:
        """Returns the value of one of torchrun's flags, or None if it is not given."""
        return TorchrunFlags(self.torchrun).get(name)

    def with_torchrun_flag(self, name: str, value: str) -> HostsSpec:
        """Returns the same request with another value of one of torchrun's flags."""
        return replace(self, torchrun=TorchrunFlags(self.torchrun).words_with(name, value))

    @property
    def shutdown_timeout_s(self) -> float:
        """The seconds that the ranks get to end.

        Raises:
            SettingError: the value is not a number.
        """
        return shutdown_timeout(self.torchrun_flag("--shutdown-timeout"), self.environment)

    def launcher_arguments(self, node_rank: int, address: str, port: int) -> list[str]:
        """Returns the arguments with which the launcher is started on one of the machines.

        Args:
            node_rank: index of the machine in `hosts`.
            address: address of the first machine, at which all launchers meet.
            port: port at which they meet.
        """
        num_hosts = len(self.hosts)
        meeting: list[str] = []
        if num_hosts > 1:
            meeting = [
                f"--nnodes={num_hosts}",
                f"--node-rank={node_rank}",
                f"--master-addr={address}",
                f"--master-port={port}",
            ]

        # The user's --master-addr and --master-port are replaced by those in `meeting`. A single
        # machine needs neither.
        given_flags = TorchrunFlags(self.torchrun)
        other_flags = given_flags.words_without("--master-addr", "--master-port")
        nproc = self.hosts[node_rank].nproc or self.nproc
        first_arguments = self.launcher[1:]  # ["run"] of ("lockstep", "run")
        arguments = [*first_arguments, f"--nproc={nproc}", *meeting, *self.arguments, *other_flags]
        if self.module:
            arguments.append("-m")
        return arguments + list(self.script)

    def describe(self) -> str:
        """Describes for `--dry-run` what would be started on each machine.

        The texts are translated here, because the lines are joined before they are shown.
        """
        resolve_all(self.hosts)  # finds out at once for all hosts whether they are `here`
        folder = working_folder()
        lines = [translate(f"{count_noun(len(self.hosts), 'host')}, in {folder}:")]

        placeholder = "ADDRESS"
        address = self.torchrun_flag("--master-addr") or placeholder
        port = int(self.torchrun_flag("--master-port") or DEFAULT_MASTER_PORT)
        for node_rank, host in enumerate(self.hosts):
            ssh_call = shlex.join(self.ssh.connecting_to(host.name))
            arguments = shlex.join(self.launcher_arguments(node_rank, address, port))
            lines.append(f"  {host.name} ({translate('here') if host.here else ssh_call}):")
            lines.append(f"    lockstep {arguments}")

        if len(self.hosts) > 1 and address == placeholder:
            lines.append(
                translate(
                    "ADDRESS: of the first machine, as the others reach it; found at the start"
                )
            )

        variables = ", ".join(sorted(self.environment)) or translate("none")
        lines.append(translate(f"variables that are sent: {variables}, and a token"))
        return "\n".join(lines)


def is_forwarded(name: str) -> bool:
    """Returns True if an environment variable of this name is sent to all machines."""
    if name in NAMES_OF_ONE_MACHINE:
        return False
    return name in FORWARDED_NAMES or name.startswith(FORWARDED_PREFIXES)


def forwarded_environment(environ: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Returns the environment variables that are sent to all machines.

    Args:
        environ: environment variables of this process.
        names: names of further variables to send, besides those of `is_forwarded` (--forward-env).

    Raises:
        SettingError: one of the names is not set.
    """
    variables = {}
    for name, value in environ.items():
        if is_forwarded(name):
            variables[name] = value

    for name in names:
        if name not in environ:
            raise SettingError(
                f"--forward-env {name}", "it is not set here", "set it, or leave it out"
            )
        variables[name] = environ[name]

    return variables


def working_folder() -> str:
    """Returns the working folder, by the name under which the user entered it.

    This name ($PWD) may contain symbolic links. It is more likely to exist on the other machines
    than the resolved name.
    """
    name = os.environ.get("PWD", "")
    with contextlib.suppress(OSError):
        if os.path.isabs(name) and os.path.samefile(name, "."):
            return name
    return current_folder()


def current_folder() -> str:
    """Returns the working folder, with symbolic links resolved.

    Raises:
        SettingError: the folder has been removed.
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        found = "it has been removed"
        raise SettingError("the working folder", found, "start it in one that exists") from None
