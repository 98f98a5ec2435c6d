"""The ranks' standard output and error: every byte to a file, the chosen ones to the console.

One thread of the launcher reads them all. It is started after the zygote was forked, and never
waits for the console alone: while that takes nothing, the ranks' streams are still read (up to
`_MAX_WAITING` bytes, then the ranks wait as they would for any slow terminal).

The console gets whole lines, each with its rank before it. A progress bar draws its line again
and again after a carriage return, and what counts is the last state. On a terminal one row stands
under the lines: what the lowest rank has not finished yet, such as its bar or a prompt.

What ranks print as an exception ends them is shown once where it is the same but for numbers; for
the others the console says which ranks they are. With hundreds of them the verdict would stand
under thousands of lines.

A rank that is alone has the launcher's terminal itself, and nothing of this is in between.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import math
import os
import re
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import IO

from lockstep.errors import SettingError
from lockstep.run.watch.evidence import Evidence
from lockstep.wording import format_ranks

STREAMS = ("stdout", "stderr")
COLUMNS = "LOCKSTEP_TERMINAL_COLUMNS"
"""Variable of the ranks: the width that they have on the launcher's terminal, if it has one."""

_PREFIX = "[rank ${rank}] "
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_MAX_WAITING = 4 << 20
_MAX_LINE = 1 << 20
_READ_BYTES = 1 << 16
_WRITE_BYTES = 4096
"""A pipe that poll() calls writable takes so many bytes at once (PIPE_BUF, pipe(7))."""
_TICK_S = 0.05
_PATIENCE_S, _HURRY_S = 60.0, 2.0
"""How long a console may take nothing at the end; and all of it, after Ctrl-C."""
_TAIL_BYTES = 1 << 16
_LAST_WORDS_S = 1.0
"""A rank that has written nothing more for so long has said what ended it."""
_NUMBER = re.compile(rb"0x[0-9a-f]+|\d+")
_HEADING = b"Traceback (most recent call last)"

_ERASED = re.compile(rb"\x1b\[2K")
_MOVES = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-ln-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
"""Control sequences that are no colours, and titles: not for a line among those of others."""
_COLOUR = re.compile(rb"\x1b\[[0-9;:]*m")
_UP = b"\x1b[A"


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
    given = getattr(flags, "log_line_prefix_template", "")  # since torch 2.14
    prefix = given or os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") or _PREFIX
    prefix = Template(prefix).safe_substitute(role_name=flags.role, hostname=socket.gethostname())
    return Console(shown, filters, prefix, always_logged=flags.tee != "0")


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
    try:
        only = {int(part) for part in local_ranks_filter.split(",") if local_ranks_filter}
    except ValueError:
        raise SettingError(
            f"--local-ranks-filter {local_ranks_filter}", "not a list of ranks", "write such as 0,2"
        ) from None
    kept_off, put_back = maps
    return {
        rank: frozenset(
            name
            for name, bit in (("stdout", Std.OUT), ("stderr", Std.ERR))
            if (bit & put_back[rank] or not bit & kept_off[rank]) and (not only or rank in only)
        )
        for rank in range(nproc)
    }


def tail(folder: Path, count: int, stream: str = "stderr") -> list[str]:
    """The last lines of a rank that are not blank, as a terminal would have shown them."""
    try:
        with open(folder / f"{stream}.log", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            data = file.read()
    except OSError:
        return []
    return _lines_shown(data)[-count:]


class RecentOutput:
    """The end of a stream, in memory: a log may be deleted, or its disk be full."""

    def __init__(self) -> None:
        self._data = b""

    def add(self, data: bytes) -> None:
        """Takes what the stream brings."""
        self._data = (self._data + data)[-_TAIL_BYTES:]

    def lines(self) -> list[str]:
        """The last lines that are not blank, as a terminal would have shown them."""
        return _lines_shown(self._data)


def _lines_shown(data: bytes) -> list[str]:
    lines = (_COLOUR.sub(b"", last_state(line)) for line in data.split(b"\n"))
    return [line.decode(errors="replace") for line in lines if line.strip()]


def last_state(line: bytes) -> bytes:
    """What is left of a line that was drawn several times, each time after a carriage return."""
    if b"\r" not in line and b"\x1b" not in line:
        return line
    states = _MOVES.sub(b"", _ERASED.sub(b"\r \r", line)).split(b"\r")
    return next((state for state in reversed(states) if state), b"")


def finished_lines(text: bytes) -> tuple[list[bytes], bytes]:
    """The finished lines as a terminal would show them, and what there is of the next one.

    Of a line that is drawn again and again no more than its last state is kept, and one of more
    than a megabyte counts as finished.
    """
    *lines, rest = text.split(b"\n")
    rest = rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :]
    if len(rest) > _MAX_LINE:
        lines.append(rest)
        rest = b""
    # Where several bars are drawn, the cursor goes up again after the lower one.
    return [last_state(line) for line in lines if not line.endswith(_UP)], rest


class Console:
    """Reads the streams of all ranks, in a thread, within a `with` block.

    Args:
        shown: by local rank the streams that reach the console; None: all do.
        filters: for `stdout` and `stderr` texts; lines shown on the console that hold one of them
            are also written to `filtered_stdout.log` in the attempt's folder.
        prefix: of each line, with `${rank}` and `${local_rank}` (torchrun's template).
        always_logged: a rank that is alone has files too, and so not the terminal itself.
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
        always_logged: bool = False,
        environ: Mapping[str, str] = os.environ,
        stdout: int = 1,
        stderr: int = 2,
    ) -> None:
        self._shown, self._filters = shown, filters or {}
        self._prefix, self._always_logged = Template(prefix), always_logged
        self._sinks = sinks(environ, stdout, stderr)
        self._streams: list[_Stream] = []
        self._lines: deque[str] = deque()
        self._raised: dict[bytes, list[int]] = {}
        """By what ranks have printed as they ended, without its numbers: which ranks."""
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._waker, False)
        self._drained = threading.Event()
        self._drained.set()
        self._draw_at = self._drain_until = math.inf
        self._deadline: FlushDeadline | None = None
        self.hurry = False
        """The run was asked to end: no slow console is waited for."""
        self._thread = threading.Thread(target=self._run, name="lockstep-logs", daemon=True)

    def __enter__(self) -> Console:
        """Starts the thread; no process may be forked without exec from now on."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Drains the streams, waits while the console takes the rest, and ends the thread."""
        self.drain()
        self._deadline = FlushDeadline(self._sinks.values(), self.hurry)
        self._wake_up()
        self._thread.join()
        if lost := self._sinks["stdout"].lost:
            self._lines.append(f"lockstep: {lost}")
            self._announce_all()
        os.close(self._wake)
        os.close(self._waker)

    @property
    def environment(self) -> dict[str, str]:
        """What ranks that are several are to know: they see pipes, where a terminal may be."""
        sink = self._sinks["stdout"]
        prefix = self._prefix.safe_substitute(rank=0, local_rank=0)
        return {COLUMNS: str(sink.columns - len(prefix))} if sink.terminal else {}

    def open(
        self,
        rank: int,
        local_rank: int,
        folder: Path,
        *,
        alone: bool = False,
        error: Path | None = None,
        recent: RecentOutput | None = None,
    ) -> tuple[int, int, int]:
        """Makes a rank's standard output and error, and a copy of our standard input.

        Args:
            rank: in the whole run.
            local_rank: on this machine.
            folder: of the rank; it exists.
            alone: the only rank of the run. It has the terminal itself where there is one and the
                stream is shown; elsewhere all it writes is passed on as it is, without a prefix.
            error: the file in which it writes down the exception that ends it; None: that of its
                folder.
            recent: gets the end of its standard error.

        Returns:
            Descriptors for the rank: input, output, error. The caller closes them once the rank
            has them.
        """
        shown = STREAMS if self._shown is None else self._shown.get(local_rank, ())
        prefix = self._prefix.safe_substitute(rank=rank, local_rank=local_rank)
        theirs = []
        for name, sink in self._sinks.items():
            if alone and name in shown and sink.is_tty and not self._always_logged:
                sink.shared = True
                theirs.append(os.dup(sink.descriptor))
                continue
            ours, end = os.pipe()
            os.set_blocking(ours, False)
            theirs.append(end)
            self._streams.append(
                _Stream(
                    rank,
                    "" if alone else prefix,
                    ours,
                    sink if name in shown else None,
                    folder / f"{name}.log",
                    [text.encode() for text in self._filters.get(name, ())],
                    error or Evidence.in_folder(folder).error,
                    recent if name == "stderr" else None,
                )
            )
        self._wake_up()
        return _standard_input(), theirs[0], theirs[1]

    def announce(self, text: str) -> None:
        """Writes lines of the launcher's own, above what the ranks draw; from any thread."""
        self._lines.append(f"lockstep: {text}")
        if self._thread.is_alive():
            self._wake_up()
        else:
            self._announce_all()

    def drain(self, timeout: float = 2.0) -> None:
        """Waits until all streams have ended, as they do with their ranks.

        Args:
            timeout: seconds after which streams that are still held open, by a process which a
                rank has left behind, are read one last time and closed.
        """
        if self._thread.is_alive():
            self._drained.clear()
            self._drain_until = time.monotonic() + timeout
            self._wake_up()
            self._drained.wait()

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it is about to wake up
            os.write(self._waker, b".")

    def _run(self) -> None:
        sinks = set(self._sinks.values())
        while self._deadline is None or not self._deadline.over():
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            full = any(len(sink.waiting) > _MAX_WAITING for sink in sinks)
            readable = {s.descriptor: s for s in self._streams if not (full and s.sink)}
            for descriptor in readable:
                poll.register(descriptor, select.POLLIN)
            for sink in sinks:
                if sink.waiting:
                    poll.register(sink.descriptor, select.POLLOUT)
            soon = min(self._draw_at, self._drain_until) < math.inf or self._deadline is not None
            soon = soon or any(stream.last_words for stream in self._streams)
            for descriptor, _ in poll.poll(_TICK_S * 1000 if soon else None):
                if descriptor == self._wake:
                    os.read(self._wake, 4096)
                elif descriptor in readable:
                    self._read(readable[descriptor])
            self._tick(sinks)

    def _announce_all(self) -> None:
        sink = self._sinks["stderr"]
        while self._lines:
            text = self._lines.popleft().encode(errors="replace") + b"\n"
            begin = b"\n" if sink.mid_line or sink.shared else b""
            sink.write(begin + text, self._row(sink))
            sink.mid_line = False

    def _read(self, stream: _Stream) -> None:
        data = stream.read()
        if data is None:
            self._end(stream)
            return
        lines = stream.lines_of(data)
        if stream.recent is not None:
            stream.recent.add(data)
        try:
            stream.keep(data, lines)
        except OSError as error:
            name = stream.close_files()
            self._lines.append(f"lockstep: rank {stream.rank}: {name} ends here: {error.strerror}")
        if stream.sink is None:
            return
        if stream.prefix:
            self._show(stream, stream.sink, stream.held_back(lines))
        else:
            stream.sink.write(data)
            stream.sink.mid_line = not data.endswith(b"\n")
        if stream.sink.terminal:
            self._draw_at = min(self._draw_at, time.monotonic() + _TICK_S)

    def _show(self, stream: _Stream, sink: Sink, lines: list[bytes]) -> None:
        if lines:
            mark = sink.mark(stream)
            end = b"\x1b[0m\n" if sink.terminal else b"\n"
            shown = (line + (end if b"\x1b" in line else b"\n") for line in lines)
            sink.write(b"".join(mark + line for line in shown), self._row(sink))

    def _show_once(self, stream: _Stream) -> None:
        """Shows what a rank has printed as it ended, unless another has printed the same."""
        lines, stream.last_words = stream.last_words, []
        if lines and stream.sink is not None:
            ranks = self._raised.setdefault(_NUMBER.sub(b"", b"\n".join(lines)), [])
            ranks.append(stream.rank)
            self._show(stream, stream.sink, lines if len(ranks) == 1 else [])

    def _say_who_else(self) -> None:
        """Once all streams have ended, and this is waited for."""
        if self._drained.is_set():
            return
        for first, *others in self._raised.values():
            if others:
                self._lines.append(
                    f"lockstep: {format_ranks(others)} ended with the same as rank {first} but for "
                    "numbers; it is in their logs"
                )
        self._raised.clear()
        self._announce_all()

    def _row(self, sink: Sink) -> bytes:
        """What is unfinished, of the lowest rank, as one row of the terminal."""
        if not sink.terminal:
            return b""
        streams = (s for s in self._streams if s.sink is sink and s.prefix and s.state.strip())
        first = min(streams, key=lambda stream: stream.rank, default=None)
        return sink.cut(sink.mark(first) + first.state) if first else b""

    def _end(self, stream: _Stream) -> None:
        self._streams.remove(stream)
        if stream.sink is not None:
            rest = [stream.state] if stream.prefix and stream.state.strip() else []
            self._show(stream, stream.sink, stream.held_back(rest))
            self._show_once(stream)
            stream.sink.draw(self._row(stream.sink))
        stream.close_files()
        os.close(stream.descriptor)

    def _tick(self, sinks: Collection[Sink]) -> None:
        now = time.monotonic()
        if now >= self._draw_at:
            self._draw_at = math.inf
            for sink in sinks:
                sink.draw(self._row(sink))
        for stream in self._streams:
            if now >= stream.last_read + _LAST_WORDS_S:
                self._show_once(stream)
        for sink in sinks:
            sink.flush()
        self._announce_all()
        if now >= self._drain_until:  # what is left in streams that somebody still holds open
            for stream in list(self._streams):
                self._read(stream)
                if stream in self._streams:
                    self._end(stream)
        if not self._streams:
            self._drain_until = math.inf
            self._say_who_else()
            self._drained.set()


def _standard_input() -> int:
    try:
        return os.dup(0)
    except OSError:  # the launcher was started without one
        return os.open(os.devnull, os.O_RDONLY)


class Sink:
    """A terminal, pipe or file that the launcher itself writes to.

    Args:
        descriptor: 1 or 2.
        environ: looked at for NO_COLOR and TERM.
    """

    def __init__(self, descriptor: int, environ: Mapping[str, str]) -> None:
        self.descriptor = descriptor
        self.waiting = bytearray()
        self.shared = False
        """A rank writes to it as well."""
        self.mid_line = False
        """The last that was passed on does not end its line."""
        self._row = b""
        """What stands under the lines."""
        self._error: str | None = None
        self._colour = not environ.get("NO_COLOR")
        try:
            found = os.fstat(descriptor)
        except OSError:  # the launcher was started without it
            self._gone, self.is_tty, self.identity = True, False, None
        else:
            self._gone, self.is_tty = False, os.isatty(descriptor)
            self.identity = (found.st_dev, found.st_ino, found.st_rdev)
        self.terminal = self.is_tty and environ.get("TERM") != "dumb"

    @property
    def columns(self) -> int:
        """Of the terminal, but for the last one: some wrap when that is written."""
        try:
            return max(20, os.get_terminal_size(self.descriptor).columns or 80) - 1
        except OSError:
            return 79

    def mark(self, stream: _Stream) -> bytes:
        """A stream's prefix; on a terminal each rank has its colour."""
        name = stream.prefix.rstrip()
        if not (self.terminal and self._colour):
            return stream.prefix.encode()
        colour = _COLOURS[stream.rank % len(_COLOURS)]
        return f"\x1b[{colour}m{name}\x1b[0m{stream.prefix[len(name) :]}".encode()

    def cut(self, row: bytes) -> bytes:
        """As much of a text as one row takes, with its colours."""
        from rich.console import Console as Rich
        from rich.text import Text

        rich = Rich(
            width=self.columns,
            color_system="truecolor",
            force_terminal=True,
            no_color=not self._colour,
        )
        with rich.capture() as captured:
            text = Text.from_ansi(row.decode(errors="replace"))
            rich.print(text, end="", no_wrap=True, overflow="crop")
        return captured.get().encode()

    def write(self, lines: bytes, row: bytes = b"") -> None:
        """Puts whole lines above the row; in one piece, without flicker."""
        if not self._gone:
            self.waiting += (b"\r\x1b[K" if self._row else b"") + lines + row
            self._row = row
            self.flush()

    def draw(self, row: bytes) -> None:
        """Puts another row in the place of the one that stands there."""
        if row != self._row:
            self.write(b"", row)

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
            except OSError as error:
                # Mostly closed: the reader of a pipe has ended, the terminal is gone.
                if error.errno not in (errno.EPIPE, errno.EIO):
                    self._error = error.strerror
                self._gone = True
                self.waiting.clear()

    @property
    def lost(self) -> str:
        """What somebody who reads it misses, in words; empty: nothing."""
        if self._error:
            return f"the output ends early: {self._error}"
        left = len(self.waiting)
        return f"the last {left} bytes of output were not taken here" if left else ""


class FlushDeadline:
    """How long sinks are waited for that have not taken all: while they take some each minute.

    In a `hurry`, for 2 s: they may be a terminal on a slow line.
    """

    def __init__(self, sinks: Collection[Sink], hurry: bool = False) -> None:
        self._sinks, self._hurry, self._waiting = sinks, hurry, math.inf
        self._stop_at = time.monotonic() + (_HURRY_S if hurry else _PATIENCE_S)

    def over(self) -> bool:
        """Whether they have taken all, or are given up; asked again and again."""
        waiting, now = sum(len(sink.waiting) for sink in self._sinks), time.monotonic()
        if waiting < self._waiting and not self._hurry:
            self._waiting, self._stop_at = waiting, now + _PATIENCE_S
        return not waiting or now >= self._stop_at


def sinks(environ: Mapping[str, str], stdout: int = 1, stderr: int = 2) -> dict[str, Sink]:
    """By stream; one for both where they go to the same place, so that one row stands there."""
    first, second = Sink(stdout, environ), Sink(stderr, environ)
    return {"stdout": first, "stderr": first if first.identity == second.identity else second}


@dataclass(eq=False)
class _Stream:
    """One stream of one rank."""

    rank: int
    prefix: str
    """Before each of its lines; empty: it is passed on as it is."""
    descriptor: int
    """Our end of it."""
    sink: Sink | None
    """Where it is shown; None: nowhere."""
    log: Path
    """The file that gets all of it."""
    filters: list[bytes]
    """Lines that are shown and hold one of them go to a file beside the rank's folder."""
    error: Path
    """The file in which the rank writes down the exception that ends it."""
    recent: RecentOutput | None
    """Gets the end of the stream, if somebody wants that."""
    unfinished: bytes = b""
    """The last line so far; of one that is drawn again and again not much more than its state."""
    last_words: list[bytes] = field(default_factory=list)
    """Lines that are not shown yet: those from where an exception has ended the rank."""
    last_read: float = 0.0

    def __post_init__(self) -> None:
        self._file: IO[bytes] | None = open(self.log, "ab", buffering=0)  # noqa: SIM115
        self._filtered = self.log.parent.with_name(f"filtered_{self.log.name}")
        if self.filters:
            self._filtered.touch()

    @property
    def state(self) -> bytes:
        """What a terminal would show of the unfinished line."""
        return last_state(self.unfinished)

    def read(self) -> bytes | None:
        """What there is; None at the end of the stream."""
        try:
            return os.read(self.descriptor, _READ_BYTES) or None
        except BlockingIOError:
            return b""

    def lines_of(self, data: bytes) -> list[bytes]:
        """The lines that are finished by what the stream brings, without newlines."""
        lines, self.unfinished = finished_lines(self.unfinished + data)
        prefix = f"[rank{self.rank}]: ".encode()  # torch's hook for exceptions puts it there, too
        return [line.removeprefix(prefix) for line in lines]

    def held_back(self, lines: list[bytes]) -> list[bytes]:
        """Puts those of the lines that tell of the rank's end into `last_words`; the others."""
        self.last_read = time.monotonic()
        if not lines or self.log.stem != "stderr" or not self._has_raised():
            return lines
        heading = (n for n, line in enumerate(lines) if _HEADING in line)
        begin = 0 if self.last_words else next(heading, 0)
        self.last_words += lines[begin:]
        return lines[:begin]

    def _has_raised(self) -> bool:
        """Whether the rank has written down an exception that ends it."""
        try:
            return self.error.stat().st_size > 0
        except OSError:
            return False

    def keep(self, data: bytes, lines: list[bytes]) -> None:
        """Writes the files.

        Raises:
            OSError: the disk is full.
        """
        if self._file is None:
            return
        self._file.write(data)
        wanted = [line for line in lines if any(text in line for text in self.filters)]
        if wanted and self.sink is not None:
            prefix = self.prefix.encode()
            with open(self._filtered, "ab") as file:
                file.write(b"".join(prefix + line + b"\n" for line in wanted))

    def close_files(self) -> str:
        """Writes no more files; the log's name."""
        if self._file is not None:
            self._file.close()
            self._file = None
        return self.log.name
