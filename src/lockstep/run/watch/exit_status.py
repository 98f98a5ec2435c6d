"""How the ranks of a run have ended, as seen from outside and as they themselves wrote it down.

All times are wall-clock seconds of the rank's own host.

What a rank raised it writes into one of its files, for the launcher; and into the file of torch's
`record` decorator, for those who read that (torch/distributed/elastic/multiprocessing/
errors/error_handler.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from lockstep.errors import LockstepError, source_line
from lockstep.run.watch.evidence import Evidence, write
from lockstep.run.watch.messages import Verdict
from lockstep.run.watch.printed_error import PrintedError
from lockstep.run.watch.snapshot import from_values
from lockstep.run.watch.stacks import Frame, Stack, own_line, parse_frames


@dataclass(frozen=True, kw_only=True)
class ErrorRecord:
    """An uncaught exception, as the rank itself wrote it down."""

    type: str
    """Name of its class, with the module where that is not builtin; also `SystemExit`."""
    message: str
    headline: str
    """Type and message in one line; `sys.exit(3)` for SystemExit."""
    line: str | None
    """The user's innermost own line, `file:line: code`."""
    time: float
    exit_code: int = 1
    """What the process ends with because of it."""
    traceback: str = ""
    chain: tuple[str, ...] = ()
    """What it was raised from, or while handling: `type: message`, the nearest first."""
    from_lockstep: bool = False
    """A `LockstepError`, whose message also holds what was found and what to do."""


@dataclass(frozen=True, kw_only=True)
class ExitStatus:
    """How the process of one rank ended."""

    rank: int
    host: str
    time: float
    """When its end was noticed."""
    code: int
    """Its exit code, or minus the number of the signal that ended it."""
    how: str
    """The code in words: `exit code 3`, `killed by SIGKILL`."""
    with_fork_server: bool = False
    """The kernel has killed it because the process that had started it ended."""
    error: ErrorRecord | None = None
    oom: Literal["certain", "likely"] | None = None
    """Whether the kernel's out-of-memory killer has ended a process of the run meanwhile."""
    oom_detail: str = ""
    """What the kernel's log says of it."""
    crash_line: str | None = None
    """Where Python was at a fatal signal, `file:line: code`."""
    last_lines: tuple[str, ...] = ()
    """The end of its standard error."""
    printed: PrintedError | None = None
    """The last traceback in its standard error, where it has recorded no exception."""
    step: int | None = None
    """Steps it had made."""
    peak_bytes: int | None = None
    """Its highest resident memory."""
    asked_to_end: float | None = None
    """When Lockstep first sent it a signal that ends it; None: never. To tell the two apart, ends
    that can be noticed must be noticed before such a signal is sent."""
    stopped: bool = False
    """Then it was stopped, by a signal or a debugger."""

    @property
    def failed_at(self) -> float:
        """When things went wrong: the exception was raised, or else the end was noticed."""
        return self.error.time if self.error else self.time

    @property
    def ended_by_us(self) -> bool:
        """Lockstep had asked it to end before anything went wrong."""
        return self.asked_to_end is not None and self.failed_at >= self.asked_to_end


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """The launcher itself was asked to end."""

    signal: int
    time: float


@dataclass(frozen=True, kw_only=True)
class ExitReport:
    """What one launcher knows of the end of its ranks, as it tells it to the others.

    All launchers of a run apply the same pure function to the reports of all of them, and so come
    to the same first failure. Times are wall-clock seconds of the launcher's host.
    """

    host: str
    ranks: tuple[int, ...] = ()
    """All that it has started."""
    exits: tuple[ExitStatus, ...] = ()
    """Of those of its ranks that have ended so far."""
    complete: bool = False
    """All of its ranks have."""
    hang: Verdict | None = None
    """Why the run cannot go on, and is to be stopped."""
    interrupted: Interruption | None = None
    """The signal that it was sent."""

    @property
    def failed(self) -> bool:
        """Something here ends the run."""
        failed = any(status.code != 0 and not status.ended_by_us for status in self.exits)
        return failed or self.hang is not None or self.interrupted is not None

    def to_values(self) -> dict[str, Any]:
        """For JSON; the tracebacks stay where they were written. `from_values` is the opposite."""
        exits = tuple(
            replace(e, error=e.error and replace(e.error, traceback="")) for e in self.exits
        )
        return asdict(replace(self, exits=exits))


ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Variable: where torch's `record` decorator writes what a script raised."""
_CHAIN = 5
_RESERVED_BYTES = 4 << 20
_MAX_HALF = 50_000
"""Characters at the beginning and at the end of a message that are kept: a batch, or a file, may be
in it."""
# What torch raises with the traceback of another process or thread in its message: its
# ExceptionWrapper, and `mp.spawn`.
_ELSEWHERE = re.compile(
    r"Caught .* in ((?:DataLoader worker process|replica) \d+)"
    r"|\s*(-- Process \d+) terminated with the following error"
)


class Reserve:
    """A file descriptor and memory with which a rank that has run out of them can still say so."""

    def __init__(self) -> None:
        self._descriptor = os.open(os.devnull, os.O_RDONLY)
        self._device = os.fstat(self._descriptor).st_rdev
        # Of zeros that nobody writes to the system only counts the addresses.
        self._memory: bytearray | None = bytearray(_RESERVED_BYTES)

    def release(self) -> None:
        """Gives both back to this process."""
        self._memory = None
        with contextlib.suppress(OSError):
            # A program that has closed all descriptors may use the number for a file of its own.
            if os.fstat(self._descriptor).st_rdev == self._device:
                os.close(self._descriptor)


def record(error: BaseException, evidence: Evidence) -> None:
    """Writes down an exception that ends this rank. Never raises.

    Args:
        error: what was caught, with its traceback.
        evidence: the files of this rank.
    """
    with contextlib.suppress(Exception):  # the exception itself must still be seen
        try:
            made = describe(error)
        except Exception:
            made = _describe_briefly(error)
        write(evidence.error, json.dumps(asdict(made)))
        elastic = os.environ.get(ERROR_FILE)
        # `record` writes it first where the script uses it, and leaves SystemExit out.
        if elastic and made.type != "SystemExit" and not os.path.exists(elastic):
            extra = {"py_callstack": made.traceback, "timestamp": str(int(made.time))}
            message = {"message": f"{made.type}: {made.message}", "extraInfo": extra}
            write(Path(elastic), json.dumps({"message": message}))


def read_record(evidence: Evidence) -> ErrorRecord | None:
    """What `record` wrote in a rank's files; None: nothing."""
    try:
        return from_values(ErrorRecord, json.loads(evidence.error.read_text()))
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def describe(error: BaseException) -> ErrorRecord:
    """An exception as values; its time is now. Of a group, the first exception in it."""
    groups, cause = _unpacked(error)
    return ErrorRecord(
        type=_type_name(cause),
        message=_message(cause),
        headline=_headline(cause) + _place_in(groups),
        line=_line(cause, groups),
        time=time.time(),
        exit_code=exit_code(error),
        traceback=_cut("".join(traceback.format_exception(error))),
        chain=tuple(f"{_type_name(e)}: {_message(e)}" for e in _chain(cause)),
        from_lockstep=isinstance(cause, LockstepError),
    )


def _describe_briefly(error: BaseException) -> ErrorRecord:
    """What can be said of an exception where memory or descriptors do not suffice for more."""
    name = _type_name(error)
    return ErrorRecord(
        type=name, message="", headline=name, line=None, time=time.time(), exit_code=1
    )


def _unpacked(error: BaseException) -> tuple[list[BaseException], BaseException]:
    """The exception groups around an error, the innermost first, and the error.

    Of several exceptions in a group it is the first: `asyncio.TaskGroup` lists those of its tasks
    in the order in which they were raised.
    """
    groups: list[BaseException] = []
    while isinstance(error, BaseExceptionGroup):
        groups.insert(0, error)
        error = error.exceptions[0]
    return groups, error


def _place_in(groups: list[BaseException]) -> str:
    """Words that say in which exception group an error was, the outermost one; empty: in none."""
    if not groups:
        return ""
    group: Any = groups[-1]
    count = len(group.exceptions)
    which = "the only exception" if count == 1 else f"the first of {count} exceptions"
    name = f"{_type_name(group)}: {group.message}".partition("\n")[0]
    return f" ({which} in {_cut(name)})"


def exit_code(error: BaseException) -> int:
    """What the interpreter ends with because of it; -2 for Ctrl-C: it ends by SIGINT."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            number = error.code or 0
            # What is no C long is -1.
            return number & 0xFF if -(1 << 63) <= number < 1 << 63 else 0xFF
        return 1
    if isinstance(error, KeyboardInterrupt):
        return -2
    return error.exit_code if isinstance(error, LockstepError) else 1


def _type_name(error: BaseException) -> str:
    module, name = type(error).__module__, type(error).__qualname__
    plain = module in ("builtins", "__main__") or module.startswith("lockstep.")
    return name if plain else f"{module}.{name}"


def _message(error: BaseException) -> str:
    try:
        return _cut(str(error))
    except Exception:
        return "(its message cannot be shown)"


def _cut(text: str) -> str:
    """A text without its middle where it is too long to be searched, sent and read."""
    left_out = len(text) - 2 * _MAX_HALF
    if left_out <= 0:
        return text
    return f"{text[:_MAX_HALF]}... ({left_out} characters are left out here) ...{text[-_MAX_HALF:]}"


def _headline(error: BaseException) -> str:
    message = _message(error)
    if isinstance(error, SystemExit):
        code = "" if error.code is None else str(error.code)
        if not isinstance(error.code, int | None):
            # It has been printed, so it may be long; its first line is enough.
            code = repr(message.split("\n")[0])
        handled = _handled(error)
        after = "" if handled is None else f" while handling {_headline(handled)}"
        return f"sys.exit({code}){after}"
    worker = _ELSEWHERE.match(message)
    remote = _end_of_traceback(message) if worker else None
    if worker and remote:
        return f"{remote} (in {(worker[1] or worker[2]).replace('-- P', 'p')})"
    first, _, _ = message.strip().partition("\n")
    return f"{_type_name(error)}: {first}" if first else _type_name(error)


def _handled(error: BaseException) -> BaseException | None:
    """What a script that ends itself in an `except` block has caught there: the true cause."""
    if not isinstance(error, SystemExit):
        return None
    handled = None if error.__suppress_context__ else error.__context__
    if error.__cause__ is not None:  # raise SystemExit(1) from error
        handled = error.__cause__
    return None if handled is None else _unpacked(handled)[1]


def _end_of_traceback(message: str) -> str | None:
    """The first line after the frames of the last traceback in a message: type and message."""
    _, heading, block = message.rpartition("Traceback (most recent call last):\n")
    lines = block.splitlines() if heading else []
    return next((text for text in lines if text and not text[0].isspace()), None)


def _line(error: BaseException, groups: Iterable[BaseException] = ()) -> str | None:
    """The user's innermost line that an error, or the groups around it, passed through."""
    if isinstance(error, LockstepError) and error.line:
        return error.line
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return source_line(error.filename, error.lineno)
    frames = list(parse_frames(_message(error))[::-1])  # of another process or thread
    handled = _handled(error)
    for each in (handled, error, *groups):
        if each is not None:
            frames += _stack(each.__traceback__)
    frame = own_line(tuple(frames))
    if frame is None or frame.file.startswith("<"):
        return None
    return source_line(frame.file, frame.line)


def _stack(trace: TracebackType | None) -> Stack:
    frames = reversed(traceback.extract_tb(trace))
    return tuple(Frame(frame.filename, frame.lineno or 0, frame.name) for frame in frames)


def _chain(error: BaseException) -> Iterator[BaseException]:
    for _ in range(_CHAIN):  # it may be a circle
        # Also one that `from None` hides: a lost connection may be behind it.
        before = error.__cause__ or error.__context__
        if before is None:
            return
        yield before
        error = before
        if isinstance(error, BaseExceptionGroup):
            error = _unpacked(error)[1]
            yield error
