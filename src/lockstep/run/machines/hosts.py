"""What `lockstep run --hosts` starts: on which machines, with which command, in which folder.

A *host* is a machine of the run, by the name under which ssh reaches it. `HostsSpec` holds what
the user asked for. Nothing is started here: `ssh_run` starts what is described here, by ssh.

ssh is the user's own program with the user's own configuration, keys, agent and jump hosts. It
never asks for a password.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shlex
import socket
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lockstep.distributed.network import is_here, resolve
from lockstep.errors import SettingError
from lockstep.run.machines.run_token import TOKEN_VARIABLE
from lockstep.run.start.torchrun_flags import shutdown_timeout
from lockstep.wording import count_noun

SSH_OPTIONS = (
    "-T",
    *("-o", "BatchMode=yes"),  # nobody would see a question, and ssh would wait forever
    *("-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=3", "-o", "ServerAliveCountMax=3"),
    *("-o", "ControlMaster=no"),  # a master would stay behind when the run has ended
    *("-o", "ClearAllForwardings=yes", "-o", "RemoteCommand=none"),
)
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
"""Environment variables whose names begin like this are sent to all machines."""
FORWARDED_NAMES = ("LD_LIBRARY_PATH",)  # where NCCL finds its network plugins
NAMES_OF_ONE_MACHINE = (
    "CUDA_VISIBLE_DEVICES",  # the GPUs of another machine may be other ones
    "NCCL_HOSTID",  # NCCL takes ranks with the same one for ranks of one machine
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # set by `import lockstep`, there as here
    TOKEN_VARIABLE,  # sent by `ssh_run`, which makes one if there is none
)
"""Variables that are not sent, although their names begin like those that are."""
DEFAULT_MASTER_PORT = 29500
NUM_NEIGHBORS_TRIED = 3
"""Each machine tests the connection to this many others, so that many machines take no longer
than few."""


@dataclass(frozen=True)
class Host:
    """A machine of the run."""

    name: str
    """As the user wrote it: `node1`, `user@node1`, `user@[fe80::1]`."""
    nproc: str | None = None
    """Processes on this machine; None: the value of --nproc."""

    @property
    def address(self) -> str:
        """The host name or IP address, without the user name and without brackets."""
        return self.name.rpartition("@")[2].strip("[]")

    @property
    def ssh_name(self) -> str:
        """The name as ssh takes it: an IPv6 address has no brackets there."""
        return self.name.replace("[", "").replace("]", "")

    @cached_property
    def here(self) -> bool:
        """True if this is the machine, and the user, that runs this process.

        Cached, because resolving a name can take seconds.
        """
        return self._is_here()

    def _is_here(self) -> bool:
        """Returns True if this is the machine, and the user, that runs this process.

        It may take seconds, see `here`, which keeps the answer.
        """
        user = self.name.rpartition("@")[0]  # empty if the name has none
        with contextlib.suppress(KeyError, OSError):  # raised if the current user has no name
            if user and user != getpass.getuser():
                return False
        if self.address in ("localhost", socket.gethostname()):
            return True
        return any(is_here(ip_address) for ip_address in resolve(self.address))

    def command(self, module: str, nonce: str, ssh: Sequence[str]) -> list[str]:
        """Returns the command that runs a Python module on this host, over ssh unless it is here.

        Args:
            module: the name of the module.
            nonce: the argument of the module, with which its answers begin.
            ssh: the ssh program and the user's options for it.
        """
        python_command = [sys.executable, "-P", "-u", "-m", module, nonce]
        if self.here:
            return python_command
        return [*ssh, *SSH_OPTIONS, self.ssh_name, f"exec {shlex.join(python_command)}"]


def resolve_all(hosts: Iterable[Host]) -> None:
    """Computes `here` of all hosts in parallel.

    Each takes seconds if no name server answers.
    """

    def resolve_host(host: Host) -> None:
        # Written into the cache directly: in Python 3.11 a cached_property has one lock for all
        # instances, so reading `host.here` in threads would resolve one name after the other.
        vars(host)["here"] = host._is_here()

    # Daemon threads, so that Ctrl-C does not wait for them.
    threads = [threading.Thread(target=resolve_host, args=(host,), daemon=True) for host in hosts]
    for thread in threads:
        thread.start()

    for thread in threads:
        thread.join()


@dataclass(frozen=True, kw_only=True)
class HostsSpec:
    """What `lockstep run --hosts` was asked to start."""

    hosts: Sequence[Host]
    arguments: Sequence[str]
    """Options of `lockstep run` for every machine."""
    script: Sequence[str]
    """The script and its arguments."""
    module: bool = False
    """The script is given as the name of a module."""
    torchrun: Sequence[str] = ()
    """Flags of torchrun and their values, as the user gave them."""
    nproc: str = "1"
    """Processes on each host that has no number of its own."""
    environment: Mapping[str, str]
    """Environment variables for all machines."""
    ssh: Sequence[str] = ("ssh",)
    """The ssh program and the user's options for it."""
    copy: bool = False
    """Send the working folder to all machines first (--copy)."""
    keep: bool = False
    """Let the ranks of a machine go on when the connection to it is lost (--on-lost keep)."""
    option: str = "--hosts"
    """The option that says on which machines: --hosts, or --ray."""
    quiet: bool = False
    """Print only the script's output and failures (--quiet)."""

    def on_machines(self, hosts: Sequence[Host]) -> HostsSpec:
        """Returns the same for these machines."""
        flags = list(self.torchrun)
        if len(hosts) == 1:
            # If that machine is in a job of Slurm, its other machines take no part.
            flags.insert(0, "--standalone")
        return replace(self, hosts=hosts, torchrun=flags)

    def torchrun_flag(self, name: str) -> str | None:
        """Returns the value of one of torchrun's flags, or None if it is not given."""
        words = list(self.torchrun)
        if name not in words:
            return None
        return words[words.index(name) + 1]  # `torchrun` has flag and value as two words

    @property
    def shutdown_timeout_s(self) -> float:
        """Seconds that the ranks have to end; raises SettingError if the value is not a number."""
        return shutdown_timeout(self.torchrun_flag("--shutdown-timeout"), self.environment)

    def launcher_arguments(self, node_rank: int, address: str, port: int) -> list[str]:
        """Returns the arguments with which `lockstep` is started on one of the machines.

        Args:
            node_rank: the machine's index in `hosts`.
            address: the address of the first machine, at which all launchers meet.
            port: the port there.
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

        # --master-addr and --master-port are in `meeting`, with the values found at the start.
        other_flags = list(self.torchrun)
        for name in ("--master-addr", "--master-port"):
            if name in other_flags:
                index = other_flags.index(name)
                del other_flags[index : index + 2]  # the flag and its value

        nproc = self.hosts[node_rank].nproc or self.nproc
        arguments = ["run", f"--nproc={nproc}", *meeting, *self.arguments, *other_flags]
        if self.module:
            arguments.append("-m")

        return arguments + list(self.script)

    def describe(self) -> str:
        """Returns the text of `--dry-run`: what would be started on each machine."""
        resolve_all(self.hosts)
        lines = [f"{count_noun(len(self.hosts), 'host')}, in {working_folder()}:"]
        given_address = self.torchrun_flag("--master-addr")

        address = given_address or "ADDRESS"
        port = int(self.torchrun_flag("--master-port") or DEFAULT_MASTER_PORT)
        for node_rank, host in enumerate(self.hosts):
            ssh_call = shlex.join([*self.ssh, *SSH_OPTIONS, host.ssh_name])
            arguments = shlex.join(self.launcher_arguments(node_rank, address, port))
            lines.append(f"  {host.name} ({'here' if host.here else ssh_call}):")
            lines.append(f"    lockstep {arguments}")

        if len(self.hosts) > 1 and address == "ADDRESS":
            lines.append(
                "ADDRESS: of the first machine, as the others reach it; found at the start"
            )

        variables = ", ".join(sorted(self.environment)) or "none"
        lines.append(f"variables that are sent: {variables}, and a token")
        return "\n".join(lines)


def is_forwarded(name: str) -> bool:
    """Returns True if an environment variable of this name is sent to all machines."""
    if name in NAMES_OF_ONE_MACHINE:
        return False
    return name in FORWARDED_NAMES or name.startswith(FORWARDED_PREFIXES)


def forwarded_environment(environ: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Returns the environment variables that are sent to all machines.

    Args:
        environ: this process's environment variables.
        names: variables to send besides those of `is_forwarded` (--forward-env).

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


def ssh_command(text: str) -> list[str]:
    """Splits the value of --ssh into the program and its options.

    Raises:
        SettingError: it is empty, or a quote is not closed.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise SettingError(f"--ssh {text}", str(error), "write it as for a shell") from None
    if not words:
        raise SettingError(f"--ssh {text!r}", "it names no program", "leave it out")
    return words


def working_folder() -> str:
    """Returns the working folder, by the name under which the user entered it.

    That name ($PWD) may contain symbolic links, and is more likely than the resolved one to
    exist on other machines as well.
    """
    name = os.environ.get("PWD", "")
    with contextlib.suppress(OSError):
        if os.path.isabs(name) and os.path.samefile(name, "."):
            return name
    return current_folder()


def current_folder() -> str:
    """Returns the working folder without symbolic links.

    Raises:
        SettingError: it has been removed.
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        found = "it has been removed"
        raise SettingError("the working folder", found, "start it in one that exists") from None
