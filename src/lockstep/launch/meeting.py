"""Where the launchers of a run meet, and the store that their ranks use.

    one machine       a store on loopback; no thread, nobody to wait for
    several           `several.py`: the store of one node on its loopback, behind a gate
    etcd and others   torch's own rendezvous, unchanged

torch elastic's agent takes a `RendezvousHandler`; all forms give it one, and beside it what torch
does not have: which nodes have left, and a place where launchers can tell each other something.

Sources: torch/distributed/elastic/rendezvous/{api,static_tcp_rendezvous,dynamic_rendezvous}.py.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from json import dumps
from typing import TYPE_CHECKING, Any

from lockstep.errors import LockstepError
from lockstep.launch.endpoint import (
    Endpoint,
    cannot_listen,
    check,
    endpoint_of,
    own_node,
    store_timeout,
)
from lockstep.launch.handlers import FixedNodes, Handler, Publish, Say
from lockstep.launch.machine import loopback_name
from lockstep.launch.nodes import LEFT, Board, Node, latest
from lockstep.sockets import LOOPBACK, serve_store

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

_OURS = ("static", "c10d")
_LONGEST_TOLD = 1 << 20


class Meeting:
    """One launcher's part in a run. May be used as a context manager; see `close`."""

    def __init__(
        self,
        handler: Handler,
        board: Board,
        *,
        interface: str | None,
        publish: Publish = lambda changes: None,
        ends: Callable[[str], None] = lambda why: None,
        hears: bool = True,
    ) -> None:
        self.handler = handler
        """torch's `RendezvousHandler` for the agent."""
        self.interface = interface
        """Name of the network interface that reaches the other nodes; loopback on one machine;
        None: unknown. For `network.socket_variables`."""
        self.hears = hears
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

    def tell(self, key: str, value: Any) -> bool:
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

    def heard(self, key: str) -> dict[int, Any]:
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

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        found = error.found if isinstance(error, LockstepError) else ""
        self.close("" if kind is None else found or f"its launcher ended with {kind.__name__}")


def open_meeting(
    config: LaunchConfig, say: Say, environ: Mapping[str, str] = os.environ
) -> Meeting:
    """Opens the place where the nodes of a run meet, or comes to it.

    On one machine, and on the node that serves, it returns at once; on other nodes when the serving
    node has taken them in. The waiting for each other happens in `Meeting.handler`. Threads are
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
    from lockstep.launch.several import come

    return come(config, say, environ)


def _alone(config: LaunchConfig, say: Say) -> Meeting:
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
    handler = FixedNodes(
        board, 1, store, store.port, timeout=1.0, say=say, backend=config.rdzv_backend
    )
    return Meeting(handler, board, interface=loopback_name())


def _in_a_file(config: LaunchConfig) -> bool:
    kind = str(config.rdzv_configs.get("store_type", "tcp")).strip().lower()
    return config.rdzv_backend == "c10d" and kind != "tcp" and config.max_nodes > 1


def _by_torch(config: LaunchConfig, say: Say) -> Meeting:
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
    return Meeting(handler, Board(own_node(config)), interface=None, hears=False)
