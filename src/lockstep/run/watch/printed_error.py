"""Reads the last traceback in what a rank has printed.

A rank records the exception that ends it. If it could not, its standard error is all that is known.
There, other programs may have put a *prefix* before each line: torch `[rank1]:`, mpirun
`[1,0]<stderr>:`, loggers the time of day. The *heading* is `Traceback (most recent call last):`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.run.watch.stacks import parse_frames, user_frame
from lockstep.user_code import format_source_line

# [rank1]: Traceback (most recent call last):
# [rank1]:   + Exception Group Traceback (most recent call last):
_HEADING = re.compile(
    r"(?P<prefix>.*?)(?P<group>\+ Exception Group )?Traceback \(most recent call last\):?"
)
# The place of a syntax error has no function:   File "train.py", line 3
_SYNTAX_ERROR_PLACE = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+)')
_MAX_LINES = 40
# A message may be megabytes in one line.
_MAX_LINE_CHARS = 2000


@dataclass(frozen=True)
class PrintedError:
    """What the last traceback says."""

    headline: str
    """The exception's type and the first line of its message, as they were printed."""
    line: str | None
    """The user's innermost line, `file:line: code`."""
    text: tuple[str, ...]
    """The headline and the lines after it."""


def printed_error(lines: Sequence[str]) -> PrintedError | None:
    """Reads the last traceback in the lines of a log.

    Returns:
        None if there is no traceback, or if the log ends before its end.
    """
    heading_number = _find_last_heading(lines)
    if heading_number is None:
        return None

    prefix = _prefix_of_lines_after(lines[heading_number])
    block = []
    for line in lines[heading_number + 1 :]:
        block.append(_remove_prefix(prefix, line[:_MAX_LINE_CHARS]))

    # The frames of a traceback are indented. The first line that is not says which exception it
    # was: `ValueError: no data`.
    for number, text in enumerate(block):
        is_blank_or_indented = not text.strip() or text[0].isspace()
        if not is_blank_or_indented:
            user_line = _user_line(block[:number])
            return PrintedError(
                headline=text.rstrip(),
                line=user_line,
                text=tuple(block[number : number + _MAX_LINES]),
            )

    return None


def _find_last_heading(lines: Sequence[str]) -> int | None:
    """Returns the index of the line that is the last traceback's heading; None if there is none.

    For an exception group, in which Python puts a bar before each line, that is the heading of its
    first exception (if it has printed one):

          + Exception Group Traceback (most recent call last):
          |   File "train.py", line 9, in <module>
          | ExceptionGroup: two tasks failed (2 sub-exceptions)
          +-+---------------- 1 ----------------
            | Traceback (most recent call last):
            |   File "train.py", line 3, in load
            | ValueError: no data
    """
    last_heading: int | None = None
    in_group = False  # true from the heading of a group to that of a traceback outside of it
    has_first_exception = False  # of the present group
    for number, line in enumerate(lines):
        heading = _HEADING.match(line)
        if heading is None:
            continue

        is_group = heading["group"] is not None
        is_inner_group = is_group and in_group and "|" in heading["prefix"]
        is_exception_of_group = in_group and heading["prefix"].endswith("| ")

        if is_inner_group:
            continue  # the exceptions in it count as the outer group's

        if is_group:
            last_heading = number
            in_group = True
            has_first_exception = False
        elif is_exception_of_group:
            if not has_first_exception:  # those after the first one do not count
                last_heading = number
                has_first_exception = True
        else:
            last_heading = number
            in_group = False

    return last_heading


def _prefix_of_lines_after(heading_line: str) -> str:
    """Returns what stands before each line that follows a heading: what stands before the heading.

    The heading of an exception group has a `+` where the lines that follow have a bar.
    """
    heading = _HEADING.match(heading_line)
    assert heading is not None
    if heading["group"]:
        return heading["prefix"] + "| "
    return heading["prefix"]


def _remove_prefix(prefix: str, line: str) -> str:
    """Returns a line without what another program has put before it.

    Args:
        prefix: what stands before the heading of the traceback; it may be empty.
        line: a line after the heading.

    Returns:
        The line as it is if it has no such prefix.
    """
    if line.startswith(prefix):
        return line[len(prefix) :]

    # A prefix that differs from line to line, such as the time of day, has the same form in each:
    # `12:59:58 ` and `13:00:01 ` both become `00:00:00 `.
    form = re.sub(r"\w", "0", prefix)
    form_of_line = re.sub(r"\w", "0", line[: len(prefix)])
    if prefix.strip() and form_of_line == form:
        return line[len(prefix) :]
    return line


def _user_line(block: Sequence[str]) -> str | None:
    """Returns the user's innermost line in the frames of a traceback, as `file:line: code`.

    Args:
        block: the lines between the heading and the line that says which exception it was.

    Returns:
        None if no line of the user's has a source file.
    """
    matches = [_SYNTAX_ERROR_PLACE.fullmatch(text) for text in block]
    syntax_errors = [match for match in matches if match is not None]
    if syntax_errors:  # the file with the error stands after the frames that imported it
        place = syntax_errors[-1]
        return format_source_line(place["file"], int(place["line"]))

    innermost_first = tuple(reversed(parse_frames("\n".join(block))))
    frame = user_frame(innermost_first)
    if frame is None or frame.file.startswith("<"):  # such as <string>, which has no source
        return None
    return format_source_line(frame.file, frame.line)
