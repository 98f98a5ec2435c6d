"""The last traceback in what a rank has printed.

A rank records the exception that ends it. Where it could not, its standard error is all that is
known. Other programs put text before each line: torch `[rank1]:`, mpirun `[1,0]<stderr>:`, loggers
the time of day.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import source_line
from lockstep.run.watch.stacks import own_line, parse_frames

_HEADING = re.compile(
    r"(?P<prefix>.*?)(?P<group>\+ Exception Group )?Traceback \(most recent call last\):?"
)
_SYNTAX_ERROR = re.compile(r'  File "(.*)", line (\d+)')
_MAX_TEXT_LINES = 40
_MAX_LINE = 2000
"""Characters; a message may be megabytes in one line."""


@dataclass(frozen=True)
class PrintedError:
    """What the last traceback says."""

    headline: str
    """The exception's type and the first line of its message, as they were printed."""
    line: str | None
    """The user's innermost own line, `file:line: code`."""
    text: tuple[str, ...]
    """The headline and what follows it."""


def printed_error(lines: Sequence[str]) -> PrintedError | None:
    """Reads the last traceback in the lines of a log.

    Returns:
        None where there is none, or it is cut off before its end.
    """
    start = _last_traceback(lines)
    if start is None:
        return None
    prefix = _prefix_after(lines[start])
    block = [_without(prefix, line[:_MAX_LINE]) for line in lines[start + 1 :]]
    for number, text in enumerate(block):
        if text.strip() and not text[0].isspace():
            line = _users_line(block[:number])
            return PrintedError(text.rstrip(), line, tuple(block[number:][:_MAX_TEXT_LINES]))
    return None


def _last_traceback(lines: Sequence[str]) -> int | None:
    """Where the last traceback begins; of an exception group, that of its first exception."""
    found: int | None = None
    in_group = False
    for number, line in enumerate(lines):
        heading = _HEADING.match(line)
        if heading is None:
            continue
        if heading["group"]:
            # A group in a group begins behind a line of the outer one.
            nested = in_group and "|" in heading["prefix"]
            found = found if nested else number
            in_group = True
        elif in_group and heading["prefix"].endswith("| "):
            first_of_group = found is not None and _HEADING.match(lines[found])
            if first_of_group and first_of_group["group"]:
                found = number
        else:
            found = number
            in_group = False
    return found


def _prefix_after(heading: str) -> str:
    """What stands before each line that follows a heading."""
    found = _HEADING.match(heading)
    assert found is not None
    return found["prefix"] + ("| " if found["group"] else "")


def _without(prefix: str, line: str) -> str:
    """A line without what another program has put before it."""
    if line.startswith(prefix):
        return line[len(prefix) :]
    # A prefix that differs from line to line, such as the time, is as long in each.
    same_form = re.sub(r"\w", "0", line[: len(prefix)]) == re.sub(r"\w", "0", prefix)
    return line[len(prefix) :] if prefix.strip() and same_form else line


def _users_line(block: Sequence[str]) -> str | None:
    frame = own_line(parse_frames("\n".join(block))[::-1])
    syntax = [found for text in block if (found := _SYNTAX_ERROR.fullmatch(text))]
    if syntax:  # the file that could not be read, after the frames that wanted it
        return source_line(syntax[-1][1], int(syntax[-1][2]))
    if frame is None or frame.file.startswith("<"):
        return None
    return source_line(frame.file, frame.line)
