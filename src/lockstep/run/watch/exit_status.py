"""Describes how the ranks of a run ended, as one launcher sees it and reports it to the others.

An `ExitStatus` is what is known about the end of one rank's process. An `ExitReport` holds those of
all ranks of one machine. All times are wall-clock seconds of the rank's own host.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from lockstep.run.watch.error_record import ErrorRecord
from lockstep.run.watch.printed_error import PrintedError
from lockstep.run.watch.verdict import Verdict


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
    """The code as a text: `exit code 3`, `killed by SIGKILL`."""
    given_up: str = ""
    """Why Lockstep gave up waiting for the end of its process; empty if the process has ended."""
    with_fork_server: bool = False
    """True if the kernel killed it because the process that had started it ended."""
    error: ErrorRecord | None = None
    """The exception that the rank itself has recorded."""
    oom: Literal["certain", "likely"] | None = None
    """Whether the kernel's out-of-memory killer has ended a process of the run in the meantime."""
    oom_detail: str = ""
    """What the kernel's log says about it."""
    crash_line: str | None = None
    """The line that Python was at when a fatal signal came, `file:line: code`."""
    stacks_file: str = ""
    """The file that has Python's stacks from that moment; empty if there is none."""
    last_lines: tuple[str, ...] = ()
    """The end of its standard error."""
    printed_traceback: PrintedError | None = None
    """The last traceback in its standard error, if it has recorded no exception."""
    step: int | None = None
    """The optimizer steps that it had made; None if it made none or if that is not known."""
    made_no_step: bool = False
    """True if it is known that it had made none."""
    ran_s: float | None = None
    """How long it had been running when it failed."""
    peak_bytes: int | None = None
    """Its highest resident memory."""
    asked_to_end: float | None = None
    """When Lockstep first sent it a signal to end it; None if it never did. Before the launcher
    sends one, it looks for ranks that have already ended, so that the two can be told apart."""
    was_suspended: bool = False
    """True if it was suspended, by SIGSTOP or a debugger, when Lockstep sent it that signal."""

    @property
    def has_made_step(self) -> bool | None:
        """Whether it has made an optimizer step; None if that is not known."""
        if self.step is not None:
            return True
        return False if self.made_no_step else None

    @property
    def failed_at(self) -> float:
        """When its exception was raised or, without one, when its end was noticed."""
        return self.time if self.error is None else self.error.time

    @property
    def ended_by_lockstep(self) -> bool:
        """True if Lockstep had asked it to end before anything went wrong."""
        return self.asked_to_end is not None and self.failed_at >= self.asked_to_end


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """The signal by which the launcher itself was asked to end."""

    signal: int
    time: float


@dataclass(frozen=True, kw_only=True)
class ExitReport:
    """What one launcher knows about the end of its ranks, as sent to the other launchers.

    All launchers of a run apply the same pure function to the reports of all of them, and so arrive
    at the same first failure.
    """

    host: str
    ranks: tuple[int, ...] = ()
    """All ranks that it has started."""
    earlier_failures: tuple[str, ...] = ()
    """The keys of what failed first in earlier attempts (`repeated_failure.failure_key`)."""
    exits: tuple[ExitStatus, ...] = ()
    """The ranks that have ended so far."""
    complete: bool = False
    """True if all of its ranks have ended."""
    hang: Verdict | None = None
    """The reason why the run cannot go on and must be stopped."""
    interrupted: Interruption | None = None
    """The signal that the launcher was sent."""

    @property
    def failed(self) -> bool:
        """True if something on this machine ends the run."""
        if self.hang is not None or self.interrupted is not None:
            return True
        return any(status.code != 0 and not status.ended_by_lockstep for status in self.exits)

    def to_values(self) -> dict[str, Any]:
        """Returns the report as plain values for JSON, from which `from_values` rebuilds it.

        Tracebacks are left out, as they may be long and are kept on the rank's own machine.
        """
        exits = []
        for status in self.exits:
            if status.error is not None:
                status = replace(status, error=replace(status.error, traceback=""))
            exits.append(status)
        return asdict(replace(self, exits=tuple(exits)))
