"""torch elastic's `RendezvousHandler`s over our own store: how the nodes agree to start.

Sources: torch/distributed/elastic/rendezvous/{api,static_tcp_rendezvous,dynamic_rendezvous}.py.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.distributed.network import LOOPBACK
from lockstep.errors import JoinError, MissingRankError
from lockstep.launcher.peers import (
    HERE,
    LEFT,
    Board,
    Node,
    absent,
    announcer,
    departure,
    here,
    latest,
    nnodes,
)

if TYPE_CHECKING:
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousInfo
    from torch.distributed.launcher.api import LaunchConfig


Say = Callable[[str], None]
Publish = Callable[[Mapping[str, Any]], None]
Forget = Callable[[str], None]
"""Has the node that serves call `forget_ranks` and then set a key."""

_LOOK_S = 0.02
_READY = "lockstep/ready"
_KEPT = ("torch.rendezvous", "lockstep/attempts")
_TORCHS_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class Handler(Protocol):
    """What torch elastic's agent calls; the methods of torch's `RendezvousHandler`."""

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks use the launchers' store."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits for the other nodes."""

    def num_nodes_waiting(self) -> int:
        """How many nodes wait for this one to start its ranks anew."""

    def shutdown(self) -> bool:
        """Ends the run for all nodes."""


class StaticHandler:
    """A torch `RendezvousHandler` for a fixed number of numbered nodes; one is the simplest case.

    Unlike torch's own for static rendezvous it starts all nodes anew together: a node whose ranks
    have failed asks for the next round, which the others learn from `num_nodes_waiting`.
    """

    use_agent_store = True

    def __init__(
        self,
        board: Board,
        size: int,
        store: TCPStore,
        port: int,
        *,
        timeout: float,
        say: Say,
        publish: Publish = lambda changes: None,
        backend: str = "static",
    ) -> None:
        self._board, self._size, self._store, self._port = board, size, store, port
        self._timeout, self._say, self._publish, self._backend = timeout, say, publish, backend
        self.attempt: int | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits until all nodes are ready to start their ranks.

        Raises:
            MissingRankError: a node has not come within the join timeout, or has left for good.
        """
        from torch.distributed import PrefixStore
        from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

        others = [n for n in self._board.all() if n.state == HERE]
        wanted = max(max(n.round, n.started + 1) for n in others)
        self._change({"round": wanted})
        self._wait(wanted)
        self._change({"started": wanted})
        self.attempt = wanted - 1
        store = PrefixStore(f"{self.get_run_id()}/{self.attempt}", self._store)
        rank = self._board.own.rank or 0
        if rank == 0:
            forget_ranks(self._store)
            store.set(_READY, "")
        store.get(_READY)
        place = RendezvousStoreInfo(LOOPBACK, self._port)
        return RendezvousInfo(store, rank, self._size, place)

    def _wait(self, wanted: int) -> None:
        deadline = time.monotonic() + self._timeout
        announce = announcer(self._say)
        while missing := absent(self._board.all(), self._size, wanted):
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
        """The node that serves, or after the first start one that said goodbye.

        Before the first start somebody may be correcting a command line, and one that was lost may
        be started again by a scheduler.
        """
        nodes = self._board.all()
        if nodes[0].state != HERE:
            return nodes[0]
        return next((n for n in latest(nodes) if n.state == LEFT and wanted > 1), None)

    def _change(self, changes: Mapping[str, Any]) -> None:
        self._board.write(self._board.own_number, changes)
        self._publish(changes)

    def num_nodes_waiting(self) -> int:
        """How many nodes wait for this one to start its ranks anew."""
        own = self._board.own
        return sum(n.state == HERE and n.round > own.round for n in self._board.all())

    def get_backend(self) -> str:
        """The name of the rendezvous backend, as given."""
        return self._backend

    def get_run_id(self) -> str:
        """`--rdzv-id`."""
        return self._board.own.run_id

    def is_closed(self) -> bool:
        """False: nobody closes it while this node takes part."""
        return False

    def set_closed(self) -> None:
        """Does nothing, as torch's own for static rendezvous."""

    def shutdown(self) -> bool:
        """Does nothing: `Rendezvous.close` says goodbye."""
        return True


class DynamicHandler:
    """torch's own dynamic rendezvous over our store, for `--nnodes MIN:MAX` and c10d.

    Membership, ranks and new rounds are torch's. Two things are ours: ranks use the store that is
    there already (torch would open a second one, on all interfaces), and the starts are counted by
    all nodes alike.
    """

    use_agent_store = True

    def __init__(
        self,
        board: Board,
        config: LaunchConfig,
        store: TCPStore,
        port: int,
        *,
        say: Say,
        publish: Publish,
        forget: Forget,
    ) -> None:
        from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
            C10dRendezvousBackend,
        )
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

        self._board, self._store, self._port = board, store, port
        self._say, self._publish, self._forget = say, publish, forget
        self.attempt: int | None = None
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=config.rdzv_endpoint,
            run_id=board.own.run_id,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            local_addr=config.local_addr,
            **config.rdzv_configs,
        )
        backend = C10dRendezvousBackend(store, board.own.run_id)
        self._torchs: RendezvousHandler | None = create_handler(store, backend, parameters)

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits until torch's rendezvous is complete.

        Raises:
            MissingRankError: too few nodes have come within the join timeout, or the node that
                serves has left.
            JoinError: the run has been ended by another node.
        """
        from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

        torchs = self._torchs
        if torchs is None or self._server_gone():
            raise self._absence("the store of the run is closed")
        with self._errors_named(), self._waiting_announced(), _no_store_of_torchs():
            info = torchs.next_rendezvous()
            # Each round has a store of its own, so that nothing of an earlier one is found here.
            if info.rank == 0:
                attempt = self._store.add("lockstep/attempts", 1) - 1
                self._forget(f"lockstep/forgotten/{attempt}")
                self._store.get(f"lockstep/forgotten/{attempt}")
                info.store.set("lockstep/attempt", str(attempt))
            self.attempt = int(info.store.get("lockstep/attempt"))
        self._change({"rank": info.rank, "round": self.attempt + 1, "started": self.attempt + 1})
        place = RendezvousStoreInfo(LOOPBACK, self._port)
        return RendezvousInfo(info.store, info.rank, info.world_size, place)

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        from torch.distributed.elastic.rendezvous import (
            RendezvousClosedError,
            RendezvousConnectionError,
            RendezvousTimeoutError,
        )

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
        server = self._board.all()[0]
        found = departure(server) if self._server_gone() else f"{reason}; here: {self._here()}"
        return MissingRankError(
            f"--nnodes {nnodes(self._board.own.nodes)}",
            found,
            "look at the output of the launchers on the other machines, or start them",
        )

    def _here(self) -> str:
        return here(self._board.all())

    @contextmanager
    def _waiting_announced(self) -> Iterator[None]:
        """Torch's waiting cannot be looked into, so another thread says who is here."""
        announce = announcer(self._say)
        over = threading.Event()

        def run() -> None:
            while not over.wait(_LOOK_S):
                announce(f"waiting for {nnodes(self._board.own.nodes)} nodes; here: {self._here()}")

        thread = threading.Thread(target=run, name="lockstep-waiting", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _server_gone(self) -> bool:
        return self._board.all()[0].state != HERE

    def _change(self, changes: Mapping[str, Any]) -> None:
        self._board.write(self._board.own_number, changes)
        self._publish(changes)

    def num_nodes_waiting(self) -> int:
        """As torch's; 0 when the node that serves has gone (see `Rendezvous.lost_nodes`)."""
        from torch.distributed.elastic.rendezvous import RendezvousConnectionError

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

    def get_run_id(self) -> str:
        """`--rdzv-id`."""
        return self._board.own.run_id

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
        if not key.startswith(_KEPT):
            store.delete_key(key)


@contextmanager
def _no_store_of_torchs() -> Iterator[None]:
    """Within it torch's dynamic rendezvous opens no store for the ranks."""
    before = os.environ.get(_TORCHS_OWN_STORE)
    os.environ[_TORCHS_OWN_STORE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_TORCHS_OWN_STORE]
        else:
            os.environ[_TORCHS_OWN_STORE] = before
