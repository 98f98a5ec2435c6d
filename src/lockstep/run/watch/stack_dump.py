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

from lockstep.run.watch.stacks import parse_frames, user_frame
from lockstep.user_code import format_source_line

CRASH_FILE = "crash.txt"
"""The name of the crash file in the folder of a rank. The rank may know it by another path."""

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
_OTHER_LINES = ("  ", "Extension modules: ", "Current thread's C stack", "Python runtime state: ")


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
    if code < 0:
        printed = find_dump(stderr_lines, _FATAL_HEADING)
    else:
        # Faulthandler has ended the rank itself if nothing follows its dump. An earlier dump says
        # nothing about the end.
        printed = find_dump(stderr_lines, _TIMEOUT_HEADING)
        if printed is not None and printed.end < len(stderr_lines):
            printed = None
    last_lines = tuple(stderr_lines)
    if printed is not None:
        last_lines = (*stderr_lines[: printed.begin + 1], *stderr_lines[printed.end :])

    if code < 0 and -code not in _FATAL_SIGNALS:
        return Crash(last_lines=last_lines)

    if code < 0:
        lines = _read_lines(crash_file)
        dump = find_dump(lines, _FATAL_HEADING)
        if dump is not None:
            return Crash(line=dump.line, stacks_file=CRASH_FILE, last_lines=last_lines)

        for line in reversed(lines):
            if line.startswith(OTHER_FILE):
                path = Path(line.removeprefix(OTHER_FILE))
                dump = find_dump(_read_lines(path), _FATAL_HEADING)
                if dump is not None:
                    return Crash(line=dump.line, stacks_file=str(path), last_lines=last_lines)
                break

    if printed is None:
        return Crash(last_lines=last_lines)
    stacks_file = stderr_log.name if stderr_log.exists() else ""
    return Crash(line=printed.line, stacks_file=stacks_file, last_lines=last_lines)


def find_dump(lines: Sequence[str], heading: re.Pattern[str]) -> StackDump | None:
    """Finds the last dump in the lines of a file, or returns None if there is none.

    Args:
        lines: the lines, with or without the blank ones.
        heading: what the heading of the dump contains.
    """
    begin = None
    for index, line in enumerate(lines):
        if heading.search(line):
            begin = index
    if begin is None:
        return None

    # The stacks of the threads, and of them that of the thread that failed.
    stacks: list[list[str]] = []
    failed_stack = None
    end = begin + 1
    for line in lines[begin + 1 :]:
        if _STACK_HEADING.fullmatch(line):
            stacks.append([])
            if _FAILED_THREAD.fullmatch(line):
                failed_stack = stacks[-1]
        elif line and not line.startswith(_OTHER_LINES):
            break  # something else was printed after the dump
        elif stacks:
            stacks[-1].append(line)
        end += 1

    # If the thread that failed runs no Python code, such as one of Gloo's, all stacks are searched,
    # beginning with the last one, which is the main thread's.
    searched = stacks if failed_stack is None else [failed_stack]
    for stack in reversed(searched):
        frame = user_frame(parse_frames("\n".join(stack)))
        if frame is not None:
            line = format_source_line(frame.file, frame.line)
            return StackDump(begin=begin, end=end, line=line)
    return StackDump(begin=begin, end=end, line=None)


def _read_lines(path: Path) -> list[str]:
    """Returns the lines of a file; none if it cannot be read."""
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
