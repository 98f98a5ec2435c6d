"""How the ranks meet: at the store of `env://`, `tcp://host:port` or `file:///path`.

A *store* is torch's key-value store, which processes share before there is a process group. Under
`env://` and `tcp://` rank 0 serves a TCPStore at an *endpoint* (a host and a port), and the other
ranks connect to it; `file://` is torch's FileStore (see `init_file`). Once they have met, the ranks
decide by the protocol of `join` whether the run starts.

Torch's own TCPStore listens on all interfaces; ours is given a socket that listens on one. Before
torch's client is built, a plain socket finds out what is behind the port, since the client waits
without end for something that listens but is not a store, and reports all causes alike.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from torch.distributed import PrefixStore, Store, TCPStore

from lockstep import errors
from lockstep.distributed import network
from lockstep.distributed.init_file import open_file
from lockstep.distributed.join import Join, read_request
from lockstep.distributed.network import LOOPBACK, Endpoint, is_here, wait_until
from lockstep.distributed.topology import Topology
from lockstep.distributed.torch_compat import answers_as_store

INIT_METHOD_FORMS = "the forms are 'env://', 'tcp://host:port' and 'file:///absolute/path'"
NOT_A_STORE = "something listens there, but it is not a torch store"

ATTEMPT_TIMEOUT_S = 2.0
"""How long one attempt to connect, or to be answered, may take."""
OWN_STORE_TIMEOUT_S = 60.0
"""How long a busy machine may take to answer itself."""
CLOSING_TIMEOUT_S = 5.0
"""How long rank 0 waits until the other ranks have closed the store."""
FILE_REMOVAL_TIMEOUT_S = 1.0
"""How long rank 0 waits until torch has removed the file of a FileStore."""
RANK_0_ANNOUNCEMENT_S = 2.0
"""How long a store may be served before rank 0 has announced itself there."""


@dataclass(eq=False)
class Joined:
    """What the ranks share once they have joined the run: the store, and who is where."""

    store: Store
    """For process groups and small messages, until `close`. While anyone has a reference to it, its
    port or file stays in use."""
    hosts: Sequence[str]
    """The host of each rank."""
    rank: int
    served_by_rank_0: bool
    file: Path | None
    """The file of a FileStore."""

    @property
    def ranks_on_this_host(self) -> list[int]:
        """The ranks of this machine."""
        this_host = self.hosts[self.rank]
        return [rank for rank, host in enumerate(self.hosts) if host == this_host]

    def close(self, *, others_leave: bool = True) -> None:
        """Closes the store. Each rank calls it after the process group was closed.

        If rank 0 serves the store, it waits until the other ranks have closed it. The file of
        `file://` is removed by torch when the last rank closes its store, or else by rank 0.

        Args:
            others_leave: True if the other ranks will close it too, so that rank 0 should wait for
                them (for a few seconds).
        """
        store = self.store
        del self.store
        if not self.served_by_rank_0 and self.file is None:
            return  # the launcher serves it
        others_have_left = False
        # A RuntimeError: the other side has gone, which is what this rank is about to do.
        with suppress(RuntimeError):
            if self.rank != 0:
                store.set(f"left/{self.rank}", "")  # tells rank 0 that this rank needs it no longer
                return
            if others_leave:
                keys = [f"left/{rank}" for rank in range(1, len(self.hosts))]
                deadline = time.monotonic() + CLOSING_TIMEOUT_S
                others_have_left = wait_until(partial(store.check, keys), deadline)
        del store  # torch closes it when nothing refers to it any more
        if others_have_left and self.file is not None:
            _remove_file(self.file)


def _remove_file(file: Path) -> None:
    """Removes the file of a FileStore that all ranks have closed, if torch does not remove it.

    If two ranks close it at the same time, torch's count of users may let neither be the last.
    """
    deadline = time.monotonic() + FILE_REMOVAL_TIMEOUT_S
    if not wait_until(lambda: not file.exists(), deadline):
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
        topology: this process's place.
        init_method: `env://` (also None), `tcp://host:port` or `file:///path`.
        manifest: from `manifest.collect`; must be equal on all ranks.
        timeout: how long ranks wait for each other, in seconds.
        attempt: distinguishes restarts that meet at the same store of a launcher.

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
    opened = _open_store(topology, init_method, manifest, timeout, attempt)
    run_store = _store_of_run(opened.store, attempt)
    try:
        hosts = Join(run_store, topology, manifest, opened.location, timeout, opened.file).agree()
    except (errors.JoinError, errors.RanksDifferError) as error:
        failure = error.with_traceback(None)
    else:
        return Joined(run_store, hosts, topology.rank, opened.served_by_rank_0, opened.file)
    # While somebody looks at the error, nothing may refer to the store: that frees port and file.
    del opened, run_store
    raise failure


class _OpenedStore(NamedTuple):
    """The store at which this process meets the others."""

    store: Store
    location: str
    """The address or path of the store, for messages."""
    served_by_rank_0: bool
    file: Path | None
    """The file of a FileStore."""


def _open_store(
    topology: Topology,
    init_method: str | None,
    manifest: Mapping[str, str],
    timeout: float,
    attempt: str,
) -> _OpenedStore:
    """Serves the store, connects to it, or opens its file. Arguments and errors: see `join`."""
    location = parse_init_method(topology, init_method)
    if isinstance(location, Path):
        store = open_file(location, topology.size, timeout)
        return _OpenedStore(store, f"file://{location}", served_by_rank_0=False, file=location)
    is_master_address = (
        location.host == topology.master_addr and location.port == topology.master_port
    )
    if topology.agent_store and is_master_address:  # the launcher serves a store there
        location_text = f"the launcher's store at tcp://{location}"
        store = connect(location, timeout)
        return _OpenedStore(store, location_text, served_by_rank_0=False, file=None)
    if topology.is_main:
        store = _serve_or_connect(location, topology, manifest, timeout, attempt)
    else:
        store = connect(location, timeout)
    return _OpenedStore(store, f"tcp://{location}", served_by_rank_0=True, file=None)


def parse_init_method(topology: Topology, init_method: str | None) -> Endpoint | Path:
    """Returns where the store is: an endpoint, or the path of a file.

    Raises:
        SettingError: the init method is malformed, or it is `env://` and rank 0's address is not
            known.
    """
    if init_method is None or init_method == "env://":
        return _endpoint_of_environment(topology)
    if init_method.startswith("file://"):
        path = Path(init_method.removeprefix("file://"))
        if not path.is_absolute():
            raise _malformed_error(
                init_method, "the path is not absolute (three slashes after 'file:')"
            )
        return path
    try:
        parts = urlsplit(init_method)
        host = parts.hostname
        port = parts.port
    except ValueError as error:
        raise _malformed_error(init_method, str(error)) from None
    if parts.scheme != "tcp":
        raise _malformed_error(init_method, f"the scheme is {parts.scheme!r}")
    if not host:
        raise _malformed_error(init_method, "the host is missing")
    if not port:
        raise _malformed_error(init_method, "the port is missing")
    if parts.path.strip("/") or parts.query:
        found = "something follows the port; rank and world_size are arguments of init"
        raise _malformed_error(init_method, found)
    # At a loopback address only processes of this machine can meet.
    one_node = topology.one_node or network.means_loopback(host)
    return Endpoint(host, port, one_node)


def _endpoint_of_environment(topology: Topology) -> Endpoint:
    """Returns the endpoint of `env://`: MASTER_ADDR and MASTER_PORT."""
    if topology.master_addr is None or topology.master_port is None:
        missing = "MASTER_ADDR" if topology.master_addr is None else "MASTER_PORT"
        raise errors.SettingError(
            f"rank {topology.rank} of {topology.size} (from {topology.source})",
            f"{missing} is not set, so rank 0 cannot be found",
            f"set {missing}, start with `lockstep run`, or give init_method='tcp://host:port'",
        )
    # Processes of one machine meet at a loopback address. But if the launcher serves the store, it
    # listens at the address that the launcher has chosen.
    one_node = topology.one_node and not topology.agent_store
    return Endpoint(topology.master_addr, topology.master_port, one_node)


def _malformed_error(init_method: str, found: str) -> errors.SettingError:
    return errors.SettingError(f"init_method={init_method!r}", found, INIT_METHOD_FORMS)


def _store_of_run(store: Store, attempt: str) -> Store:
    """Returns the part of a store that belongs to this attempt to start a run."""
    return PrefixStore(f"lockstep/{attempt}", store)


def _serve_or_connect(
    endpoint: Endpoint,
    topology: Topology,
    manifest: Mapping[str, str],
    timeout: float,
    attempt: str,
) -> Store:
    """Serves rank 0's store and returns it.

    If another process with rank 0 of the same run serves one already, it returns that process's
    store, so that all ranks are told of the duplicate.

    Args:
        endpoint: where the store is served.
        topology: this process's place.
        manifest: the command, code, versions and settings of this process.
        timeout: how long ranks wait for each other, in seconds.
        attempt: with it begin the keys of this attempt to start the run.

    Raises:
        PortTakenError: something else has the port.
    """
    try:
        return serve(endpoint, timeout)
    except errors.PortTakenError:
        found = _look_for_store(endpoint, time.monotonic() + ATTEMPT_TIMEOUT_S)
        if not found.is_store:
            raise
    # The port has a store already. Is the process that serves it rank 0 of this run?
    store = connect(endpoint, timeout)
    run_store = _store_of_run(store, attempt)
    deadline = time.monotonic() + min(RANK_0_ANNOUNCEMENT_S, timeout)
    if not wait_until(lambda: run_store.check(["rank 0"]), deadline):  # it is no run of Lockstep's
        raise network.port_taken_error(endpoint)
    other = read_request(run_store, "rank 0")
    arguments = other.manifest.get("arguments")
    same_command = (
        arguments == manifest.get("arguments")
        and other.manifest.get("script") == manifest.get("script")
        and other.size == topology.size
    )
    has_decided = run_store.check(["decision"])
    if has_decided or not same_command:
        owner = f"another Lockstep run: {other.process}, {arguments or ''}".rstrip(", ")
        raise network.port_taken_error(endpoint, owner)
    return store


def serve(endpoint: Endpoint, timeout: float) -> Store:
    """Serves a store at the endpoint, on loopback or on one address of this machine.

    Args:
        endpoint: its host is this machine.
        timeout: how long to wait until the host name resolves, in seconds; also of the store.

    Raises:
        MasterUnreachableError: the host does not resolve, or is not this machine.
        PortTakenError: another program has the port.
        SettingError: this user may not listen on it.
    """
    # The name of a machine that has just been started may not resolve yet.
    if not wait_until(endpoint.addresses, time.monotonic() + timeout):
        raise network.unreachable_error("rank 0", endpoint, network.UNRESOLVED)
    try:
        address = network.serving_address(endpoint)
        return network.serve_store(address, endpoint.port, timedelta(seconds=timeout))
    except OSError as error:
        raise network.listening_error(error, endpoint) from None


def connect(endpoint: Endpoint, timeout: float) -> Store:
    """Connects to the store at the endpoint, trying again until the timeout.

    Args:
        endpoint: where the store should be.
        timeout: in seconds.

    Raises:
        MasterUnreachableError: there is no store; says what there is instead.
        PortTakenError: another program of this machine has the port.
    """
    deadline = time.monotonic() + timeout
    found = LookupResult("", "")  # each attempt replaces it

    def store_is_there() -> bool:
        """Tries once to reach a store; `found` says why there is none."""
        nonlocal found
        found = _look_for_store(endpoint, deadline)
        return found.is_store

    if not wait_until(store_is_there, deadline):
        if found.why_no_store == NOT_A_STORE and is_here(found.address):
            raise network.port_taken_error(endpoint)
        raise network.unreachable_error(
            "rank 0", endpoint, found.why_no_store, address=found.address, tried=timeout
        )
    remaining_s = max(deadline - time.monotonic(), ATTEMPT_TIMEOUT_S)
    try:
        return TCPStore(
            found.address,
            endpoint.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=remaining_s),
        )
    except RuntimeError as error:
        # torch says, for example, "The client socket has timed out after 2000ms while trying to
        # connect to (10.0.0.5, 29500)". Its other errors are of a connection that was closed.
        reason = network.NO_ANSWER if "timed out" in str(error) else network.CUT
        raise network.unreachable_error("rank 0", endpoint, reason, address=found.address) from None


@dataclass(frozen=True)
class LookupResult:
    """What one attempt to find a store has found."""

    address: str
    """The address that was tried last; empty if the host name does not resolve."""
    why_no_store: str
    """Empty if there is a store."""

    @property
    def is_store(self) -> bool:
        """True if a store answers at the address."""
        return not self.why_no_store


def _look_for_store(endpoint: Endpoint, deadline: float) -> LookupResult:
    """Tries each address of the endpoint once, until a store answers.

    Args:
        endpoint: where a store should be.
        deadline: in the seconds of `time.monotonic()`; the attempts are shorter close to it.

    Returns:
        The address of the store; or the last address, and why there is no store.
    """
    result = LookupResult("", network.UNRESOLVED)  # if the endpoint has no address
    for address in endpoint.addresses():
        timeout_s = min(ATTEMPT_TIMEOUT_S, max(deadline - time.monotonic(), 0.1))
        try:
            connection = socket.create_connection((address, endpoint.port), timeout=timeout_s)
        except ConnectionRefusedError:
            result = LookupResult(address, network.REFUSED)
            continue
        except OSError:
            result = LookupResult(address, network.NO_ANSWER)
            continue
        with connection:
            # A later torch may have another greeting. Then whatever listens is taken for a store.
            if answers_as_store(connection) or not _greeting_is_current():
                return LookupResult(address, why_no_store="")
        result = LookupResult(address, NOT_A_STORE)
    return result


@cache
def _greeting_is_current() -> bool:
    """Returns True if stores of this version of torch understand the greeting that we send.

    It is tried on a store of our own. If a store does not understand it, anything that listens
    may be a store.
    """
    store = network.serve_store(LOOPBACK, 0, timedelta(seconds=OWN_STORE_TIMEOUT_S))
    address = (LOOPBACK, store.port)
    with socket.create_connection(address, timeout=OWN_STORE_TIMEOUT_S) as connection:
        return answers_as_store(connection)
