"""Reads what Python's faulthandler has written about a process at its end.

A *dump* begins with a heading, such as `Fatal Python error: Segmentation fault`, and contains the
stack of each thread, the innermost frame first. Faulthandler writes it into one file only: the
rank's crash file, unless the script has called `faulthandler.enable` itself. Then it is in the file
that the script has named, or in the rank's standard error.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.run.run_folder import CRASH_NAME
from lockstep.run.watch.stacks import parse_frames, user_frame
from lockstep.user_code import format_source_line

OTHER_FILE = "faulthandler writes into "
"""The beginning of a line in the crash file that names the file that the script has chosen."""

_FATAL_SIGNALS = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
_FATAL_HEADING = re.compile(r"Fatal Python error: ")
# `faulthandler.dump_traceback_later` writes this one.
_TIMEOUT_HEADING = re.compile(r"Timeout \(\d+:\d\d:\d\d(?:\.\d+)?\)!$")

# The line before the stack of each thread, such as "Thread 0x00007f2a (most recent call first):".
_STACK_HEADING = re.compile(r"(?:Current thread |Thread |Stack\b).*\(most recent call first\):")
# The one before the stack of the thread that failed; "Stack (...):" since Python 3.14.
_FAILED_THREAD = re.compile(r"(?:Current thread .*|Stack) \(most recent call first\):")
# How the other lines of a dump begin. Those with two spaces are frames.
_BEGINNINGS_OF_DUMP_LINES = (
    "  ", "Extension modules: ", "Current thread's C stack", "Python runtime state: ",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StackDump:
    """A dump in the lines of a file."""

    begin: int
    """The index of its heading."""
    end: int
    """The index after its last line."""
    line: str | None
    """The line of the user's code that the failed thread was at, `FILE:LINE: CODE`; None if it was
    at none."""


@dataclass(frozen=True, kw_only=True)
class Crash:
    """What is known of a rank that a fatal signal, or a timeout of faulthandler, has ended."""

    line: str | None = None
    """See `StackDump.line`."""
    stacks_file: str = ""
    """The file that has the dump; empty if there is none."""
    last_lines: tuple[str, ...] = ()
    """The last lines of standard error. Of a dump among them, only the heading is kept, since its
    last frames are those of the launcher."""


def find_crash(code: int, crash_file: Path, stderr_log: Path, stderr_lines: Sequence[str]) -> Crash:
    """Finds the dump of a rank that has ended, wherever it was written.

    Args:
        code: the exit code of the rank, or minus the number of the signal that ended it.
        crash_file: the file into which Lockstep lets faulthandler write.
        stderr_log: the rank's standard error.
        stderr_lines: its last lines, without blank ones.
    """
    is_ended_by_signal = code < 0
    if is_ended_by_signal:
        return _crash_by_signal(-code, crash_file, stderr_log, stderr_lines)
    return _crash_in_stderr(_timeout_dump_at_end(stderr_lines), stderr_log, stderr_lines)


def _crash_by_signal(
    signal_number: int, crash_file: Path, stderr_log: Path, stderr_lines: Sequence[str]
) -> Crash:
    """Describes a rank that a signal has ended.

    Its dump is in the crash file, in the file that the script has named, or in standard error.
    """
    dump_in_stderr = find_dump(stderr_lines, _FATAL_HEADING)
    last_lines = _without_frames_of(dump_in_stderr, stderr_lines)

    # At any other signal, such as SIGKILL, faulthandler writes nothing.
    if signal_number not in _FATAL_SIGNALS:
        return Crash(last_lines=last_lines)

    lines_of_crash_file = _read_lines(crash_file)
    dump = find_dump(lines_of_crash_file, _FATAL_HEADING)
    if dump is not None:
        return Crash(line=dump.line, stacks_file=CRASH_NAME, last_lines=last_lines)

    # If the script calls `faulthandler.enable(file)`, the probe notes that file in the crash file.
    named_file = _file_named_by_script(lines_of_crash_file)
    if named_file is not None:
        dump = find_dump(_read_lines(named_file), _FATAL_HEADING)
        if dump is not None:
            return Crash(line=dump.line, stacks_file=str(named_file), last_lines=last_lines)

    return _crash_in_stderr(dump_in_stderr, stderr_log, stderr_lines)


def _crash_in_stderr(
    dump: StackDump | None, stderr_log: Path, stderr_lines: Sequence[str]
) -> Crash:
    """Describes a rank from its standard error alone.

    Args:
        dump: the dump that was found in its standard error; None if none was.
        stderr_log: the file with its standard error.
        stderr_lines: the last lines of it.
    """
    last_lines = _without_frames_of(dump, stderr_lines)
    if dump is None:
        return Crash(last_lines=last_lines)

    # The lines may be known although there is no file of them, which can be named then.
    stacks_file = stderr_log.name if stderr_log.exists() else ""
    return Crash(line=dump.line, stacks_file=stacks_file, last_lines=last_lines)


def _without_frames_of(dump: StackDump | None, lines: Sequence[str]) -> tuple[str, ...]:
    """Cuts a dump out of the lines that it is in, except for its heading."""
    if dump is None:
        return tuple(lines)
    return (*lines[: dump.begin + 1], *lines[dump.end :])


def _timeout_dump_at_end(stderr_lines: Sequence[str]) -> StackDump | None:
    """Returns the dump of a timeout by which faulthandler has ended a rank; None if it has not.

    It has if nothing follows the dump. An earlier dump says nothing about the end.
    """
    dump = find_dump(stderr_lines, _TIMEOUT_HEADING)
    if dump is not None and dump.end == len(stderr_lines):
        return dump
    return None


def _file_named_by_script(lines_of_crash_file: Sequence[str]) -> Path | None:
    """Returns the file that the script has last told faulthandler to write into, if it has."""
    for line in reversed(lines_of_crash_file):
        if line.startswith(OTHER_FILE):
            return Path(line.removeprefix(OTHER_FILE))
    return None


def find_dump(lines: Sequence[str], heading: re.Pattern[str]) -> StackDump | None:
    """Finds the last dump in the lines of a file, or returns None if there is none.

    Args:
        lines: the lines, with or without the blank ones.
        heading: what the heading of the dump contains.
    """
    indices_of_headings = [index for index, line in enumerate(lines) if heading.search(line)]
    if not indices_of_headings:
        return None

    begin = indices_of_headings[-1]
    end = begin + 1
    while end < len(lines) and _is_part_of_dump(lines[end]):
        end += 1
    return StackDump(begin=begin, end=end, line=_user_line(lines[begin + 1 : end]))


def _is_part_of_dump(line: str) -> bool:
    """Returns True if a line after the heading of a dump belongs to the dump."""
    is_blank = line == ""
    is_stack_heading = _STACK_HEADING.fullmatch(line) is not None
    return is_blank or is_stack_heading or line.startswith(_BEGINNINGS_OF_DUMP_LINES)


def _user_line(dump_lines: Sequence[str]) -> str | None:
    """Returns the line of the user's code that the failed thread was at, or None if at none.

    Args:
        dump_lines: the lines of a dump after its heading.
    """
    stacks: list[list[str]] = []  # the lines of each thread's stack
    stack_of_failed_thread = None
    for line in dump_lines:
        if _STACK_HEADING.fullmatch(line):
            stacks.append([])
            if _FAILED_THREAD.fullmatch(line):
                stack_of_failed_thread = stacks[-1]
        elif stacks:
            stacks[-1].append(line)

    # If the thread that failed runs no Python code, such as one of Gloo's, all stacks are searched,
    # beginning with the last one, which is the main thread's.
    searched_stacks = stacks if stack_of_failed_thread is None else [stack_of_failed_thread]
    for stack in reversed(searched_stacks):
        frame = user_frame(parse_frames("\n".join(stack)))
        if frame is not None:
            return format_source_line(frame.file, frame.line)
    return None


def _read_lines(path: Path) -> list[str]:
    """Returns the lines of a file; none if it cannot be read."""
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
