"""The join: every rank reports at the store, rank 0 judges, and all ranks get the same verdict.

Communication pattern, on a store of torch's (no process group exists yet):

    each rank   n = add("arrivals", 1); set("arrival/n", its record)
    rank 0      reads the arrivals until all ranks have come, two claim the same rank, two claim
                different world sizes, or the time is over; then set("verdict", ...)
    each rank   reads the verdict; set("read/n"); goes on, or raises what the verdict says
    rank 0      after a bad verdict, stays until the others have read it, as it may host the store

Everything written is JSON.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from lockstep.errors import (
    DuplicateRankError,
    JoinError,
    MissingRankError,
    RanksDifferError,
    WorldSizeError,
    name_ranks,
)
from lockstep.runtime.manifest import differences
from lockstep.runtime.store import Store, wait_until
from lockstep.topology import Topology

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
