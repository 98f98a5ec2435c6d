"""Where the launchers of a run meet, and the store that their ranks use.

    one machine       a store on loopback; no thread, nobody to wait for
    several           `several.py`: the store of one node on its loopback, behind a gate
    etcd and others   torch's own rendezvous, unchanged

torch elastic's agent takes a `RendezvousHandler`; all forms give it one, and beside it what torch
does not have: which nodes have left, and a place where launchers can tell each other something.

Sources: torch/distributed/elastic/rendezvous/{api,static_tcp_rendezvous,dynamic_rendezvous}.py.

A meeting on several machines: one node serves the store behind its gate, the others come to it.

Which node serves is torchrun's rule: node 0 with --node-rank, --master-addr and --master-port; with
c10d the node that --rdzv-endpoint names, or whose --rdzv-conf says `is_host=1`.

What the flags of torchrun say about the meeting place, and why nothing can listen there.

Which address and interface this machine shows to the other machines of a run.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from json import dumps
from typing import TYPE_CHECKING, Any

from lockstep.distributed.network import (
    CUT,
    LOOPBACK,
    UNRESOLVED,
    Endpoint,
    cannot_listen,
    interface_of,
    is_here,
    listening_socket,
    means_loopback,
    resolve,
    serve_store,
    serving_address,
    unreachable,
)
from lockstep.errors import (
    LockstepError,
    MasterUnreachableError,
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
    Board,
    Hub,
    Link,
    Node,
    Visitor,
    announcer,
    introduce,
    latest,
    objection_as_error,
)
from lockstep.launcher.rendezvous_handlers import (
    DynamicHandler,
    Forget,
    Handler,
    Publish,
    Say,
    StaticHandler,
    forget_ranks,
)

if TYPE_CHECKING:
    from torch.distributed import TCPStore
    from torch.distributed.launcher.api import LaunchConfig


_OURS = ("static", "c10d")
_LONGEST_TOLD = 1 << 20


class Rendezvous:
    """One launcher's part in a run. May be used as a context manager; see `close`."""

    def __init__(
        self,
        handler: Handler,
        board: Board,
        *,
        interface: str | None,
        publish: Publish = lambda changes: None,
        ends: Callable[[str], None] = lambda why: None,
        can_publish: bool = True,
    ) -> None:
        self.handler = handler
        """torch's `RendezvousHandler` for the agent."""
        self.interface = interface
        """Name of the network interface that reaches the other nodes; loopback on one machine;
        None: unknown. For `network.socket_variables`."""
        self.can_publish = can_publish
        """Whether launchers hear what others tell; they do not by a rendezvous of torch's own."""
        self._board, self._publish, self._ends = board, publish, ends
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
        own = self._board.own
        return [n for n in latest(self._board.all()) if n.gone and n.round >= own.round > 0]

    def publish(self, key: str, value: Any) -> bool:
        """Lets all nodes know a value (JSON) under a key, for the current attempt; never waits.

        Returns:
            False when it was not told, because it is longer than 1 MiB.
        """
        if len(dumps(value)) > _LONGEST_TOLD:
            return False
        changes = {"told": {key: {"attempt": self.attempt, "value": value}}}
        self._board.write(self._board.own_number, changes)
        self._publish(changes)
        return True

    def published(self, key: str) -> dict[int, Any]:
        """What each node has told under a key in the current attempt, by node rank; never waits."""
        found = {}
        for node in latest(self._board.all()):
            told = node.told.get(key)
            if node.rank is not None and told is not None and told["attempt"] == self.attempt:
                found[node.rank] = told["value"]
        return found

    def nodes(self) -> list[Node]:
        """Every node that has come so far, gone or not."""
        return self._board.all()

    def close(self, why: str = "") -> None:
        """Leaves the meeting; the node that serves waits up to 10 s for the others to leave.

        Args:
            why: why this node leaves before the end of the run, told to the others; empty: the run
                has ended.
        """
        if self._closed:
            return
        self._closed = True
        self._board.write(self._board.own_number, {"state": LEFT, "why": why})
        self._ends(why)

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        found = error.found if isinstance(error, LockstepError) else ""
        self.close("" if kind is None else found or f"its launcher ended with {kind.__name__}")


def open_rendezvous(
    config: LaunchConfig, say: Say, environ: Mapping[str, str] = os.environ
) -> Rendezvous:
    """Opens the place where the nodes of a run meet, or comes to it.

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
    check(config)
    if config.rdzv_backend not in _OURS or _in_a_file(config):
        return _by_torch(config, say)
    if config.max_nodes == 1:
        return _alone(config, say)

    return come(config, say, environ)


def _alone(config: LaunchConfig, say: Say) -> Rendezvous:
    # The port of a c10d endpoint is where other nodes find the store; that of a static one becomes
    # the ranks' MASTER_PORT.
    endpoint = endpoint_of(config) if config.rdzv_backend == "static" else Endpoint(LOOPBACK, 0)
    try:
        store = serve_store(LOOPBACK, endpoint.port, store_timeout(config))
    except OSError as error:
        raise cannot_listen(error, endpoint) from None
    node = own_node(config)
    board = Board(node)
    board.write(0, {"rank": 0, "run_id": config.run_id or str(uuid.uuid4())})
    handler = StaticHandler(
        board, 1, store, store.port, timeout=1.0, say=say, backend=config.rdzv_backend
    )
    return Rendezvous(handler, board, interface=loopback_name())


def _in_a_file(config: LaunchConfig) -> bool:
    kind = str(config.rdzv_configs.get("store_type", "tcp")).strip().lower()
    return config.rdzv_backend == "c10d" and kind != "tcp" and config.max_nodes > 1


def _by_torch(config: LaunchConfig, say: Say) -> Rendezvous:
    """The meeting by a rendezvous that is not ours, with torch's meaning."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    handler = get_rendezvous_handler(
        RendezvousParameters(
            backend=config.rdzv_backend,
            endpoint=config.rdzv_endpoint,
            run_id=config.run_id,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            local_addr=config.local_addr,
            **config.rdzv_configs,
        )
    )
    say(
        f"--rdzv-backend {config.rdzv_backend}: torch's own rendezvous; its store asks for no "
        "token and listens on all interfaces of the node of rank 0, and ranks that hang on several "
        "machines are not told"
    )
    return Rendezvous(handler, Board(own_node(config)), interface=None, can_publish=False)


_SERVER = "the node that serves"
_RETRY_S, _LOOK_S = 0.25, 0.02
_FIRST_COMER_S = 1.0
"""How long a launcher that is to serve looks for another one that does so already."""
_WRONG_SERVICE_S = 10.0
"""How long something else may hold the port before we give up: it may be about to end."""
_PATIENCE_S, _PATIENCE_AFTER_FAILURE_S = 10.0, 2.0
"""How long the serving node waits for the others to leave."""


def come(config: LaunchConfig, say: Say, environ: Mapping[str, str]) -> Rendezvous:
    """Serves the store of a run on several machines, or goes to it; see `open_rendezvous`.

    Raises:
        SettingError: contradicting or malformed flags, or no token can be had.
        JoinError: of the kinds of `open_rendezvous`.
    """
    endpoint, token = endpoint_of(config), find_token(environ)
    serves, sure = _serves(config, endpoint)
    if not serves:
        return _visit(config, endpoint, token, say, join_timeout(config))
    if sure and not any(map(is_here, resolve(endpoint.host))):
        # A forwarder's address, or that of a machine on which another node 0 is.
        with suppress(MasterUnreachableError):
            return _visit(config, endpoint, token, say, _FIRST_COMER_S)
    address = serving_address(endpoint, config.local_addr)
    try:
        listener = listening_socket(address, endpoint.port)
    except OSError as error:
        taken = cannot_listen(error, endpoint)
        if not isinstance(taken, PortTakenError):
            raise taken from None
        patience = _FIRST_COMER_S if sure else join_timeout(config)
        return _visit_first_comer(config, endpoint, token, say, patience, taken)
    return _serve(config, endpoint, token, say, listener)


def _serves(config: LaunchConfig, endpoint: Endpoint) -> tuple[bool, bool]:
    """Whether this node serves, and whether that is what the user said or our guess."""
    if config.rdzv_backend == "static":
        return int(config.rdzv_configs["rank"]) == 0, True
    said = config.rdzv_configs.get("is_host")
    if said is not None:
        text = str(said).lower()
        if text not in {"1", "true", "t", "yes", "y", "0", "false", "f", "no", "n"}:
            raise SettingError(f"--rdzv-conf is_host={said}", "neither yes nor no", "write 1 or 0")
        return text in {"1", "true", "t", "yes", "y"}, True
    here = endpoint.host in ("localhost", socket.gethostname())
    return here or any(map(is_here, resolve(endpoint.host))), False


def _visit_first_comer(
    config: LaunchConfig,
    endpoint: Endpoint,
    token: Token,
    say: Say,
    patience: float,
    taken: PortTakenError,
) -> Rendezvous:
    """Goes to the launcher that has the port already: it says what is wrong, if anything is.

    Raises:
        PortTakenError: it is not a launcher, or not one of this run.
        DuplicateRankError: it is this run's, and this node came twice.
    """
    try:
        return _visit(config, endpoint, token, say, patience)
    except (MasterUnreachableError, TokenDiffersError):
        raise taken from None


def _serve(
    config: LaunchConfig, endpoint: Endpoint, token: Token, say: Say, listener: socket.socket
) -> Rendezvous:
    address = str(listener.getsockname()[0])
    store = serve_store(LOOPBACK, 0, store_timeout(config))
    board = Board(own_node(config))
    inside = _client(store.port, store_timeout(config), endpoint)

    def forget(key: str) -> None:
        forget_ranks(inside)
        inside.set(key, "")

    hub = Hub(board, say, forget)
    thread = auth.Thread()
    door = auth.Gate(token, store.port, hub.attend, say)

    def ends(why: str) -> None:
        try:
            if why:
                thread.soon(lambda: hub.publish({"state": board.own.state, "why": why}))
            _wait_for_goodbyes(board, _PATIENCE_AFTER_FAILURE_S if why else _PATIENCE_S)
            thread.wait(hub.close(why))
        finally:
            thread.wait(door.close())
            thread.close()

    try:
        thread.wait(door.listen(listener))
        if token.open:
            where = Endpoint(address, endpoint.port)
            say(f"{VARIABLE}=none: whoever reaches {where} may join this run")
        return _meeting(config, board, (store, store.port), address, say, thread, hub, ends, forget)
    except BaseException:
        thread.wait(door.close())
        thread.close()
        raise


def _wait_for_goodbyes(board: Board, patience: float) -> None:
    deadline = time.monotonic() + patience
    while any(n.state == HERE for n in board.all()) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def _visit(
    config: LaunchConfig, endpoint: Endpoint, token: Token, say: Say, patience: float
) -> Rendezvous:
    thread = auth.Thread()
    forwarder = None
    try:
        address, streams = _knock_until(thread, endpoint, token, say, patience)
        link = Link(*streams)
        try:
            board, objection = thread.wait(introduce(link, own_node(config)))
        except (OSError, EOFError, ValueError):
            raise unreachable(_SERVER, endpoint, CUT, address=address) from None
        if board is None:
            thread.wait(link.close())
            raise objection_as_error(objection)
        forwarder = auth.Forwarder(address, endpoint.port, token)
        port = thread.wait(forwarder.listen())
        visitor = Visitor(link, board, forwarder.cut)
        thread.wait(visitor.begin())
        store = _client(port, store_timeout(config), endpoint)
        own = str(streams[1].get_extra_info("sockname")[0])

        def ends(why: str) -> None:
            try:
                thread.wait(visitor.close(why))
            finally:
                thread.wait(forwarder.close())
                thread.close()

        def forget(key: str) -> None:
            thread.soon(lambda: visitor.forget(key))

        return _meeting(config, board, (store, port), own, say, thread, visitor, ends, forget)
    except BaseException:
        if forwarder is not None:
            thread.wait(forwarder.close())
        thread.close()
        raise


def _client(port: int, timeout: timedelta, endpoint: Endpoint) -> TCPStore:
    from torch.distributed import TCPStore

    try:
        return TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=timeout)
    except RuntimeError:
        raise unreachable(_SERVER, endpoint, CUT) from None


def _knock_until(
    thread: auth.Thread, endpoint: Endpoint, token: Token, say: Say, timeout: float
) -> tuple[str, auth.Streams]:
    """Tries to pass the gate at every address of the endpoint, until the timeout."""
    began = time.monotonic()
    announce = announcer(say)
    while True:
        address, hindrance = "", UNRESOLVED
        for address in endpoint.addresses():
            try:
                return address, thread.wait(auth.knock(address, endpoint.port, token, auth.LINK))
            except auth.Hindrance as error:
                hindrance = str(error)
        waited = time.monotonic() - began
        if hindrance == auth.TOKEN_DIFFERS:
            raise TokenDiffersError(
                f"the run at {endpoint}, with the token of {token.source}",
                "the token differs: the node that serves has another one",
                f"set {VARIABLE} to the same text on all machines (`openssl rand -hex 16` makes "
                "one), or copy the token file of one machine to the others",
            )
        if waited > timeout or (hindrance == auth.NOT_A_GATE and waited > _WRONG_SERVICE_S):
            tried = 0.0 if hindrance == auth.NOT_A_GATE else timeout
            raise unreachable(_SERVER, endpoint, hindrance, address=address, tried=tried)
        announce(f"{_SERVER} at {endpoint}: {hindrance}")
        time.sleep(_RETRY_S)


def _meeting(
    config: LaunchConfig,
    board: Board,
    store_and_port: tuple[TCPStore, int],
    address: str,
    say: Say,
    thread: auth.Thread,
    side: Hub | Visitor,
    ends: Callable[[str], None],
    forget: Forget,
) -> Rendezvous:
    def publish(changes: Mapping[str, object]) -> None:
        thread.soon(lambda: side.publish(changes))

    store, port = store_and_port
    handler: StaticHandler | DynamicHandler
    if config.rdzv_backend == "static":
        handler = StaticHandler(
            board,
            config.max_nodes,
            store,
            port,
            timeout=join_timeout(config),
            say=say,
            publish=publish,
        )
    else:
        handler = DynamicHandler(
            board, config, store, port, say=say, publish=publish, forget=forget
        )
    asked = resolve(config.local_addr) if config.local_addr else []
    shown = next(filter(is_here, asked), address)

    def let_go_and_end(why: str) -> None:
        if isinstance(handler, DynamicHandler):
            handler.let_go()
        ends(why)

    interface = interface_of(shown)
    return Rendezvous(handler, board, interface=interface, publish=publish, ends=let_go_and_end)


# torch's own defaults.
_C10D_PORT = 29400
_STATIC_TIMEOUT_S = _JOIN_TIMEOUT_S = 600.0
_READ_TIMEOUT_S = 60.0


def check(config: LaunchConfig) -> None:
    """Refuses node ranks that the number of nodes does not have.

    Raises:
        SettingError: as said.
    """
    rank = config.rdzv_configs.get("rank", 0)
    if config.rdzv_backend == "static" and not 0 <= int(rank) < config.max_nodes:
        raise SettingError(
            f"--node-rank {rank} with --nnodes {config.max_nodes}",
            f"node ranks count from 0 to {config.max_nodes - 1}",
            "give each machine a --node-rank of its own",
        )


def own_node(config: LaunchConfig) -> Node:
    """This launcher, as it introduces itself."""
    rank = int(config.rdzv_configs.get("rank", 0)) if config.rdzv_backend == "static" else None
    fewest = config.max_nodes if config.rdzv_backend == "static" else config.min_nodes
    return Node(
        number=0,
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        run_id=config.run_id or "none",
        nodes=f"{fewest}:{config.max_nodes}",
    )


def join_timeout(config: LaunchConfig) -> float:
    """Seconds that nodes wait for each other: `timeout` (static), `join_timeout` (c10d).

    Raises:
        SettingError: not a number above 0.
    """
    static = config.rdzv_backend == "static"
    name, default = ("timeout", _STATIC_TIMEOUT_S) if static else ("join_timeout", _JOIN_TIMEOUT_S)
    return _seconds(config, name, default)


def store_timeout(config: LaunchConfig) -> timedelta:
    """How long the store waits for an answer: `timeout` (static) or `read_timeout`."""
    static = config.rdzv_backend == "static"
    name, default = ("timeout", _STATIC_TIMEOUT_S) if static else ("read_timeout", _READ_TIMEOUT_S)
    return timedelta(seconds=_seconds(config, name, default))


def _seconds(config: LaunchConfig, name: str, default: float) -> float:
    given = config.rdzv_configs.get(name, default)
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise SettingError(
            f"--rdzv-conf {name}={given}", "not a number of seconds above 0", "write a number"
        )
    return seconds


def endpoint_of(config: LaunchConfig) -> Endpoint:
    """The host and port that all nodes were given.

    Raises:
        SettingError: they are malformed, or not given.
    """
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    static = config.rdzv_backend == "static"
    flags = "--master-addr and --master-port" if static else "--rdzv-endpoint"
    try:
        host, port = parse_rendezvous_endpoint(config.rdzv_endpoint, -1 if static else 29400)
    except ValueError as error:
        raise SettingError(
            f"{flags}: {config.rdzv_endpoint!r}", str(error), "write HOST:PORT"
        ) from None
    if port < 1 and config.max_nodes > 1:
        raise SettingError(
            f"{flags}: {config.rdzv_endpoint!r}",
            "there is no port at which several machines could meet",
            "give the address of one of the machines and a free port there, the same on all",
        )
    return Endpoint(host, port, one_node=means_loopback(host))
