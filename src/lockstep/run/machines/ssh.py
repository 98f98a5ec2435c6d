"""A run on several machines over ssh, started from one of them or from a laptop.

On each machine ssh starts a small process (`remote`), which starts the launcher there; on this
machine it is started without ssh. All that they are told goes through their standard input: the
run's token and other variables never stand in a command line.

Everything that can be known before a launcher is started is asked on all machines at once, and what
is wrong is told for all of them in one error.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import math
import os
import random
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import IO, Any, TypeVar

from lockstep.distributed.network import address_reaching, is_here
from lockstep.errors import EXIT_LOST_RANK, HostError
from lockstep.run.machines.hosts import (
    DEFAULT_MASTER_PORT,
    NUM_NEIGHBORS_TRIED,
    SSH_OPTIONS,
    Host,
    HostsSpec,
    resolve_all,
    working_folder,
)
from lockstep.run.machines.remote import ALIVE, HEARTBEAT_S, MARK, SILENT_S, versions
from lockstep.run.machines.run_token import TOKEN_VARIABLE
from lockstep.run.machines.ssh_errors import ConnectionDropped, Problem, ssh_failure
from lockstep.run.start.output import FlushDeadline, Sink, finished_lines, last_state, sinks
from lockstep.wording import count_noun

T = TypeVar("T")
_FAILED_ELSEWHERE = "SIGUSR2"
"""Ends a launcher whose ranks have not started."""
_OTHERS_S = SILENT_S + 3.0
"""When a machine has failed or is lost, the launchers of the others find that out by themselves
where their ranks have started."""
_END_S = 20.0
"""What a launcher needs to end beside what it gives its ranks, as at Ctrl-C."""
_PAUSES_S = (1.0, 2.0, 4.0)
"""Before a machine is tried again whose ssh server drops connections (MaxStartups)."""
_FINISH_S = 2.0
_READS = 64
"""More than it takes to read what a process has written that has ended."""
_CLOCK_S = 5.0
"""As `watchdog.first_failure` allows for."""
_TICK_S = 0.05
_ANSWER_S = 25.0
_MAX_WAITING = 4 << 20
_MAX_KEPT = 1 << 16
_PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1")


# The way to one machine


class Remote:
    """A machine of the run, and the process there.

    Args:
        host: which.
        ssh: how ssh is called.
        show: is called with each line that is printed there once the launcher is started.
        module: what is started there.
    """

    def __init__(
        self,
        host: Host,
        ssh: Sequence[str],
        show: Callable[[Host, str, bytes], Coroutine[Any, Any, None]] | None = None,
        module: str = "lockstep.run.machines.remote",
    ) -> None:
        self.host, self.here = host, host.here
        self._ssh, self._show, self._module = ssh, show, module
        self.patience = _ANSWER_S
        """Seconds for each answer."""
        self.code: int | None = None
        """How the launcher has ended there; None: it has not, or is lost."""
        self.found: dict[str, Any] = {}
        """What it has answered first; see `remote.look`."""
        self.clock = 0.0
        """By how many seconds it is ahead of this machine at least, or behind where below 0."""
        self.place = ("", 0)
        """The address and port at which it listens."""
        self.unfinished = {"stdout": b"", "stderr": b""}
        """By stream, what there is of a line that is not finished."""
        self._held = dict(self.unfinished)
        """By stream, what may be the beginning of an answer."""
        self._said = b""
        self._grace: float | None = None
        """The seconds that its ranks have to end, once the launcher is started."""
        self._process: subprocess.Popen[bytes] | None = None
        self._input: asyncio.WriteTransport | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def connect(self, **request: Any) -> dict[str, Any]:
        """Starts the process there; its answer to a first request.

        Raises:
            Problem: there is no ssh, or no answer within `patience`, all tries together.
        """
        until = time.monotonic() + self.patience

        async def attempt() -> dict[str, Any]:
            await self._start_process()
            self.send(**request)
            return await self._answer(until - time.monotonic())

        return await self._until_not_dropped(attempt, until)

    async def _until_not_dropped(
        self, attempt: Callable[[], Coroutine[Any, Any, T]], until: float = math.inf
    ) -> T:
        """Tries again, after a pause each time, until `time.monotonic()` would pass `until`."""
        pauses, dropped = iter(_PAUSES_S), None
        while True:
            try:
                return await attempt()
            except ConnectionDropped as error:
                dropped = error
                pause = random.uniform(0.5, 1.0) * next(pauses, math.inf)
                if pause == math.inf or time.monotonic() + pause > until:
                    raise
            except Problem:
                if dropped and time.monotonic() >= until:  # cut short, and it tells nothing
                    raise dropped from None
                raise
            await self.close()
            await asyncio.sleep(pause)

    async def _start_process(self) -> None:
        nonce = secrets.token_hex(8)
        self._mark = MARK + f"{nonce} ".encode()
        self._said, self._tasks = b"", []
        self.unfinished = dict.fromkeys(self.unfinished, b"")
        self._held = dict(self.unfinished)
        self._answers: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        line = self.host.command(self._module, nonce, self._ssh)
        pipe = subprocess.PIPE
        # Not asyncio's own: it waits for all who hold the output, also when it closes the loop.
        self._process = process = _started(
            line,
            "install OpenSSH's client, or name another program with --ssh",
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,  # the terminal's keys are for this process
        )
        loop = asyncio.get_running_loop()
        self._input, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
        for stream, file in (("stdout", process.stdout), ("stderr", process.stderr)):
            source = asyncio.StreamReader()
            protocol = partial(asyncio.StreamReaderProtocol, source)
            output, _ = await loop.connect_read_pipe(protocol, file)
            self._tasks.append(asyncio.create_task(self._read(stream, source, output)))

    async def open(self, request: Mapping[str, Any], copied: bool) -> None:
        """Starts the process there, and asks what it finds, after the folder was `copied` or not.

        Raises:
            Problem: it could not be started, or something is missing.
        """
        asked = time.time()
        self.found = await self.connect(**request, here=self.here)
        there = self.found["time"]
        self.clock = max(there - time.time(), 0.0) or min(there - asked, 0.0)
        for name, here in versions().items():
            there = self.found["versions"].get(name)
            if there != here:
                do = f"install {name} {here} there, for {sys.executable}, or the other one here"
                raise Problem(f"{name} {there} there, {here} here", do)
        if self.found["missing"]:
            do = "the folder must be on a disk that all machines share, or be sent: --copy"
            if copied:
                do = "--copy sends what is in this folder and not ignored by git"
            raise Problem(self.found["missing"], do)

    async def copy(self, files: bytes | None) -> None:
        """Sends this folder; the one there keeps what else it has.

        Args:
            files: the names of what is sent, each with a zero byte behind it; None: all but what
                .gitignore names.

        Raises:
            Problem: it could not be sent.
        """
        folder = working_folder()
        # A link to a folder there stays a link. An rsync of before 3.2.3 cannot make the folder.
        line = ["rsync", "-azsr", "--keep-dirlinks", "--exclude=.git"]
        line += [f"--rsync-path=mkdir -p {shlex.quote(folder)} && rsync"]
        line += ["-e", shlex.join([*self._ssh, *SSH_OPTIONS])]
        if files is None:
            line += ["--filter=:- .gitignore"]
        else:
            line += ["--from0", "--files-from=-", "--ignore-missing-args"]
        line += [f"{folder}/", f"{self.host.name}:{folder}/"]
        await self._until_not_dropped(partial(self._copy, line, files or b""))

    async def _copy(self, line: Sequence[str], files: bytes) -> None:
        with _temporary(files) as names, _temporary() as said:
            process = self._process = _started(
                line, "install rsync", stdin=names, stderr=said, start_new_session=True
            )
            try:
                await _exited(process)
            finally:
                if process.returncode is None:  # a signal asks this process to end
                    os.killpg(process.pid, signal.SIGTERM)
                    if await _within(_FINISH_S, [_exited(process)]):
                        self.kill()
                        await _exited(process)
            said.seek(0)
            words = said.read().decode(errors="replace")
        if process.returncode:
            advice = f"see whether {working_folder()} can be written on it, and has room"
            raise ssh_failure(self.host, process.returncode, words, self._ssh, advice)

    async def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            Problem: there is none.
        """
        self.send(**request)
        return await self._answer(self.patience)

    async def _answer(self, seconds: float) -> dict[str, Any]:
        answer = None
        with contextlib.suppress(TimeoutError):
            answer = await asyncio.wait_for(self._answers.get(), seconds)
            if answer is None:
                await _within(_FINISH_S, [self.ended()])
        if answer is None:
            said = self._said.decode(errors="replace")
            code = self._process.poll() if self._process else None
            raise ssh_failure(self.host, code, said, self._ssh)
        return answer

    async def listen(self, address: str, port: int, instead: bool = False) -> None:
        """Listens there at a port, or `instead` at a free one; 0: any. The others try the way.

        Raises:
            Problem: the port is taken.
        """
        found = await self.ask(listen=port, instead=instead)
        if "error" in found:
            do = "give another --master-port, or leave it out"
            raise Problem(f"port {port}: {found['error']}", do)
        self.place = (address, int(found["port"]))

    async def reach(self, other: Remote) -> str:
        """Tries the way to a machine that listens; the address there that lies on the way.

        Raises:
            Problem: it is not reached, or by short messages alone.
        """
        found = await self.ask(reach=other.place)
        if found["why"]:
            address, port = other.place
            where = f"{other.host.name} cannot be reached from it at {address}, port {port}"
            do = (
                "a firewall must let them reach each other at all ports; --master-addr and "
                "--master-port give another place of the first; `lockstep doctor --hosts` looks at "
                "all ways"
            )
            if "MTU" in found["why"]:
                do = "set the MTU of their interfaces to what the way carries, as root"
            raise Problem(f"{where}: {found['why']}", do)
        return str(found["own"])

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], keep: bool, grace: float
    ) -> None:
        """Starts the launcher there."""
        self._grace = grace
        self.unfinished = dict.fromkeys(self.unfinished, b"")
        rules = {"environment": dict(environment), "keep": keep, "grace": grace}
        self.send(start=list(arguments), **rules)

    def send(self, **request: Any) -> None:
        """Sends a request, or a sign of life; nothing when nobody is there."""
        if self._runs() and self._input and not self._input.is_closing():
            self._input.write((json.dumps(request) if request else "").encode() + b"\n")

    def _runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def _read(
        self, stream: str, source: asyncio.StreamReader, output: asyncio.ReadTransport
    ) -> None:
        try:
            await self._read_all(stream, source)
        finally:
            output.close()
        await self._take(stream, b"\n" if self.unfinished[stream].strip() else b"")
        if stream == "stdout":
            self._answers.put_nowait(None)

    async def _read_all(self, stream: str, source: asyncio.StreamReader) -> None:
        silent, left, reads = 0.0, _FINISH_S, 0
        while True:
            runs, begun = self._runs(), time.monotonic()
            try:
                patience = _FINISH_S if left > 0 else _FINISH_S / 4
                data = await asyncio.wait_for(source.read(1 << 16), patience)
            except TimeoutError:
                data = None
            waited = time.monotonic() - begun
            if not runs:  # what it has left behind may hold the output open, and write
                left -= waited
                reads += 1
                if reads > _READS or (data is None and left <= 0):
                    break
            if data is None:
                silent += waited
                if self._grace is not None and stream == "stdout" and silent > SILENT_S:
                    self.kill()
                continue
            if not data:
                break
            silent = 0.0
            await self._take(stream, data)
        self._held[stream] = b""  # an answer that does not come whole

    async def _take(self, stream: str, data: bytes) -> None:
        """Shows the lines that are finished, but for the answers among them."""
        text = self.unfinished[stream] + self._held[stream] + data
        while (at := text.find(self._mark)) >= 0 and (end := text.find(b"\n", at)) >= 0:
            answer = json.loads(text[at + len(self._mark) : end])
            text = text[:at] + text[end + 1 :]
            if answer != ALIVE:
                self.code = answer.get("exit")
                self._answers.put_nowait(answer)
        at = text.rfind(self._mark[:1])
        if at < 0 or not self._mark.startswith(text[at : at + len(self._mark)]):
            at = len(text)
        self._held[stream] = text[at:]
        lines, self.unfinished[stream] = finished_lines(text[:at])
        if self._grace is None:
            if stream == "stderr":
                self._said = (self._said + data)[-_MAX_KEPT:]
            return
        for line in lines:
            if self._show is not None:
                await self._show(self.host, stream, line)

    async def ended(self) -> None:
        """Waits until the launcher there has ended, or the connection has."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._process:
            await _exited(self._process)

    def kill(self) -> None:
        """Ends the connection at once."""
        if self._process and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                # With a ProxyCommand's process; here the launcher is in the group, and ends itself.
                (os.kill if self.here else os.killpg)(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Ends what still runs there, and the connection."""
        if self._input:
            self._input.close()
        patience = _FINISH_S if self._grace is None else _END_S + self._grace
        if await _within(patience, [self.ended()]):
            self.kill()
            await _within(2 * _FINISH_S, [self.ended()])
        for task in self._tasks:
            task.cancel()


def _started(line: Sequence[str], do: str, **options: Any) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(line, **options)
    except OSError as error:
        if error.errno == errno.EMFILE:
            do = "allow more open files here: `ulimit -n`"
        raise Problem(f"{line[0]} cannot be started here: {error.strerror}", do) from None


@contextlib.contextmanager
def _temporary(content: bytes = b"") -> Iterator[IO[bytes]]:
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.TemporaryFile())
            file.write(content)
            file.seek(0)
        except OSError as error:
            found = f"no file for rsync can be written here: {error.strerror}"
            raise Problem(found, "make room in /tmp, or set TMPDIR to another folder") from None
        yield file


async def _exited(process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        await asyncio.sleep(_TICK_S)


def _files_of_git() -> bytes | None:
    """What git knows or does not ignore of this folder, each name with a zero byte behind it.

    None: there is no git, or this is no working tree of its.
    """
    line = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(line, capture_output=True)
    except FileNotFoundError:
        return None
    # Of a folder that it ignores as a whole git lists nothing.
    return done.stdout if done.stdout and done.returncode == 0 else None


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


async def on_all(
    remotes: Sequence[Remote], work: Callable[[Remote], Coroutine[Any, Any, T]]
) -> tuple[dict[Remote, T], dict[Remote, Problem]]:
    """What the work gives for each machine, or why it fails, all at the same time."""
    found: dict[Remote, T] = {}
    failed: dict[Remote, Problem] = {}
    done = await asyncio.gather(*map(work, remotes), return_exceptions=True)
    for remote, result in zip(remotes, done, strict=True):
        if isinstance(result, Problem):
            failed[remote] = result
        elif isinstance(result, BaseException):
            raise result
        else:
            found[remote] = result
    return found, failed


class _Run:
    def __init__(self, spec: HostsSpec, say: Callable[[str], None]) -> None:
        self._spec, self._say = spec, say
        self._grace = spec.shutdown_timeout_s
        self._sinks = sinks(os.environ)
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
            self._main = None
            await asyncio.gather(*(remote.close() for remote in self._remotes))
            beating.cancel()
            await self._flush()

    def _on_signal(self, name: str) -> None:
        again = self._asked_to_end is not None
        if name != "SIGUSR1":
            self._asked_to_end = signal.Signals[name]
        if self._running:
            self._send(name, self._remotes)
        elif name != "SIGUSR1" and self._main and not again:
            self._main.cancel()
        elif name != "SIGUSR1":  # it takes too long
            for remote in self._remotes:
                remote.kill()

    async def _beat(self) -> None:
        """Tells the machines that this one is there, and lets the terminal take what waits."""
        while True:
            for remote in self._remotes:
                if remote.found:
                    remote.send()
            for _ in range(int(HEARTBEAT_S / _TICK_S)):
                await asyncio.sleep(_TICK_S)
                self._draw()

    async def _show(self, host: Host, stream: str, line: bytes) -> None:
        """Prints a line of a machine, behind its name.

        All launchers say what has failed first; what another one has said is not said again.
        """
        said = b"consequences" if line.startswith(b"consequences: ") else line
        sink = self._sinks[stream]
        launchers_own = stream == "stderr" and line.strip() and not line.startswith(b"[rank")
        several = len(self._remotes) > 1  # a rank that is alone has no prefix
        if several and launchers_own and self._told.setdefault(said, host) is not host:
            return
        sink.write(f"[{host.name}] ".encode() + line + b"\n", self._row(sink))
        while len(sink.waiting) > _MAX_WAITING and self._asked_to_end is None:
            await asyncio.sleep(_TICK_S)

    def _row(self, sink: Sink) -> bytes:
        """What stands under the lines on a terminal: what a machine has not finished yet."""
        if sink.terminal:
            for remote in self._remotes:
                for stream, text in remote.unfinished.items():
                    if self._sinks[stream] is sink and (state := last_state(text)).strip():
                        return sink.cut(f"[{remote.host.name}] ".encode() + state)
        return b""

    def _draw(self) -> None:
        for sink in self._sinks.values():
            sink.draw(self._row(sink))
            sink.flush()

    async def _flush(self) -> None:
        deadline = FlushDeadline(self._sinks.values(), self._asked_to_end is not None)
        self._draw()
        while not deadline.over():
            await asyncio.sleep(_TICK_S)
            self._draw()
        if lost := self._sinks["stdout"].lost:
            self._say(lost)

    async def _on_all(
        self, remotes: Sequence[Remote], work: Callable[[Remote], Coroutine[Any, Any, Any]]
    ) -> None:
        """Does it for all machines at the same time.

        Raises:
            HostError: it failed for some of them.
        """
        _, failed = await on_all(remotes, work)
        if problems := [(remote.host.name, *why.args) for remote, why in failed.items()]:
            names = ", ".join(name for name, _, _ in problems)
            many = len(problems) > 1
            raise HostError(
                f"--hosts: a run on {names}",
                "; ".join(f"{name}: {found}" if many else found for name, found, _ in problems),
                "; ".join(dict.fromkeys(do for _, _, do in problems)),
            )

    async def _prepare(self) -> None:
        """Starts the launchers on all machines.

        Raises:
            HostError: the run cannot be started on some of them.
        """
        spec, remotes = self._spec, self._remotes
        if spec.copy:
            files = await asyncio.to_thread(_files_of_git)
            await self._on_all([r for r in remotes if not r.here], lambda r: r.copy(files))
        script = None if spec.module else spec.script[0]
        request = {"folder": working_folder(), "script": script}
        await self._on_all(remotes, lambda remote: remote.open(request, spec.copy))
        names: dict[str, str] = {}
        for remote in remotes:
            first = names.setdefault(remote.found["machine"], remote.host.name)
            if first is not remote.host.name:
                self._say(f"{first} and {remote.host.name} are one machine: each uses its devices")
            if abs(remote.clock) > _CLOCK_S:
                where = "ahead" if remote.clock > 0 else "behind"
                self._say(
                    f"the clock of {remote.host.name} is {abs(remote.clock):.0f} s {where}: which "
                    "rank failed first may be told wrong; `timedatectl set-ntp true` there, as root"
                )
        address, port = "", 0
        if len(remotes) > 1:
            address, port = await self._meeting_place()
        environment = {
            TOKEN_VARIABLE: os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(32),
            **spec.environment,
        }
        self._running = True
        for number, remote in enumerate(remotes):
            arguments = spec.launcher_arguments(number, address, port)
            remote.start(arguments, environment, spec.keep, self._grace)
        place = f"; they meet at {address}, port {port}" if address else ""
        all_of_them = ", ".join(host.name for host in spec.hosts)
        self._say(f"{count_noun(len(remotes), 'host')}: {all_of_them}{place}")

    async def _meeting_place(self) -> tuple[str, int]:
        """The address and port of the first machine at which all others have reached it.

        Some of the ways between the others are tried too: Gloo connects all ranks with each other.
        """
        spec, remotes = self._spec, self._remotes
        address = spec.torchrun_flag("--master-addr") or self._address()
        given = spec.torchrun_flag("--master-port")
        first, *others = remotes

        async def meet(remote: Remote) -> None:
            await remote.listen(await remote.reach(first), 0)

        async def reach_next(remote: Remote) -> None:
            number = remotes.index(remote)
            for other in [*remotes[number + 1 :], *remotes[:number]][:NUM_NEIGHBORS_TRIED]:
                await remote.reach(other)

        await self._on_all(
            [first],
            lambda remote: remote.listen(address, int(given or DEFAULT_MASTER_PORT), given is None),
        )
        await self._on_all(others, meet)
        if "GLOO_SOCKET_IFNAME" not in spec.environment:  # with it Gloo takes other ways
            await self._on_all(remotes, reach_next)
        return first.place

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
        lost = failed = False
        ends = {asyncio.create_task(remote.ended()): remote for remote in self._remotes}
        while ends:
            patience = _OTHERS_S + self._grace if failed else None
            over, _ = await asyncio.wait(
                ends, timeout=patience, return_when=asyncio.FIRST_COMPLETED
            )
            for task in over:
                remote = ends.pop(task)
                if remote.code is None:
                    lost = True
                    self._say(f"the connection to {remote.host.name} is lost" + self._then())
                    codes += [] if self._spec.keep else [EXIT_LOST_RANK]
                else:
                    codes.append(remote.code)
            if any(codes) and not failed:
                failed = True
                self._send(_FAILED_ELSEWHERE, ends.values())
            elif not over:
                self._send("SIGTERM", ends.values())
                await _within(_END_S + self._grace, [remote.ended() for remote in ends.values()])
                break
        return next(filter(None, codes), EXIT_LOST_RANK if lost and not codes else 0)

    def _send(self, name: str, remotes: Iterable[Remote]) -> None:
        for remote in remotes:
            remote.send(signal=name)

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
    resolve_all(spec.hosts)
    return asyncio.run(_Run(spec, say).run())
