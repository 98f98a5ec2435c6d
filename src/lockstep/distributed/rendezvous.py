"""Opens the store at which the ranks meet: `env://`, `tcp://host:port` or `file:///path`.

A *store* is torch's key-value store, which processes can share before a process group exists. With
`env://` and `tcp://`, rank 0 serves a TCPStore at an *endpoint* (a host and a port), and the other
ranks connect to it. With `file://`, all ranks open torch's FileStore (see `init_file`). Once they
have met, the ranks decide whether the run starts (see `join`).

Two things differ from what torch does by itself. Torch's TCPStore listens on all network
interfaces; ours is given a socket that listens on one. And before torch's client connects, a plain
socket finds out what is behind the port: the client would wait forever for a program that listens
but is not a store, and its errors do not tell the causes apart.
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
from lockstep.distributed.init_file import open_file
from lockstep.distributed.join import Join, JoinRequest, read_request
from lockstep.machine import network
from lockstep.machine.network import LOOPBACK, Endpoint, is_here, wait_until
from lockstep.machine.topology import Topology
from lockstep.torch_compat import answers_as_store, number_among_spawned

INIT_METHOD_FORMS = "the forms are 'env://', 'tcp://host:port' and 'file:///absolute/path'"
NOT_A_STORE = "something listens there, but it is not a torch store"

ATTEMPT_TIMEOUT_S = 2.0
"""How long one attempt may take to connect or to get an answer."""
OWN_STORE_TIMEOUT_S = 60.0
"""How long this process waits for an answer of its own store; a busy machine is slow."""
CLOSING_TIMEOUT_S = 5.0
"""How long rank 0 waits until the other ranks have closed the store."""
FILE_REMOVAL_TIMEOUT_S = 1.0
"""How long rank 0 waits until torch has removed the file of a FileStore."""
RANK_0_ANNOUNCEMENT_S = 2.0
"""How long after a store has been opened rank 0 may take to announce itself in it."""


@dataclass(eq=False)
class Joined:
    """The store that the ranks share once they have joined the run, and the host of each rank."""

    store: Store
    """Used for process groups and small messages until `close` is called. Its port or file stays in
    use as long as there is a reference to it."""
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

    def close(self, *, wait_for_others: bool = True) -> None:
        """Closes the store. Each rank calls this after it has closed the process group.

        If rank 0 serves the store, or it is in a file, rank 0 waits a few seconds until the other
        ranks have closed it. Torch removes the file of a FileStore when the last rank closes the
        store. Rank 0 makes sure that the file is gone.

        Args:
            wait_for_others: False if the other ranks may not close the store, so that rank 0 does
                not wait for them.
        """
        # Torch closes a store when the last reference to it is gone.
        store = self.store
        del self.store

        launcher_serves_store = not self.served_by_rank_0 and self.file is None
        if launcher_serves_store:
            return

        if self.rank != 0:
            _tell_rank_0_of_leaving(store, self.rank)
            return

        num_ranks = len(self.hosts)
        all_have_left = wait_for_others and _wait_until_others_leave(store, num_ranks)
        del store  # closes it
        if all_have_left and self.file is not None:
            _remove_file(self.file)


def _tell_rank_0_of_leaving(store: Store, rank: int) -> None:
    """Tells rank 0, which waits in `_wait_until_others_leave`, that this rank leaves."""
    with suppress(RuntimeError):  # rank 0 has gone already
        store.set(f"left/{rank}", "")


def _wait_until_others_leave(store: Store, num_ranks: int) -> bool:
    """Waits on rank 0 until the other ranks have told it that they leave.

    Returns:
        False if some ranks have not told it in time, or if the store does not answer.
    """
    keys = [f"left/{rank}" for rank in range(1, num_ranks)]
    deadline = time.monotonic() + CLOSING_TIMEOUT_S
    with suppress(RuntimeError):
        return wait_until(partial(store.check, keys), deadline)
    return False


def _remove_file(file: Path) -> None:
    """Removes the file of a FileStore that all ranks have closed, unless torch does so in time.

    The last rank that closes the store should remove its file. But if two ranks close it at the
    same time, torch may count wrongly, so that neither of them is the last.
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
    """Meets the other ranks at the store, and starts the run on all of them or on none.

    If the run cannot start, all ranks that have met raise the same error.

    Args:
        topology: this process's rank and machine.
        init_method: `env://`, `tcp://host:port` or `file:///path`. None means `env://`.
        manifest: the result of `manifest.collect`, which must be equal on all ranks.
        timeout: how long ranks wait for each other, in seconds.
        attempt: text that sets this start of the run apart from others, such as restarts, at the
            same store.

    Raises:
        SettingError: the init method is malformed, or the address of rank 0 is not known.
        MissingRankError: a rank did not come; the error says which.
        DuplicateRankError: two processes have the same rank.
        WorldSizeError: the ranks were started with different world sizes.
        RanksDifferError: the manifests differ; the error says where and how.
        MasterUnreachableError: rank 0's host name does not resolve, the connection is refused,
            nothing answers, or what answers is not a store.
        PortTakenError: another program uses rank 0's port.
        StaleInitFileError: the file is left over from an earlier run.
    """
    opened = _open_store(topology, init_method, manifest, timeout, attempt)
    run_store = _store_of_run(opened.store, attempt)
    joining = Join(
        store=run_store,
        topology=topology,
        manifest=manifest,
        store_location=opened.location,
        timeout_s=timeout,
        file=opened.file,
    )
    hosts_or_error = _agree(joining)
    if isinstance(hosts_or_error, Exception):
        # The frame of this function is in the traceback of the error. Its variables would keep the
        # store open, and its port or file in use, for as long as the caller keeps the error.
        del opened, run_store, joining
        raise hosts_or_error

    return Joined(
        store=run_store,
        hosts=hosts_or_error,
        rank=topology.rank,
        served_by_rank_0=opened.served_by_rank_0,
        file=opened.file,
    )


def _agree(joining: Join) -> list[str] | errors.JoinError | errors.RanksDifferError:
    """Returns the host of each rank, or the error if the run does not start.

    The error has no traceback, whose frames would keep the store open (see `join`).
    """
    try:
        return joining.agree()
    except (errors.JoinError, errors.RanksDifferError) as error:
        return error.with_traceback(None)


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
    """Opens the store of the init method. Rank 0 serves it, unless it is a file or the launcher's.

    The arguments and errors are those of `join`.
    """
    location = parse_init_method(topology, init_method)

    # A file: all ranks open it.
    if isinstance(location, Path):
        store = open_file(location, topology.size, timeout)
        return _OpenedStore(store, f"file://{location}", served_by_rank_0=False, file=location)

    # A store that the launcher serves at the master's address: all ranks connect to it.
    is_master_address = (
        location.host == topology.master_addr and location.port == topology.master_port
    )
    launcher_serves_here = topology.agent_store and is_master_address
    if launcher_serves_here:
        location_text = f"the launcher's store at tcp://{location}"
        store = connect(location, timeout)
        return _OpenedStore(store, location_text, served_by_rank_0=False, file=None)

    # Any other address, for example one that the script has passed as `init_method`: rank 0 serves
    # the store, and the other ranks connect to it.
    if topology.is_main:
        store = _serve_or_connect(location, topology, manifest, timeout, attempt)
    else:
        store = connect(location, timeout)
    return _OpenedStore(store, f"tcp://{location}", served_by_rank_0=True, file=None)


def parse_init_method(topology: Topology, init_method: str | None) -> Endpoint | Path:
    """Returns the endpoint or the file path that an init method stands for.

    Examples: `tcp://node1:29500` stands for an endpoint, `file:///shared/init` for a path. None is
    the same as `env://`.

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

    at_loopback = _all_meet_at_loopback(topology, host)
    return Endpoint(host, port, processes_meet_at_loopback=at_loopback)


def _endpoint_of_environment(topology: Topology) -> Endpoint:
    """Returns the endpoint that MASTER_ADDR and MASTER_PORT name; used for `env://`.

    Raises:
        SettingError: one of them is not set.
    """
    if topology.master_addr is None or topology.master_port is None:
        missing = "MASTER_ADDR" if topology.master_addr is None else "MASTER_PORT"
        advice = f"set {missing}, start with `lockstep run`, or give init_method='tcp://host:port'"
        if number_among_spawned() is not None:
            advice = (
                "call the function without torch.multiprocessing.spawn, and start the script with "
                f"lockstep run --nproc N; or set {missing}, or give init_method='tcp://host:port'"
            )
        raise errors.SettingError(
            f"rank {topology.rank} of {topology.size} (from {topology.source})",
            f"{missing} is not set, so rank 0 cannot be found",
            advice,
        )

    # Processes of one machine meet at loopback, except at a store of the launcher (`agent_store`,
    # after torchrun's TORCHELASTIC_USE_AGENT_STORE), which listens at MASTER_ADDR only.
    host = topology.master_addr
    at_loopback = _all_meet_at_loopback(topology, host) and not topology.agent_store
    return Endpoint(host, topology.master_port, processes_meet_at_loopback=at_loopback)


def _all_meet_at_loopback(topology: Topology, host: str) -> bool:
    """Returns True if all processes can only be on this machine, so that they meet at loopback.

    A loopback address can only be reached by processes on the same machine, even if each of them
    was started as if it were alone on its machine (LOCAL_WORLD_SIZE=1).
    """
    return topology.one_node or network.means_loopback(host)


def _malformed_error(init_method: str, found: str) -> errors.SettingError:
    return errors.SettingError(f"init_method={init_method!r}", found, INIT_METHOD_FORMS)


def _store_of_run(store: Store, attempt: str) -> Store:
    """Returns a view of a store that prefixes all keys with this attempt to start a run."""
    return PrefixStore(f"lockstep/{attempt}", store)


def _serve_or_connect(
    endpoint: Endpoint,
    topology: Topology,
    manifest: Mapping[str, str],
    timeout: float,
    attempt: str,
) -> Store:
    """Serves rank 0's store, or connects to the store that another rank 0 already serves.

    Two processes may be started as rank 0 of the same run by mistake. The first one serves the
    store. The second one finds the port taken, and joins at the first one's store. Then the join
    protocol reports the duplicate to all ranks.

    Args:
        endpoint: the host and port at which to serve the store.
        topology: this process's rank and machine.
        manifest: the command, code, versions and settings of this process.
        timeout: how long ranks wait for each other, in seconds.
        attempt: text that distinguishes this attempt to start the run in the keys of the store.

    Raises:
        PortTakenError: the port is used by another program or by another run.
    """
    try:
        return serve(endpoint, timeout)
    except errors.PortTakenError:
        lookup = _look_for_store(endpoint, time.monotonic() + ATTEMPT_TIMEOUT_S)
        if not lookup.is_store:  # another program has the port
            raise

    return _connect_to_other_rank_0(endpoint, topology, manifest, timeout, attempt)


def _connect_to_other_rank_0(
    endpoint: Endpoint,
    topology: Topology,
    manifest: Mapping[str, str],
    timeout: float,
    attempt: str,
) -> Store:
    """Connects to the store at a port if it is that of another rank 0 of this run.

    It is called if the port at which this rank 0 wanted to serve its store is taken: perhaps by a
    second rank 0 of the same run, started by mistake. The join protocol reports that mistake to
    both, so they must meet at one store.

    Each rank 0 of Lockstep writes its request into its store, and later its decision whether the
    run starts. A rank 0 that has another command, or has decided already, belongs to another run.

    The arguments and errors are those of `_serve_or_connect`.
    """
    store = connect(endpoint, timeout)
    run_store = _store_of_run(store, attempt)
    deadline = time.monotonic() + min(RANK_0_ANNOUNCEMENT_S, timeout)
    if not wait_until(lambda: run_store.check(["rank 0"]), deadline):
        raise network.port_taken_error(endpoint)

    other = read_request(run_store, "rank 0")
    has_decided = run_store.check(["decision"])
    is_of_same_run = _has_same_command(other, manifest, topology) and not has_decided
    if not is_of_same_run:
        arguments = other.manifest.get("arguments")
        owner = f"another Lockstep run: {other.process}"
        if arguments:
            owner = f"another Lockstep run: {other.process}, {arguments}"
        raise network.port_taken_error(endpoint, owner)
    return store


def _has_same_command(other: JoinRequest, manifest: Mapping[str, str], topology: Topology) -> bool:
    """Returns True if another process runs the same script, with as many ranks, as this one."""
    return (
        other.manifest.get("arguments") == manifest.get("arguments")
        and other.manifest.get("script") == manifest.get("script")
        and other.size == topology.size
    )


def serve(endpoint: Endpoint, timeout: float) -> Store:
    """Serves a store at the endpoint.

    The store listens on a single address of this machine, which is a loopback address if all
    processes are here.

    Args:
        endpoint: a port of this machine.
        timeout: how long to wait until the host name resolves, in seconds. It is also the timeout
            of the store's requests.

    Raises:
        MasterUnreachableError: the host name does not resolve, or is not that of this machine.
        PortTakenError: another program uses the port.
        SettingError: this user is not allowed to listen on the port.
    """
    # The name of a machine that has just been started may not resolve yet. This waits until
    # `endpoint.addresses()` returns at least one address.
    if not wait_until(endpoint.addresses, time.monotonic() + timeout):
        raise network.unreachable_error("rank 0", endpoint, network.UNRESOLVED)

    try:
        address = network.serving_address(endpoint)
        return network.serve_store(address, endpoint.port, timedelta(seconds=timeout))
    except OSError as error:
        # This returns a `PortTakenError` or a `SettingError`, or the error itself.
        raise network.explain_listening_error(error, endpoint) from None


def connect(endpoint: Endpoint, timeout: float) -> Store:
    """Connects to the store at the endpoint, and tries again until the timeout.

    Args:
        endpoint: the host and port at which rank 0 serves the store.
        timeout: how long to try, in seconds.

    Raises:
        MasterUnreachableError: there is no store. The error says what was found instead.
        PortTakenError: another program on this machine uses the port.
    """
    deadline = time.monotonic() + timeout
    lookup = _wait_for_store(endpoint, deadline)
    if not lookup.is_store:
        is_other_program = lookup.why_no_store == NOT_A_STORE
        if is_other_program and is_here(lookup.address):
            raise network.port_taken_error(endpoint)

        raise network.unreachable_error(
            "rank 0", endpoint, lookup.why_no_store, address=lookup.address, tried=timeout
        )

    # A store answers there, so torch's client can connect to it. If the store was found at the last
    # moment, the client still gets the time of one attempt.
    remaining_s = max(deadline - time.monotonic(), ATTEMPT_TIMEOUT_S)
    try:
        return TCPStore(
            lookup.address,
            endpoint.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=remaining_s),
        )
    except RuntimeError as error:
        # Example of torch's message: "The client socket has timed out after 2000ms while trying to
        # connect to (10.0.0.5, 29500)". Any other message means that the store has closed the
        # connection (`CONNECTION_CUT`).
        reason = network.NO_ANSWER if "timed out" in str(error) else network.CONNECTION_CUT
        raise network.unreachable_error(
            "rank 0", endpoint, reason, address=lookup.address
        ) from None


@dataclass(frozen=True)
class LookupResult:
    """The result of one attempt to find a store."""

    address: str
    """The address that was tried last; empty if the host name does not resolve."""
    why_no_store: str
    """The reason why there is no store, for messages; empty if there is one."""

    @property
    def is_store(self) -> bool:
        """True if a store answers at the address."""
        return not self.why_no_store

    def __bool__(self) -> bool:
        """Makes `wait_until` repeat the attempt until a store is found."""
        return self.is_store


def _wait_for_store(endpoint: Endpoint, deadline: float) -> LookupResult:
    """Looks for a store again and again until there is one or the deadline has passed.

    Returns:
        The result of the last attempt.
    """
    return wait_until(lambda: _look_for_store(endpoint, deadline), deadline)  # at least once


def _look_for_store(endpoint: Endpoint, deadline: float) -> LookupResult:
    """Tries each address of the endpoint once, until a store answers.

    Args:
        endpoint: the host and port at which a store is expected.
        deadline: time of `time.monotonic()` by which the attempts should end.

    Returns:
        The address of the store. If no store was found: the last address that was tried, and the
        reason why there is no store.
    """
    result = LookupResult("", network.UNRESOLVED)  # returned if the endpoint has no address
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
            answers = answers_as_store(connection)

        # If this version of torch uses another greeting than the one that Lockstep sends, a missing
        # answer says nothing. Then any program that listens is taken for a store.
        if answers or not _greeting_is_current():
            return LookupResult(address, why_no_store="")

        result = LookupResult(address, NOT_A_STORE)
    return result


@cache
def _greeting_is_current() -> bool:
    """Returns True if stores of this version of torch answer the greeting that Lockstep sends.

    To find out, this function serves a store of its own and sends the greeting to it.
    """
    store = network.serve_store(LOOPBACK, 0, timedelta(seconds=OWN_STORE_TIMEOUT_S))
    address = (LOOPBACK, store.port)
    with socket.create_connection(address, timeout=OWN_STORE_TIMEOUT_S) as connection:
        return answers_as_store(connection)
