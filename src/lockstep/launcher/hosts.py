"""`lockstep run --hosts`: a run on several machines, started from one of them or from a laptop.

On each machine ssh starts a small process (`remote`), which starts the launcher there; on this
machine it is started without ssh. All that they are told goes through their standard input: the
run's token and other variables never stand in a command line. ssh is the user's own program with
the user's own configuration, keys, agent and jump hosts, and never asks for a password here.

Everything that can be known before a launcher is started is asked on all machines at once, and what
is wrong is told for all of them in one error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lockstep.distributed.network import address_reaching, is_here, resolve
from lockstep.errors import EXIT_LOST_RANK, HostError, SettingError, counted
from lockstep.launcher.auth import VARIABLE as TOKEN
from lockstep.launcher.output import Sink
from lockstep.launcher.remote import MARK, SILENT_S, versions

T = TypeVar("T")
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
_PORT = 29500
_ANSWER_S = 25.0
_HEARTBEAT_S = 2.0
_OTHERS_S = SILENT_S + 3.0
"""When a machine has failed or is lost, the launchers of the others find that out by themselves."""
_END_S = 30.0
_FINISH_S = 2.0
_TICK_S = 0.05
_MAX_WAITING = 4 << 20
_MAX_KEPT = 1 << 16
_PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1")
_NAME = re.compile(r"(?:[\w.-]+@)?(?:[\w.][\w.-]*|\[[0-9a-fA-F:.]+\])")


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
    def here(self) -> bool:
        """Whether it is this machine."""
        own = self.address in ("localhost", socket.gethostname())
        return own or any(map(is_here, resolve(self.address)))


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
        lines = [f"{counted(len(self.hosts), 'host')}, in {working_folder()}:"]
        address = self.flag("--master-addr") or self.hosts[0].address
        port = int(self.flag("--master-port") or _PORT)
        for number, host in enumerate(self.hosts):
            way = "here" if host.here else shlex.join([*self.ssh, *SSH_OPTIONS, host.name])
            lines.append(f"  {host.name} ({way}):")
            lines.append(f"    lockstep {shlex.join(self.launcher(number, address, port))}")
        names = ", ".join(sorted(self.environment)) or "none"
        return "\n".join([*lines, f"variables that are sent: {names}, and a token"])


# What the command line says


def parse_hosts(text: str) -> list[Host]:
    """The hosts of `node1,node2:4`, or of a file in the form of Open MPI's hostfile.

    A line of the file is `node1 slots=4`; what follows a `#` is a comment.

    Raises:
        SettingError: a part of it names no host, or a host stands there twice.
    """
    was_set = f"--hosts {text}"
    if Path(text).is_file():
        lines = Path(text).read_text().splitlines()
        words = [line.partition("#")[0] for line in lines]
        hosts = [_of_line(was_set, line) for line in words if line.strip()]
    else:
        hosts = [_of_part(was_set, part.strip()) for part in text.split(",")]
    for number, host in enumerate(hosts):
        if host.name in [other.name for other in hosts[:number]]:
            raise SettingError(
                was_set, f"{host.name} is named twice", f"name it once, as {host.name}:2 say"
            )
    if not hosts:
        raise SettingError(
            was_set, "the file names no host", "write a line for each: node1 slots=4"
        )
    return hosts


def _of_part(was_set: str, part: str) -> Host:
    found = re.fullmatch(f"({_NAME.pattern})(?::([0-9]+|auto|gpu|cpu))?", part)
    if found is None or found[2] == "0":
        raise SettingError(
            was_set,
            f"{part!r} is neither a host nor a file",
            "write node1,node2:4, the number being that of processes there, or a hostfile's name",
        )
    return Host(found[1], found[2])


def _of_line(was_set: str, line: str) -> Host:
    name, *rest = re.sub(r"\s*=\s*", "=", line).split()
    options = dict(word.partition("=")[::2] for word in rest)
    slots = options.get("slots")
    known = options.keys() <= {"slots", "max_slots", "max-slots"}
    if not _NAME.fullmatch(name) or not known or (slots and not slots.isdecimal()) or slots == "0":
        raise SettingError(was_set, f"the line {line.strip()!r}", "write it as: node1 slots=4")
    return Host(name, slots)


def forwarded(environ: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """The variables that all machines get: those of `FORWARDED`, and some more by name.

    Raises:
        SettingError: one of the names is not set.
    """
    for name in names:
        if name not in environ:
            raise SettingError(
                f"--forward-env {name}", "it is not set here", "set it, or leave it out"
            )
    found = {k: v for k, v in environ.items() if k.startswith(FORWARDED) and k != TOKEN}
    return found | {name: environ[name] for name in names}


def working_folder() -> str:
    """This folder, by the name under which the user came here: a mount may have another one."""
    name = os.environ.get("PWD", "")
    with contextlib.suppress(OSError):
        if os.path.isabs(name) and os.path.samefile(name, "."):
            return name
    return os.getcwd()


# What went wrong with ssh, by its words

_NO_PROGRAM = "no such file|not found|does not exist|permission denied|unknown command"
_FAILURES: tuple[tuple[str, str, str], ...] = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key is not the one that this machine knows: it was set up anew, or another "
        "machine answers in its place",
        "make sure which, then `ssh-keygen -R {address}` and `ssh {name}`",
    ),
    (
        r"Host key verification failed",
        "its host key is not known here",
        "log in once and compare the key: `ssh {name}`",
    ),
    (
        rf"(?i){{python}}.*(?:{_NO_PROGRAM})|(?:{_NO_PROGRAM}).*{{python}}",
        "{python} cannot be started there",
        "make the same environment there, at the same path, or start from one that all machines "
        "have",
    ),
    (
        r"Permission denied|Too many authentication failures",
        "it lets nobody in without a password",
        "let your key in: `ssh-copy-id {name}`; a key with a passphrase belongs into ssh-agent",
    ),
    (
        r"Could not resolve hostname",
        "there is no such name",
        "check its spelling, /etc/hosts, and the Host entries in ~/.ssh/config",
    ),
    (
        r"Connection refused",
        "nothing listens for ssh there",
        "start sshd on it, or give its port in ~/.ssh/config",
    ),
    (
        r"timed out|No route to host|Network is unreachable|not responding",
        "it does not answer",
        "see whether it is up and reached: `ping {address}`; a firewall must let ssh through",
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
    (r"rsync.*not found", "it has no rsync", "install rsync there, or copy the folder yourself"),
)


def ssh_failure(host: Host, code: int | None, said: str, python: str) -> tuple[str, str]:
    """What ssh's failure means.

    Args:
        host: the machine.
        code: ssh's exit code; None: it still runs.
        said: what was printed to its standard error.
        python: the Python that was to be started there.

    Returns:
        What was found, and what to do.
    """
    names = {"name": host.name, "address": host.address, "python": python}
    for pattern, found, do in _FAILURES:
        if re.search(pattern.replace("{python}", re.escape(python)), said):
            return found.format(**names), do.format(**names)
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "no word")
    ended = f"no answer within {_ANSWER_S:g} s" if code is None else f"exit code {code}"
    return f"{ended}: {last}", f"try it by hand: `ssh {host.name} {python} --version`"


class _Problem(Exception):
    """Why a run cannot be started on a host: what was found, and what to do."""


# The way to one machine


class Remote:
    """A machine of the run, and the process there."""

    def __init__(self, host: Host, ssh: Sequence[str], show: Callable[[Host, str, bytes], Any]):
        self.host, self.here = host, host.here
        self._ssh, self._show = ssh, show
        self.code: int | None = None
        """How the launcher has ended there; None: it has not, or is lost."""
        self.found: dict[str, Any] = {}
        """What it has answered first; see `remote.look`."""
        self._said = b""
        self._started = False
        self._answers: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def _line(self) -> list[str]:
        python = [sys.executable, "-P", "-u", "-m", "lockstep.launcher.remote"]
        if self.here:
            return python
        name = self.host.name.replace("[", "").replace("]", "")
        return [*self._ssh, *SSH_OPTIONS, name, f"exec {shlex.join(python)}"]

    async def open(self, request: Mapping[str, Any]) -> None:
        """Starts the process there, and asks what it finds.

        Raises:
            _Problem: it could not be started, or something is missing.
        """
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._line,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # the terminal's keys are for this process
            )
        except FileNotFoundError:
            do = "install OpenSSH's client, or name another program with --ssh"
            raise _Problem(f"there is no program {self._line[0]!r} here", do) from None
        assert self._process.stdout
        assert self._process.stderr
        self._tasks = [
            asyncio.create_task(self._read(self._process.stdout, self._take_output)),
            asyncio.create_task(self._read(self._process.stderr, self._take_errors)),
        ]
        self.found = await self.ask(**request)
        for name, here in versions().items():
            there = self.found["versions"].get(name)
            if there != here:
                do = f"install {name} {here} there, for {sys.executable}, or the other one here"
                raise _Problem(f"{name} {there} there, {here} here", do)
        if self.found["missing"]:
            do = "the folder must be on a disk that all machines share, or be sent: --copy"
            raise _Problem(self.found["missing"], do)

    async def copy(self) -> None:
        """Sends this folder, without what .gitignore names; nothing is deleted there.

        Raises:
            _Problem: it could not be sent.
        """
        folder, name = working_folder(), self.host.name
        way = shlex.join([*self._ssh, *SSH_OPTIONS])
        what = ["--filter=:- .gitignore", "--exclude=/.git", f"{folder}/", f"{name}:{folder}/"]
        line = ["rsync", "-az", "--mkpath", "-e", way, *what]
        try:
            process = await asyncio.create_subprocess_exec(
                *line, stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
            )
        except FileNotFoundError:
            raise _Problem("there is no rsync on this machine", "install it") from None
        said = (await process.communicate())[1]
        if process.returncode:
            text = said.decode(errors="replace")
            raise _Problem(*ssh_failure(self.host, process.returncode, text, sys.executable))

    async def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            _Problem: there is none.
        """
        self.send(**request)
        answer = None
        with contextlib.suppress(TimeoutError):
            answer = await asyncio.wait_for(self._answers.get(), _ANSWER_S)
            if answer is None:
                await asyncio.wait(self._tasks, timeout=_FINISH_S)
        if answer is None:
            said = self._said.decode(errors="replace")
            raise _Problem(*ssh_failure(self.host, self._process.returncode, said, sys.executable))
        return answer

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], keep: bool) -> None:
        """Starts the launcher there."""
        self._started = True
        self.send(start=list(arguments), environment=dict(environment), keep=keep)

    def send(self, **request: Any) -> None:
        """Sends a request, or a sign of life; nothing when nobody is there."""
        pipe = self._process.stdin
        if pipe and self._process.returncode is None and not pipe.transport.is_closing():
            pipe.write((json.dumps(request) if request else "").encode() + b"\n")

    async def _read(
        self, stream: asyncio.StreamReader, take: Callable[[bytes], Coroutine[Any, Any, None]]
    ) -> None:
        unfinished = b""
        while data := await stream.read(1 << 16):
            *lines, unfinished = (unfinished + data).split(b"\n")
            for line in lines:
                await take(line)
        if unfinished:
            await take(unfinished)
        if take == self._take_output:
            self._answers.put_nowait(None)

    async def _take_output(self, line: bytes) -> None:
        before, mark, text = line.partition(MARK)
        if mark:
            answer = json.loads(text)
            self.code = answer.get("exit")
            self._answers.put_nowait(answer)
        if self._started and (before or not mark):
            await self._show(self.host, "stdout", before)

    async def _take_errors(self, line: bytes) -> None:
        if self._started:
            await self._show(self.host, "stderr", line)
        else:
            self._said = (self._said + line + b"\n")[-_MAX_KEPT:]

    async def ended(self) -> None:
        """Waits until the launcher there has ended, or the connection has."""
        await asyncio.wait(self._tasks)
        await self._process.wait()

    async def close(self) -> None:
        """Ends what still runs there, and the connection."""
        if not self._tasks:
            return
        if self._process.stdin:
            self._process.stdin.close()
        if await _within(_END_S if self._started else _FINISH_S, [self.ended()]):
            self._process.kill()
            await self.ended()


async def _within(seconds: float, work: Iterable[Coroutine[Any, Any, Any]]) -> bool:
    """Whether some of the work is not done within so many seconds."""
    tasks = [asyncio.ensure_future(each) for each in work]
    if not tasks:
        return False
    _, left = await asyncio.wait(tasks, timeout=seconds)
    for task in left:
        task.cancel()
    return bool(left)


# All of them


class _Run:
    def __init__(self, spec: HostsSpec, say: Callable[[str], None]) -> None:
        self._spec, self._say = spec, say
        self._sinks = {"stdout": Sink(1, os.environ), "stderr": Sink(2, os.environ)}
        self._told: dict[bytes, Host] = {}
        self._remotes = [Remote(host, spec.ssh, self._show) for host in spec.hosts]
        self._asked_to_end: int | None = None
        self._running = False

    async def run(self) -> int:
        """See `run_on_hosts`."""
        self._main = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for name in _PASSED_ON:
            if signal.getsignal(signal.Signals[name]) is not signal.SIG_IGN:
                loop.add_signal_handler(signal.Signals[name], self._on_signal, name)
        loop.add_signal_handler(signal.SIGTSTP, self._say, _CANNOT_STOP)
        beating = asyncio.create_task(self._beat())
        try:
            await self._prepare()
            return await self._watch()
        except asyncio.CancelledError:
            if self._asked_to_end is None:
                raise
            return 128 + self._asked_to_end
        finally:
            await asyncio.gather(*(remote.close() for remote in self._remotes))
            beating.cancel()
            await self._flush()

    def _on_signal(self, name: str) -> None:
        if name != "SIGUSR1":
            self._asked_to_end = signal.Signals[name]
        if self._running:
            for remote in self._remotes:
                remote.send(signal=name)
        elif self._main and self._asked_to_end is not None:
            self._main.cancel()

    async def _beat(self) -> None:
        """Tells the machines that this one is there, and lets the terminal take what waits."""
        while True:
            for remote in self._remotes:
                if remote.found:
                    remote.send()
            for _ in range(int(_HEARTBEAT_S / _TICK_S)):
                await asyncio.sleep(_TICK_S)
                for sink in self._sinks.values():
                    sink.flush()

    async def _show(self, host: Host, stream: str, line: bytes) -> None:
        """Prints a line of a machine, behind its name.

        All launchers say what has failed first; what another one has said is not said again.
        """
        sink = self._sinks[stream]
        launchers_own = stream == "stderr" and line.strip() and not line.startswith(b"[rank")
        if launchers_own and self._told.setdefault(line, host) is not host:
            return
        sink.write(f"[{host.name}] ".encode() + line + b"\n")
        while len(sink.waiting) > _MAX_WAITING:
            await asyncio.sleep(_TICK_S)

    async def _flush(self) -> None:
        for _ in range(int(_FINISH_S / _TICK_S)):
            for sink in self._sinks.values():
                sink.flush()
            if not any(sink.waiting for sink in self._sinks.values()):
                return
            await asyncio.sleep(_TICK_S)

    async def _on_all(
        self, remotes: Sequence[Remote], work: Callable[[Remote], Coroutine[Any, Any, T]]
    ) -> list[T]:
        """What the work gives for each machine.

        Raises:
            HostError: it failed for some of them.
        """
        done = await asyncio.gather(*map(work, remotes), return_exceptions=True)
        problems = []
        for remote, result in zip(remotes, done, strict=True):
            if isinstance(result, _Problem):
                problems.append((remote.host.name, *result.args))
            elif isinstance(result, BaseException):
                raise result
        if problems:
            names = ", ".join(name for name, _, _ in problems)
            many = len(problems) > 1
            raise HostError(
                f"--hosts: a run on {names}",
                "; ".join(f"{name}: {found}" if many else found for name, found, _ in problems),
                "; ".join(dict.fromkeys(do for _, _, do in problems)),
            )
        return [result for result in done if not isinstance(result, BaseException)]

    async def _prepare(self) -> None:
        """Starts the launchers on all machines.

        Raises:
            HostError: the run cannot be started on some of them.
        """
        spec, remotes = self._spec, self._remotes
        if spec.copy:
            await self._on_all([r for r in remotes if not r.here], Remote.copy)
        script = None if spec.module else spec.script[0]
        request = {"folder": working_folder(), "script": script}
        await self._on_all(remotes, lambda remote: remote.open(request))
        address, port = "", 0
        if len(remotes) > 1:
            address, port = await self._meeting_place()
        environment = {TOKEN: os.environ.get(TOKEN) or secrets.token_hex(32), **spec.environment}
        self._running = True
        for number, remote in enumerate(remotes):
            remote.start(spec.launcher(number, address, port), environment, spec.keep)
        place = f"; they meet at {address}, port {port}" if address else ""
        names = ", ".join(host.name for host in spec.hosts)
        self._say(f"{counted(len(remotes), 'host')}: {names}{place}")

    async def _meeting_place(self) -> tuple[str, int]:
        """The address and port of the first machine at which all others have reached it."""
        spec, (first, *others) = self._spec, self._remotes
        address = spec.flag("--master-addr") or self._address()
        given = spec.flag("--master-port")

        async def listen(remote: Remote) -> int:
            found = await remote.ask(listen=int(given or _PORT), instead=given is None)
            if "error" in found:
                do = "give another --master-port, or leave it out"
                raise _Problem(f"port {given}: {found['error']}", do)
            return int(found["port"])

        async def reach(remote: Remote) -> None:
            why = (await remote.ask(reach=[address, port]))["why"]
            if why:
                raise _Problem(
                    f"{first.host.name} cannot be reached from it at {address}, port {port}: {why}",
                    "a firewall must let the machines reach each other; --master-addr and "
                    "--master-port give another address and port of the first machine",
                )

        (port,) = await self._on_all([first], listen)
        await self._on_all(others, reach)
        return address, port

    def _address(self) -> str:
        """The first machine's, as the others see it."""
        first, second = self._remotes[:2]
        if not first.here:
            return str(first.found["own"] or first.host.address)
        came_from = str(second.found["first"])  # a jump host's, where there is one
        if came_from and is_here(came_from):
            return came_from
        return address_reaching(second.host.address) or first.host.address

    async def _watch(self) -> int:
        """Waits for the end on all machines; the exit code of the first that has failed."""
        codes: list[int] = []
        lost = False
        ends = {asyncio.create_task(remote.ended()): remote for remote in self._remotes}
        while ends:
            failed = any(codes) or (lost and not self._spec.keep)
            patience = _OTHERS_S + float(self._spec.flag("--shutdown-timeout") or 0)
            over, _ = await asyncio.wait(
                ends, timeout=patience if failed else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in over:
                remote = ends.pop(task)
                if remote.code is None:
                    lost = True
                    self._say(f"the connection to {remote.host.name} is lost" + self._then())
                else:
                    codes.append(remote.code)
            if not over:
                for remote in ends.values():
                    remote.send(signal="SIGTERM")
                await _within(_END_S, [remote.ended() for remote in ends.values()])
                break
        code = next(filter(None, codes), 0)
        return code or (EXIT_LOST_RANK if lost and not (self._spec.keep and codes) else 0)

    def _then(self) -> str:
        if self._spec.keep:
            return "; its ranks go on if the other machines reach them (--on-lost keep)"
        return "; the run is ended (--on-lost stop)"


_CANNOT_STOP = "Ctrl-Z does nothing here: a run on several machines cannot be stopped for a while"


def run_on_hosts(spec: HostsSpec, say: Callable[[str], None]) -> int:
    """Starts a run on all of its machines, and ends it on all of them when one fails.

    Args:
        spec: what to start.
        say: called with each line that the user should read.

    Returns:
        The exit code of the launcher that has failed first; see `lockstep.errors`.

    Raises:
        HostError: the run cannot be started on some machine; nothing runs then on any.
    """
    return asyncio.run(_Run(spec, say).run())
