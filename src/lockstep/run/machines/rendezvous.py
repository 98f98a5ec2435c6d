"""Where the launchers of a run meet, and the store that their ranks use.

    one machine       a store on loopback; no thread, nobody to wait for
    several           one node serves the store on its loopback, behind an auth proxy
    etcd and others   torch's own rendezvous, unchanged

Which node serves is torchrun's rule: node 0 with --node-rank, --master-addr and --master-port; with
c10d the node that --rdzv-endpoint names, or whose --rdzv-conf says `is_host=1`.

Torch elastic's agent takes a `RendezvousHandler`. All forms are one (`Rendezvous`), and have beside
it what torch does not have: which nodes have left, and a way for launchers to publish something.

Sources: torch/distributed/elastic/rendezvous/{api,static_tcp_rendezvous,dynamic_rendezvous}.py.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from json import dumps
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from lockstep import errors
from lockstep.distributed import network
from lockstep.distributed.network import LOOPBACK, Endpoint
from lockstep.run.machines import auth, peers
from lockstep.run.machines.peers import HERE, LEFT, LOST, Node, Peers
from lockstep.run.start.machine import loopback_name

Say = Callable[[str], None]

_SERVER = "the node that serves"
_JOIN_TIMEOUT_S, _READ_TIMEOUT_S, _LAST_CALL_S = 600.0, 60.0, 30.0
"""Torch's own defaults."""
_MAX_PUBLISHED = 1 << 20
_RETRY_S, _LOOK_S = 0.25, 0.02
_FIRST_COMER_S = 1.0
"""How long a launcher that is to serve looks for another one that does so already."""
_WRONG_SERVICE_S = 10.0
"""How long something else may hold the port before we give up: it may be about to end."""
_LEAVE_S, _LEAVE_AFTER_FAILURE_S = 10.0, 2.0
"""How long the serving node waits for the others to leave."""
_READY = "lockstep/ready"


class Rendezvous(RendezvousHandler):
    """One launcher's part in a run. May be used as a context manager; see `close`.

    Args:
        parameters: what torchrun makes of its flags.
        nodes: the launchers of the run.
        store: for the ranks, on loopback; None: torch's own rendezvous opens it.
        say: called with what is waited for.
        interface: name of the network interface that reaches the other nodes; loopback on one
            machine; None: unknown. For `network.socket_variables`.
    """

    can_publish = True
    """Whether launchers see what others publish; they do not by a rendezvous of torch's own."""

    def __init__(
        self,
        parameters: RendezvousParameters,
        nodes: Peers,
        store: TCPStore | None,
        say: Say,
        interface: str | None,
    ) -> None:
        self._parameters, self._peers, self._say = parameters, nodes, say
        self._store: Any = store
        self.interface = interface
        self.opened = ExitStack()
        """Closed with the rendezvous."""
        self._closed = False
        self._torchs = self._handler()
        """Of those that torch makes; None: there is none, or nothing is heard from it any more. Its
        heartbeats end with it."""
        self.attempt: int | None = None
        """How many times the ranks were started before, counted by all nodes alike; None: unknown.

        For TORCHELASTIC_RESTART_COUNT, by which the ranks of one start find each other: the agents'
        own counts differ once a node has restarted because of another one.
        """

        self.joiners_wait: Callable[[], bool] = lambda: False
        """Whether a machine that comes is not to be taken in yet; set by who starts the ranks."""

    def _handler(self) -> RendezvousHandler | None:
        return None

    @property
    def elastic(self) -> bool:
        """Whether the run may go on with other machines."""
        return False

    def ask(self) -> None:
        """Asks the other nodes for a new start; see `DynamicRendezvous`."""

    def change(self) -> str:
        """Which machines were lost, where the run goes on without them; empty: none."""
        return ""

    def lost_nodes(self) -> list[Node]:
        """The nodes of the current start that have gone before the end; never waits."""
        own = self._peers.own
        return [n for n in peers.latest(self._peers.all()) if n.gone and n.round >= own.round > 0]

    def publish(self, key: str, value: Any, to: int | None = None) -> bool:
        """Lets other nodes know a value (JSON) under a key, for the current attempt; never waits.

        Args:
            key: a later value takes the place of an earlier one.
            value: what they find there.
            to: the rank of the one node that is to know it; None: all, this one included.

        Returns:
            False when it was not published, because it is longer than 1 MiB.
        """
        if len(dumps(value)) > _MAX_PUBLISHED:
            return False
        published = {key: {"attempt": self.attempt, "value": value}}
        if to is None:
            self._peers.update(published=published)
            return True
        for node in peers.latest(self._peers.all()):
            if node.rank == to:
                self._peers.send({"published": published}, node.number)
        return True

    def published(self, key: str) -> dict[int, Any]:
        """What each node has published under a key in this attempt, by node rank; never waits."""
        found = {}
        for node in peers.latest(self._peers.all()):
            entry = node.published.get(key)
            if node.rank is not None and entry is not None and entry["attempt"] == self.attempt:
                found[node.rank] = entry["value"]
        return found

    def close(self, why: str = "") -> None:
        """Leaves the run; the node that serves waits up to 10 s for the others to leave.

        Args:
            why: why this node leaves before the end of the run, told to the others; empty: the run
                has ended.
        """
        if self._closed:
            return
        self._closed = True
        self._torchs = None
        self.joiners_wait = lambda: False  # whoever set it holds this, and so the store
        with self.opened:
            if why:
                self._peers.update(state=LEFT, why=why)
            if self._peers.own_number == 0:
                deadline = time.monotonic() + (_LEAVE_AFTER_FAILURE_S if why else _LEAVE_S)
                others = self._peers.all
                network.wait_until(lambda: all(n.state != HERE for n in others()[1:]), deadline)
            self._peers.update(state=LEFT)

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        found = error.found if isinstance(error, errors.LockstepError) else ""
        self.close("" if kind is None else found or f"its launcher ended with {kind.__name__}")

    @property
    def use_agent_store(self) -> bool:
        """True."""
        return True

    def get_run_id(self) -> str:
        """`--rdzv-id`."""
        return str(self._parameters.run_id)

    def get_backend(self) -> str:
        """`--rdzv-backend`."""
        return str(self._parameters.backend)

    def is_closed(self) -> bool:
        """False; torch elastic's agent does not ask."""
        return False

    def set_closed(self) -> None:
        """Does nothing; torch elastic's agent does not call it."""

    def shutdown(self) -> bool:
        """Does nothing: `close` tells the others."""
        return True

    def _info(self, store: Any, rank: int, size: int) -> RendezvousInfo:
        return RendezvousInfo(store, rank, size, RendezvousStoreInfo(LOOPBACK, self._store.port))

    def _server_gone(self) -> bool:
        return self._peers.all()[0].state != HERE


def open_rendezvous(
    parameters: RendezvousParameters, say: Say, environ: Mapping[str, str] = os.environ
) -> Rendezvous:
    """Serves the store at which the nodes of a run meet, or connects to it.

    On one machine, and on the node that serves, it returns at once; on other nodes when the serving
    node has taken them in. The waiting for each other happens in `next_rendezvous`. Threads are
    started on several machines alone, so call it after what must be forked without any.

    Args:
        parameters: what torchrun makes of its flags.
        say: called with each line that the user should read, from any thread.
        environ: for LOCKSTEP_TOKEN, and to find the user's home folder.

    Raises:
        SettingError: contradicting or malformed flags, or no token can be had.
        PortTakenError: the port belongs to another program.
        MasterUnreachableError: there is no node that serves; says what there is instead.
        DuplicateRankError: the node rank has come already.
        WorldSizeError: `--nnodes` differs from the serving node's.
        TokenDiffersError: the token differs from the serving node's.
    """
    static, size = parameters.backend == "static", parameters.max_nodes
    rank = int(parameters.get("rank", 0)) if static or size == 1 else None
    if static and not 0 <= (rank or 0) < size:
        raise errors.SettingError(
            f"--node-rank {rank} with --nnodes {size}",
            f"node ranks count from 0 to {size - 1}",
            "give each machine a --node-rank of its own",
        )
    own = Node(
        number=0,
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        run_id=parameters.run_id,
        nodes=f"{size if static else parameters.min_nodes}:{size}",
    )
    kind = str(parameters.get("store_type", "tcp")).strip().lower()
    if parameters.backend not in ("static", "c10d") or (not static and kind != "tcp" and size > 1):
        say(
            f"--rdzv-backend {parameters.backend}: torch's own rendezvous; its store asks for no "
            "token and listens on all interfaces of the node of rank 0, and ranks that hang on "
            "several machines are not told"
        )
        return TorchsRendezvous(parameters, Peers(own), None, say, None)
    if size > 1:
        return _OneOfSeveral(parameters, own, say, environ).open()
    # The port of a c10d endpoint is where other nodes find the store; that of a static one becomes
    # the ranks' MASTER_PORT.
    endpoint = _endpoint(parameters) if static else Endpoint(LOOPBACK, 0)
    try:
        store = network.serve_store(LOOPBACK, endpoint.port, _store_timeout(parameters))
    except OSError as error:
        raise network.cannot_listen(error, endpoint) from None
    return StaticRendezvous(parameters, Peers(own), store, say, loopback_name())


class _OneOfSeveral:
    """A node on its way to the others: it serves the run, or connects to the node that does."""

    def __init__(
        self, parameters: RendezvousParameters, own: Node, say: Say, environ: Mapping[str, str]
    ) -> None:
        self._parameters, self._own, self._say = parameters, own, say
        self._endpoint, self._token = _endpoint(parameters), auth.find_token(environ)
        self._timeout = _join_timeout(parameters)

    def open(self) -> Rendezvous:
        """See `open_rendezvous`."""
        endpoint = self._endpoint
        serves, sure = self._serves()
        if not serves:
            return self._connect(self._timeout)
        if sure and not any(map(network.is_here, network.resolve(endpoint.host))):
            # A forwarder's address, or that of a machine on which another node 0 is.
            with suppress(errors.MasterUnreachableError):
                return self._connect(_FIRST_COMER_S)
        address = network.serving_address(endpoint, self._parameters.local_addr)
        try:
            listener = network.listening_socket(address, endpoint.port)
        except OSError as error:
            taken = network.cannot_listen(error, endpoint)
            if not isinstance(taken, errors.PortTakenError):
                raise taken from None
            # A launcher that has the port already says what is wrong, if anything is.
            try:
                return self._connect(_FIRST_COMER_S if sure else self._timeout)
            except (errors.MasterUnreachableError, errors.TokenDiffersError):
                raise taken from None
        return self._serve(listener)

    def _serves(self) -> tuple[bool, bool]:
        """Whether this node serves, and whether that is what the user said or our guess."""
        if self._parameters.backend == "static":
            return self._own.rank == 0, True
        try:
            said = self._parameters.get_as_bool("is_host")
        except ValueError:
            given = self._parameters.get("is_host")
            raise errors.SettingError(
                f"--rdzv-conf is_host={given}", "neither yes nor no", "write 1 or 0"
            ) from None
        if said is not None:
            return said, True
        host = self._endpoint.host
        here = host in ("localhost", socket.gethostname())
        return here or any(map(network.is_here, network.resolve(host))), False

    def _serve(self, listener: socket.socket) -> Rendezvous:
        address = str(listener.getsockname()[0])
        store = network.serve_store(LOOPBACK, 0, _store_timeout(self._parameters))
        nodes = Peers(self._own)
        with ExitStack() as stack:
            thread = stack.enter_context(closing(auth.NetworkThread()))
            server = peers.Server(nodes, self._say)
            nodes.send = lambda changes, to: thread.soon(lambda: server.send(changes, to=to))
            proxy = auth.AuthProxy(self._token, store.port, server.attend, self._say)
            thread.wait(proxy.listen(listener))
            stack.callback(lambda: thread.wait(proxy.close()))
            stack.callback(lambda: thread.wait(server.close()))
            if self._token.open:
                where = Endpoint(address, self._endpoint.port)
                self._say(f"{auth.VARIABLE}=none: whoever reaches {where} may join this run")
            return self._made(nodes, store, address, stack)

    def _connect(self, patience: float) -> Rendezvous:
        endpoint = self._endpoint
        with ExitStack() as stack:
            thread = stack.enter_context(closing(auth.NetworkThread()))
            address, streams = self._authenticate(thread, patience)
            connection = peers.Connection(*streams)
            stack.callback(lambda: thread.wait(connection.close()))
            try:
                nodes = thread.wait(peers.introduce(connection, self._own))
            except (OSError, EOFError, ValueError):
                raise network.unreachable(_SERVER, endpoint, network.CUT, address=address) from None
            forwarder = auth.Forwarder(address, endpoint.port, self._token)
            listener = network.listening_socket(LOOPBACK, 0)
            thread.wait(forwarder.listen(listener))
            stack.callback(lambda: thread.wait(forwarder.close()))
            nodes.send = lambda changes, to: thread.soon(
                lambda: connection.send({"changes": changes, "to": to})
            )
            thread.start(peers.listen(connection, nodes, forwarder.cut))
            store = self._client_store(listener.getsockname()[1])
            return self._made(nodes, store, str(streams[1].get_extra_info("sockname")[0]), stack)

    def _made(self, nodes: Peers, store: TCPStore, address: str, stack: ExitStack) -> Rendezvous:
        """The rendezvous, which takes over what is on the stack."""
        kind = StaticRendezvous if self._parameters.backend == "static" else DynamicRendezvous
        local = self._parameters.local_addr
        asked = network.resolve(local) if local else []
        interface = network.interface_of(next(filter(network.is_here, asked), address))
        made = kind(self._parameters, nodes, store, self._say, interface)
        made.opened = stack.pop_all()
        return made

    def _client_store(self, port: int) -> TCPStore:
        limit = _store_timeout(self._parameters)
        try:
            return TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=limit)
        except RuntimeError:
            raise network.unreachable(_SERVER, self._endpoint, network.CUT) from None

    def _authenticate(self, thread: auth.NetworkThread, timeout: float) -> tuple[str, auth.Streams]:
        """Tries to get through the auth proxy at all of its addresses, until the timeout."""
        endpoint, token = self._endpoint, self._token
        began = time.monotonic()
        announce = peers.announcer(self._say)
        while True:
            address, reason = "", network.UNRESOLVED
            for address in endpoint.addresses():
                try:
                    connecting = auth.authenticate(address, endpoint.port, token, auth.PEER)
                    return address, thread.wait(connecting)
                except auth.ConnectionFailed as error:
                    reason = str(error)
            waited = time.monotonic() - began
            if reason == auth.TOKEN_DIFFERS:
                raise errors.TokenDiffersError(
                    f"the run at {endpoint}, with the token of {token.source}",
                    "the token differs: the node that serves has another one",
                    f"set {auth.VARIABLE} to the same text on all machines (`openssl rand -hex 16` "
                    "makes one), or copy the token file of one machine to the others",
                )
            wrong_service = reason == auth.NOT_A_LAUNCHER
            if waited > timeout or (wrong_service and waited > _WRONG_SERVICE_S):
                tried = 0.0 if wrong_service else timeout
                raise network.unreachable(_SERVER, endpoint, reason, address=address, tried=tried)
            announce(f"{_SERVER} at {endpoint}: {reason}")
            time.sleep(_RETRY_S)


# What the flags say


def _join_timeout(parameters: RendezvousParameters) -> float:
    """Seconds that nodes wait for each other: `timeout` (static), `join_timeout` (c10d)."""
    return _seconds(parameters, "join_timeout", _JOIN_TIMEOUT_S)


def _store_timeout(parameters: RendezvousParameters) -> timedelta:
    """How long the store waits for an answer: `timeout` (static) or `read_timeout` (c10d)."""
    return timedelta(seconds=_seconds(parameters, "read_timeout", _READ_TIMEOUT_S))


def _seconds(parameters: RendezvousParameters, name: str, default: float) -> float:
    if parameters.backend == "static":
        name, default = "timeout", _JOIN_TIMEOUT_S
    given = parameters.get(name, default)
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise errors.SettingError(
            f"--rdzv-conf {name}={given}", "not a number of seconds above 0", "write a number"
        )
    return seconds


def _endpoint(parameters: RendezvousParameters) -> Endpoint:
    """The host and port that all nodes were given."""
    static = parameters.backend == "static"
    flags = "--master-addr and --master-port" if static else "--rdzv-endpoint"
    was_set = f"{flags}: {parameters.endpoint!r}"
    try:
        host, port = parse_rendezvous_endpoint(parameters.endpoint, -1 if static else 29400)
    except ValueError as error:
        raise errors.SettingError(was_set, str(error), "write HOST:PORT") from None
    if port < 1 and parameters.max_nodes > 1:
        raise errors.SettingError(
            was_set,
            "there is no port at which several machines could meet",
            "give the address of one of the machines and a free port there, the same on all",
        )
    return Endpoint(host, port, one_node=network.means_loopback(host))


class StaticRendezvous(Rendezvous):
    """For a fixed number of numbered nodes; one is the simplest case.

    Unlike torch's own for static rendezvous it starts all nodes anew together: a node whose ranks
    have failed asks for the next round, which the others learn from `num_nodes_waiting`.
    """

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits until all nodes are ready to start their ranks.

        Raises:
            MissingRankError: a node has not come within the join timeout, or has left for good.
        """
        present = [n for n in self._peers.all() if n.state == HERE]
        wanted = max(max(n.round, n.started + 1) for n in present)
        self._peers.update(round=wanted)
        self._wait(wanted)
        self._peers.update(started=wanted)
        self.attempt = wanted - 1
        store = PrefixStore(f"{self.get_run_id()}/{self.attempt}", self._store)
        rank = self._peers.own.rank or 0
        if rank == 0:
            forget_ranks(self._store)
            store.set(_READY, "")
        store.get(_READY)
        return self._info(store, rank, self._parameters.max_nodes)

    def _wait(self, wanted: int) -> None:
        size, timeout = self._parameters.max_nodes, _join_timeout(self._parameters)
        deadline = time.monotonic() + timeout
        announce = peers.announcer(self._say)
        while missing := peers.absent(self._peers.all(), size, wanted):
            # For good: the node that serves, or after the first start one that left by itself.
            # Before that somebody may be correcting a command line, and one that was lost may be
            # started again by a scheduler.
            nodes = self._peers.all()
            left = [n for n in peers.latest(nodes) if n.state == LEFT and wanted > 1]
            gone = nodes[:1] if self._server_gone() else left
            if gone or time.monotonic() > deadline:
                raise errors.MissingRankError(
                    f"--nnodes {size}",
                    peers.departure(gone[0]) if gone else f"{missing} (waited {timeout:g} s)",
                    "look at the output of the launcher there, or start it",
                )
            announce(missing)
            time.sleep(_LOOK_S)

    def num_nodes_waiting(self) -> int:
        """How many nodes wait for this one to start its ranks anew."""
        own = self._peers.own
        return sum(n.state == HERE and n.round > own.round for n in self._peers.all())


class TorchsRendezvous(Rendezvous):
    """A rendezvous of torch's own, such as that of etcd."""

    can_publish = False

    def _handler(self) -> RendezvousHandler:
        try:
            return get_rendezvous_handler(self._parameters)
        except ValueError as error:
            backend = self._parameters.backend
            do = "give one that torch has, such as c10d or static"
            raise errors.SettingError(f"--rdzv-backend {backend}", str(error), do) from None

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks use the store in which the launchers meet."""
        return self._store is not None or bool(self._torchs and self._torchs.use_agent_store)

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits until torch's rendezvous is complete."""
        if self._torchs is None:
            raise RendezvousClosedError
        return self._torchs.next_rendezvous()

    def num_nodes_waiting(self) -> int:
        """As torch's; 0 when the node that serves has gone (see `lost_nodes`)."""
        if self._server_gone():
            self._torchs = None
        try:
            return 0 if self._torchs is None else int(self._torchs.num_nodes_waiting())
        except RendezvousConnectionError:
            self._torchs = None
            return 0

    def shutdown(self) -> bool:
        """Ends the run for all nodes, and torch's heartbeats."""
        torchs, self._torchs = self._torchs, None
        return torchs is None or self._server_gone() or bool(torchs.shutdown())


class DynamicRendezvous(Rendezvous):
    """For `--nnodes MIN:MAX` and c10d: machines may come and go.

    The node that serves decides who takes part in a round, as soon as all nodes that are here have
    asked for it; before the first it waits for more, as torch's does (`last_call_timeout`). Torch's
    own takes up to 45 s for a restart: it waits for a lost node's heartbeats and for more to come.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._enough_since = math.inf

    @property
    def elastic(self) -> bool:
        """Whether the run may go on with other machines."""
        return bool(self._parameters.min_nodes < self._parameters.max_nodes)

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits until the next round is decided, and this node takes part in it.

        Raises:
            MissingRankError: too few nodes have come within the join timeout, or the node that
                serves has left.
        """
        least = self._parameters.min_nodes
        deadline = time.monotonic() + _join_timeout(self._parameters)
        announce = peers.announcer(self._say)
        while True:
            present = self._present()
            if self._server_gone():
                raise self._absence(peers.departure(self._peers.all()[0]))
            if len(present) < least and time.monotonic() > deadline:
                found = "too few nodes have come within the join timeout"
                raise self._absence(f"{found}; here: {peers.here(present)}")
            own, decided = self._peers.own, self._peers.node(0).decided
            number = decided["round"]
            if own.number in decided["nodes"] and number > own.started and number >= own.round:
                break
            number = self._asked(present)
            if number > own.round:
                self._peers.update(round=number)
            if own.number == 0:
                self._decide(number)
            wanted = peers.nnodes(self._peers.own.nodes)
            announce(f"waiting for {wanted} nodes; here: {peers.here(present)}")
            time.sleep(_LOOK_S)
        self.attempt = number - 1
        rank = decided["nodes"].index(own.number)
        self._peers.update(rank=rank, started=number)
        store = PrefixStore(f"{self.get_run_id()}/{self.attempt}", self._store)
        return self._info(store, rank, len(decided["nodes"]))

    def ask(self) -> None:
        """Asks for the next round: the others then know why their ranks lose those of this node."""
        self._peers.update(round=self._peers.own.started + 1)

    def change(self) -> str:
        """The machines that were lost, in words, where enough are left; never waits."""
        lost = [node for node in self.lost_nodes() if node.state == LOST]
        enough = len(self._present()) >= self._parameters.min_nodes
        if not (lost and enough and self.elastic) or self._server_gone():
            return ""
        return "; ".join(map(peers.departure, lost))

    def num_nodes_waiting(self) -> int:
        """How many nodes wait for a new round, or make one necessary."""
        own = self._peers.own
        asking = [node for node in self._present() if node.round > own.round]
        joiners = all(node.started < own.started for node in asking)
        if asking and not (joiners and self.joiners_wait()):
            return len(asking)
        return int(bool(self.change()))

    def _present(self) -> list[Node]:
        return [node for node in self._peers.all() if node.state == HERE]

    def _asked(self, present: Sequence[Node]) -> int:
        """The round that this node asks for, counted from 1; where all have places, none."""
        own, running = self._peers.own, max(node.started for node in present)
        asked = max(max(node.round for node in present), own.started + 1)
        inside = sum(node.started == running for node in present)
        if own.started < running == asked:
            return own.round if inside >= self._parameters.max_nodes else running + 1
        return asked

    def _decide(self, number: int) -> None:
        """Who takes part in a round, in the order of their ranks: that of hosts, as torch's."""
        own, present, now = self._peers.own, self._present(), time.monotonic()
        least, most = self._parameters.min_nodes, self._parameters.max_nodes
        if len(present) < least:
            self._enough_since = math.inf
            return
        self._enough_since = min(self._enough_since, now)
        last_call = _seconds(self._parameters, "last_call_timeout", _LAST_CALL_S)
        patient = number == 1 and len(present) < most and now < self._enough_since + last_call
        if patient or own.decided["round"] >= number or any(n.round < number for n in present):
            return
        forget_ranks(self._store)
        nodes = sorted(present[:most], key=lambda node: (node.host, node.pid))
        self._peers.update(decided={"round": number, "nodes": [node.number for node in nodes]})

    def _absence(self, found: str) -> errors.MissingRankError:
        return errors.MissingRankError(
            f"--nnodes {peers.nnodes(self._peers.own.nodes)}",
            found,
            "look at the output of the launchers on the other machines, or start them",
        )


def forget_ranks(store: TCPStore) -> None:
    """Takes away what the ranks of an earlier start have left in the store; where it is served.

    Since torch 2.13 ranks put no prefix of the attempt before their keys (`_create_c10d_store` in
    torch/distributed/rendezvous.py), and would connect to addresses of ranks that are gone.
    `list_keys` holds the interpreter's lock while it waits for the answer, which elsewhere the
    forwarder, in the same process, would have to carry.
    """
    for key in store.list_keys():
        store.delete_key(key)
