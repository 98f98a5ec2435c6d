"""Starts a script in the ways that are compared, one after the other, and reads what they did.

How a script is recorded: what the command writes down, and every rank of a run reads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.settings import INSTEAD
from lockstep.verify.record import Update, read_ends, read_updates

_TAIL = 15
"""Last lines of what a run printed."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way of computing the same global batches."""

    name: str
    nproc: int
    instead: Mapping[str, Any] = field(default_factory=dict)
    """What is set in the place of the script's settings; see `lockstep.settings`."""
    batch_times: int = 1


def alone(precision: str, batch_times: int = 1) -> Way:
    """The reference: on one process."""
    instead = {"precision": precision, "shares": None, "micro_batch_size": None}
    return Way(name="1 process", nproc=1, instead=instead, batch_times=batch_times)


@dataclass(frozen=True)
class Recorded:
    """What a run did."""

    way: Way
    updates: list[Update]
    error: str = ""
    """What it ended with; empty: nothing went wrong."""
    code: str = ""
    """The code of the catalogue that the error carries, if it does."""
    output: str = ""
    """What it printed last, unless the error says it all."""
    notes: tuple[str, ...] = ()
    """What was switched off."""
    of_lockstep: bool = False
    """Whether the script trains by Lockstep, which alone honours `Way.instead`."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a script is recorded."""

    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    local_rank_flag: str | None = None
    """`--local_rank` or `--local-rank` for a script that takes its rank from there."""
    steps: int = 3
    """Of the first optimizer."""
    double: bool = True
    batch_times: int = 1

    def write(self, folder: Path) -> None:
        """For the ranks to read."""
        (folder / _FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")


Start = Callable[[Path, Way, Plan], str]
"""Runs a plan that lies in a folder, to its end; returns what was printed."""


def record(way: Way, plan: Plan, folder: Path, start: Start) -> Recorded:
    """Runs the script in one way.

    Args:
        way: how.
        plan: of the script.
        folder: for the records; it is made.
        start: brings the processes up.
    """
    folder.mkdir(parents=True)
    plan = replace(plan, batch_times=way.batch_times)
    plan.write(folder)
    output = start(folder, way, plan)
    ends = read_ends(folder, way.nproc)
    # What failed later has often failed because of it: a connection that was closed.
    failed = [end for end in ends if end and end["error"]]
    first = min(failed, key=lambda end: (not end["code"], end["time"]), default={})
    lost = "the loss of a process" if None in ends else ""
    return Recorded(
        way,
        read_updates(folder, way.nproc),
        first.get("error", lost),
        first.get("code") or "",
        output="\n".join(output.splitlines()[-_TAIL:]) if first.get("exited", True) else "",
        notes=tuple(dict.fromkeys(note for end in ends if end for note in end["notes"])),
        of_lockstep=any(end["of_lockstep"] for end in ends if end),
    )


def by_command(folder: Path, way: Way, plan: Plan) -> str:
    """Starts the processes with `lockstep run`."""
    command = [sys.executable, "-m", "lockstep.cli.main", "run", "--nproc", str(way.nproc)]
    command += ["-m", "lockstep.verify.rank", str(folder)]
    ended = subprocess.run(
        command,
        env=environment(way),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        text=True,
        errors="replace",
    )
    return ended.stdout.partition("\n")[2]  # the launcher begins with how it starts


def environment(way: Way) -> dict[str, str]:
    """Of a run's processes."""
    # Sets of strings have another order in every process: here surely, elsewhere by chance.
    own = {"PYTHONHASHSEED": str(way.nproc), **os.environ}
    return {**own, INSTEAD: json.dumps(dict(way.instead))}


_FILE = "plan.json"


def read_plan(folder: Path) -> Plan:
    """What `Plan.write` wrote."""
    values = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    return Plan(**{**values, "arguments": tuple(values["arguments"])})
