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
from typing import NamedTuple

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
    message_lines: tuple[str, ...]
    """The headline and the lines after it."""


def printed_error(lines: Sequence[str]) -> PrintedError | None:
    """Reads the last traceback in the lines of a log.

    Returns:
        The traceback, or None if there is none or the log ends in the middle of it.
    """
    heading_index = _find_last_heading(lines)
    if heading_index is None:
        return None

    # Another program may have put a prefix before every line: the same as before the heading, such
    # as `[rank1]: `, or one of the same form, such as `12:00:02 ` after `12:00:01 `.
    prefix_of_heading = _prefix_by_heading(lines[heading_index])
    block = []  # the lines after the heading, without the prefix
    for line in lines[heading_index + 1 :]:
        block.append(_remove_prefix(prefix_of_heading, line[:_MAX_LINE_CHARS]))

    # The frames of a traceback are indented. The first line that is not indented names the
    # exception: `ValueError: no data`.
    for index, text in enumerate(block):
        is_blank_or_indented = not text.strip() or text[0].isspace()
        if not is_blank_or_indented:
            user_line = _user_line(block[:index])
            return PrintedError(
                headline=text.rstrip(),
                line=user_line,
                message_lines=tuple(block[index : index + _MAX_LINES]),
            )

    return None


def _find_last_heading(lines: Sequence[str]) -> int | None:
    """Returns the index of the last traceback's heading, or None if there is no traceback.

    If the last traceback is that of an exception group, the result is the heading of the first
    exception in the group, which says most about the cause. If no exception is printed in the
    group, the result is the heading of the group. Python prints a group with a plus sign before
    its heading, and a bar before each line inside it, even the heading of another traceback:

          + Exception Group Traceback (most recent call last):
          |   File "train.py", line 9, in <module>
          | ExceptionGroup: two tasks failed (2 sub-exceptions)
          +-+---------------- 1 ----------------
            | Traceback (most recent call last):                        <- the result
            |   File "train.py", line 3, in load
            | ValueError: no data
            +---------------- 2 ----------------
            | Traceback (most recent call last):
            |   ...
    """
    headings = _headings_of_last_traceback(lines)
    if not headings:
        return None

    first_heading, *inner_headings = headings
    for heading in inner_headings:
        if not heading.is_of_group:  # the first one that is not of a group within the group
            return heading.line_index
    return first_heading.line_index


class _Heading(NamedTuple):
    """The heading of a traceback."""

    line_index: int
    is_of_group: bool
    """True for an exception group."""


def _headings_of_last_traceback(lines: Sequence[str]) -> list[_Heading]:
    """Returns the heading of the last traceback and, if it is of a group, the headings inside it.

    In the last traceback here, these are the headings of the group and of its two exceptions. Those
    inside the group have a bar before them:

          + Exception Group Traceback (most recent call last):
            | Traceback (most recent call last):
            | Traceback (most recent call last):

    The list is empty if there is no traceback.
    """
    block: list[_Heading] = []
    for index, line in enumerate(lines):
        match = _HEADING.match(line)
        if match is None:
            continue

        heading = _Heading(line_index=index, is_of_group=match["group"] is not None)
        follows_group = bool(block) and block[0].is_of_group
        is_inside_group = follows_group and match["prefix"].endswith("| ")
        if is_inside_group:
            block.append(heading)
        else:
            block = [heading]
    return block


def _prefix_by_heading(heading_line: str) -> str:
    """Returns the prefix of the lines that follow a heading, as the heading shows it.

    It is the prefix of the heading itself: `[rank1]: ` for `[rank1]: Traceback ...`. After the
    heading of an exception group, `[rank1]:   + Exception Group Traceback ...`, the lines have a
    bar in place of the plus sign: `[rank1]:   | `.
    """
    heading = _HEADING.match(heading_line)
    assert heading is not None
    has_plus_sign = (heading["group"] or "").startswith("+ ")
    return heading["prefix"] + "| " if has_plus_sign else heading["prefix"]


def _remove_prefix(prefix_of_heading: str, line: str) -> str:
    """Removes from a line what another program has put before it.

    Args:
        prefix_of_heading: the prefix of the heading; it may be empty.
        line: a line after the heading.

    Returns:
        The rest of the line, or the line as it is if it has no such prefix.
    """
    if line.startswith(prefix_of_heading):
        return line[len(prefix_of_heading) :]

    # Spaces alone are indentation, and no prefix of another program.
    if not prefix_of_heading.strip():
        return line

    # A prefix such as the time of day differs from line to line, but always has the same form:
    # `12:59:58 ` and `13:00:01 ` both become `00:00:00 `.
    form = re.sub(r"\w", "0", prefix_of_heading)
    form_of_line = re.sub(r"\w", "0", line[: len(prefix_of_heading)])
    has_prefix = form_of_line == form
    return line[len(prefix_of_heading) :] if has_prefix else line


def _user_line(block: Sequence[str]) -> str | None:
    """Returns the innermost line of the user's code in a traceback, as `file:line: code`.

    Args:
        block: the lines between the heading and the line that names the exception.

    Returns:
        The line, or None if no line of the user's has a source file.
    """
    # A syntax error names its own file and line after all frames, without a function. The last
    # frame is only the line that imports the file:
    #   File "train.py", line 1, in <module>
    #     import model
    #   File "model.py", line 3
    #     def forward(
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
