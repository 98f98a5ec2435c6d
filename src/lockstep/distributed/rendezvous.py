"""How the ranks come together: `env://`, `tcp://host:port` or `file:///path`.

`env://` and `tcp://`: rank 0 serves a TCPStore, the others connect to it. Torch's own store listens
on all interfaces; ours is given a socket that listens on one. Before torch's client is built, a
plain socket finds out what is behind the port, since the client waits without end for something
that listens but is not a store, and reports all causes alike.

`file://`: torch's FileStore, after a look at what is there. The store removes the file when the
last rank has let go of it. A run that was killed leaves it behind, and the next run would meet the
dead. So the file is read first, as plain bytes and without changing it: what ranks write is JSON,
whatever the format around it.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from torch.distributed import FileStore, PrefixStore, Store, TCPStore

from lockstep import errors
from lockstep.distributed import network
from lockstep.distributed.manifest import (
    ERROR_MARK,
    REQUEST_MARK,
    Join,
    JoinRequest,
    read_request,
)
from lockstep.distributed.network import LOOPBACK, Endpoint, is_here, wait_until
from lockstep.distributed.topology import Topology
from lockstep.distributed.torch_compat import answers_as_store

_FORMS = "the forms are 'env://', 'tcp://host:port' and 'file:///absolute/path'"
_NOT_A_STORE = "something listens there, but it is not a torch store"
_ATTEMPT_S = 2.0
"""How long one attempt to connect, or to be answered, may take."""
_OWN_STORE_S = 60.0
"""How long a busy machine may take to answer itself."""
_CLOSE_S, _REMOVAL_S = 5.0, 1.0
_RANK_0_S = 2.0
"""How long a store may be served before rank 0 has said that it is there."""
_TOGETHER_S = 3.0
"""Processes that were created within this time of each other were started together."""


@dataclass(eq=False)
class Joined:
    """What the ranks share once they have come together."""

    store: Store
    """For process groups and small messages, until `close`; whoever keeps it keeps port or file in
    use."""
    hosts: Sequence[str]
    """Of each rank."""
    rank: int
    served_by_rank_0: bool
    file: Path | None

    @property
    def here(self) -> list[int]:
        """The ranks of this machine."""
        return [r for r, host in enumerate(self.hosts) if host == self.hosts[self.rank]]

    def close(self, *, others_leave: bool = True) -> None:
        """Lets go of the store; to be called on every rank after the process group was closed.

        Where rank 0 serves the store, it waits until the others have let go of it. The file of
        `file://` is removed by the store of the rank that is the last to let go, or by rank 0.

        Args:
            others_leave: whether the others can be counted on to do the same; rank 0 waits for
                them, but not long.
        """
        store = self.store
        del self.store
        if not (self.served_by_rank_0 or self.file):
            return
        left = False
        with suppress(RuntimeError):  # the other side has gone, which is what we are about to do
            if self.rank != 0:
                store.set(f"left/{self.rank}", "")
                return
            others = [f"left/{rank}" for rank in range(1, len(self.hosts))]
            limit = time.monotonic() + _CLOSE_S
            left = others_leave and wait_until(partial(store.check, others), limit)
        del store
        if left and self.file is not None:
            # Of two stores that are let go at once, torch's counting may let neither be the last.
            file = self.file
            if not wait_until(lambda: not file.exists(), time.monotonic() + _REMOVAL_S):
                file.unlink(missing_ok=True)


def join(
    topology: Topology,
    init_method: str | None,
    *,
    manifest: Mapping[str, str],
    timeout: float,
    attempt: str = "0",
) -> Joined:
    """Meets the other ranks; returns on all of them, or raises the same error on all of them.

    Args:
        topology: who this process is.
        init_method: `env://` (also None), `tcp://host:port` or `file:///path`.
        manifest: from `manifest.collect`; must be equal on all ranks.
        timeout: how long ranks wait for each other, in seconds.
        attempt: tells restarts apart that meet at the same store of a launcher.

    Raises:
        SettingError: the init method is malformed, or the address of rank 0 is not known.
        MissingRankError: a rank did not come; says which.
        DuplicateRankError: two processes have the same rank.
        WorldSizeError: the ranks were started with different world sizes.
        RanksDifferError: the manifests differ; says where and how.
        MasterUnreachableError: rank 0's address does not resolve, refuses, does not answer, or is
            not a store's.
        PortTakenError: rank 0's port belongs to another program.
        StaleInitFileError: the file is left over from an earlier run.
    """
    where = parse_init_method(topology, init_method)
    place, file, of_launcher = f"tcp://{where}", None, False
    if isinstance(where, Path):
        place, file = f"file://{where}", where
        store = open_file(where, topology.size, timeout)
    else:
        masters = (topology.master_addr, topology.master_port)
        of_launcher = topology.agent_store and (where.host, where.port) == masters
        if of_launcher:
            place = f"the launcher's store at {place}"
        if topology.is_main and not of_launcher:
            store = _serve(where, topology, manifest, timeout, attempt)
        else:
            store = connect(where, timeout)
    scoped = _scope(store, attempt)
    try:
        hosts = Join(scoped, topology, manifest, place, timeout, file).agree()
    except (errors.JoinError, errors.RanksDifferError) as error:
        failed = error.with_traceback(None)
    else:
        return Joined(scoped, hosts, topology.rank, file is None and not of_launcher, file)
    del store, scoped  # lets go of port and file even while the error is being looked at
    raise failed


def parse_init_method(topology: Topology, init_method: str | None) -> Endpoint | Path:
    """Reads an init method.

    Raises:
        SettingError: it is malformed, or it is `env://` and rank 0's address is not known.
    """
    if init_method is None or init_method == "env://":
        if topology.master_addr is None or topology.master_port is None:
            missing = "MASTER_ADDR" if topology.master_addr is None else "MASTER_PORT"
            raise errors.SettingError(
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
    try:
        parts = urlsplit(init_method)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise _malformed(init_method, str(error)) from None
    if parts.scheme != "tcp":
        found = f"the scheme is {parts.scheme!r}"
    elif not host or not port:
        found = f"the {'port' if host else 'host'} is missing"
    elif parts.path.strip("/") or parts.query:
        found = "something follows the port; rank and world_size are arguments of init"
    else:
        return Endpoint(host, port, topology.one_node)
    raise _malformed(init_method, found)


def _malformed(init_method: str, found: str) -> errors.SettingError:
    return errors.SettingError(f"init_method={init_method!r}", found, _FORMS)


def _scope(store: Store, attempt: str) -> Store:
    return PrefixStore(f"lockstep/{attempt}", store)


def _serve(
    endpoint: Endpoint,
    topology: Topology,
    manifest: Mapping[str, str],
    timeout: float,
    attempt: str,
) -> Store:
    """Rank 0's store.

    Where the port is taken by another rank 0 of the same run, that one's store: it is to tell all.

    Raises:
        PortTakenError: something else has the port.
    """
    try:
        return serve(endpoint, timeout)
    except errors.PortTakenError:
        if _why_no_store(endpoint, time.monotonic() + _ATTEMPT_S)[1]:
            raise
    store = connect(endpoint, timeout)
    scoped = _scope(store, attempt)
    if not wait_until(lambda: scoped.check(["rank 0"]), time.monotonic() + min(_RANK_0_S, timeout)):
        raise network.port_taken(endpoint)
    other = read_request(scoped, "rank 0")
    same = all(other.manifest.get(f) == manifest.get(f) for f in ("arguments", "script"))
    if scoped.check(["decision"]) or other.size != topology.size or not same:
        arguments = other.manifest.get("arguments", "")
        owner = f"another Lockstep run: {other.process}, {arguments}".rstrip(", ")
        raise network.port_taken(endpoint, owner)
    return store


def serve(endpoint: Endpoint, timeout: float) -> Store:
    """Serves a store at the endpoint, on loopback or on one address of this machine.

    Raises:
        MasterUnreachableError: the host does not resolve, or is not this machine.
        PortTakenError: another program has the port.
        SettingError: this user may not listen on it.
    """
    if not wait_until(endpoint.addresses, time.monotonic() + timeout):
        raise network.unreachable("rank 0", endpoint, network.UNRESOLVED)
    try:
        address = network.serving_address(endpoint)
        return network.serve_store(address, endpoint.port, timedelta(seconds=timeout))
    except OSError as error:
        raise network.cannot_listen(error, endpoint) from None


def connect(endpoint: Endpoint, timeout: float) -> Store:
    """Connects to the store at the endpoint, trying again until the timeout.

    Raises:
        MasterUnreachableError: there is no store; says what there is instead.
        PortTakenError: another program of this machine has the port.
    """
    deadline = time.monotonic() + timeout
    address = reason = ""

    def is_there() -> bool:
        nonlocal address, reason
        address, reason = _why_no_store(endpoint, deadline)
        return not reason

    if not wait_until(is_there, deadline):
        if reason == _NOT_A_STORE and is_here(address):
            raise network.port_taken(endpoint)
        raise network.unreachable("rank 0", endpoint, reason, address=address, tried=timeout)
    try:
        return TCPStore(
            address,
            endpoint.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=max(deadline - time.monotonic(), _ATTEMPT_S)),
        )
    except RuntimeError as error:
        reason = network.NO_ANSWER if "timed out" in str(error) else network.CUT
        raise network.unreachable("rank 0", endpoint, reason, address=address) from None


def _why_no_store(endpoint: Endpoint, deadline: float) -> tuple[str, str]:
    """One attempt at each address of the endpoint.

    Returns:
        The address that was tried last, and why there is no store; empty when there is one.
    """
    address, reason = "", network.UNRESOLVED
    for address in endpoint.addresses():
        limit = min(_ATTEMPT_S, max(deadline - time.monotonic(), 0.1))
        try:
            connection = socket.create_connection((address, endpoint.port), timeout=limit)
        except OSError as error:
            refused = isinstance(error, ConnectionRefusedError)
            reason = network.REFUSED if refused else network.NO_ANSWER
            continue
        with connection:
            if answers_as_store(connection) or not _greeting_is_current():
                return address, ""
        reason = _NOT_A_STORE
    return address, reason


@cache
def _greeting_is_current() -> bool:
    """Whether this torch's stores understand our greeting, tried on one; else all may be stores."""
    store = network.serve_store(LOOPBACK, 0, timedelta(seconds=_OWN_STORE_S))
    with socket.create_connection((LOOPBACK, store.port), timeout=_OWN_STORE_S) as connection:
        return answers_as_store(connection)


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
        raise errors.SettingError(asked, "it is a folder", "name a file in it")
    if not path.parent.is_dir():
        raise errors.SettingError(
            asked, f"there is no folder {path.parent}", "create it on every machine"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise errors.SettingError(
            asked, "it cannot be written", "choose a path that this user may write"
        )


def _check_fresh(path: Path, timeout: float) -> None:
    try:
        status, content = path.stat(), path.read_bytes()
    except FileNotFoundError:
        return
    if not content:  # made ready by the user, or by another rank just now
        return
    age = max(0.0, _now(path.parent) - status.st_mtime)
    own_start = psutil.Process().create_time()
    dead = [request for request in _requests(content) if _has_ended(request)]
    if ERROR_MARK.encode() in content and all(
        abs(request.started - own_start) < _TOGETHER_S for request in dead
    ):
        return  # the others of this very start have failed already, and left the decision here
    if dead:
        reason = f"written by {dead[0].process}, which has ended"
    elif age > time.time() - own_start + timeout:
        reason = "from long before this process was started"
    else:
        return
    duration, _, _ = str(timedelta(seconds=round(age))).partition(", ")  # `3 days` or `0:05:12`
    raise errors.StaleInitFileError(
        f"init_method='file://{path}'",
        f"the file is left over from an earlier run: last changed {duration} ago, owner "
        f"{_owner(path)}; {reason}",
        f"make sure that no run uses it, then remove it (rm {path}), or name another file",
    )


def _requests(content: bytes) -> list[JoinRequest]:
    _, *written = content.decode(errors="replace").split(REQUEST_MARK)
    found = []
    for text in written:
        with suppress(ValueError, TypeError):  # still being written, or of another version
            values, _ = json.JSONDecoder().raw_decode(REQUEST_MARK + text)
            found.append(JoinRequest(**values))
    return found


def _has_ended(request: JoinRequest) -> bool:
    if request.host != socket.gethostname():
        return False  # nothing is known of it
    try:
        return bool(abs(psutil.Process(request.pid).create_time() - request.started) > 1)
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
