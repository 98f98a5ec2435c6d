"""What all ranks must agree on before the first step, and how a difference is worded.

The join: every rank reports at the store, rank 0 judges, and all ranks get the same verdict.

Communication pattern, on a store of torch's (no process group exists yet):

    each rank   n = add("arrivals", 1); set("arrival/n", its record)
    rank 0      reads the arrivals until all ranks have come, two claim the same rank, two claim
                different world sizes, or the time is over; then set("verdict", ...)
    each rank   reads the verdict; set("read/n"); goes on, or raises what the verdict says
    rank 0      after a bad verdict, stays until the others have read it, as it may host the store

Everything written is JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist
from torch.distributed import Store

from lockstep.distributed.topology import Topology
from lockstep.errors import (
    DuplicateRankError,
    JoinError,
    MissingRankError,
    RanksDifferError,
    WorldSizeError,
    name_ranks,
)

NEVER_COMPARED = frozenset({"host", "pid", "rank"})
# They number the process or its machine, so they differ by their nature.
_PLACE_FLAGS = frozenset(
    f"--{noun}{joint}rank" for noun in ("local", "node", "machine") for joint in "_-"
) | {"--rank"}
_GROUPS_SHOWN = 4
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05
T = TypeVar("T")


def collect(topology: Topology, settings: Mapping[str, object]) -> dict[str, str]:
    """This rank's record: the command, the code, the versions and the settings of the run.

    Args:
        topology: who this process is.
        settings: what else must be equal on all ranks, such as the seed.

    Returns:
        Text by field. `host`, `pid` and `rank` say whose record it is and are never compared.
    """
    record = {
        "host": socket.gethostname(),
        "pid": str(os.getpid()),
        "rank": str(topology.rank),
        "arguments": shlex.join(shared_arguments(sys.argv)),
        "script": _script_hash(),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "platform": platform.machine(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
        "NCCL": _nccl_version(),
        "numpy": _version("numpy"),
        "lockstep": _version("torch-lockstep"),
    }
    return record | {name: str(value) for name, value in settings.items()}


def differences(records: Sequence[Mapping[str, str]]) -> list[str]:
    """One line for each field that is not equal on all ranks.

    Args:
        records: one per rank, in the order of ranks.

    Returns:
        Lines such as "arguments: rank 0 has '--lr 0.1', rank 1 has '--lr 0.2'", ranks that agree
        grouped together.
    """
    fields = dict.fromkeys(name for record in records for name in record)
    lines = []
    for name in fields:
        if name in NEVER_COMPARED:
            continue
        holders: dict[str | None, list[int]] = {}
        for rank, record in enumerate(records):
            holders.setdefault(record.get(name), []).append(rank)
        if len(holders) > 1:
            lines.append(f"{name}: {_groups(holders)}")
    return lines


def shared_arguments(argv: Sequence[str]) -> list[str]:
    """The script's name and its arguments without those that say which rank or node this is."""
    kept: list[str] = []
    skip = False
    for position, argument in enumerate(argv):
        flag, equals, _ = argument.partition("=")
        if skip:
            skip = False
        elif position == 0:
            kept.append(Path(argument).name)  # machines may keep the script in other folders
        elif flag in _PLACE_FLAGS:
            skip = not equals
        else:
            kept.append(argument)
    return kept


def _groups(holders: Mapping[str | None, Sequence[int]]) -> str:
    shown = [
        f"{name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} "
        + ("none" if value is None else repr(value))
        for value, ranks in list(holders.items())[:_GROUPS_SHOWN]
    ]
    hidden = len(holders) - len(shown)
    return ", ".join([*shown, f"and {hidden} more values"] if hidden else shown)


def _script_hash() -> str:
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None or not Path(path).is_file():
        return "none"
    return f"sha256 {hashlib.sha256(Path(path).read_bytes()).hexdigest()}"


def _nccl_version() -> str:
    if torch.version.cuda is None or not dist.is_nccl_available():
        return "none"
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed as a package"


GRACE_S = 5.0
"""How long past the deadline a rank waits for a judge who is there, and a judge for his readers."""

ARRIVAL_MARK = '{"number": '
"""How the JSON of an `Arrival` begins."""
FAULT_MARK = '"fault": ["'
"""What only the JSON of a verdict that is a fault holds."""

Fault = JoinError | RanksDifferError
_KINDS: dict[str, type[Fault]] = {
    kind.__name__: kind
    for kind in (MissingRankError, DuplicateRankError, WorldSizeError, RanksDifferError)
}


@dataclass(frozen=True)
class Arrival:
    """One process that has come to the store."""

    number: int
    """The how-manieth it was, from 1."""
    rank: int
    size: int
    """The world size it was started with."""
    host: str
    pid: int
    started: float
    """When the process was created, in seconds since 1970."""
    record: Mapping[str, str]
    """From `manifest.collect`."""

    @property
    def process(self) -> str:
        """Its process in words."""
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True)
class Verdict:
    """What rank 0 has decided; `fault` is None when all is well."""

    records: Sequence[Mapping[str, str]] = ()
    """In the order of ranks."""
    fault: Fault | None = None
    judged: bool = False
    """This process is the one that decided."""


@dataclass(frozen=True)
class Claim:
    """What a process says of itself, and where it says so."""

    topology: Topology
    record: Mapping[str, str]
    place: str
    """The meeting place in words, for messages."""
    timeout: float
    """Seconds."""
    alone: str = "a port of its own"
    """What a second run needs not to meet this one."""
    before_next_try: str = ""
    """What else to do, appended to an advice."""

    @property
    def run(self) -> str:
        """What was asked for, in words."""
        return f"a run of {self.topology.size} processes that meet at {self.place}"


def meet(store: Store, claim: Claim) -> Verdict:
    """Reports at the store and returns the verdict, which is the same on every rank.

    Args:
        store: where the ranks of this run, and of no other, report.
        claim: who this process is.

    Returns:
        The verdict; the caller raises its fault after having let go of the store.
    """
    try:
        # A second rank 0 reports like any other, and the first one judges.
        judges = claim.topology.is_main and store.add("judges", 1) == 1
        own = _arrive(store, claim)
        return _Judge(store, claim, own).judge() if judges else _attend(store, claim, own)
    except RuntimeError as error:  # what torch's stores raise
        reason = str(error).partition("\n")[0]
        return Verdict(
            fault=MissingRankError(
                claim.run,
                f"rank 0 or its store went away during the join ({reason})",
                "look at rank 0's error: it failed first",
            )
        )


def read_arrival(store: Store, key: str) -> Arrival:
    """The arrival under a key that is there."""
    return Arrival(**json.loads(store.get(key)))


def _arrive(store: Store, claim: Claim) -> Arrival:
    process = psutil.Process()
    arrival = Arrival(
        number=int(store.add("arrivals", 1)),
        rank=claim.topology.rank,
        size=claim.topology.size,
        host=claim.record["host"],
        pid=process.pid,
        started=process.create_time(),
        record=dict(claim.record),
    )
    store.set(f"arrival/{arrival.number}", _written(arrival))
    return arrival


def _written(arrival: Arrival) -> str:
    return json.dumps(vars(arrival))


def _attend(store: Store, claim: Claim, own: Arrival) -> Verdict:
    """Waits for the judge, then for the verdict."""
    if not wait_until(lambda: store.check(["judge"]), time.monotonic() + claim.timeout):
        return Verdict(
            fault=MissingRankError(
                claim.run,
                f"rank 0 did not come within {claim.timeout:g} s; {name_ranks([own.rank])} did",
                f"look at the output of rank 0's process, or start it{claim.before_next_try}",
            )
        )
    if not wait_until(lambda: store.check(["verdict"]), time.monotonic() + claim.timeout + GRACE_S):
        return Verdict(
            fault=MissingRankError(
                claim.run,
                f"rank 0 ({read_arrival(store, 'judge').process}) came, but stopped answering",
                "look at rank 0's process: it was ended, stopped, or its machine is out of reach"
                + claim.before_next_try,
            )
        )
    verdict = json.loads(store.get("verdict"))
    store.set(f"read/{own.number}", "")
    if verdict["fault"] is not None:
        kind, was_set, found, do = verdict["fault"]
        return Verdict(fault=_KINDS[kind](was_set, found, do))
    if own.number in verdict["members"]:
        return Verdict(records=verdict["records"])
    member = read_arrival(
        store, f"arrival/{verdict['members'][own.rank % len(verdict['members'])]}"
    )
    return Verdict(
        fault=DuplicateRankError(
            claim.run,
            f"a run has already begun there, with {member.process} as rank {member.rank}; "
            f"this is {own.process} as rank {own.rank}",
            f"start each rank once, and give a second run {claim.alone}",
        )
    )


class _Judge:
    """Rank 0's part, from the first arrival to the last reader."""

    def __init__(self, store: Store, claim: Claim, own: Arrival) -> None:
        self.store = store
        self.claim = claim
        self.own = own
        self.arrivals: list[Arrival] = []

    def judge(self) -> Verdict:
        self.store.set("judge", _written(self.own))
        wait_until(self._can_decide, time.monotonic() + self.claim.timeout)
        members = {arrival.rank: arrival for arrival in reversed(self.arrivals)}
        in_order = [members[rank] for rank in sorted(members)]
        records = [arrival.record for arrival in in_order]
        fault = self._contradiction() or self._absence() or self._difference(records)
        told = fault and (type(fault).__name__, fault.was_set, fault.found, fault.do)
        verdict = {"members": [a.number for a in in_order], "records": records, "fault": told}
        self.store.set("verdict", json.dumps(verdict))
        if fault is not None:
            self._stay(fault)
        return Verdict(records=records, fault=fault, judged=True)

    def _take(self) -> None:
        """Reads the arrivals that are new."""
        while self.store.check([key := f"arrival/{len(self.arrivals) + 1}"]):
            self.arrivals.append(read_arrival(self.store, key))

    def _can_decide(self) -> bool:
        self._take()
        return self._contradiction() is not None or not self._missing()

    def _missing(self) -> set[int]:
        return set(range(self.own.size)) - {a.rank for a in self.arrivals}

    def _contradiction(self) -> Fault | None:
        claimed: dict[int, list[int]] = {}
        holders: dict[int, list[Arrival]] = {}
        for arrival in self.arrivals:
            claimed.setdefault(arrival.size, []).append(arrival.rank)
            holders.setdefault(arrival.rank, []).append(arrival)
        if len(claimed) > 1:
            return WorldSizeError(
                f"processes that meet at {self.claim.place}",
                "; ".join(
                    f"{name_ranks(ranks)} {'says' if len(set(ranks)) == 1 else 'say'} "
                    f"world size {size}"
                    for size, ranks in sorted(claimed.items())
                ),
                f"start every process with the same world size, and give a second run "
                f"{self.claim.alone}",
            )
        for rank, doubled in sorted(holders.items()):
            if len(doubled) > 1:
                return DuplicateRankError(
                    self.claim.run,
                    f"two processes claim rank {rank}: "
                    + " and ".join(a.process for a in doubled[:2]),
                    "start each process with a rank of its own, and give a second run "
                    f"{self.claim.alone}",
                )
        return None

    def _absence(self) -> Fault | None:
        missing = self._missing()
        if not missing:
            return None
        by_host: dict[str, list[int]] = {}
        for arrival in self.arrivals:
            by_host.setdefault(arrival.host, []).append(arrival.rank)
        came = "; ".join(f"{name_ranks(ranks)} on {host}" for host, ranks in by_host.items())
        return MissingRankError(
            self.claim.run,
            f"{name_ranks(missing)} did not come within {self.claim.timeout:g} s; came: {came}",
            f"look at the output of {name_ranks(missing)}, or start "
            f"{'it' if len(missing) == 1 else 'them'}; if there should be fewer processes, correct "
            "the world size",
        )

    def _difference(self, records: Sequence[Mapping[str, str]]) -> Fault | None:
        lines = differences(records)
        if not lines:
            return None
        return RanksDifferError(
            self.claim.run,
            "; ".join(lines),
            "start the same command, with the same code and versions, on every machine",
        )

    def _stay(self, fault: Fault) -> None:
        """Until all who can be expected have read the verdict, but not long."""

        def all_have_read() -> bool:
            self._take()
            expected = (
                0 if isinstance(fault, MissingRankError) else max(a.size for a in self.arrivals)
            )
            keys = [f"read/{a.number}" for a in self.arrivals if a.number != self.own.number]
            return len(self.arrivals) >= expected and (not keys or self.store.check(keys))

        wait_until(all_have_read, time.monotonic() + GRACE_S)


def wait_until(attempt: Callable[[], T], deadline: float) -> T:
    """Calls `attempt` until it returns something true, or `time.monotonic()` passes the deadline.

    `Store.wait` would do for keys, but it cannot be interrupted, logs its timeouts, and on files
    looks once a second.

    Returns:
        The last result.
    """
    pause = _FIRST_PAUSE_S
    while not (result := attempt()):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return result
