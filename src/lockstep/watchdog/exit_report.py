"""What one launcher knows of the end of its ranks, as it tells it to the others.

All launchers of a run apply the same pure function to the accounts of all of them, and so come to
the same first failure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.watchdog.exit_status import Ending, Interruption, ending_from
from lockstep.watchdog.messages import Finding, Row
from lockstep.watchdog.snapshot import Call, Frame
from lockstep.watchdog.waiting import Parting


@dataclass(frozen=True, kw_only=True)
class ExitReport:
    """The view of one launcher; times are wall-clock seconds of its host."""

    host: str
    endings: tuple[Ending, ...] = ()
    """Of those of its ranks that have ended so far."""
    complete: bool = False
    """All of its ranks have."""
    hang: Finding | None = None
    """Why the run cannot go on, and is to be stopped."""
    judged_at: float = 0.0
    interrupted: Interruption | None = None
    """The signal that it was sent."""

    @property
    def failed(self) -> bool:
        """Something here ends the run."""
        if self.hang is not None or self.interrupted is not None:
            return True
        by_themselves = (e for e in self.endings if e.failed_at < (e.asked_to_end or math.inf))
        return any(end.code != 0 for end in by_themselves)

    def to_values(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "host": self.host,
            "endings": [end.to_values() for end in self.endings],
            "complete": self.complete,
            "hang": None if self.hang is None else asdict(self.hang),
            "judged_at": self.judged_at,
            "interrupted": None if self.interrupted is None else asdict(self.interrupted),
        }


def exit_report_from(values: Mapping[str, Any]) -> ExitReport:
    """What `Account.to_values` gave, after JSON.

    Raises:
        TypeError: these are not its values.
    """
    hang, interrupted = values["hang"], values["interrupted"]
    read = {
        "endings": tuple(map(ending_from, values["endings"])),
        "hang": None if hang is None else _finding(hang),
        "interrupted": None if interrupted is None else Interruption(**interrupted),
    }
    return ExitReport(**{**values, **read})


def _finding(values: Mapping[str, Any]) -> Finding:
    parting = values["parting"]
    read = {
        "ranks": tuple(values["ranks"]),
        "rows": tuple(Row(**{**row, "line": _frame(row["line"])}) for row in values["rows"]),
        "parting": None if parting is None else _parting(parting),
        "advice": tuple(values["advice"]),
    }
    return Finding(**{**values, **read})


def _parting(values: Mapping[str, Any]) -> Parting:
    calls = tuple((rank, None if call is None else _call(call)) for rank, call in values["calls"])
    return Parting(**{**values, "calls": calls})


def _call(values: Mapping[str, Any]) -> Call:
    frames = values["frames"]
    read = {
        "input_sizes": tuple(map(tuple, values["input_sizes"])),
        "output_sizes": tuple(map(tuple, values["output_sizes"])),
        "dtypes": tuple(values["dtypes"]),
        "frames": None if frames is None else tuple(Frame(**frame) for frame in frames),
    }
    return Call(**{**values, **read})


def _frame(values: Mapping[str, Any] | None) -> Frame | None:
    return None if values is None else Frame(**values)
