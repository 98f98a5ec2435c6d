"""Finds the last traceback in the output of a rank.

A rank records the exception that ends it. If it could not, its standard error is all there is. In
that output, other programs may have put a *prefix* before each line: torch `[rank1]:`, mpirun
`[1,0]<stderr>:`, loggers the time of day. The *heading* of a traceback is the line `Traceback (most
recent call last):`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.run.watch.stacks import parse_frames, user_frame
from lockstep.user_code import format_source_line

# [rank1]: Traceback (most recent call last):
# [rank1]:   + Exception Group Traceback (most recent call last):
# [rank1]:     | Exception Group Traceback (most recent call last):
# The last one is a group within a group. Its prefix ends with the bar.
_HEADING = re.compile(
    r"(?P<prefix>.*?)(?P<group>(?:\+ )?Exception Group )?Traceback \(most recent call last\):?"
)
# The place of a syntax error has no function:   File "train.py", line 3
_SYNTAX_ERROR_PLACE = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+)')
_MAX_LINES = 40
# A message may be megabytes in one line.
_MAX_LINE_CHARS = 2000


@dataclass(frozen=True)
class PrintedError:
    """The last traceback in a rank's output."""

    headline: str
    """The exception's type and the first line of its message, as printed."""
    line: str | None
    """The user's innermost line, `file:line: code`."""
    text: tuple[str, ...]
    """The headline and the lines after it."""


def printed_error(lines: Sequence[str]) -> PrintedError | None:
    """Reads the last traceback in the lines of a log.

    Returns:
        The traceback, or None if there is none or the log ends in the middle of it.
    """
    heading_number = _find_last_heading(lines)
    if heading_number is None:
        return None

    # Another program may have put a prefix before each line, such as `[rank1]: `. It is read from
    # the heading.
    heading_line = lines[heading_number]
    prefix = _prefix_of_lines_after(heading_line)
    block = []  # the lines after the heading, without the prefix
    for line in lines[heading_number + 1 :]:
        block.append(_remove_prefix(prefix, line[:_MAX_LINE_CHARS]))

    # The frames of a traceback are indented. The first line that is not indented names the
    # exception: `ValueError: no data`.
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
    """Returns the index of the last traceback's heading, or None if there is no traceback.

    Python prints an exception group as below: its own heading follows a plus sign, and each line
    inside the group, even the heading of another traceback, follows a bar. Then the result is the
    heading of the first exception in the group, or that of the group if none is printed in it.

          + Exception Group Traceback (most recent call last):
          |   File "train.py", line 9, in <module>
          | ExceptionGroup: two tasks failed (2 sub-exceptions)
          +-+---------------- 1 ----------------
            | Traceback (most recent call last):
            |   File "train.py", line 3, in load
            | ValueError: no data
    """
    last_heading: int | None = None
    in_group = False  # True from the heading of a group to that of a traceback outside it
    has_first_exception = False  # True once an exception of the present group has been found
    for number, line in enumerate(lines):
        heading = _HEADING.match(line)
        if heading is None:
            continue

        # A heading inside a group follows a bar ("| "), even that of a group within the group. The
        # heading of the outermost group follows a plus sign.
        is_group = heading["group"] is not None
        is_inside_group = in_group and heading["prefix"].endswith("| ")

        if is_inside_group:
            # Exceptions of a group within the group are treated as those of the outer one.
            if not is_group and not has_first_exception:
                last_heading = number
                has_first_exception = True
            continue

        # A traceback of its own, which ends a group before it.
        last_heading = number
        in_group = is_group
        has_first_exception = False

    return last_heading


def _prefix_of_lines_after(heading_line: str) -> str:
    """Returns the prefix of the lines that follow a heading.

    It is the prefix of the heading itself: `[rank1]: ` for `[rank1]: Traceback ...`. After the
    heading of an exception group, `[rank1]:   + Exception Group Traceback ...`, the lines have a
    bar in place of the plus sign: `[rank1]:   | `.
    """
    heading = _HEADING.match(heading_line)
    assert heading is not None
    has_plus_sign = (heading["group"] or "").startswith("+ ")
    return heading["prefix"] + "| " if has_plus_sign else heading["prefix"]


def _remove_prefix(prefix: str, line: str) -> str:
    """Removes from a line what another program has put before it.

    Args:
        prefix: the text before the heading of the traceback; it may be empty.
        line: a line after the heading.

    Returns:
        The rest of the line, or the line as it is if it has no such prefix.
    """
    if line.startswith(prefix):
        return line[len(prefix) :]

    # A prefix such as the time of day differs from line to line, but always has the same form:
    # `12:59:58 ` and `13:00:01 ` both become `00:00:00 `.
    form = re.sub(r"\w", "0", prefix)
    form_of_line = re.sub(r"\w", "0", line[: len(prefix)])
    is_only_indentation = not prefix.strip()
    if form_of_line == form and not is_only_indentation:
        return line[len(prefix) :]
    return line


def _user_line(block: Sequence[str]) -> str | None:
    """Returns the innermost line of the user's code in a traceback, as `file:line: code`.

    Args:
        block: the lines between the heading and the line that names the exception.

    Returns:
        The line, or None if no line of the user's has a source file.
    """
    # A syntax error names its file and line after all frames. The last frame is not its place, but
    # the line that imports the file.
    matches = [_SYNTAX_ERROR_PLACE.fullmatch(text) for text in block]
    syntax_errors = [match for match in matches if match is not None]
    if syntax_errors:
        place = syntax_errors[-1]
        return format_source_line(place["file"], int(place["line"]))

    innermost_first = tuple(reversed(parse_frames("\n".join(block))))
    frame = user_frame(innermost_first)
    if frame is None or frame.file.startswith("<"):  # such as <string>, which has no source
        return None
    return format_source_line(frame.file, frame.line)
