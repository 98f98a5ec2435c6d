"""Implements the launcher's own standard output and error, which may be a terminal, a pipe or a
file.

A `Sink` writes without blocking. Data that is not accepted yet is kept in memory. On a terminal,
there is a *status row* below the lines: an unfinished line of a rank, such as a progress bar or a
prompt. New lines are written above it.
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
"""The number of bytes that a pipe accepts at once when poll() reports it as writable (PIPE_BUF, see
pipe(7))."""
_PATIENCE_S = 60.0
"""At the end of a run, the launcher waits for a sink as long as it accepts some bytes within this
time."""
_HURRY_S = 2.0
"""After Ctrl-C, the launcher waits for a sink no longer than this."""


class Sink:
    """A terminal, pipe or file that the launcher writes to.

    Args:
        descriptor: 1 or 2.
        environ: environment variables, of which NO_COLOR and TERM are used.
    """

    def __init__(self, descriptor: int, environ: Mapping[str, str]) -> None:
        self.descriptor = descriptor
        self.waiting = bytearray()
        """The data that the terminal, pipe or file has not accepted yet."""
        self.is_shared_with_rank = False
        """True if a rank writes to it directly as well."""
        self.ends_mid_line = False
        """True if the data that was written last does not end with a newline."""
        self._status_row = b""
        self._error: str | None = None
        self._has_colours = not environ.get("NO_COLOR")
        self._is_closed = False
        self.is_terminal = False
        self.identity: tuple[int, int, int] | None = None
        """A value that is equal for two descriptors of the same file or terminal."""

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
        """The number of columns for a line: the width of the terminal minus 1, as some terminals
        wrap when the last column is used.
        """
        try:
            width = os.get_terminal_size(self.descriptor).columns
        except OSError:  # it is no terminal
            width = _DEFAULT_COLUMNS
        if width == 0:  # the terminal does not know its width
            width = _DEFAULT_COLUMNS
        return max(_MIN_COLUMNS, width) - 1

    def colour_prefix(self, prefix: str, rank: int) -> bytes:
        """Encodes the prefix of a rank's lines; on a terminal, in the colour of the rank."""
        if not self.can_draw or not self._has_colours:
            return prefix.encode()
        colour = _RANK_COLOURS[rank % len(_RANK_COLOURS)]
        name = prefix.rstrip()
        spaces = prefix[len(name) :]
        return f"\x1b[{colour}m{name}{_RESET_COLOUR}{spaces}".encode()

    def crop(self, row: bytes) -> bytes:
        """Cuts a text off so that it fits in one row of the terminal, and keeps its colours."""
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
        """Writes whole lines, and a new status row below them.

        Everything is written in one piece, so that nothing flickers.
        """
        if self._is_closed:
            return
        if self._status_row:
            self.waiting += _ERASE_ROW
        self.waiting += lines + status_row
        self._status_row = status_row
        self.flush()

    def draw(self, status_row: bytes) -> None:
        """Replaces the status row, if it has changed."""
        if status_row != self._status_row:
            self.write(b"", status_row)

    def flush(self) -> None:
        """Writes as much as is accepted without blocking, in pieces that end with a line if
        possible.

        If the terminal, pipe or file is gone, everything that is waiting is dropped.
        """
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
                # EPIPE: the reader of the pipe has ended. EIO: the terminal is gone. Any other
                # error, such as a full disk, is told to the user (`message_on_lost_output`).
                if error.errno not in (errno.EPIPE, errno.EIO):
                    self._error = error.strerror
                self._is_closed = True
                self.waiting.clear()
            else:
                del self.waiting[:written]

    @property
    def message_on_lost_output(self) -> str:
        """Says which output was lost; empty if none was."""
        if self._error:
            return f"the output ends early: {self._error}"
        if self.waiting:
            return f"the last {len(self.waiting)} bytes of output were not taken here"
        return ""


class FlushDeadline:
    """Decides how long to wait, at the end of a run, for sinks that have not accepted everything.

    As long as the sinks accept some bytes each minute, the wait goes on. In a hurry it ends after 2
    s in any case, as they may belong to a terminal on a slow line.

    Args:
        sinks: the sinks.
        hurry: True if the user has asked the run to end.
    """

    def __init__(self, sinks: Collection[Sink], hurry: bool = False) -> None:
        self._sinks = sinks
        self._hurry = hurry
        self._least_waiting: float = math.inf
        self._stop_at = time.monotonic() + (_HURRY_S if hurry else _PATIENCE_S)

    def wait_is_over(self) -> bool:
        """Returns True if the sinks have accepted everything, or if the wait is over.

        This must be called repeatedly, as it also measures the progress of the sinks.
        """
        waiting = sum(len(sink.waiting) for sink in self._sinks)
        now = time.monotonic()
        if waiting < self._least_waiting and not self._hurry:
            self._least_waiting = waiting
            self._stop_at = now + _PATIENCE_S
        return waiting == 0 or now >= self._stop_at


def open_sinks(environ: Mapping[str, str], stdout: int = 1, stderr: int = 2) -> dict[str, Sink]:
    """Opens the sinks for `stdout` and `stderr`.

    If both go to the same terminal or file, they are one sink, so that there is one status row.
    """
    stdout_sink = Sink(stdout, environ)
    stderr_sink = Sink(stderr, environ)
    if stdout_sink.identity == stderr_sink.identity:
        stderr_sink = stdout_sink
    return {"stdout": stdout_sink, "stderr": stderr_sink}
