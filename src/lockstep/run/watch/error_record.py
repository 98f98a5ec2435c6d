"""Records the exception that ends a rank, so that the launcher can report what failed first.

The record is written into the rank's evidence files, which the launcher reads. It is also written
into the file of torch's `record` decorator, for programs that read that file
(torch/distributed/elastic/multiprocessing/errors/error_handler.py).

An exception may be wrapped in exception *groups*. The *cause* is then the exception inside them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.error_in_flight import (
    ErrorInFlight,
    errors_before,
    find_handled_error,
    find_uncaught_before,
    is_handled_by_user,
    training_went_on,
)
from lockstep.errors import LockstepError, format_for_user
from lockstep.run.watch.dataclass_json import from_values
from lockstep.run.watch.evidence import Evidence, write_in_place
from lockstep.run.watch.hiding_file import find_hiding_file
from lockstep.run.watch.stacks import Frame, Stack, parse_frames, user_frame
from lockstep.user_code import format_source_line

TORCH_ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Names the file into which torch's `record` decorator writes what a script raised."""

_MAX_CHAIN = 5
_MAX_HEADLINE_CHARS = 200
_RESERVED_BYTES = 4 << 20
# Longer messages lose their middle: they may contain a batch, or a whole file.
_MAX_CHARS_AT_EACH_END = 50_000

# torch puts the traceback of another process or thread into the message of the exception that it
# raises here, in its ExceptionWrapper and in `mp.spawn`:
#   Caught ValueError in DataLoader worker process 0.
#   -- Process 1 terminated with the following error:
_RAISED_ELSEWHERE = re.compile(
    r"Caught .* in (?P<worker>(?:DataLoader worker process|replica) \d+)"
    r"|\s*-- Process (?P<process>\d+) terminated with the following error"
)

# `multiprocessing.Pool` and `ProcessPoolExecutor` raise the exception of a worker process again as
# it is, without its traceback, and make an exception of one of these classes its cause. The text of
# the cause is the traceback. joblib and multiprocess, which do the same, use the same names.
_CLASSES_OF_REMOTE_TRACEBACKS = ("RemoteTraceback", "_RemoteTraceback")
_HEADING_OF_TRACEBACK = "Traceback (most recent call last):\n"


@dataclass(frozen=True, kw_only=True)
class ErrorRecord:
    """An uncaught exception, as recorded by the rank itself."""

    type: str
    """The name of its class, with the module unless that is builtin; also `SystemExit`."""
    message: str
    headline: str
    """Type and message in one line; for SystemExit, `sys.exit(3)`."""
    line: str | None
    """The user's innermost line, `file:line: code`."""
    time: float
    exit_code: int = 1
    """The exit code with which the process ends because of it."""
    traceback: str = ""
    chain: tuple[str, ...] = ()
    """The exceptions that it was raised from, or while handling, the nearest first, each as
    `type: message`."""
    raised_meanwhile: tuple[str, ...] = ()
    """The exceptions that were raised while this one was in flight (in `finally`, say), the last
    one first, each as `type: message, file:line: code`. The last one has ended the rank."""
    handled: str = ""
    """The exception that the user's code had caught, and handled when this one was raised, as
    `type: message, file:line: code`."""
    trained_steps: int | None = None
    """Optimizer steps since the training began, including earlier attempts that this one resumed;
    None if `lockstep.init` was not called."""
    from_lockstep: bool = False
    """True for a `LockstepError`, whose message also says what was found and what to do."""
    may_be_temporary: bool = True
    """See `LockstepError.may_be_temporary`; True for all exceptions of others."""
    of_rank: int | None = None
    """The rank that has failed, if this one was only told of it (`LockstepError.of_rank`)."""
    hiding_file: str = ""
    """A file of the user's that was imported in place of an installed module of the same name, if
    the exception may come from that."""


class Reserve:
    """Holds back a file descriptor and memory, for a rank that runs out of them."""

    def __init__(self) -> None:
        self._descriptor = os.open(os.devnull, os.O_RDONLY)
        self._device = os.fstat(self._descriptor).st_rdev
        # Nobody writes to these zeros, so that they use addresses but no memory.
        self._memory: bytearray | None = bytearray(_RESERVED_BYTES)

    def release(self) -> None:
        """Frees the descriptor and the memory, so that the rank can record its error."""
        self._memory = None
        with contextlib.suppress(OSError):
            # A program that has closed all descriptors may have reused the number for a file of its
            # own, which must stay open. It is still ours if it is on the device of /dev/null.
            if os.fstat(self._descriptor).st_rdev == self._device:
                os.close(self._descriptor)


def record_error(error: BaseException, evidence: Evidence) -> None:
    """Records an exception that ends this rank, for the launcher and for torch. Never raises.

    Args:
        error: the exception that was caught, with its traceback.
        evidence: the files of this rank.
    """
    with contextlib.suppress(Exception):  # so that the exception itself is still shown
        try:
            record = describe_error(error)
        except Exception:  # there may be no memory or no descriptor left to describe it
            record = _describe_briefly(error)

        write_in_place(evidence.error, json.dumps(asdict(record)))

        # torch's decorator `record` writes a file too, for every exception but SystemExit. If the
        # script does not use the decorator, the file is written here.
        torch_file = os.environ.get(TORCH_ERROR_FILE_VARIABLE, "")
        if torch_file and record.type != "SystemExit":
            was_written_by_decorator = os.path.exists(torch_file)
            if not was_written_by_decorator:
                _write_for_torch(record, Path(torch_file))


def _write_for_torch(record: ErrorRecord, path: Path) -> None:
    """Writes a record in the format of torch's `record` decorator."""
    message = {
        "message": f"{record.type}: {record.message}",
        "extraInfo": {"py_callstack": record.traceback, "timestamp": str(int(record.time))},
    }
    write_in_place(path, json.dumps({"message": message}))


def readable_torch_file(path: Path) -> str:
    """Returns the path of a file in the format of torch's `record` decorator, if torch can read it.

    It cannot if the file is missing, or incomplete because the disk was full.

    Returns:
        The path, or an empty string.
    """
    try:
        message = json.loads(path.read_text())["message"]
        # Unless the message is a text, torch reads this number of it. Where that fails in torch, it
        # fails here too.
        if not isinstance(message, str):
            int(message["extraInfo"]["timestamp"])
    except (OSError, ValueError, TypeError, KeyError):
        return ""
    return str(path)


def read_error(evidence: Evidence) -> ErrorRecord | None:
    """Reads the record that `record_error` wrote into a rank's files.

    Returns:
        The record, or None if there is none, or if it is damaged.
    """
    try:
        return from_values(ErrorRecord, json.loads(evidence.error.read_text()))
    except (OSError, ValueError, TypeError, AttributeError, LookupError):
        return None


def describe_error(error: BaseException) -> ErrorRecord:
    """Describes an exception, with the present time; for a group, the first exception in it.

    The headline of an exception in a group says so: "ValueError: no data (the first of 2 exceptions
    in ...)".

    An error of Lockstep's also says whether it may pass if the ranks are started again, and which
    rank has failed if this one was only told of the failure. A wrong module may have been imported:
    the user's `random.py` instead of Python's, for example. Then the record names that file.
    """
    groups, cause = _unpack_groups(error)
    raised_meanwhile: list[str] = []
    handled = ""

    # A rank may have been about to end by an exception, when code that cleans up raised another
    # one. Then the first of them, `uncaught`, says what went wrong. (`sys.exit` and Ctrl-C are no
    # such accidents.)
    if isinstance(cause, Exception):
        uncaught = find_uncaught_before(cause)
        if isinstance(uncaught, Exception):
            raised_meanwhile = _describe_until(cause, uncaught)
            groups, cause = _unpack_groups(uncaught)
        else:
            handled = _describe_handled(cause)

    earlier_errors = _chain(cause)

    may_be_temporary = True
    failed_rank = None
    if isinstance(cause, LockstepError):
        may_be_temporary = cause.may_be_temporary
        failed_rank = cause.of_rank

    return ErrorRecord(
        type=_type_name(cause),
        message=_message(cause),
        headline=_headline(cause) + _place_in_groups(groups),
        line=_user_line(cause, groups),
        time=time.time(),
        exit_code=exit_code(error),
        traceback=_shorten(format_for_user(error)),
        chain=_describe_chain(earlier_errors),
        raised_meanwhile=tuple(raised_meanwhile),
        handled=handled,
        trained_steps=trained_steps(),
        from_lockstep=isinstance(cause, LockstepError),
        may_be_temporary=may_be_temporary,
        of_rank=failed_rank,
        hiding_file=find_hiding_file([cause, *earlier_errors]),
    )


def _describe_chain(errors: Sequence[BaseException]) -> tuple[str, ...]:
    """Describes the exceptions that another one was raised from, each as `type: message`.

    If a worker process of a pool raised the exception, its cause here is no exception of the
    worker's, but the text of the worker's traceback (`_is_remote_traceback`):

        KeyError: 'a'
        During handling of the above exception, another exception occurred: ...
        ValueError: no data

    The last one, `ValueError: no data`, is the exception itself, so `KeyError: 'a'` is described.
    """
    descriptions: list[str] = []
    for error in errors:
        if _is_remote_traceback(error):
            descriptions += _headlines_before_last(_message(error))
        else:
            descriptions.append(f"{_type_name(error)}: {_message(error)}")
    return tuple(descriptions)


def describe_in_flight(error: BaseException) -> ErrorInFlight | None:
    """Describes the exception that will end the program, while a thread handles an exception.

    It may be the handled one, or one that was raised before it. For example, the thread handles the
    OSError here, but it is the ValueError that will end the program (`find_handled_error`):

        try:
            train()  # raises ValueError
        finally:
            try:
                write_summary()  # raises OSError
            except OSError:
                world.barrier()

    Args:
        error: the exception that the thread handles.

    Returns:
        The description, or None if no exception concerns the user.
    """
    error_to_report = find_handled_error(error)
    if error_to_report is None:
        return None
    groups, cause = _unpack_groups(error_to_report)
    return ErrorInFlight(
        headline=_shorten_headline(_headline(cause)),
        line=_user_line(cause, groups),
        # True if an optimizer has made a step since the exception was raised: then it did no harm.
        training_went_on=training_went_on(error_to_report),
    )


def _describe_until(error: BaseException, first: BaseException) -> list[str]:
    """Describes the exceptions that were raised while an earlier one was in flight.

    Args:
        error: the last exception.
        first: the one that was in flight.

    Returns:
        The descriptions, that of the last exception first.
    """
    descriptions = []
    for later in [error, *errors_before(error)]:
        if later is first:
            break
        descriptions.append(_describe_with_line(later))
    return descriptions


def _describe_handled(error: BaseException) -> str:
    """Describes the exception that the user's code had caught when it raised another one.

    Returns:
        The description; empty if there was none, or if the other one was raised from it (then it
        is in the chain of that exception).
    """
    for earlier in errors_before(error):
        if is_handled_by_user(earlier):
            return _describe_with_line(earlier)
    return ""


def _describe_with_line(error: BaseException) -> str:
    """Describes an exception in one line: `ValueError: no data, train.py:12: load()`."""
    groups, cause = _unpack_groups(error)
    headline = _shorten_headline(_headline(cause))
    return ErrorInFlight(headline=headline, line=_user_line(cause, groups)).describe()


def _shorten_headline(headline: str) -> str:
    """Cuts off a headline that is too long to be a part of a line."""
    if len(headline) <= _MAX_HEADLINE_CHARS:
        return headline
    return f"{headline[:_MAX_HEADLINE_CHARS]}..."


def _describe_briefly(error: BaseException) -> ErrorRecord:
    """Describes an exception only by its type, if memory or descriptors do not suffice for more."""
    name = _type_name(error)
    return ErrorRecord(
        type=name, message="", headline=name, line=None, time=time.time(), exit_code=1
    )


def exit_code(error: BaseException) -> int:
    """Returns the exit code with which the interpreter ends because of an exception.

    For Ctrl-C it is minus the number of SIGINT, as the interpreter ends itself by this signal.
    """
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        if not isinstance(error.code, int):
            return 1  # it is a message, which the interpreter prints

        # The system keeps only the lowest byte: `sys.exit(256)` ends with 0. If the number does not
        # fit into a C long, the interpreter uses -1 instead, whose lowest byte is 0xFF.
        fits_into_c_long = -(2**63) <= error.code < 2**63
        return error.code & 0xFF if fits_into_c_long else 0xFF

    if isinstance(error, KeyboardInterrupt):
        return -signal.SIGINT
    if isinstance(error, LockstepError):
        return error.exit_code
    return 1


def trained_steps() -> int | None:
    """Returns `World.step` of this process, or None if `lockstep.init` was not called."""
    world = sys.modules.get("lockstep.world")  # it may not be imported here
    if world is None:
        return None
    steps: int | None = world.trained_steps()
    return steps


# --- Exception groups and chains


def _unpack_groups(error: BaseException) -> tuple[list[BaseException], BaseException]:
    """Unwraps an exception from the exception groups around it.

    If a group has several exceptions, the first one is taken: `asyncio.TaskGroup` lists those of
    its tasks in the order in which they were raised.

    Returns:
        The groups, the innermost first, and the exception.
    """
    groups: list[BaseException] = []
    while isinstance(error, BaseExceptionGroup):
        groups.insert(0, error)
        error = error.exceptions[0]
    return groups, error


def _place_in_groups(groups: list[BaseException]) -> str:
    """Says where an exception was, for a headline: ` (the first of 2 exceptions in ...)`.

    The exception that is reported is always the first one in its group, see `_unpack_groups`.

    Args:
        groups: the groups around the exception, the innermost first.

    Returns:
        The text, or an empty string if there is no group.
    """
    if not groups:
        return ""

    # Groups may be nested. The outermost one is what the script has raised.
    outermost_group: Any = groups[-1]
    count = len(outermost_group.exceptions)
    position = "the only exception" if count == 1 else f"the first of {count} exceptions"
    group_headline = f"{_type_name(outermost_group)}: {outermost_group.message}"
    first_line, _, _ = group_headline.partition("\n")  # a headline is one line
    return f" ({position} in {_shorten(first_line)})"


def _chain(error: BaseException) -> list[BaseException]:
    """Returns the exceptions that an exception was raised from, or while handling.

    The nearest comes first; the exception itself is not included. A group is followed by the first
    exception in it.
    """
    chain: list[BaseException] = []
    present = error
    for _ in range(_MAX_CHAIN):  # the chain may be circular
        # `raise ... from None` hides the context, but a lost connection may be behind it.
        earlier = present.__cause__ or present.__context__
        if earlier is None:
            break

        chain.append(earlier)

        # What the exception in a group was raised from says more than what the group was.
        _, present = _unpack_groups(earlier)
        if present is not earlier:
            chain.append(present)

    return chain


def _handled_error(error: BaseException) -> BaseException | None:
    """Returns the exception that a script caught before it called `sys.exit`: the true cause.

    Returns:
        The exception. None if `error` is not a SystemExit, or if the script caught nothing.
    """
    if not isinstance(error, SystemExit):
        return None

    if error.__cause__ is not None:  # raise SystemExit(1) from error
        handled: BaseException | None = error.__cause__
    elif error.__suppress_context__:  # raise SystemExit(1) from None
        handled = None
    else:
        handled = error.__context__

    if handled is None:
        return None
    _, cause = _unpack_groups(handled)
    return cause


# --- Texts


def _type_name(error: BaseException) -> str:
    """Returns the name of an exception's class, with its module if needed: `socket.gaierror`."""
    module = type(error).__module__
    name = type(error).__qualname__
    needs_no_module = module in ("builtins", "__main__") or module.startswith("lockstep.")
    return name if needs_no_module else f"{module}.{name}"


def _message(error: BaseException) -> str:
    """Returns the message of an exception, shortened if it is very long."""
    try:
        # Lockstep's own errors are recorded in English, as the launcher searches the records.
        return _shorten(error.text if isinstance(error, LockstepError) else str(error))
    except Exception:
        return "(its message cannot be shown)"


def _shorten(text: str) -> str:
    """Removes the middle of a text that is too long to be searched, sent and read."""
    num_removed = len(text) - 2 * _MAX_CHARS_AT_EACH_END
    if num_removed <= 0:
        return text
    begin = text[:_MAX_CHARS_AT_EACH_END]
    end = text[-_MAX_CHARS_AT_EACH_END:]
    return f"{begin}... ({num_removed} characters are left out here) ...{end}"


def _headline(error: BaseException) -> str:
    """Describes an exception in one line: `ValueError: no data`."""
    if isinstance(error, SystemExit):
        return _headline_of_exit(error)

    message = _message(error)

    # A DataLoader and `mp.spawn` raise the exception of another process again, with the traceback
    # from there as its message: its original headline is at the end of that.
    elsewhere = _RAISED_ELSEWHERE.match(message)
    if elsewhere is not None:
        remote_headline = _headline_of_traceback(message)
        if remote_headline:
            place = elsewhere["worker"] or f"process {elsewhere['process']}"
            return f"{remote_headline} (in {place})"

    first_line, _, _ = message.strip().partition("\n")
    headline = f"{_type_name(error)}: {first_line}" if first_line else _type_name(error)

    # The pools (`concurrent.futures`, `multiprocessing.Pool`) raise it again as it was, with the
    # traceback from there as its cause.
    if _remote_traceback(error):
        return f"{headline} (in a worker process)"
    return headline


def _headline_of_exit(error: SystemExit) -> str:
    """Describes an exit in one line: `sys.exit(1) while handling ValueError: no data`."""
    if error.code is None:
        argument = ""
    elif isinstance(error.code, int):
        argument = str(error.code)
    else:
        # The code is a message for the interpreter to print, of which the first line is enough.
        argument = repr(_message(error).split("\n")[0])

    headline = f"sys.exit({argument})"
    handled = _handled_error(error)  # the exception in whose `except` block the script has exited
    if handled is not None:
        headline += f" while handling {_headline(handled)}"
    return headline


def _headline_of_traceback(message: str) -> str | None:
    """Finds the headline of the last traceback in a message, such as `ValueError: no data`.

    Returns:
        The headline, or None if the message contains no traceback.
    """
    headlines = _headlines_of_tracebacks(message)
    return headlines[-1] if headlines else None


def _headlines_before_last(message: str) -> list[str]:
    """Returns the headlines of the tracebacks before the last one in a message, the nearest first.

    The last one is that of the exception itself, and the others are those that it was raised from.
    """
    headlines_before_last = _headlines_of_tracebacks(message)[:-1]
    return list(reversed(headlines_before_last))


def _headlines_of_tracebacks(message: str) -> list[str]:
    """Returns the headline of each traceback in a message: its first line after the frames."""
    headlines = []
    for after_heading in message.split(_HEADING_OF_TRACEBACK)[1:]:
        for line in after_heading.splitlines():
            is_frame_or_empty = not line or line[0].isspace()
            if not is_frame_or_empty:
                headlines.append(line)
                break
    return headlines


def _remote_traceback(error: BaseException) -> str:
    """Returns the traceback from the worker process that raised an exception.

    Returns:
        The text; empty if the exception does not come from the worker of a pool.
    """
    cause = error.__cause__
    if cause is None or not _is_remote_traceback(cause):
        return ""
    return _message(cause)


def _is_remote_traceback(error: BaseException) -> bool:
    """Returns True if an exception is only the text of a traceback from a worker process."""
    return type(error).__name__ in _CLASSES_OF_REMOTE_TRACEBACKS


def _user_line(error: BaseException, groups: Iterable[BaseException]) -> str | None:
    """Returns the innermost line of the user's code that an exception passed through.

    Args:
        error: the exception.
        groups: the groups around it, the innermost first.

    Returns:
        The line as `file:line: code`, or None if no line of the user's has a source file.
    """
    # An error of Lockstep's may know the line already.
    if isinstance(error, LockstepError) and error.line:
        return error.line

    # The line with a syntax error has not run, so it is in no frame.
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return format_source_line(error.filename, error.lineno)

    frame = user_frame(_frames_passed_through(error, groups))
    if frame is None or frame.file.startswith("<"):  # such as <string>, which has no source
        return None
    return format_source_line(frame.file, frame.line)


def _frames_passed_through(error: BaseException, groups: Iterable[BaseException]) -> Stack:
    """Returns all frames that an exception may come from, the innermost first.

    Args:
        error: the exception.
        groups: the groups around it, the innermost first.
    """
    # If the script called `sys.exit` in an `except` block, the exception that it had caught shows
    # more than the exit does. So the frames of that exception come first.
    frames: list[Frame] = []
    handled = _handled_error(error)
    if handled is not None:
        frames += _frames_of(handled)

    for raised in (error, *groups):
        frames += _frames_of(raised)
    return tuple(frames)


def _frames_of(error: BaseException) -> list[Frame]:
    """Returns the frames of an exception, also those in another process, the innermost first."""
    # If the exception comes from another process or thread, its message (DataLoader, `mp.spawn`) or
    # its cause (the pools) contains the traceback from there, which lists the outermost frame
    # first.
    text = f"{_message(error)}\n{_remote_traceback(error)}"
    return [*reversed(parse_frames(text)), *_stack(error.__traceback__)]


def _stack(trace: TracebackType | None) -> Stack:
    """Returns the frames of a traceback, the innermost first."""
    frames = []
    for frame in reversed(traceback.extract_tb(trace)):
        frames.append(Frame(frame.filename, frame.lineno or 0, frame.name))
    return tuple(frames)
