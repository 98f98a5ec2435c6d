"""How the ranks of a run have ended, as seen from outside and as they themselves wrote it down.

All times are wall-clock seconds of the rank's own host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal


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
    step: int | None = None
    """Steps it had made."""
    chain: tuple[str, ...] = ()
    """What it was raised from, or while handling: `type: message`, the nearest first."""
    from_lockstep: bool = False
    """A `LockstepError`, whose message also holds what was found and what to do."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How the process of one rank ended."""

    rank: int
    host: str
    time: float
    """When its end was noticed."""
    code: int
    """Its exit code, or minus the number of the signal that ended it."""
    how: str
    """The code in words: `exit code 3`, `killed by SIGKILL`."""
    error: ErrorRecord | None = None
    oom: Literal["certain", "likely"] | None = None
    """Whether the kernel's out-of-memory killer has ended a process of the run meanwhile."""
    oom_detail: str = ""
    """What the kernel's log says of it."""
    crash_line: str | None = None
    """Where Python was at a fatal signal, `file:line: code`."""
    last_lines: tuple[str, ...] = ()
    """The end of its standard error."""
    step: int | None = None
    """Steps it had made."""
    peak_bytes: int | None = None
    """Its highest resident memory."""
    asked_to_end: float | None = None
    """When Lockstep first sent it a signal that ends it; None: never. To tell the two apart, ends
    that can be noticed must be noticed before such a signal is sent."""

    @property
    def failed_at(self) -> float:
        """When things went wrong: the exception was raised, or else the end was noticed."""
        return self.error.time if self.error else self.time

    def to_values(self) -> dict[str, Any]:
        """For JSON, to tell other machines; the traceback stays where it was written."""
        error = None if self.error is None else replace(self.error, traceback="")
        return asdict(replace(self, error=error))


def ending_from(values: Mapping[str, Any]) -> Ending:
    """What `Ending.to_values` gave, after JSON.

    Raises:
        TypeError: these are not its values.
    """
    error = values["error"]
    record = None if error is None else ErrorRecord(**{**error, "chain": tuple(error["chain"])})
    return Ending(**{**values, "error": record, "last_lines": tuple(values["last_lines"])})


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """The launcher itself was told to end."""

    signal: int
    time: float


@dataclass(frozen=True, kw_only=True)
class LostNode:
    """A machine whose launcher is no longer heard."""

    host: str
    ranks: tuple[int, ...]
    time: float
    reason: str = ""
