"""The launcher's own standard output and error: a terminal, a pipe or a file.

A `Sink` writes without waiting. What is not taken yet waits in memory. On a terminal a *status row*
stands under the lines: what a rank has not finished yet, such as a progress bar or a prompt. New
lines are put above it.
"""

from __future__ import annotations

import errno
import math
import os
import select
import time
from collections.abc import Collection, Mapping

_RANK_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_RESET_COLOUR = "\x1b[0m"
_ERASE_ROW = b"\r\x1b[K"
_DEFAULT_COLUMNS = 80
_MIN_COLUMNS = 20
_WRITE_BYTES = 4096
"""A pipe that poll() calls writable takes this many bytes at once (PIPE_BUF, see pipe(7))."""
_PATIENCE_S = 60.0
"""At the end a sink is waited for while it takes some bytes within this time."""
_HURRY_S = 2.0
"""After Ctrl-C a sink is waited for no longer than this."""


class Sink:
    """A terminal, pipe or file that the launcher writes to.

    Args:
        descriptor: 1 or 2.
        environ: the environment variables, of which NO_COLOR and TERM are read.
    """

    def __init__(self, descriptor: int, environ: Mapping[str, str]) -> None:
        self.descriptor = descriptor
        self.waiting = bytearray()
        """What the terminal, pipe or file has not taken yet."""
        self.is_shared_with_rank = False
        """True if a rank writes to it directly as well."""
        self.ends_mid_line = False
        """True if what was passed on last does not end its line."""
        self._status_row = b""
        self._error: str | None = None
        self._has_colours = not environ.get("NO_COLOR")
        self._is_closed = False
        self.is_terminal = False
        self.identity: tuple[int, int, int] | None = None
        """Equal for two descriptors of the same file or terminal."""

        try:
            status = os.fstat(descriptor)
        except OSError:  # the launcher was started without it
            self._is_closed = True
        else:
            self.is_terminal = os.isatty(descriptor)
            self.identity = (status.st_dev, status.st_ino, status.st_rdev)

        self.can_draw = self.is_terminal and environ.get("TERM") != "dumb"
        """True if it is a terminal that can show colours and a status row."""

    @property
    def columns(self) -> int:
        """The terminal's width without its last column: some terminals wrap when that is used."""
        try:
            columns = os.get_terminal_size(self.descriptor).columns
        except OSError:
            return _DEFAULT_COLUMNS - 1
        if columns == 0:  # the terminal does not know its width
            columns = _DEFAULT_COLUMNS
        return max(_MIN_COLUMNS, columns) - 1

    def colour_prefix(self, prefix: str, rank: int) -> bytes:
        """Returns the prefix of a rank's lines; on a terminal in the rank's colour."""
        if not self.can_draw or not self._has_colours:
            return prefix.encode()
        colour = _RANK_COLOURS[rank % len(_RANK_COLOURS)]
        name = prefix.rstrip()
        spaces = prefix[len(name) :]
        return f"\x1b[{colour}m{name}{_RESET_COLOUR}{spaces}".encode()

    def crop(self, row: bytes) -> bytes:
        """Returns as much of a text as fits in one row of the terminal, with its colours."""
        from rich.console import Console
        from rich.text import Text

        console = Console(
            width=self.columns,
            color_system="truecolor",
            force_terminal=True,
            no_color=not self._has_colours,
        )
        with console.capture() as captured:
            text = Text.from_ansi(row.decode(errors="replace"))
            console.print(text, end="", no_wrap=True, overflow="crop")

        return captured.get().encode()

    def write(self, lines: bytes, status_row: bytes = b"") -> None:
        """Writes whole lines, and a new status row under them.

        All of it is written in one piece, so that nothing flickers.
        """
        if self._is_closed:
            return
        if self._status_row:
            self.waiting += _ERASE_ROW
        self.waiting += lines + status_row
        self._status_row = status_row
        self.flush()

    def draw(self, status_row: bytes) -> None:
        """Replaces the status row."""
        if status_row != self._status_row:
            self.write(b"", status_row)

    def flush(self) -> None:
        """Writes what is taken without waiting, in pieces that end with a line if possible."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLOUT)

        while self.waiting and poll.poll(0):
            piece = bytes(self.waiting[:_WRITE_BYTES])
            if len(self.waiting) > len(piece):
                last_newline = piece.rfind(b"\n")
                if last_newline >= 0:
                    piece = piece[: last_newline + 1]

            try:
                written = os.write(self.descriptor, piece)
            except BlockingIOError:
                return
            except OSError as error:
                # EPIPE: the reader of the pipe has ended. EIO: the terminal is gone.
                if error.errno not in (errno.EPIPE, errno.EIO):
                    self._error = error.strerror
                self._is_closed = True
                self.waiting.clear()
            else:
                del self.waiting[:written]

    @property
    def lost(self) -> str:
        """A text that says which output was lost; empty: none."""
        if self._error:
            return f"the output ends early: {self._error}"
        if self.waiting:
            return f"the last {len(self.waiting)} bytes of output were not taken here"
        return ""


class FlushDeadline:
    """Decides how long sinks are waited for at the end, while they have not taken everything.

    A sink that takes some bytes each minute is waited for. In a hurry, the wait ends after 2 s
    whatever they take: they may be a terminal on a slow line.

    Args:
        sinks: those that are waited for.
        hurry: True if the user has asked the run to end.
    """

    def __init__(self, sinks: Collection[Sink], hurry: bool = False) -> None:
        self._sinks = sinks
        self._hurry = hurry
        self._least_waiting: float = math.inf
        self._stop_at = time.monotonic() + (_HURRY_S if hurry else _PATIENCE_S)

    def over(self) -> bool:
        """Returns True if the sinks have taken everything or are given up; to be called
        repeatedly.
        """
        waiting = sum(len(sink.waiting) for sink in self._sinks)
        now = time.monotonic()
        if waiting < self._least_waiting and not self._hurry:
            self._least_waiting = waiting
            self._stop_at = now + _PATIENCE_S
        return waiting == 0 or now >= self._stop_at


def open_sinks(environ: Mapping[str, str], stdout: int = 1, stderr: int = 2) -> dict[str, Sink]:
    """Returns the sinks of `stdout` and `stderr`.

    It is one sink for both if they go to the same place, so that one status row stands there.
    """
    stdout_sink = Sink(stdout, environ)
    stderr_sink = Sink(stderr, environ)
    if stdout_sink.identity == stderr_sink.identity:
        stderr_sink = stdout_sink
    return {"stdout": stdout_sink, "stderr": stderr_sink}
