"""The ranks' processes, seen from the launcher."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.diagnose.first_failure import FirstFailure


@dataclass(eq=False)
class Process:
    """A rank on this machine."""

    rank: int
    """In the whole run."""
    local_rank: int
    folder: Path
    """Of its logs and evidence."""
    pid: int | None = None
    code: int | None = None
    """How it ended: its exit code, or minus the signal's number; None: it runs."""
    ended_at: float | None = None
    """`time.time()` when its end was seen."""
    sent: dict[int, float] = field(default_factory=dict)
    """Signals that the launcher has sent, and when first."""


@dataclass(eq=False)
class Attempt:
    """The ranks of this machine between two rendezvous."""

    restarts: int
    processes: list[Process]
    world_size: int
    node: int
    """Rank of this machine among the `nodes` of the run."""
    nodes: int
    folder: Path
    failure: FirstFailure | None = None
    """What failed first, once all have ended; None: nothing."""

    @property
    def running(self) -> list[Process]:
        """Those that have not ended."""
        return [process for process in self.processes if process.code is None]
