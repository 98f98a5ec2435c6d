"""The descriptors between the ranks and the console: what is read, and what is written to."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import termios
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import IO

from lockstep.launch.screen import Composer, Lines, Screen, Source

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
