"""Where the launchers of a run meet, and the store that their ranks use.

    one machine       a store on loopback; no thread, nobody to wait for
    several           one node serves the store on its loopback, behind an auth proxy
    etcd and others   torch's own rendezvous, unchanged

Which node serves is torchrun's rule: node 0 with --node-rank, --master-addr and --master-port; with
c10d the node that --rdzv-endpoint names, or whose --rdzv-conf says `is_host=1`.

Torch elastic's agent takes a `RendezvousHandler`; all forms give it one (`handler`), and beside it
what torch does not have: which nodes have left, and a way for launchers to publish something.

Sources: torch/distributed/elastic/rendezvous/{api,static_tcp_rendezvous,dynamic_rendezvous}.py.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from json import dumps
from typing import TYPE_CHECKING, Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from lockstep.distributed.network import (
    CUT,
    LOOPBACK,
    UNRESOLVED,
    Endpoint,
    cannot_listen,
    interface_of,
    is_here,
    listening_socket,
    resolve,
    serve_store,
    serving_address,
    unreachable,
    wait_until,
)
from lockstep.errors import (
    JoinError,
    LockstepError,
    MasterUnreachableError,
    MissingRankError,
    PortTakenError,
    SettingError,
    TokenDiffersError,
)
from lockstep.launcher import auth
from lockstep.launcher.auth import VARIABLE, Token, find_token
from lockstep.launcher.machine import loopback_name
from lockstep.launcher.peers import (
    HERE,
    LEFT,
    Client,
    Connection,
    Node,
    Peers,
    Server,
    absent,
    announcer,
    departure,
    here,
    introduce,
    latest,
    nnodes,
)
from lockstep.launcher.plan import (
    check_node_rank,
    endpoint_of,
    join_timeout,
    store_timeout,
    variables,
)

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

Say = Callable[[str], None]
Forget = Callable[[str], object]
"""Has the node that serves call `forget_ranks` and then set a key."""

_OURS = ("static", "c10d")
_SERVER = "the node that serves"
_MAX_PUBLISHED = 1 << 20
_RETRY_S, _LOOK_S = 0.25, 0.02
_FIRST_COMER_S = 1.0
"""How long a launcher that is to serve looks for another one that does so already."""
_WRONG_SERVICE_S = 10.0
"""How long something else may hold the port before we give up: it may be about to end."""
_LEAVE_S, _LEAVE_AFTER_FAILURE_S = 10.0, 2.0
"""How long the serving node waits for the others to leave."""
_READY = "lockstep/ready"
_KEPT_KEYS = ("torch.rendezvous", "lockstep/attempts")
_NO_STORE_OF_TORCHS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Torch's dynamic rendezvous then opens no store for the ranks."""


class Rendezvous:
    """One launcher's part in a run. May be used as a context manager; see `close`."""

    def __init__(
        self,
        handler: RendezvousHandler,
        peers: Peers,
        *,
        interface: str | None,
        can_publish: bool = True,
        leave: Callable[[str], None] = lambda why: None,
    ) -> None:
        self.handler = handler
        """For torch's agent."""
        self.interface = interface
        """Name of the network interface that reaches the other nodes; loopback on one machine;
        None: unknown. For `network.socket_variables`."""
        self.can_publish = can_publish
        """Whether launchers see what others publish; they do not by a rendezvous of torch's own."""
        self._peers, self._leave = peers, leave
        self._closed = False

    @property
    def attempt(self) -> int | None:
        """How many times the ranks were started before, counted by all nodes alike; None: unknown.

        For TORCHELASTIC_RESTART_COUNT, by which the ranks of one start find each other: the agents'
        own counts differ once a node has restarted because of another one.
        """
        return getattr(self.handler, "attempt", None)

    def lost_nodes(self) -> list[Node]:
        """The nodes of the current start that have gone before the end; never waits."""
        own = self._peers.own
        return [n for n in latest(self._peers.all()) if n.gone and n.round >= own.round > 0]

    def publish(self, key: str, value: Any) -> bool:
        """Lets all nodes know a value (JSON) under a key, for the current attempt; never waits.

        Returns:
            False when it was not published, because it is longer than 1 MiB.
        """
        if len(dumps(value)) > _MAX_PUBLISHED:
            return False
        self._peers.update(published={key: {"attempt": self.attempt, "value": value}})
        return True

    def published(self, key: str) -> dict[int, Any]:
        """What each node has published under a key in this attempt, by node rank; never waits."""
        found = {}
        for node in latest(self._peers.all()):
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
        if not self._closed:
            self._closed = True
            self._leave(why)

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        found = error.found if isinstance(error, LockstepError) else ""
        self.close("" if kind is None else found or f"its launcher ended with {kind.__name__}")


def open_rendezvous(
    config: LaunchConfig, say: Say, environ: Mapping[str, str] = os.environ
) -> Rendezvous:
    """Serves the store at which the nodes of a run meet, or connects to it.

    On one machine, and on the node that serves, it returns at once; on other nodes when the serving
    node has taken them in. The waiting for each other happens in `Rendezvous.handler`. Threads are
    started on several machines alone, so call it after what must be forked without any.

    Args:
        config: as torch's `config_from_args` makes it; `--standalone` and the defaults that
            torchrun's `run` sets are the caller's.
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
    check_node_rank(config)
    kind = str(config.rdzv_configs.get("store_type", "tcp")).strip().lower()
    in_file = config.rdzv_backend == "c10d" and kind != "tcp" and config.max_nodes > 1
    if config.rdzv_backend not in _OURS or in_file:
        say(
            f"--rdzv-backend {config.rdzv_backend}: torch's own rendezvous; its store asks for no "
            "token and listens on all interfaces of the node of rank 0, and ranks that hang on "
            "several machines are not told"
        )
        handler = get_rendezvous_handler(_parameters(config, config.rdzv_backend, config.run_id))
        return Rendezvous(handler, Peers(_own_node(config)), interface=None, can_publish=False)
    if config.max_nodes == 1:
        return _on_one_machine(config, say)
    return _on_several(config, say, environ)


def _on_one_machine(config: LaunchConfig, say: Say) -> Rendezvous:
    # The port of a c10d endpoint is where other nodes find the store; that of a static one becomes
    # the ranks' MASTER_PORT.
    endpoint = endpoint_of(config) if config.rdzv_backend == "static" else Endpoint(LOOPBACK, 0)
    try:
        store = serve_store(LOOPBACK, endpoint.port, store_timeout(config))
    except OSError as error:
        raise cannot_listen(error, endpoint) from None
    peers = Peers(_own_node(config))
    peers.update(rank=0, run_id=config.run_id or str(uuid.uuid4()))
    handler = StaticHandler(peers, store, store.port, say, size=1, timeout=1.0)
    return Rendezvous(handler, peers, interface=loopback_name())


def _on_several(config: LaunchConfig, say: Say, environ: Mapping[str, str]) -> Rendezvous:
    endpoint, token = endpoint_of(config), find_token(environ)
    serves, sure = _serves(config, endpoint)
    if not serves:
        return _connect(config, endpoint, token, say, join_timeout(config))
    if sure and not any(map(is_here, resolve(endpoint.host))):
        # A forwarder's address, or that of a machine on which another node 0 is.
        with suppress(MasterUnreachableError):
            return _connect(config, endpoint, token, say, _FIRST_COMER_S)
    address = serving_address(endpoint, config.local_addr)
    try:
        listener = listening_socket(address, endpoint.port)
    except OSError as error:
        taken = cannot_listen(error, endpoint)
        if not isinstance(taken, PortTakenError):
            raise taken from None
        # A launcher that has the port already says what is wrong, if anything is.
        try:
            patience = _FIRST_COMER_S if sure else join_timeout(config)
            return _connect(config, endpoint, token, say, patience)
        except (MasterUnreachableError, TokenDiffersError):
            raise taken from None
    return _serve(config, endpoint, token, say, listener)


def _serves(config: LaunchConfig, endpoint: Endpoint) -> tuple[bool, bool]:
    """Whether this node serves, and whether that is what the user said or our guess."""
    if config.rdzv_backend == "static":
        return int(config.rdzv_configs["rank"]) == 0, True
    try:
        said = _parameters(config, "c10d", config.run_id).get_as_bool("is_host")
    except ValueError:
        given = config.rdzv_configs["is_host"]
        raise SettingError(
            f"--rdzv-conf is_host={given}", "neither yes nor no", "write 1 or 0"
        ) from None
    if said is not None:
        return said, True
    here = endpoint.host in ("localhost", socket.gethostname())
    return here or any(map(is_here, resolve(endpoint.host))), False


def _serve(
    config: LaunchConfig, endpoint: Endpoint, token: Token, say: Say, listener: socket.socket
) -> Rendezvous:
    address = str(listener.getsockname()[0])
    store = serve_store(LOOPBACK, 0, store_timeout(config))
    inside = _client_store(store.port, store_timeout(config), endpoint)
    peers = Peers(_own_node(config))

    def forget(key: str) -> None:
        forget_ranks(inside)
        inside.set(key, "")

    with ExitStack() as stack:
        thread = auth.NetworkThread()
        stack.callback(thread.close)
        server = Server(peers, say, forget)
        peers.send = lambda changes: thread.soon(lambda: server.send(changes))
        proxy = auth.AuthProxy(token, store.port, server.attend, say)
        thread.wait(proxy.listen(listener))
        stack.callback(lambda: thread.wait(proxy.close()))
        stack.callback(lambda: thread.wait(server.close()))
        if token.open:
            where = Endpoint(address, endpoint.port)
            say(f"{VARIABLE}=none: whoever reaches {where} may join this run")

        def leave(why: str) -> None:
            if why:
                peers.update(state=LEFT, why=why)
            patience = _LEAVE_AFTER_FAILURE_S if why else _LEAVE_S
            deadline = time.monotonic() + patience
            wait_until(lambda: all(n.state != HERE for n in peers.all()[1:]), deadline)
            if not why:
                peers.update(state=LEFT)

        return _rendezvous(config, peers, store, store.port, address, say, forget, leave, stack)


def _connect(
    config: LaunchConfig, endpoint: Endpoint, token: Token, say: Say, patience: float
) -> Rendezvous:
    with ExitStack() as stack:
        thread = auth.NetworkThread()
        stack.callback(thread.close)
        address, streams = _authenticate(thread, endpoint, token, say, patience)
        connection = Connection(*streams)
        stack.callback(lambda: thread.wait(connection.close()))
        try:
            peers = thread.wait(introduce(connection, _own_node(config)))
        except (OSError, EOFError, ValueError):
            raise unreachable(_SERVER, endpoint, CUT, address=address) from None
        forwarder = auth.Forwarder(address, endpoint.port, token)
        port = thread.wait(forwarder.listen())
        stack.callback(lambda: thread.wait(forwarder.close()))
        client = Client(connection, peers, forwarder.cut)
        peers.send = lambda changes: thread.soon(lambda: client.send(changes))
        thread.wait(client.begin())
        store = _client_store(port, store_timeout(config), endpoint)
        own_address = str(streams[1].get_extra_info("sockname")[0])

        def leave(why: str) -> None:
            peers.update(state=LEFT, why=why)

        def forget(key: str) -> None:
            thread.soon(lambda: client.forget(key))

        return _rendezvous(config, peers, store, port, own_address, say, forget, leave, stack)


def _rendezvous(
    config: LaunchConfig,
    peers: Peers,
    store: TCPStore,
    port: int,
    address: str,
    say: Say,
    forget: Forget,
    leave: Callable[[str], None],
    stack: ExitStack,
) -> Rendezvous:
    """The rendezvous of one of several nodes; it takes over what is on the stack."""
    handler: StaticHandler | DynamicHandler
    if config.rdzv_backend == "static":
        timeout = join_timeout(config)
        handler = StaticHandler(peers, store, port, say, size=config.max_nodes, timeout=timeout)
    else:
        handler = DynamicHandler(peers, store, port, say, config, forget)
    asked = resolve(config.local_addr) if config.local_addr else []
    shown = next(filter(is_here, asked), address)
    opened = stack.pop_all()

    def leave_and_close(why: str) -> None:
        with opened:
            if isinstance(handler, DynamicHandler):
                handler.let_go()
            leave(why)

    return Rendezvous(handler, peers, interface=interface_of(shown), leave=leave_and_close)


def _client_store(port: int, timeout: timedelta, endpoint: Endpoint) -> TCPStore:
    try:
        return TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=timeout)
    except RuntimeError:
        raise unreachable(_SERVER, endpoint, CUT) from None


def _authenticate(
    thread: auth.NetworkThread, endpoint: Endpoint, token: Token, say: Say, timeout: float
) -> tuple[str, auth.Streams]:
    """Tries to get through the auth proxy at every address of the endpoint, until the timeout."""
    began = time.monotonic()
    announce = announcer(say)
    while True:
        address, reason = "", UNRESOLVED
        for address in endpoint.addresses():
            try:
                connecting = auth.authenticate(address, endpoint.port, token, auth.PEER)
                return address, thread.wait(connecting)
            except auth.ConnectionFailed as error:
                reason = str(error)
        waited = time.monotonic() - began
        if reason == auth.TOKEN_DIFFERS:
            raise TokenDiffersError(
                f"the run at {endpoint}, with the token of {token.source}",
                "the token differs: the node that serves has another one",
                f"set {VARIABLE} to the same text on all machines (`openssl rand -hex 16` makes "
                "one), or copy the token file of one machine to the others",
            )
        wrong_service = reason == auth.NOT_A_LAUNCHER
        if waited > timeout or (wrong_service and waited > _WRONG_SERVICE_S):
            tried = 0.0 if wrong_service else timeout
            raise unreachable(_SERVER, endpoint, reason, address=address, tried=tried)
        announce(f"{_SERVER} at {endpoint}: {reason}")
        time.sleep(_RETRY_S)


def _own_node(config: LaunchConfig) -> Node:
    """This launcher, as it introduces itself."""
    static = config.rdzv_backend == "static"
    return Node(
        number=0,
        rank=int(config.rdzv_configs.get("rank", 0)) if static else None,
        host=socket.gethostname(),
        pid=os.getpid(),
        run_id=config.run_id or "none",
        nodes=f"{config.max_nodes if static else config.min_nodes}:{config.max_nodes}",
    )


def _parameters(config: LaunchConfig, backend: str, run_id: str) -> RendezvousParameters:
    return RendezvousParameters(
        backend=backend,
        endpoint=config.rdzv_endpoint,
        run_id=run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )


class _Handler(RendezvousHandler):
    """What the handlers over our own store have in common: ranks use that store, on loopback."""

    def __init__(self, peers: Peers, store: TCPStore, port: int, say: Say) -> None:
        self._peers, self._store, self._port, self._say = peers, store, port, say
        self.attempt: int | None = None

    @property
    def use_agent_store(self) -> bool:
        """True."""
        return True

    def get_run_id(self) -> str:
        """`--rdzv-id`."""
        return self._peers.own.run_id

    def _info(self, store: Any, rank: int, size: int) -> RendezvousInfo:
        return RendezvousInfo(store, rank, size, RendezvousStoreInfo(LOOPBACK, self._port))

    def _server_gone(self) -> bool:
        return self._peers.all()[0].state != HERE


class StaticHandler(_Handler):
    """For a fixed number of numbered nodes; one is the simplest case.

    Unlike torch's own for static rendezvous it starts all nodes anew together: a node whose ranks
    have failed asks for the next round, which the others learn from `num_nodes_waiting`.

    Args:
        peers: the nodes.
        store: for the ranks.
        port: of the store, on loopback.
        say: called with what is waited for.
        size: number of nodes.
        timeout: how long nodes wait for each other, in seconds.
    """

    def __init__(
        self, peers: Peers, store: TCPStore, port: int, say: Say, *, size: int, timeout: float
    ) -> None:
        super().__init__(peers, store, port, say)
        self._size, self._timeout = size, timeout

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
        return self._info(store, rank, self._size)

    def _wait(self, wanted: int) -> None:
        deadline = time.monotonic() + self._timeout
        announce = announcer(self._say)
        while missing := absent(self._peers.all(), self._size, wanted):
            gone = self._gone_for_good(wanted)
            if gone is not None or time.monotonic() > deadline:
                raise MissingRankError(
                    f"--nnodes {self._size}",
                    departure(gone) if gone else f"{missing} (waited {self._timeout:g} s)",
                    "look at the output of the launcher there, or start it",
                )
            announce(missing)
            time.sleep(_LOOK_S)

    def _gone_for_good(self, wanted: int) -> Node | None:
        """The node that serves, or after the first start one that left by itself.

        Before the first start somebody may be correcting a command line, and one that was lost may
        be started again by a scheduler.
        """
        nodes = self._peers.all()
        if self._server_gone():
            return nodes[0]
        return next((n for n in latest(nodes) if n.state == LEFT and wanted > 1), None)

    def num_nodes_waiting(self) -> int:
        """How many nodes wait for this one to start its ranks anew."""
        own = self._peers.own
        return sum(n.state == HERE and n.round > own.round for n in self._peers.all())

    def get_backend(self) -> str:
        """`static`."""
        return "static"

    def is_closed(self) -> bool:
        """False: nobody closes it while this node takes part."""
        return False

    def set_closed(self) -> None:
        """Does nothing, as torch's own for static rendezvous."""

    def shutdown(self) -> bool:
        """Does nothing: `Rendezvous.close` tells the others."""
        return True


class DynamicHandler(_Handler):
    """Torch's own dynamic rendezvous over our store, for `--nnodes MIN:MAX` and c10d.

    Membership, ranks and new rounds are torch's. Two things are ours: ranks use the store that is
    there already (torch would open a second one, on all interfaces), and the starts are counted by
    all nodes alike.
    """

    def __init__(
        self,
        peers: Peers,
        store: TCPStore,
        port: int,
        say: Say,
        config: LaunchConfig,
        forget: Forget,
    ) -> None:
        super().__init__(peers, store, port, say)
        self._forget = forget
        backend = C10dRendezvousBackend(store, self.get_run_id())
        parameters = _parameters(config, "c10d", self.get_run_id())
        self._torchs: RendezvousHandler | None = create_handler(store, backend, parameters)

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits until torch's rendezvous is complete.

        Raises:
            MissingRankError: too few nodes have come within the join timeout, or the node that
                serves has left.
            JoinError: the run has been ended by another node.
        """
        torchs = self._torchs
        if torchs is None or self._server_gone():
            raise self._absence("the store of the run is closed")
        with self._errors_named(), self._waiting_announced(), variables(_NO_STORE_OF_TORCHS):
            info = torchs.next_rendezvous()
            # Each round has a store of its own, so that nothing of an earlier one is found here.
            if info.rank == 0:
                attempt = self._store.add("lockstep/attempts", 1) - 1
                self._forget(f"lockstep/forgotten/{attempt}")
                self._store.get(f"lockstep/forgotten/{attempt}")
                info.store.set("lockstep/attempt", str(attempt))
            self.attempt = int(info.store.get("lockstep/attempt"))
        self._peers.update(rank=info.rank, round=self.attempt + 1, started=self.attempt + 1)
        return self._info(info.store, info.rank, info.world_size)

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except RendezvousTimeoutError:
            raise self._absence("too few nodes have come within the join timeout") from None
        except RendezvousClosedError:
            raise JoinError(
                f"run {self.get_run_id()!r} (--rdzv-id)",
                "another node has ended the run",
                "look at the first failure there; give a new run another --rdzv-id",
            ) from None
        except (RendezvousConnectionError, RuntimeError) as error:
            if not self._server_gone() and not isinstance(error, RendezvousConnectionError):
                raise
            raise self._absence("the store of the run is out of reach") from None

    def _absence(self, reason: str) -> MissingRankError:
        nodes = self._peers.all()
        gone = self._server_gone()
        return MissingRankError(
            f"--nnodes {nnodes(self._peers.own.nodes)}",
            departure(nodes[0]) if gone else f"{reason}; here: {here(nodes)}",
            "look at the output of the launchers on the other machines, or start them",
        )

    @contextmanager
    def _waiting_announced(self) -> Iterator[None]:
        """Torch's waiting cannot be looked into, so another thread says who is here."""
        announce = announcer(self._say)
        wanted = nnodes(self._peers.own.nodes)
        over = threading.Event()

        def run() -> None:
            while not over.wait(_LOOK_S):
                announce(f"waiting for {wanted} nodes; here: {here(self._peers.all())}")

        thread = threading.Thread(target=run, name="lockstep-waiting", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def num_nodes_waiting(self) -> int:
        """As torch's; 0 when the node that serves has gone (see `Rendezvous.lost_nodes`)."""
        if self._server_gone():
            self.let_go()
        if self._torchs is None:
            return 0
        try:
            return int(self._torchs.num_nodes_waiting())
        except RendezvousConnectionError:
            self.let_go()
            return 0

    def get_backend(self) -> str:
        """`c10d`."""
        return "c10d"

    def is_closed(self) -> bool:
        """Whether a node has ended the run."""
        return self._torchs is None or self._server_gone() or bool(self._torchs.is_closed())

    def set_closed(self) -> None:
        """Ends the run for all nodes."""
        if self._torchs is not None and not self._server_gone():
            self._torchs.set_closed()  # type: ignore[no-untyped-call]

    def shutdown(self) -> bool:
        """Ends the run for all nodes, and torch's heartbeats."""
        torchs = self._torchs
        done = torchs is None or self._server_gone() or bool(torchs.shutdown())
        self.let_go()
        return done

    def let_go(self) -> None:
        """Ends torch's heartbeats without a word to the others; without the handler they end."""
        self._torchs = None


def forget_ranks(store: TCPStore) -> None:
    """Takes away what the ranks of an earlier start have left in the store; where it is served.

    Since torch 2.13 ranks put no prefix of the attempt before their keys (`_create_c10d_store` in
    torch/distributed/rendezvous.py), and would connect to addresses of ranks that are gone.
    `list_keys` holds the interpreter's lock while it waits for the answer, which elsewhere the
    forwarder, in the same process, would have to carry.
    """
    for key in store.list_keys():
        if not key.startswith(_KEPT_KEYS):
            store.delete_key(key)
