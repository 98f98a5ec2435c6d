"""The ranks' standard output and error: every byte to a file, and the chosen ones to the console.

One thread of the launcher reads them all. It is started after the zygote was forked, and never
waits for the console alone: while that takes nothing, the ranks' streams are still read (up to
`_MAX_WAITING` bytes, then the ranks wait as they would for any slow terminal).

The descriptors between the ranks and the console: what is read, and what is written to.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import pty
import select
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from string import Template
from typing import IO

from lockstep.errors import SettingError
from lockstep.launcher.screen import Composer, Lines, Screen, Sheet, Source

STREAMS = ("stdout", "stderr")

_PREFIX = "[rank ${rank}] "
_MAX_WAITING = 4 << 20
_TICK_S = 0.05
_SIZE_EVERY_S = 1.0
_FINISH_S = 2.0
_TAIL_BYTES = 1 << 16


def console_for(flags: argparse.Namespace, nproc: int) -> Console:
    """The console that torchrun's flags ask for.

    Args:
        flags: torchrun's.
        nproc: ranks on this machine.

    Raises:
        SettingError: a value that torchrun refuses.
    """
    shown = choose_streams(nproc, flags.redirects, flags.tee, flags.local_ranks_filter)
    filters = {name: getattr(flags, f"duplicate_{name}_filters", None) or () for name in STREAMS}
    prefix = os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") or _PREFIX
    return Console(shown, filters, Template(prefix).safe_substitute(role_name=flags.role))


def choose_streams(
    nproc: int, redirects: str = "0", tee: str = "0", local_ranks_filter: str = ""
) -> dict[int, frozenset[str]]:
    """Which streams of which local rank reach the console, from torchrun's flags of these names.

    Without flags all do. `redirects` keeps a stream off the console, `tee` puts it back, and the
    filter names the ranks that are shown at all; see `torch.distributed.elastic.multiprocessing`.

    Raises:
        SettingError: a value that torchrun refuses.
    """
    from torch.distributed.elastic.multiprocessing import Std, to_map

    maps = []
    for flag, text in (("--redirects", redirects), ("--tee", tee)):
        try:
            maps.append(to_map(Std.from_str(text), nproc))
        except ValueError:
            raise SettingError(
                f"{flag} {text}",
                "neither one of 0 to 3 nor a list such as 0:1,1:3",
                "0: none, 1: stdout, 2: stderr, 3: both; RANK:NUMBER for single ranks",
            ) from None
    only = _ranks_of(local_ranks_filter)
    bits = {"stdout": Std.OUT, "stderr": Std.ERR}
    return {
        rank: frozenset(
            name
            for name, bit in bits.items()
            if (bit & maps[1][rank] or not bit & maps[0][rank]) and (not only or rank in only)
        )
        for rank in range(nproc)
    }


def _ranks_of(text: str) -> set[int]:
    try:
        return {int(part) for part in text.split(",")} if text else set()
    except ValueError:
        raise SettingError(
            f"--local-ranks-filter {text}", "not a list of ranks", "write such as 0,2"
        ) from None


def tail(folder: Path, count: int, stream: str = "stderr") -> list[str]:
    """The last lines of a rank that are not blank, as a terminal would have shown them."""
    try:
        with open(folder / f"{stream}.log", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            data = file.read()
    except OSError:
        return []
    sheet = Sheet(colour=False)
    lines = [line.decode(errors="replace") for line in [*sheet.feed(data), *sheet.close()]]
    return [line for line in lines if line.strip()][-count:]


class Console:
    """Reads the streams of all ranks, in a thread, within a `with` block.

    Args:
        shown: by local rank the streams that reach the console; None: all do.
        filters: for `stdout` and `stderr` texts; lines shown on the console that hold one of them
            are also written to `filtered_stdout.log` in the attempt's folder.
        prefix: of each line, with `${rank}` and `${local_rank}` (torchrun's template).
        environ: looked at for NO_COLOR and TERM.
        stdout: where the ranks' standard output goes.
        stderr: where their standard error and the launcher's own lines go.
    """

    def __init__(
        self,
        shown: Mapping[int, Collection[str]] | None = None,
        filters: Mapping[str, Collection[str]] | None = None,
        prefix: str = _PREFIX,
        *,
        environ: Mapping[str, str] = os.environ,
        stdout: int = 1,
        stderr: int = 2,
    ) -> None:
        self._shown, self._filters = shown, filters or {}
        self._prefix = Template(prefix)
        first, second = Sink(stdout, environ), Sink(stderr, environ)
        if first.identity == second.identity:
            second = first  # one cursor: what is drawn for the one would be in the way of the other
        self._sinks = {"stdout": first, "stderr": second}
        self._readers: list[Reader] = []
        self._new: deque[Reader] = deque()
        self._lines: deque[str] = deque()
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._waker, False)
        self._drains: list[threading.Event] = []
        self._streams_until = 0.0
        self._stop_at: float | None = None
        self._next_size = 0.0
        self._thread = threading.Thread(target=self._run, name="lockstep-logs", daemon=True)

    def __enter__(self) -> Console:
        """Starts the thread; no process may be forked without exec from now on."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Drains the streams, gives the console 2 s to take the rest, and ends the thread."""
        self.drain()
        self._stop_at = time.monotonic() + _FINISH_S
        self._wake_up()
        self._thread.join()
        os.close(self._wake)
        os.close(self._waker)

    def open(
        self, rank: int, local_rank: int, folder: Path, *, alone: bool = False
    ) -> tuple[int, int, int]:
        """Makes a rank's standard output and error, and a copy of our standard input.

        Where the console is a terminal they are terminals too, so that bars and colours survive;
        those of a rank that is alone are then one terminal, and `stderr.log` is `stdout.log`.

        Args:
            rank: in the whole run.
            local_rank: on this machine.
            folder: of the rank; it exists.
            alone: the only rank of the run: no prefix, and all it writes is passed on as it is.

        Returns:
            Descriptors for the rank: input, output, error. The caller closes them once the rank
            has them.
        """
        prefix = self._prefix.safe_substitute(rank=rank, local_rank=local_rank)
        source = Source(rank, "" if alone else prefix, alone)
        shown = STREAMS if self._shown is None else self._shown.get(local_rank, ())
        first, second = self._sinks.values()
        if alone and first is second and first.terminal and len(shown) == len(STREAMS):
            # Two would lose the order in which a bar and the lines above it were written.
            output = self._open_stream("stdout", source, folder, first)
            (folder / "stderr.log").symlink_to("stdout.log")
            error = os.dup(output)
        else:
            output, error = (
                self._open_stream(name, replace(source), folder, sink if name in shown else None)
                for name, sink in self._sinks.items()
            )
        self._wake_up()
        return _standard_input(), output, error

    def _open_stream(self, name: str, source: Source, folder: Path, sink: Sink | None) -> int:
        """The rank's end of a stream; the other one is read from now on."""
        like = self._sinks[name]
        ours, theirs = open_terminal(*_room(source, like)) if like.terminal else os.pipe()
        os.set_blocking(ours, False)
        texts = self._filters.get(name, ())
        self._new.append(Reader(name, ours, source, sink, folder, texts))
        return theirs

    def say(self, text: str) -> None:
        """Writes lines of the launcher's own, above what the ranks draw; from any thread."""
        self._lines.append(f"lockstep: {text}")
        if self._thread.is_alive():
            self._wake_up()
        else:
            self._say_all()

    def drain(self, timeout: float = 2.0) -> None:
        """Waits until all streams have ended, as they do with their ranks.

        Args:
            timeout: seconds after which streams that are still held open, by a process which a
                rank has left behind, are read one last time and closed.
        """
        done = threading.Event()
        self._streams_until = time.monotonic() + timeout
        self._drains.append(done)
        if self._thread.is_alive():
            self._wake_up()
            done.wait()

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it is about to wake up
            os.write(self._waker, b".")

    def _run(self) -> None:
        while not self._over():
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            sinks = set(self._sinks.values())
            full = any(len(sink.waiting) > _MAX_WAITING for sink in sinks)
            readers = {r.descriptor: r for r in self._readers if not (full and r.sink)}
            for descriptor in readers:
                poll.register(descriptor, select.POLLIN)
            for sink in sinks:
                if sink.waiting:
                    poll.register(sink.descriptor, select.POLLOUT)
            for descriptor, _ in poll.poll(self._patience() * 1000):
                if descriptor == self._wake:
                    self._take_orders()
                elif descriptor in readers:
                    self._read(readers[descriptor])
            self._tick()

    def _over(self) -> bool:
        if self._stop_at is None:
            return False
        waiting = any(sink.waiting for sink in self._sinks.values())
        return not waiting or time.monotonic() >= self._stop_at

    def _patience(self) -> float:
        restless = any(sink.composer.restless for sink in self._sinks.values())
        return _TICK_S if restless or self._drains or self._stop_at is not None else _SIZE_EVERY_S

    def _take_orders(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        while self._new:
            self._readers.append(self._new.popleft())
        self._say_all()

    def _say_all(self) -> None:
        sink = self._sinks["stderr"]
        while self._lines:
            sink.put(sink.composer.say(self._lines.popleft()))

    def _read(self, reader: Reader) -> None:
        data = reader.read()
        if data is None:
            self._end(reader)
        elif data:
            reader.keep(data, lambda text: self._lines.append(f"lockstep: {text}"))
            if reader.sink is not None:
                now = time.monotonic()
                reader.sink.put(reader.sink.composer.feed(reader.source, data, now))

    def _read_last(self, reader: Reader) -> None:
        """Takes what is left in a stream that somebody still holds open."""
        limit = time.monotonic() + _TICK_S
        while reader in self._readers and time.monotonic() < limit:
            poll = select.poll()
            poll.register(reader.descriptor, select.POLLIN)
            if not poll.poll(0):
                break
            self._read(reader)
        if reader in self._readers:
            self._end(reader)

    def _end(self, reader: Reader) -> None:
        self._readers.remove(reader)
        if reader.sink is not None:
            reader.sink.put(reader.sink.composer.close(reader.source))
        reader.close()

    def _tick(self) -> None:
        now = time.monotonic()
        if now >= self._next_size:
            self._next_size = now + _SIZE_EVERY_S
            for sink in set(self._sinks.values()):
                if sink.measure():
                    self._pass_on_size(sink)
        for sink in set(self._sinks.values()):
            sink.put(sink.composer.tick(now))
            sink.flush()
        self._say_all()
        if self._drains and now >= self._streams_until:
            for reader in list(self._readers):
                self._read_last(reader)
        if self._drains and not (self._readers or self._new):
            for done in self._drains:
                done.set()
            self._drains.clear()

    def _pass_on_size(self, sink: Sink) -> None:
        for reader in self._readers:
            if self._sinks[reader.name] is sink:
                set_size(reader.descriptor, *_room(reader.source, sink))


def _room(source: Source, sink: Sink) -> tuple[int, int]:
    """Columns and rows of the terminal that are left for a rank's own rows."""
    columns, rows = sink.size
    return columns - (len(source.prefix) + 1 if source.prefix else 0), rows


def _standard_input() -> int:
    try:
        return os.dup(0)
    except OSError:  # the launcher was started without one
        return os.open(os.devnull, os.O_RDONLY)


_READ_BYTES = 1 << 16
_WRITE_BYTES = 4096
"""A pipe that poll() calls writable takes so many bytes at once (PIPE_BUF, pipe(7))."""


class Sink:
    """A terminal, pipe or file that the launcher itself writes to.

    Args:
        descriptor: 1 or 2.
        environ: looked at for NO_COLOR and TERM.
    """

    def __init__(self, descriptor: int, environ: Mapping[str, str]) -> None:
        self.descriptor = descriptor
        self.waiting = bytearray()
        self._gone = False
        self.size = (80, 24)
        self.terminal = False
        try:
            self.terminal = os.isatty(descriptor) and environ.get("TERM") != "dumb"
            self.identity: object = _identity(descriptor)
        except OSError:  # the launcher was started without it
            self._gone, self.identity = True, None
        self.composer: Composer = Lines()
        if self.terminal:
            self.size = _size_of(descriptor)
            self.screen = Screen(*self.size, colour=not environ.get("NO_COLOR"))
            self.composer = self.screen

    def put(self, data: bytes) -> None:
        """Writes as much as can be written now, and keeps the rest waiting."""
        if data and not self._gone:
            self.waiting += data
            self.flush()

    def flush(self) -> None:
        """Writes what it takes without waiting, a line's end at the end of each piece if it can."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLOUT)
        while self.waiting and poll.poll(0):
            piece = bytes(self.waiting[:_WRITE_BYTES])
            end = piece.rfind(b"\n") + 1 if len(self.waiting) > len(piece) else 0
            try:
                del self.waiting[: os.write(self.descriptor, piece[: end or None])]
            except BlockingIOError:
                return
            except OSError:  # closed: the reader of a pipe has ended, the terminal is gone
                self._gone = True
                self.waiting.clear()

    def measure(self) -> bool:
        """Takes the terminal's new size, if it has one."""
        size = _size_of(self.descriptor) if self.terminal else self.size
        changed, self.size = size != self.size, size
        if changed:
            self.screen.resize(*size)
        return changed


class Reader:
    """One stream of one rank.

    Args:
        name: `stdout` or `stderr`.
        descriptor: our end of it.
        source: whose it is, for the console.
        sink: where it is shown; None: nowhere.
        folder: of the rank.
        filters: texts; shown lines that hold one also go to `filtered_stdout.log` beside `folder`.
    """

    def __init__(
        self,
        name: str,
        descriptor: int,
        source: Source,
        sink: Sink | None,
        folder: Path,
        filters: Collection[str],
    ) -> None:
        self.name, self.descriptor, self.source, self.sink = name, descriptor, source, sink
        self._filters = [text.encode() for text in filters] if sink else []
        self._unfinished = b""
        self._log: IO[bytes] | None = open(folder / f"{name}.log", "ab", buffering=0)  # noqa: SIM115
        self._filtered = folder.parent / f"filtered_{name}.log"
        if filters:
            self._filtered.touch()

    def read(self) -> bytes | None:
        """What there is; None at the end of the stream."""
        try:
            return os.read(self.descriptor, _READ_BYTES) or None
        except BlockingIOError:
            return b""
        except OSError:  # EIO: Linux's end of a pseudo-terminal
            return None

    def keep(self, data: bytes, say: Callable[[str], None]) -> None:
        """Writes the files."""
        try:
            if self._log is not None:
                self._log.write(data)
            if self._filters:
                self._filter(data)
        except OSError as error:
            say(f"rank {self.source.rank}: {self.name}.log ends here: {error.strerror}")
            self.close_log()

    def _filter(self, data: bytes) -> None:
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        wanted = [line for line in lines if any(text in line for text in self._filters)]
        if wanted:
            prefix = self.source.prefix.encode()
            with open(self._filtered, "ab") as file:
                file.write(b"".join(prefix + line + b"\n" for line in wanted))

    def close_log(self) -> None:
        """Writes no more files."""
        if self._log is not None:
            self._log.close()
        self._log, self._filters = None, []

    def close(self) -> None:
        """Closes the files and the stream."""
        self.close_log()
        os.close(self.descriptor)


def _identity(descriptor: int) -> object:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_rdev


def _size_of(descriptor: int) -> tuple[int, int]:
    try:
        columns, rows = os.get_terminal_size(descriptor)
    except OSError:
        return 80, 24
    return columns or 80, rows or 24


def open_terminal(columns: int, rows: int) -> tuple[int, int]:
    """A pseudo-terminal: our end and the rank's.

    Its output processing is off: the console's own terminal does that, and the files hold what the
    rank has written.
    """
    ours, theirs = pty.openpty()
    attributes = termios.tcgetattr(theirs)
    attributes[1] &= ~termios.OPOST
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    set_size(ours, columns, rows)
    return ours, theirs


def set_size(descriptor: int, columns: int, rows: int) -> None:
    """Tells a pseudo-terminal its size, which programs ask for."""
    size = struct.pack("HHHH", rows, max(20, columns), 0, 0)
    with contextlib.suppress(OSError):
        fcntl.ioctl(descriptor, termios.TIOCSWINSZ, size)
