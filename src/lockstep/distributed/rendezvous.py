"""Where the ranks meet (`env://`, `tcp://host:port`, `file:///path`) and how they come together.

torch's key-value stores, under names that type checkers see, and how we wait on them.

Meeting at a host and port: rank 0 serves a TCPStore there, the others connect to it.

torch's own store listens on all interfaces; ours is given a socket that listens on one. Before
torch's client is built, a plain socket finds out what is behind the port, since the client waits
without end for something that listens but is not a store, and reports all causes alike.

Meeting at a file that all ranks can reach: torch's FileStore, after a look at what is there.

The store removes the file when the last rank has let go of it. A run that was killed leaves it
behind, and the next run would meet the dead. So the file is read first, as plain bytes and without
changing it: the join's records are JSON, whatever the format around them.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from torch.distributed import FileStore, PrefixStore, Store, TCPStore

from lockstep.distributed.manifest import (
    ARRIVAL_MARK,
    FAULT_MARK,
    Arrival,
    Claim,
    meet,
    read_arrival,
    wait_until,
)
from lockstep.distributed.network import (
    ANY_OUTSIDE_ADDRESS,
    LOOPBACK,
    address_reaching,
    is_loopback_address,
    local_addresses,
    owner_of,
    resolve,
    serve_store,
)
from lockstep.distributed.topology import Topology
from lockstep.distributed.torch_compat import answers_as_store
from lockstep.errors import (
    MasterUnreachableError,
    PortTakenError,
    SettingError,
    StaleInitFileError,
    UsageError,
)

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


_ATTEMPT_S = 2.0
"""How long one attempt to connect, or to be answered, may take."""


@dataclass(frozen=True)
class Endpoint:
    """Where rank 0 serves the store."""

    host: str
    port: int
    one_node: bool
    """All ranks are on this machine, so that loopback serves."""

    @property
    def text(self) -> str:
        """The endpoint in the notation of init methods."""
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


@dataclass(frozen=True)
class _Sight:
    """What one attempt to reach the store came to; true when it is there."""

    address: str
    """The one that was tried last; empty when the host name does not resolve."""
    hindrance: str = ""

    def __bool__(self) -> bool:
        return not self.hindrance


_UNRESOLVED = "the host name does not resolve"
_REFUSED = "the machine answers, but nothing listens on that port"
_NO_ANSWER = "no answer"
_NOT_A_STORE = "something listens there, but it is not a torch store"
_ADVICE = {
    _UNRESOLVED: "check the spelling, or give the address of rank 0's machine",
    _REFUSED: "look at rank 0's output: it has not started, has ended, or uses another port",
    _NO_ANSWER: "check the address, and that no firewall stands between the machines",
    _NOT_A_STORE: "choose a free port, the same on all ranks",
}


def serve(endpoint: Endpoint, timeout: float) -> Store:
    """Serves a store at the endpoint, on loopback or on one address of this machine.

    Raises:
        MasterUnreachableError: the host does not resolve, or is not this machine.
        OSError: the port cannot be bound (EADDRINUSE: it is taken).
    """
    address = _listening_address(endpoint, timeout)
    return serve_store(address, endpoint.port, timedelta(seconds=timeout))


def connect(endpoint: Endpoint, timeout: float) -> Store:
    """Connects to the store at the endpoint, trying again until the timeout.

    Raises:
        MasterUnreachableError: there is no store; says what there is instead.
        PortTakenError: another program of this machine has the port.
    """
    deadline = time.monotonic() + timeout
    sight = wait_until(lambda: _look(endpoint, deadline), deadline)
    if not sight:
        if sight.hindrance == _NOT_A_STORE and _is_here(sight.address):
            raise port_taken(endpoint)
        where = f" ({sight.address})" if sight.address not in ("", endpoint.host) else ""
        raise MasterUnreachableError(
            f"rank 0 at {endpoint.text}{where}",
            f"{sight.hindrance} (tried for {timeout:g} s)",
            _ADVICE[sight.hindrance],
        )
    try:
        return TCPStore(
            sight.address,
            endpoint.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=max(deadline - time.monotonic(), _ATTEMPT_S)),
        )
    except RuntimeError:
        raise MasterUnreachableError(
            f"rank 0 at {endpoint.text}",
            "its store answered once and then went away",
            "look at rank 0's error: it failed first",
        ) from None


def is_store(endpoint: Endpoint) -> bool:
    """Whether a torch store is behind the endpoint now."""
    return bool(_look(endpoint, time.monotonic() + _ATTEMPT_S))


def port_taken(endpoint: Endpoint, owner: str | None = None) -> PortTakenError:
    """The error for a port that something else has."""
    owner = owner or owner_of(endpoint.port)
    return PortTakenError(
        f"rank 0 serves the run at {endpoint.text}",
        f"port {endpoint.port} is taken by {owner}",
        "set MASTER_PORT (or the port of tcp://) to a free port, or end that program",
    )


def _look(endpoint: Endpoint, deadline: float) -> _Sight:
    """One attempt at each address of the endpoint."""
    addresses = resolve(endpoint.host)
    if not addresses:
        return _Sight("", _UNRESOLVED)
    if endpoint.one_node and any(map(_is_here, addresses)):
        addresses = [_loopback(addresses)]
    for address in addresses:
        limit = min(_ATTEMPT_S, max(deadline - time.monotonic(), 0.1))
        sight = _Sight(address, _hindrance(address, endpoint.port, limit))
        if sight:
            break
    return sight


def _hindrance(address: str, port: int, limit: float) -> str:
    """Why there is no store at the address; empty when there is one."""
    try:
        link = socket.create_connection((address, port), timeout=limit)
    except ConnectionRefusedError:
        return _REFUSED
    except OSError:
        return _NO_ANSWER
    with link:
        return "" if answers_as_store(link) or not _greeting_is_current() else _NOT_A_STORE


@cache
def _greeting_is_current() -> bool:
    """Whether this torch's stores understand our greeting, tried on one; else all may be stores."""
    store = serve_store(LOOPBACK, 0, timedelta(seconds=_ATTEMPT_S))
    with socket.create_connection((LOOPBACK, store.port), timeout=_ATTEMPT_S) as link:
        return answers_as_store(link)


def _listening_address(endpoint: Endpoint, timeout: float) -> str:
    """Loopback when all ranks are here; else the master's address; else the one to the outside.

    The last case is a host name that means loopback on its own machine (127.0.1.1 in /etc/hosts),
    or the address of a forwarder in front of this machine, as in Kubernetes.
    """
    addresses = wait_until(lambda: resolve(endpoint.host), time.monotonic() + timeout)
    if not addresses:
        raise MasterUnreachableError(
            f"rank 0 serves the run at {endpoint.text}", _UNRESOLVED, _ADVICE[_UNRESOLVED]
        )
    here = [address for address in addresses if _is_here(address)]
    if endpoint.one_node and here:
        return _loopback(here)
    outward = [address for address in here if not is_loopback_address(address)]
    if not endpoint.one_node and not outward:
        own = [a for each in local_addresses().values() for a in each if not is_loopback_address(a)]
        routed = address_reaching(ANY_OUTSIDE_ADDRESS)
        outward = own if len(own) == 1 else [routed] if routed in own else []
    if not outward:
        raise MasterUnreachableError(
            f"rank 0 serves the run at {endpoint.text}",
            f"{', '.join(addresses)} is not an address of rank 0's machine, which has "
            + "; ".join(", ".join(own) for own in local_addresses().values()),
            "set MASTER_ADDR (or the host of tcp://) to the address of the machine of rank 0",
        )
    return outward[0]


def _is_here(address: str) -> bool:
    return is_loopback_address(address) or any(address in own for own in local_addresses().values())


def _loopback(addresses: list[str]) -> str:
    return "::1" if all(":" in address for address in addresses) else LOOPBACK


_TOGETHER_S = 3.0
"""Processes that were created within this time of each other were started together."""


def open_file(path: Path, size: int, timeout: float) -> Store:
    """Opens the store at a path, creating the file or meeting those who have.

    Args:
        path: absolute; on a file system that all ranks share.
        size: the world size; the file goes when so many processes have closed it.
        timeout: of the join, in seconds.

    Raises:
        SettingError: the folder does not exist or cannot be written, or the path is a folder.
        StaleInitFileError: the file is left over from an earlier run.
    """
    _check_writable(path)
    _check_fresh(path, timeout)
    return FileStore(str(path), size)


def _check_writable(path: Path) -> None:
    asked = f"init_method='file://{path}'"
    if path.is_dir():
        raise SettingError(asked, "it is a folder", "name a file in it")
    if not path.parent.is_dir():
        raise SettingError(asked, f"there is no folder {path.parent}", "create it on every machine")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise SettingError(asked, "it cannot be written", "choose a path that this user may write")


def _check_fresh(path: Path, timeout: float) -> None:
    try:
        status, content = path.stat(), path.read_bytes()
    except FileNotFoundError:
        return
    if not content:  # made ready by the user, or by another rank just now
        return
    age = max(0.0, _now(path.parent) - status.st_mtime)
    own_start = psutil.Process().create_time()
    dead = [arrival for arrival in _arrivals(content) if _has_ended(arrival)]
    if FAULT_MARK.encode() in content and all(
        abs(arrival.started - own_start) < _TOGETHER_S for arrival in dead
    ):
        return  # the others of this very start have failed already, and left the verdict here
    if dead:
        reason = f"written by {dead[0].process}, which has ended"
    elif age > time.time() - own_start + timeout:
        reason = "from long before this process was started"
    else:
        return
    raise StaleInitFileError(
        f"init_method='file://{path}'",
        f"the file is left over from an earlier run: last changed {_duration(age)} ago, owner "
        f"{_owner(path)}; {reason}",
        f"make sure that no run uses it, then remove it (rm {path}), or name another file",
    )


def _arrivals(content: bytes) -> list[Arrival]:
    text = content.decode(errors="replace")
    decoder = json.JSONDecoder()
    found = []
    position = text.find(ARRIVAL_MARK)
    while position >= 0:
        with suppress(ValueError, TypeError):  # still being written, or of another version
            found.append(Arrival(**decoder.raw_decode(text, position)[0]))
        position = text.find(ARRIVAL_MARK, position + 1)
    return found


def _has_ended(arrival: Arrival) -> bool:
    if arrival.host != socket.gethostname():
        return False  # nothing is known of it
    try:
        return bool(abs(psutil.Process(arrival.pid).create_time() - arrival.started) > 1)
    except psutil.NoSuchProcess:
        return True


def _now(folder: Path) -> float:
    """The time by the clock of the file system, which may be another machine's."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except (KeyError, OSError):
        return f"user {path.stat().st_uid}"


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
