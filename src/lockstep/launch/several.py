"""A meeting on several machines: one node serves the store behind its gate, the others come to it.

Which node serves is torchrun's rule: node 0 with --node-rank, --master-addr and --master-port; with
c10d the node that --rdzv-endpoint names, or whose --rdzv-conf says `is_host=1`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from lockstep.errors import (
    MasterUnreachableError,
    PortTakenError,
    SettingError,
    TokenDiffersError,
)
from lockstep.launch import gate, network
from lockstep.launch.endpoint import (
    Endpoint,
    cannot_listen,
    endpoint_of,
    join_timeout,
    own_node,
    store_timeout,
)
from lockstep.launch.handlers import ChangingNodes, FixedNodes, Forget, Say, forget_ranks
from lockstep.launch.links import Hub, Link, Visitor, introduce
from lockstep.launch.meeting import Meeting
from lockstep.launch.nodes import HERE, Board, announcer, objection_as_error
from lockstep.launch.run_token import VARIABLE, Token, find_token
from lockstep.sockets import LOOPBACK, listening_socket, resolve, serve_store

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.launcher.api import LaunchConfig

_UNRESOLVED = "the host name does not resolve"
_ADVICE = {
    _UNRESOLVED: "check the spelling, or give the address of the node that serves",
    gate.REFUSED: "look at the output of the node that serves: it has not started, has ended, or "
    "uses another port",
    gate.NO_ANSWER: "check the address, and that no firewall stands between the machines",
    gate.CUT: "look at the output of the node that serves: it has not started, or has ended",
    gate.NOT_A_GATE: "start all nodes with `lockstep run`, at a port that no other program has",
}
_RETRY_S, _LOOK_S = 0.25, 0.02
_FIRST_COMER_S = 1.0
"""How long a launcher that is to serve looks for another one that does so already."""
_WRONG_SERVICE_S = 10.0
"""How long something else may hold the port before we give up: it may be about to end."""
_PATIENCE_S, _PATIENCE_AFTER_FAILURE_S = 10.0, 2.0
"""How long the serving node waits for the others to leave."""


def come(config: LaunchConfig, say: Say, environ: Mapping[str, str]) -> Meeting:
    """Serves the meeting of a run on several machines, or goes to it; see `meeting.open_meeting`.

    Raises:
        SettingError: contradicting or malformed flags, or no token can be had.
        JoinError: of the kinds of `meeting.open_meeting`.
    """
    endpoint, token = endpoint_of(config), find_token(environ)
    serves, sure = _serves(config, endpoint)
    if not serves:
        return _visit(config, endpoint, token, say, join_timeout(config))
    if sure and not any(map(network.is_here, resolve(endpoint.host))):
        # A forwarder's address, or that of a machine on which another node 0 is.
        with suppress(MasterUnreachableError):
            return _visit(config, endpoint, token, say, _FIRST_COMER_S)
    address = network.serving_address(endpoint.host, config.local_addr)
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
    return here or any(map(network.is_here, resolve(endpoint.host))), False


def _visit_first_comer(
    config: LaunchConfig,
    endpoint: Endpoint,
    token: Token,
    say: Say,
    patience: float,
    taken: PortTakenError,
) -> Meeting:
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
) -> Meeting:
    address = str(listener.getsockname()[0])
    store = serve_store(LOOPBACK, 0, store_timeout(config))
    board = Board(own_node(config))
    inside = _client(store.port, store_timeout(config), endpoint)

    def forget(key: str) -> None:
        forget_ranks(inside)
        inside.set(key, "")

    hub = Hub(board, say, forget)
    thread = gate.Thread()
    door = gate.Gate(token, store.port, hub.attend, say)

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
            where = Endpoint(address, endpoint.port).text
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
) -> Meeting:
    thread = gate.Thread()
    forwarder = None
    try:
        address, streams = _knock_until(thread, endpoint, token, say, patience)
        link = Link(*streams)
        try:
            board, objection = thread.wait(introduce(link, own_node(config)))
        except (OSError, EOFError, ValueError):
            raise _unreachable(endpoint, address, gate.CUT, 0) from None
        if board is None:
            thread.wait(link.close())
            raise objection_as_error(objection)
        forwarder = gate.Forwarder(address, endpoint.port, token)
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
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        return TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=timeout)
    except RuntimeError:
        raise _unreachable(endpoint, endpoint.host, gate.CUT, 0) from None


def _knock_until(
    thread: gate.Thread, endpoint: Endpoint, token: Token, say: Say, timeout: float
) -> tuple[str, gate.Streams]:
    """Tries to pass the gate at every address of the endpoint, until the timeout."""
    began = time.monotonic()
    announce = announcer(say)
    while True:
        address, hindrance = "", _UNRESOLVED
        for address in resolve(endpoint.host):
            try:
                return address, thread.wait(gate.knock(address, endpoint.port, token, gate.LINK))
            except gate.Hindrance as error:
                hindrance = str(error)
        waited = time.monotonic() - began
        if hindrance == gate.TOKEN_DIFFERS:
            raise TokenDiffersError(
                f"the run at {endpoint.text}, with the token of {token.source}",
                "the token differs: the node that serves has another one",
                f"set {VARIABLE} to the same text on all machines (`openssl rand -hex 16` makes "
                "one), or copy the token file of one machine to the others",
            )
        if waited > timeout or (hindrance == gate.NOT_A_GATE and waited > _WRONG_SERVICE_S):
            raise _unreachable(endpoint, address, hindrance, timeout)
        announce(f"the node that serves at {endpoint.text}: {hindrance}")
        time.sleep(_RETRY_S)


def _unreachable(
    endpoint: Endpoint, address: str, hindrance: str, timeout: float
) -> MasterUnreachableError:
    where = f" ({address})" if address not in ("", endpoint.host) else ""
    tried = f" (tried for {timeout:g} s)" if timeout and hindrance != gate.NOT_A_GATE else ""
    return MasterUnreachableError(
        f"the node that serves at {endpoint.text}{where}",
        f"{hindrance}{tried}",
        _ADVICE[hindrance],
    )


def _meeting(
    config: LaunchConfig,
    board: Board,
    store_and_port: tuple[TCPStore, int],
    address: str,
    say: Say,
    thread: gate.Thread,
    side: Hub | Visitor,
    ends: Callable[[str], None],
    forget: Forget,
) -> Meeting:
    def publish(changes: Mapping[str, object]) -> None:
        thread.soon(lambda: side.publish(changes))

    store, port = store_and_port
    handler: FixedNodes | ChangingNodes
    if config.rdzv_backend == "static":
        handler = FixedNodes(
            board,
            config.max_nodes,
            store,
            port,
            timeout=join_timeout(config),
            say=say,
            publish=publish,
        )
    else:
        handler = ChangingNodes(board, config, store, port, say=say, publish=publish, forget=forget)
    asked = resolve(config.local_addr) if config.local_addr else []
    shown = next(filter(network.is_here, asked), address)

    def let_go_and_end(why: str) -> None:
        if isinstance(handler, ChangingNodes):
            handler.let_go()
        ends(why)

    interface = network.interface_of(shown)
    return Meeting(handler, board, interface=interface, publish=publish, ends=let_go_and_end)
