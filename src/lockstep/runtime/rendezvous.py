"""Where the ranks meet (`env://`, `tcp://host:port`, `file:///path`) and how they come together."""

from __future__ import annotations

import errno
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from lockstep.errors import SettingError, UsageError
from lockstep.runtime.joining import Claim, meet, read_arrival
from lockstep.runtime.rendezvous_file import open_file
from lockstep.runtime.rendezvous_tcp import Endpoint, connect, is_store, port_taken, serve
from lockstep.runtime.store import PrefixStore, Store, wait_until
from lockstep.topology import Topology

_FORMS = "the forms are 'env://', 'tcp://host:port' and 'file:///absolute/path'"
_PATIENCE_S = 5.0
_REMOVAL_S = 1.0
_SETTLING_S = 2.0
"""How long a store may be served before rank 0 has said that it is there."""


class Joined:
    """What the ranks share once they have come together.

    Attributes:
        records: each rank's record, in the order of ranks.
    """

    def __init__(
        self,
        store: Store,
        records: Sequence[Mapping[str, str]],
        *,
        rank: int,
        served_by_rank_0: bool,
        file: Path | None,
    ) -> None:
        self._store: Store | None = store
        self._rank = rank
        self._served_by_rank_0 = served_by_rank_0
        self._file = file
        self.records = records

    @property
    def store(self) -> Store:
        """For process groups and small messages; whoever keeps it keeps port or file in use."""
        if self._store is None:
            raise UsageError("the store of a run", "the run has been left", "ask before close()")
        return self._store

    def close(self, patience: float = _PATIENCE_S) -> None:
        """Lets go of the store; to be called on every rank after the process group was closed.

        Where rank 0 serves the store, it waits until the others have let go of it. The file of
        `file://` is removed by the store of the rank that is the last to let go, or by rank 0.

        Args:
            patience: how long rank 0 waits, in seconds; 0 where the others cannot be counted on.
        """
        store, self._store = self._store, None
        if store is None or not (self._served_by_rank_0 or self._file):
            return
        left = False
        try:
            if self._rank != 0:
                store.set(f"left/{self._rank}", "")
                return
            left = _have_left(store, len(self.records), patience)
        except RuntimeError:
            pass  # the other side has gone, which is what we are about to do
        del store
        if left and self._file is not None:
            # Of two stores that are let go at once, torch's counting may let neither be the last.
            file = self._file
            if not wait_until(lambda: not file.exists(), time.monotonic() + _REMOVAL_S):
                file.unlink(missing_ok=True)


def _have_left(store: Store, size: int, patience: float) -> bool:
    others = [f"left/{rank}" for rank in range(1, size)]
    return wait_until(lambda: not others or store.check(others), time.monotonic() + patience)


def join(
    topology: Topology,
    init_method: str | None,
    *,
    record: Mapping[str, str],
    timeout: float,
    attempt: str = "0",
) -> Joined:
    """Meets the other ranks; returns on all of them, or raises the same error on all of them.

    Args:
        topology: who this process is.
        init_method: `env://` (also None), `tcp://host:port` or `file:///path`.
        record: from `manifest.collect`; must be equal on all ranks but for host, pid and rank.
        timeout: how long ranks wait for each other, in seconds.
        attempt: tells restarts apart that meet at the same store of a launcher.

    Raises:
        SettingError: the init method is malformed, or the address of rank 0 is not known.
        MissingRankError: a rank did not come; says which.
        DuplicateRankError: two processes claim a rank.
        WorldSizeError: the ranks were started with different world sizes.
        RanksDifferError: the records differ; says where and how.
        MasterUnreachableError: rank 0's address does not resolve, refuses, does not answer, or is
            not a store's.
        PortTakenError: rank 0's port belongs to another program.
        StaleInitFileError: the file is left over from an earlier run.
    """
    place = meeting_place(topology, init_method)
    if isinstance(place, Path):
        claim = Claim(
            topology,
            record,
            f"file://{place}",
            timeout,
            alone="a file of its own (if no other run uses this one, it is left over: remove it)",
            before_next_try=f"; remove {place} before the next try",
        )
        store = open_file(place, topology.size, timeout)
    elif _is_the_launchers(place, topology):
        claim = Claim(topology, record, f"the launcher's store at {place.text}", timeout)
        store = connect(place, timeout)
    else:
        claim = Claim(topology, record, place.text, timeout)
        store = _serve_or_connect(place, claim, attempt)
    scoped = _scope(store, attempt)
    verdict = meet(scoped, claim)
    if verdict.fault is None:
        served = not isinstance(place, Path) and not _is_the_launchers(place, topology)
        file = place if isinstance(place, Path) else None
        rank, records = topology.rank, verdict.records
        return Joined(scoped, records, rank=rank, served_by_rank_0=served, file=file)
    del store, scoped  # lets go of port and file even while the error is being looked at
    if verdict.judged and isinstance(place, Path):
        place.unlink(missing_ok=True)  # this run's own, and all who came have read the verdict
    raise verdict.fault


def meeting_place(topology: Topology, init_method: str | None) -> Endpoint | Path:
    """Reads an init method.

    Raises:
        SettingError: it is malformed, or it is `env://` and rank 0's address is not known.
    """
    if init_method is None or init_method == "env://":
        if topology.master_addr is None or topology.master_port is None:
            missing = "MASTER_ADDR" if topology.master_addr is None else "MASTER_PORT"
            raise SettingError(
                f"rank {topology.rank} of {topology.size} (from {topology.source})",
                f"{missing} is not set, so rank 0 cannot be found",
                f"set {missing}, start with `lockstep run`, or give init_method='tcp://host:port'",
            )
        # A launcher's store listens where the launcher chose to, which need not be loopback.
        one_node = topology.one_node and not topology.agent_store
        return Endpoint(topology.master_addr, topology.master_port, one_node)
    if init_method.startswith("file://"):
        path = Path(init_method.removeprefix("file://"))
        if not path.is_absolute():
            raise _malformed(init_method, "the path is not absolute (three slashes after 'file:')")
        return path
    return _tcp_place(topology, init_method)


def _tcp_place(topology: Topology, init_method: str) -> Endpoint:
    try:
        parts = urlsplit(init_method)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise _malformed(init_method, str(error)) from None
    if parts.scheme != "tcp":
        raise _malformed(init_method, f"the scheme is {parts.scheme!r}")
    if not host or not port:
        raise _malformed(init_method, f"the {'port' if host else 'host'} is missing")
    if parts.path.strip("/") or parts.query:
        raise _malformed(
            init_method, "something follows the port; rank and world_size are arguments of init"
        )
    return Endpoint(host, port, topology.one_node)


def _malformed(init_method: str, found: str) -> SettingError:
    return SettingError(f"init_method={init_method!r}", found, _FORMS)


def _is_the_launchers(place: Endpoint, topology: Topology) -> bool:
    address = (topology.master_addr, topology.master_port)
    return topology.agent_store and (place.host, place.port) == address


def _scope(store: Store, attempt: str) -> Store:
    return PrefixStore(f"lockstep/{attempt}", store)


def _serve_or_connect(place: Endpoint, claim: Claim, attempt: str) -> Store:
    if not claim.topology.is_main:
        return connect(place, claim.timeout)
    try:
        return serve(place, claim.timeout)
    except OSError as error:
        if error.errno == errno.EACCES:
            raise SettingError(
                f"rank 0 serves the run at {place.text}",
                f"this user may not listen on port {place.port}",
                "set MASTER_PORT (or the port of tcp://) to one above 1023",
            ) from None
        if error.errno != errno.EADDRINUSE:
            raise
    return _store_of_first_rank_0(place, claim, attempt)


def _store_of_first_rank_0(place: Endpoint, claim: Claim, attempt: str) -> Store:
    """The port is taken: by another rank 0 of the same run, which is then to say so to all.

    Raises:
        PortTakenError: or by something else.
    """
    if not is_store(place):
        raise port_taken(place)
    store = connect(place, claim.timeout)
    scoped = _scope(store, attempt)
    settled = time.monotonic() + min(_SETTLING_S, claim.timeout)
    if not wait_until(lambda: scoped.check(["judge"]), settled):
        raise port_taken(place)
    judge = read_arrival(scoped, "judge")
    same = all(judge.record.get(f) == claim.record.get(f) for f in ("arguments", "script"))
    if scoped.check(["verdict"]) or judge.size != claim.topology.size or not same:
        raise port_taken(
            place,
            f"another Lockstep run: {judge.process}, {judge.record.get('arguments', '')}".rstrip(
                ", "
            ),
        )
    return store
