"""Finds the lines that a terminal would show for the output of a program.

A progress bar draws its line again and again, each time after a carriage return or after control
sequences that move the cursor. Only the *last state* of such a line is kept. Colours are kept for
the console, and removed from lines that are used in messages.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from lockstep.run.run_folder import log_path

_MAX_LINE_BYTES = 1 << 20
_TAIL_BYTES = 1 << 16

# "Erase the whole line", which rich and tqdm write before they draw a line again: "\x1b[2K".
_ERASE_LINE = re.compile(rb"\x1b\[2K")
# Control sequences other than colours, such as "\x1b[3A" (cursor up) and "\x1b[?25l" (hide the
# cursor); and window titles, such as "\x1b]0;training\x07".
_CURSOR_OR_TITLE = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-ln-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
# A colour, such as "\x1b[31m".
_COLOUR = re.compile(rb"\x1b\[[0-9;:]*m")
_CURSOR_UP = b"\x1b[A"


def last_state(line: bytes) -> bytes:
    r"""Returns the last state of a line that may have been drawn several times.

    For example, `b"10%\r20%\r30%"` becomes `b"30%"`. If the line was erased after its last state,
    the result is a blank: `b"10%\x1b[2K"` becomes `b" "`.
    """
    if b"\r" not in line and b"\x1b" not in line:
        return line

    # To erase a line is to go to its beginning (\r), to draw a blank, and to go back there:
    # "10%<erase>20%" becomes "10%\r \r20%".
    line = _ERASE_LINE.sub(b"\r \r", line)
    line = _CURSOR_OR_TITLE.sub(b"", line)

    states = line.split(b"\r")  # "10%", " ", ""
    drawn_states = [state for state in states if state]  # "10%", " "
    return drawn_states[-1] if drawn_states else b""


def finished_lines(text: bytes) -> tuple[list[bytes], bytes]:
    """Splits output into finished lines and the line that is not finished yet.

    Returns:
        The last state of each finished line, without newlines; and the unfinished line, of which
        only the last state is kept.
    """
    *lines, unfinished = text.split(b"\n")

    # After a carriage return, the line is drawn again, so what comes before can be dropped. A
    # carriage return at the very end does not count, as nothing has been drawn after it yet:
    #
    #     unfinished             b"10%\r20%\r"
    #     drawn                  b"10%\r20%", whose last return is at index 3
    #     unfinished from 4 on   b"20%\r"
    drawn = unfinished.rstrip(b"\r")
    last_return = drawn.rfind(b"\r")  # -1 if there is none
    unfinished = unfinished[last_return + 1 :]

    # A very long line is treated as finished, so that memory does not fill up.
    if len(unfinished) > _MAX_LINE_BYTES:
        lines.append(unfinished)
        unfinished = b""

    # A program with several progress bars moves the cursor up after each of the lower bars. These
    # lines are left out: the program draws them again and again.
    shown = [last_state(line) for line in lines if not line.endswith(_CURSOR_UP)]
    return shown, unfinished


class RecentOutput:
    """Keeps the last lines of a stream in memory, since its log may be deleted or its disk may be
    full.
    """

    def __init__(self) -> None:
        self._data = b""

    def add(self, data: bytes) -> None:
        """Adds data that the stream has brought."""
        self._data = (self._data + data)[-_TAIL_BYTES:]

    def lines(self) -> list[str]:
        """Returns the last lines that are not blank, without colours."""
        return _lines_for_messages(self._data)


def read_last_lines(folder: Path, count: int, stream: str = "stderr") -> list[str]:
    """Reads the last lines of a rank's log that are not blank, without colours.

    Args:
        folder: the rank's folder.
        count: the largest number of lines to return.
        stream: `stdout` or `stderr`.
    """
    try:
        with open(log_path(folder, stream), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            data = file.read()
    except OSError:
        return []
    return _lines_for_messages(data)[-count:]


def _lines_for_messages(data: bytes) -> list[str]:
    """Returns the lines that a terminal would show, without colours and without blank lines."""
    texts = []
    for line in data.split(b"\n"):
        shown = _COLOUR.sub(b"", last_state(line))
        if shown.strip():
            texts.append(shown.decode(errors="replace"))
    return texts
