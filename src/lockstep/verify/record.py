"""What the ranks of a run have written down of a training, and how a run that does so is started.

Each rank writes one file for each update; the command, which has started the ranks with the `Way`
that lies beside, reads them.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.distributed.torch_compat import on_default_group
from lockstep.errors import LockstepError, RecordingFailedError, UsageError
from lockstep.run.start.worker import Script
from lockstep.run.watch.error_record import describe_error
from lockstep.settings import VERIFY_VARIABLE
from lockstep.verify.files import restore
from lockstep.verify.lines_up import lined_up, steps_of, with_idle_ranks
from lockstep.verify.names import renamed
from lockstep.verify.tolerance import Array
from lockstep.verify.training_record import Place, RankUpdate, Update

OWN_PROCESSES = (
    "verify a script that is one rank, as for torchrun: with RANK and WORLD_SIZE from the "
    "environment, or with lockstep.init"
)
"""What to do with a script that starts its ranks itself."""
_WAY, _ENDED, _STEP = "way.pickle", "ended.json", "step"
LEAST_STEPS = 3
"""They are compared however long they take."""
_APART = "diloco"
"""The strategy with other numbers than those of one model."""
LOST_PEER = "by peer|Broken pipe"
"""In what torch says of a connection that has broken, as of a rank that is gone."""
_LOOK_S = 0.2
"""Seconds between two looks at how far a run is."""
_TAIL = 15
"""Last lines of what a run printed."""


def recording_failed(what: str, traceback: str) -> RecordingFailedError:
    """An error of `lockstep verify` itself.

    Args:
        what: was recorded or compared.
        traceback: of the error.
    """
    text = traceback.rstrip().replace("\n", "\n         | ")
    return RecordingFailedError(
        f"lockstep verify, {what}",
        f"verify itself has failed; this says nothing about the script\n         | {text}",
        "please report it with this text; `lockstep run` runs the script as it is",
    )


def not_recorded(what: str) -> UsageError:
    """Of something that a script does in processes that it has started itself."""
    found = "lockstep verify records only the processes that it starts"
    return UsageError(what, found, OWN_PROCESSES)


def refuse_own_ranks(*_: Any, **__: Any) -> None:
    """For what would start ranks in the place of the launcher.

    Raises:
        UsageError: always.
    """
    raise not_recorded("ranks that the script starts itself, by torch.multiprocessing")


def refuse_groups(nproc: int, run: Callable[[], object] = lambda: None) -> None:
    """Runs something; from here on no group of this process has more ranks than `nproc`."""

    def check(group: Any) -> None:
        if group.size() > nproc:
            for child in active_children():  # which would wait for this rank
                child.kill()
            refuse_own_ranks()

    on_default_group(check)
    run()


class UpdateWriter:
    """Writes the updates of one rank.

    Args:
        folder: of the run; the rank makes one of its own in it.
        rank: whose.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder / f"rank{rank}"
        self.folder.mkdir(parents=True)
        self.count = 0
        self._owner = os.getpid()

    def write(self, update: RankUpdate, replica: int | None = None) -> None:
        """One more update; its file has its name when all of it is there.

        Args:
            update: it.
            replica: of the model, where several train apart, each with tensors of its own.

        Raises:
            UsageError: it was made in a copy of the process that is recorded.
        """
        if os.getpid() != self._owner:
            raise not_recorded("an optimizer step in a process that the script has started itself")
        if replica is not None:
            update = renamed(update, lambda name: f"{name} (replica {replica})")
        unfinished = self.folder / "unfinished"
        with unfinished.open("wb") as file:
            pickle.dump(update, file)
        unfinished.rename(self.folder / f"{self.count}.pickle")
        (self.folder / f"{_STEP}{update.step}").touch()
        self.count += 1

    def end(self, error: BaseException | None, notes: Sequence[str] = (), **known: Any) -> None:
        """The script has ended.

        Args:
            error: with which; None: as it should.
            notes: what was switched off.
            **known: `of_lockstep`, `until`, `by_choice`, `started`, `internal` and `ways`, as of
                `Recorded`, and `internal`, as of `Recorder`.
        """
        told = {
            "error": "" if error is None else _in_words(error),
            "code": (error.code if isinstance(error, LockstepError) else None) or "",
            "exited": isinstance(error, SystemExit),
            "lost_peer": bool(re.search(LOST_PEER, str(error))),
            "time": time.time(),
            "notes": list(notes),
            **known,
        }
        (self.folder / _ENDED).write_text(json.dumps(told), encoding="utf-8")


def _in_words(error: BaseException) -> str:
    if isinstance(error, LockstepError):
        return f"{type(error).__name__}: {error}"
    made = describe_error(error)
    exited = isinstance(error, SystemExit)
    text = made.headline if exited else f"{made.type}: {made.message}"
    return text if made.line is None else f"{text}\n  at:    {made.line}"


def _read_rank(folder: Path) -> Iterator[RankUpdate]:
    number = 0
    while (path := folder / f"{number}.pickle").exists():
        with path.open("rb") as file:
            yield pickle.load(file)  # written by our own processes, in a folder of this user alone
        number += 1


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way of computing the same global batches, by the same script."""

    name: str
    nproc: int
    script: Script
    steps: int = 3
    """Of the optimizer that makes the most, at most."""
    seconds: float | None = None
    """After these no further step is made, but for the first 3; None: all of them are."""
    precision: str = "fp64"
    """What everything is computed in, `fp64` or `fp32`."""
    batch_times: int = 1
    """DataLoaders of torch get so many times the batch size."""
    batches: Path | None = None
    """Where the batches of the run on several processes are kept for that on one; None: they are
    not."""
    instead: Mapping[str, Any] = field(default_factory=dict)
    """What else is set in the place of the script's settings; see `lockstep.settings`."""

    def alone(self, batch_times: int = 1) -> Way:
        """The reference: on one process."""
        whole = {"shares": None, "micro_batch_size": None}
        own = {"strategy": self.instead["strategy"]} if self.apart else {}
        name = "1 process" + f", strategy {own.get('strategy')}" * self.apart
        instead = {**whole, **own}
        return replace(self, name=name, nproc=1, batch_times=batch_times, instead=instead)

    @property
    def apart(self) -> bool:
        """It needs a reference that trains several replicas too."""
        return str(self.instead.get("strategy")).partition(":")[0] == _APART

    def environment(self) -> dict[str, str]:
        """Of the run's processes."""
        # Sets of strings have another order in every process: here surely, elsewhere by chance.
        own = {"PYTHONHASHSEED": str(self.nproc), **os.environ}
        instead = {"precision": self.precision, "uncompressed": True, **self.instead}
        return {**own, VERIFY_VARIABLE: json.dumps(instead)}


def read_way(folder: Path) -> Way:
    """How the script is run whose records come into a folder."""
    way: Way = pickle.loads((folder / _WAY).read_bytes())
    return way


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
    until: str = ""
    """Where the script was stopped; empty: it came to its end."""
    by_choice: str = ""
    """What the script has chosen that gives other numbers, and was left out; empty: nothing."""
    started: str = ""
    """The line that started the first process of the script's own; empty: none was started."""
    kept_batches: str = ""
    """The line of a DataLoader whose batches could not be made larger; empty: there was none."""
    loaders: int = 0
    """How many of torch's DataLoaders were iterated to train."""
    finals: Sequence[Mapping[str, Array]] = ()
    """Of each rank, sums over the parameters that its next forward pass would begin with."""
    ways: Sequence[Mapping[Place, int]] = ()
    """Of each rank, the outcomes of tests since its last update."""
    idle: Sequence[int] = ()
    """Ranks of which no step was seen, while others trained."""

    @property
    def steps(self) -> int:
        """Of the optimizer that has made the most."""
        return most_steps([update[0] for update in self.updates])


def record(way: Way, folder: Path, start: Callable[[Path, Way], str]) -> Recorded:
    """Runs the script in one way.

    Args:
        way: how.
        folder: for the records; it is made.
        start: brings the processes up that write into the folder; returns what they printed.

    Raises:
        RecordingFailedError: the recorder itself has failed.
    """
    folder.mkdir(parents=True)
    (folder / _WAY).write_bytes(pickle.dumps(way))
    try:
        output = start(folder, way)
    finally:
        restore(folder)
    ranks = [folder / f"rank{rank}" for rank in range(way.nproc)]
    ended = {n: rank / _ENDED for n, rank in enumerate(ranks)}
    ends = {n: json.loads(p.read_text(encoding="utf-8")) for n, p in ended.items() if p.exists()}
    updates = [list(_read_rank(rank)) for rank in ranks]
    first = _first_failure(ends, updates, way.steps)
    lost = "the loss of a process" if len(ends) < way.nproc else ""

    def first_told(what: str) -> str:
        return next((end[what] for end in ends.values() if end.get(what)), "")

    if internal := first_told("internal"):
        raise recording_failed(f"{way.name} of {way.script.path}", internal)

    idle = () if first or lost else _idle(ends, updates)
    trained = [steps_of(each) for rank, each in enumerate(updates) if rank not in idle]
    return Recorded(
        way,
        with_idle_ranks(lined_up(trained), idle),
        first.get("error", lost),
        first.get("code", ""),
        output="\n".join(output.splitlines()[-_TAIL:]) if first.get("exited", True) else "",
        notes=tuple(dict.fromkeys(note for end in ends.values() for note in end["notes"])),
        of_lockstep=any(end.get("of_lockstep") for end in ends.values()),
        until=first_told("until"),
        by_choice=first_told("by_choice"),
        started=first_told("started"),
        kept_batches=first_told("kept_batches"),
        loaders=max((end.get("loaders", 0) for end in ends.values()), default=0),
        finals=[
            {name: np.array(sums) for name, sums in ends[n].get("final", {}).items()}
            for n in sorted(ends)
        ],
        ways=[{(*place,): way for place, way in ends[n].get("ways", ())} for n in sorted(ends)],
        idle=idle,
    )


def most_steps(updates: Sequence[RankUpdate]) -> int:
    """How many steps the optimizer has made that made the most."""
    return max(Counter(update.optimizer for update in updates).values(), default=0)


def _first_failure(
    ends: Mapping[int, dict[str, Any]], updates: Sequence[list[RankUpdate]], wanted: int
) -> dict[str, Any]:
    """What went wrong first, with what that rank has told of its end; empty: nothing did."""
    failed = [rank for rank, end in ends.items() if end["error"]]
    if not failed:
        for rank in sorted(ends):
            if seen := _unchanged(rank, ends, updates):
                return {"error": seen, "code": "LS304"}
        return {}
    # What failed later has often failed because of it, and a connection breaks because of another.
    failed.sort(key=lambda n: (not ends[n]["code"], ends[n]["lost_peer"], ends[n]["time"]))
    rank = failed[0]
    first = ends[rank]
    if not first["lost_peer"]:
        return first
    if seen := _unchanged(rank, ends, updates):
        return {**first, "error": seen, "code": "LS304"}
    if _peers_were_stopped(rank, ends, updates, wanted):
        return {}
    if left := _left(rank, ends, updates, wanted):
        return {**first, "error": f"{left}\nrank {rank}: {first['error']}", "code": "LS405"}
    return first


def _peers_were_stopped(
    rank: int, ends: Mapping[int, dict[str, Any]], updates: Sequence[list[RankUpdate]], wanted: int
) -> bool:
    """Whether a rank lost its peers only because enough steps of theirs had been recorded.

    Ranks that do not step alike, as under `Join` or with one optimizer for all, are not stopped at
    the same place. A rank without a step may have waited for another one that pretrained.
    """
    peers = [end for other, end in ends.items() if other != rank and not end["error"]]
    if not peers or not all(end.get("until") for end in peers):
        return False
    begins = ends[rank].get("passes", LEAST_STEPS) < LEAST_STEPS
    return most_steps(updates[rank]) >= wanted or (begins and not updates[rank])


def _idle(
    ends: Mapping[int, dict[str, Any]], updates: Sequence[list[RankUpdate]]
) -> tuple[int, ...]:
    """Ranks that had not begun to train while others did.

    Where the others were stopped after enough steps, a rank without a step of its own may have made
    the backward passes of its first one.
    """
    if not any(updates):
        return ()
    stopped = any(end.get("until") for end in ends.values())
    most = LEAST_STEPS if stopped else 1
    return tuple(
        rank
        for rank in sorted(ends)
        if not updates[rank] and ends[rank].get("passes", LEAST_STEPS) < most
    )


def _unchanged(
    rank: int, ends: Mapping[int, dict[str, Any]], updates: Sequence[list[RankUpdate]]
) -> str:
    """That a rank has trained without a step while others stepped, in words; empty: it has not."""
    passes = ends[rank].get("passes_without_step", 0)
    others = [other for other, each in enumerate(updates) if each and other != rank]
    if updates[rank] or passes < LEAST_STEPS or not others:
        return ""
    made = len(updates[others[0]])
    return (
        f"the parameters of rank {rank} have not changed in {passes} backward passes: it makes no "
        f"step and is sent none; those of rank {others[0]} have changed {made} times"
    )


def _left(
    rank: int, ends: Mapping[int, dict[str, Any]], updates: Sequence[list[RankUpdate]], wanted: int
) -> str:
    """That a rank's peer was gone because it had ended, in words; empty: that was not why."""
    steps = [most_steps(each) for each in updates]
    gone = [other for other, end in ends.items() if not end["error"]]
    if not gone or steps[rank] >= wanted:
        return ""
    return (
        f"a rank that was gone: rank {gone[0]} ended without an error after optimizer step "
        f"{steps[gone[0]]}, rank {rank} went on after step {steps[rank]}"
    )


def by_command(folder: Path, way: Way, tell: Callable[[int], None] = lambda steps: None) -> str:
    """Starts the processes with `lockstep run`; while they run `tell` is given their steps."""
    command = [sys.executable, "-m", "lockstep.cli.main", "run", "--nproc", str(way.nproc)]
    command += ["-m", "lockstep.verify.rank", str(folder)]
    with subprocess.Popen(
        command,
        env=way.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as running:
        try:
            while True:
                tell(len(list(folder.glob(f"rank0/{_STEP}*"))))
                with suppress(subprocess.TimeoutExpired):
                    printed, _ = running.communicate(timeout=_LOOK_S)
                    return printed.partition("\n")[2]  # the launcher begins with how it starts
        except BaseException:
            running.kill()
            raise
