"""What `lockstep run --hosts` was asked for: the machines, how each is called, and what it starts.

ssh is the user's own program with the user's own configuration, keys, agent and jump hosts, and
never asks for a password here. `ssh` does what is planned here.
"""

from __future__ import annotations

import contextlib
import getpass
import math
import os
import re
import shlex
import socket
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lockstep.distributed.network import is_here, resolve
from lockstep.errors import SettingError
from lockstep.run.machines.auth import VARIABLE as TOKEN
from lockstep.run.start.plan import shutdown_timeout
from lockstep.wording import count_noun

SSH_OPTIONS = (
    "-T",
    *("-o", "BatchMode=yes"),  # a question nobody sees would be waited for for ever
    *("-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=3", "-o", "ServerAliveCountMax=3"),
    *("-o", "ControlMaster=no"),  # it would stay behind when the run has ended
    *("-o", "ClearAllForwardings=yes", "-o", "RemoteCommand=none"),
)
FORWARDED = ("CUDA_", "GLOO_", "LOCKSTEP_", "MKL_", "NCCL_", "OMP_", "PYTHON", "PYTORCH_", "TORCH_")
"""How the variables begin that all machines get."""
PORT = 29500
SHIFTS = 3
"""Each machine tries the way to so many others, so that many take no longer than few."""
_NAME = re.compile(r"(?:[\w.-]+@)?(?:[\w.][\w.-]*|\[[0-9a-fA-F:.]+\])")


class Problem(Exception):
    """Why nothing can be started on a host: what was found, and what to do."""


class Dropped(Problem):
    """Its ssh server ended the connection before anything else; another try may do."""


@dataclass(frozen=True)
class Host:
    """A machine of the run."""

    name: str
    """As ssh is given it: `node1`, `user@node1`."""
    nproc: str | None = None
    """Processes there; None: as --nproc says."""

    @property
    def address(self) -> str:
        """Its name or address, without the user's."""
        return self.name.rpartition("@")[2].strip("[]")

    @property
    def for_ssh(self) -> str:
        """Its name as ssh takes it: an IPv6 address has no brackets there."""
        return self.name.replace("[", "").replace("]", "")

    @cached_property
    def here(self) -> bool:
        """Whether it is this machine, and the user who runs this; looked up once: it may last."""
        return self._is_here()

    def _is_here(self) -> bool:
        user = self.name.rpartition("@")[0]
        with contextlib.suppress(KeyError, OSError):  # whoever runs this has no name
            if user and user != getpass.getuser():
                return False
        own = self.address in ("localhost", socket.gethostname())
        return own or any(map(is_here, resolve(self.address)))

    def command(self, module: str, nonce: str, ssh: Sequence[str]) -> list[str]:
        """The command that starts a module of this Python there, by ssh unless it is this machine.

        Args:
            module: its name.
            nonce: begins its answers.
            ssh: how ssh is called.
        """
        python = [sys.executable, "-P", "-u", "-m", module, nonce]
        if self.here:
            return python
        return [*ssh, *SSH_OPTIONS, self.for_ssh, f"exec {shlex.join(python)}"]


def resolve_all(hosts: Iterable[Host]) -> None:
    """Resolves all names at the same time: each takes seconds where no name server answers."""

    def look(host: Host) -> None:
        # Not by `host.here`: Python 3.11 has one lock for that property of all hosts.
        vars(host)["here"] = host._is_here()

    # Daemons, so that Ctrl-C does not wait for them.
    threads = [threading.Thread(target=look, args=(host,), daemon=True) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@dataclass(frozen=True, kw_only=True)
class HostsSpec:
    """What `lockstep run --hosts` was asked to start."""

    hosts: Sequence[Host]
    arguments: Sequence[str]
    """For `lockstep run` on every machine, before the script."""
    script: Sequence[str]
    """The script, and what follows it."""
    module: bool = False
    """The script is a module's name."""
    torchrun: Sequence[str] = ()
    """Torchrun's flags and their values, as given."""
    nproc: str = "1"
    """Processes of a host that does not say its own."""
    environment: Mapping[str, str]
    """Variables for all machines."""
    ssh: Sequence[str] = ("ssh",)
    copy: bool = False
    keep: bool = False

    def flag(self, name: str) -> str | None:
        """The value of one of torchrun's flags, where it is given."""
        words = list(self.torchrun)
        return words[words.index(name) + 1] if name in words else None

    @property
    def grace(self) -> float:
        """Seconds that the ranks have to end; raises SettingError where it is no number."""
        return shutdown_timeout(self.flag("--shutdown-timeout"), self.environment)

    def launcher(self, number: int, address: str, port: int) -> list[str]:
        """The arguments of `lockstep` on one machine."""
        size = len(self.hosts)
        meeting = [f"--nnodes={size}", f"--node-rank={number}"]
        meeting += [f"--master-addr={address}", f"--master-port={port}"]
        nproc = self.hosts[number].nproc or self.nproc
        others = [*self.torchrun]
        for name in ("--master-addr", "--master-port"):
            if name in others:
                del others[others.index(name) : others.index(name) + 2]
        return [
            "run",
            f"--nproc={nproc}",
            *(meeting if size > 1 else []),
            *self.arguments,
            *others,
            *(["-m"] if self.module else []),
            *self.script,
        ]

    def describe(self) -> str:
        """What would be started, for `--dry-run`."""
        resolve_all(self.hosts)
        lines = [f"{count_noun(len(self.hosts), 'host')}, in {working_folder()}:"]
        address = self.flag("--master-addr") or "ADDRESS"
        port = int(self.flag("--master-port") or PORT)
        for number, host in enumerate(self.hosts):
            way = "here" if host.here else shlex.join([*self.ssh, *SSH_OPTIONS, host.for_ssh])
            lines.append(f"  {host.name} ({way}):")
            lines.append(f"    lockstep {shlex.join(self.launcher(number, address, port))}")
        names = ", ".join(sorted(self.environment)) or "none"
        if len(self.hosts) > 1 and address == "ADDRESS":
            lines.append(
                "ADDRESS: of the first machine, as the others reach it; found at the start"
            )
        return "\n".join([*lines, f"variables that are sent: {names}, and a token"])


# What the command line says


def parse_hosts(text: str) -> list[Host]:
    """The hosts of `node1,node2:4`, or of a file in the form of Open MPI's hostfile.

    A line of the file is `node1 slots=4`; what follows a `#` is a comment.

    Raises:
        SettingError: a part of it names no host, or a host stands there twice.
    """
    was_set, hosts = f"--hosts {text}", []
    if os.path.isfile(text):  # many hosts are too long for a file's name, which pathlib raises for
        for number, line in enumerate(_lines(was_set, text), 1):
            if words := re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split():
                hosts.append(_of_line(f"--hosts {text}, line {number}", *words))
    else:
        hosts = [_of_part(was_set, part.strip()) for part in text.split(",")]
    seen: dict[str, Host] = {}
    for host in hosts:
        other = seen.setdefault(host.address, host)
        if other is not host:
            do = "name each machine once, with the number of its processes"
            raise SettingError(was_set, f"{other.name} and {host.name} are one machine", do)
    if not hosts:
        do = "write a line for each: node1 slots=4"
        raise SettingError(was_set, "the file names no host", do)
    return hosts


def _lines(was_set: str, path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(was_set, str(error), "make it a text file that can be read") from None


def _of_part(was_set: str, part: str) -> Host:
    name, processes = part, None
    bare_ipv6 = "[" not in part and ("::" in part or part.count(":") > 2)
    if not bare_ipv6 and (found := re.fullmatch(r"(.*[^:]):([^:\]]*)", part)):
        name, processes = found[1], found[2]
        if processes not in ("auto", "gpu", "cpu") and not re.fullmatch("0*[1-9][0-9]*", processes):
            do = "write node1:4, or node1:gpu for one for each GPU"
            raise SettingError(was_set, f"{processes!r} is no number of processes", do)
    do = "write node1,node2:4, the number being that of processes there, or a hostfile's name"
    _check_name(was_set, name, f"{do}; there is no file {name!r}")
    return Host(name, processes)


def _check_name(was_set: str, name: str, do: str) -> None:
    if name.count(":") > 1 and "[" not in name:
        user, at, address = name.rpartition("@")
        do = f"write an IPv6 address in brackets: {user}{at}[{address}]"
    if not _NAME.fullmatch(name):
        found = f"{name!r} is no host's name" if name else "a host's name is missing"
        raise SettingError(was_set, found, do)


_LINE = "write the line as: node1 slots=4"


def _of_line(was_set: str, name: str, *options: str) -> Host:
    numbers = {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in ("slots", "max_slots", "max-slots") or not re.fullmatch("[0-9]+", value):
            raise SettingError(was_set, f"{option!r} is not understood", _LINE)
        numbers[key.replace("-", "_")] = int(value)
    slots = numbers.get("slots")
    if slots == 0 or (slots or 1) > numbers.get("max_slots", math.inf):
        found = f"{' '.join(options)}: there is no room for so many processes"
        raise SettingError(was_set, found, "give slots of at least 1, and no more than max_slots")
    _check_name(was_set, name, _LINE)
    return Host(name, None if slots is None else str(slots))


def forwarded(environ: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """The variables that all machines get: those of `FORWARDED`, and some more by name.

    Raises:
        SettingError: one of the names is not set.
    """
    for name in names:
        if name not in environ:
            do = "set it, or leave it out"
            raise SettingError(f"--forward-env {name}", "it is not set here", do)
    found = {k: v for k, v in environ.items() if k.startswith(FORWARDED) and k != TOKEN}
    return found | {name: environ[name] for name in names}


def ssh_command(text: str) -> list[str]:
    """The words of --ssh; raises SettingError where there are none, or a quote has no end."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise SettingError(f"--ssh {text}", str(error), "write it as for a shell") from None
    if not words:
        raise SettingError(f"--ssh {text!r}", "it names no program", "leave it out")
    return words


def working_folder() -> str:
    """This folder, by the name under which the user came here: a mount may have another one."""
    name = os.environ.get("PWD", "")
    with contextlib.suppress(OSError):
        if os.path.isabs(name) and os.path.samefile(name, "."):
            return name
    return current_folder()


def current_folder() -> str:
    """This folder, without symbolic links; raises SettingError where it has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        found = "it has been removed"
        raise SettingError("the working folder", found, "start it in one that exists") from None


# What went wrong with ssh, by its words

_DROPPED = "exchange_identification|Connection closed by UNKNOWN port"
"""What ssh says where the server ends the connection before anything else."""
_OF_SSH = re.compile(
    r"\S*ssh\S*: |dbclient: |channel \d+: |kex_|banner exchange: |Timeout, server |Host key |"
    r"Connection (?:to \S+ port|closed by|reset by|timed out)|@ +WARNING: |Received disconnect |"
    r".*Permission denied \([a-z]"
)
"""How ssh's own lines begin, in which it says why it ends; others are a banner's or a shell's."""
_OF_PROXY = re.compile(r"(?!Warning: |Load key )(?:[\w./-]+:(?:\d+:)? |.*: [A-Z][a-z ]+\.?$)")
"""A ProxyCommand's lines: a shell's, or those that end in a reason."""
_OF_PROXY_LINES = 4
_OF_RSYNC = re.compile(r"rsync error: |rsync: connection unexpectedly closed|\[\w+\] ")
"""How rsync ends, whatever the reason."""
_NO_PROGRAM = "no such file|not found|does not exist|permission denied|unknown command"
_REMOTE_FAILURES: tuple[tuple[str, str, str], ...] = (
    (
        rf"(?i){{python}}.*(?:{_NO_PROGRAM})|(?:{_NO_PROGRAM}).*{{python}}",
        "{python} cannot be started there",
        "make the same environment there, at the same path, or start from one that all machines "
        "have",
    ),
    (
        r"No module named '?lockstep\.launcher\.remote",
        "its Lockstep is older than this one",
        "install the same version there, for {python}",
    ),
    (
        r"No module named '?lockstep|nknown option:? -P",
        "{python} has no Lockstep there",
        "make the same environment there, at the same path: the first machine's Python is used",
    ),
    (
        r"Too many levels of symbolic links",
        "a folder that is sent is a link there, and rsync follows none that lead out of the folder",
        "name it in .gitignore, or make it a folder there",
    ),
    (r"rsync.*not found", "it has no rsync", "install rsync there, or copy the folder yourself"),
)
"""What the machine says once ssh has reached it."""
_SSH_FAILURES: tuple[tuple[str, str, str], ...] = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key is not the one that this machine knows: it was set up anew, or another "
        "machine answers in its place",
        "make sure which, then `ssh-keygen -R {address}` and `{ssh}`",
    ),
    (
        r"Host key verification failed",
        "its host key is not known here",
        "log in once and compare the key: `{ssh}`",
    ),
    (
        r"Permission denied \([a-z]|Too many authentication failures",
        "it lets nobody in without a password",
        "let your key in: `ssh-copy-id {name}`; a key with a passphrase belongs into ssh-agent",
    ),
    (
        rf"(?i)(?:{_NO_PROGRAM}|cannot execute).*\s+(?:kex_exchange_identification: .*\s+)?"
        r"Connection closed by UNKNOWN port",
        "the ProxyCommand that leads to it cannot be started here",
        "see its entry in ~/.ssh/config",
    ),
    (
        r"administratively prohibited",
        "the jump host that leads to it forwards nothing",
        "set AllowTcpForwarding in the jump host's sshd_config",
    ),
    (
        r"Could not resolve hostname|Name or service not known|failure in name resolution",
        "there is no such name",
        "check its spelling, /etc/hosts, and the Host entries in ~/.ssh/config",
    ),
    (
        r"Connection refused",
        "nothing listens for ssh there",
        "start sshd on it, or give its port in ~/.ssh/config",
    ),
    (
        r"Connection to UNKNOWN port \S+ timed out",
        "it does not answer, or the jump host or ProxyCommand that leads to it does not",
        "see whether it is up, and reached from the jump host",
    ),
    (
        r"during banner exchange|banner exchange: .* timed out",
        "something accepts the connection and never says that it is an ssh server",
        "see whether its sshd hangs, and whether that is its port",
    ),
    (
        r"Connection to .* timed out",  # words of ssh's for what happens after it is connected
        "its ssh server answers, and then nothing comes through: it hangs, or packets are longer "
        "than the way carries (MTU)",
        "see whether long packets pass: `ping -M do -s 1472 {address}`",
    ),
    (
        r"timed out|No route to host|Network is unreachable|not responding",
        "it does not answer",
        "see whether it is up and reached: `ping {address}`; a firewall must let ssh through",
    ),
    (  # behind the others: of a jump host, ssh prints the reason first and then this
        _DROPPED,
        "its ssh server, or a jump host's, drops the connection, as where many begin at once or "
        "this machine is barred",
        "raise MaxStartups in its sshd_config, and see its log",
    ),
)
"""What ssh says itself."""


def ssh_failure(
    host: Host, code: int | None, said: str, ssh: Sequence[str] = ("ssh",), advice: str = ""
) -> Problem:
    """What the failure of ssh, or of rsync over it, means.

    Args:
        host: the machine.
        code: the exit code; None: it has not answered in time.
        said: what was printed to its standard error.
        ssh: how it is called.
        advice: what to do where no known cause is found; else ssh is to be tried by hand.
    """
    python, call = sys.executable, f"{shlex.join(ssh)} {host.for_ssh}"
    names = {"name": host.name, "address": host.address, "python": python, "ssh": call}
    for pattern, found, do in _REMOTE_FAILURES:
        if re.search(pattern.replace("{python}", re.escape(python)), said):
            return Problem(found.format(**names), do.format(**names))
    own = _of_ssh(said)
    for pattern, found, do in _SSH_FAILURES:
        if re.search(pattern, own):
            found, do = found.format(**names), do.format(**names)
            if pattern != _DROPPED:
                return Problem(found, do)
            before = _before_the_drop(said)[-1:]
            return Dropped("; before that it said: ".join([found, *before]), do)
    words = (line.strip() for line in reversed(said.splitlines()))
    last = next((line for line in words if line and not _OF_RSYNC.match(line)), "no word")
    do = advice or f"try it by hand: `{call} {python} --version`"
    if code is None:
        do += f"; where that stops, too, look at the MTU: `ping -M do -s 1472 {host.address}`"
    return Problem(f"{'no answer in time' if code is None else f'exit code {code}'}: {last}", do)


def _of_ssh(said: str) -> str:
    """The lines that are ssh's own, and those of a ProxyCommand whose end it tells."""
    own = [line for line in said.splitlines() if _OF_SSH.match(line)]
    return "\n".join([line for line in _before_the_drop(said) if _OF_PROXY.match(line)] + own)


def _before_the_drop(said: str) -> list[str]:
    """The last few lines before ssh says that the connection was dropped, if it says so."""
    lines = said.splitlines()
    end = next((n for n, line in enumerate(lines) if re.search(_DROPPED, line)), 0)
    return lines[max(end - _OF_PROXY_LINES, 0) : end]
