"""Finds the user's own code in the call stack, so that messages can name the line to look at.

A file is the user's own if it does not belong to Lockstep, Python or an installed package. The
*innermost* frame of the call stack belongs to the function that is running now.
"""

from __future__ import annotations

import ast
import linecache
import sys
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import FrameType, TracebackType

Location = tuple[str, int]
"""A file and a line in it, counted from 1."""

PACKAGE_FOLDER = str(Path(__file__).parent)
FOREIGN_PREFIXES = (
    PACKAGE_FOLDER,
    sysconfig.get_paths()["stdlib"],
    str(Path(sys.executable).parent),  # commands of installed packages
    "<frozen ",
    "<string>",  # compiled from a string, as namedtuples are
)
"""Files whose names begin like this are not the user's own."""

USUAL_VARIABLE_OF_CLASS = {
    "World": "world",
    "Checkpoint": "checkpoint",
    "PreparedOptimizer": "optimizer",
    "PreparedScheduler": "scheduler",
}
"""How scripts usually name an object of a class."""
PUBLIC_FUNCTIONS = ("save_weights", "load_weights")


def is_user_file(file: str) -> bool:
    """Returns True if a source file is the user's own."""
    return not file.startswith(FOREIGN_PREFIXES) and "site-packages" not in file


def user_location() -> Location | None:
    """Returns the innermost line of the call stack that is the user's own."""
    frame = _innermost_user_frame()
    if frame is None:
        return None
    return frame.f_code.co_filename, frame.f_lineno


def user_line() -> str | None:
    """Returns the innermost line of the call stack that is the user's own, with its source."""
    location = user_location()
    if location is None:
        return None
    file, line = location
    return format_source_line(file, line)


def user_stack() -> tuple[Location, ...]:
    """Returns the lines of the call stack that are the user's own, the innermost first."""
    return tuple((frame.f_code.co_filename, frame.f_lineno) for frame in user_frames())


def user_frames() -> Iterator[FrameType]:
    """Yields the frames of the call stack that are in the user's own code, the innermost first."""
    frame = _innermost_user_frame()
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def user_call() -> str | None:
    """Returns the call of Lockstep that the user's line makes, e.g. "checkpoint.save()".

    Returns None if the user has called neither a method of a class in `USUAL_VARIABLE_OF_CLASS` nor
    a public function.
    """
    # The functions of Lockstep that are running, e.g. "Checkpoint.save", the innermost first.
    function_names: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(PACKAGE_FOLDER):
            function_names.append(frame.f_code.co_qualname)
        frame = frame.f_back

    # The outermost function that users may call is the one that the user has called. For example,
    # with ["Checkpoint.save", "Checkpoint.step"] it is `step`, which has called `save`.
    for name in reversed(function_names):
        class_name, _, name_in_class = name.partition(".")

        # "save" is the name of a method. "save.<locals>.write" is that of a function inside of one.
        is_method = name_in_class.isidentifier()
        if class_name in USUAL_VARIABLE_OF_CLASS and is_method:
            return f"{USUAL_VARIABLE_OF_CLASS[class_name]}.{name_in_class}()"

        if name in PUBLIC_FUNCTIONS:
            return f"lockstep.{name}()"

    return None


def format_source_line(file: str, line: int, if_no_source: str = "") -> str:
    """Returns a line with its source, e.g. "train.py:41: loss.backward()".

    Args:
        file: path of the file.
        line: number of the line.
        if_no_source: text to put after the number if the file cannot be read.
    """
    source = linecache.getline(file, line).strip()
    text = f"{Path(file).name}:{line}"
    if source:
        return f"{text}: {source}"
    return text + if_no_source


@lru_cache(maxsize=1)  # several checks parse the same script, one after the other
def parse_source(source: str) -> ast.Module | None:
    """Parses the source of a script; returns None if it is not valid Python.

    The result is shared by all callers, who must not change it.
    """
    try:
        return ast.parse(source)
    except SyntaxError:
        return None


def user_traceback(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback with only the user's own frames.

    If there are none, as with `python -c`, returns all frames except those of Lockstep.
    """
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next

    kept = [entry for entry in entries if is_user_file(entry.tb_frame.f_code.co_filename)]
    if not kept:
        for entry in entries:
            if not entry.tb_frame.f_code.co_filename.startswith(PACKAGE_FOLDER):
                kept.append(entry)

    # Link the frames again, from the innermost to the outermost.
    result = None
    for entry in reversed(kept):
        result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result


def _innermost_user_frame() -> FrameType | None:
    """Returns the innermost frame of the call stack that is in the user's own code, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None
