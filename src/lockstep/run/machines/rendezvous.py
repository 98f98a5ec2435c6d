"""Defines the base class of rendezvous: how the launchers of a run meet before each start of the
ranks.

Torch elastic's agent calls `next_rendezvous` of a `RendezvousHandler`, and then starts the ranks.
Lockstep's handlers are all a `Rendezvous`, which also knows which *nodes* (launchers, see `nodes`)
have left, and lets nodes publish values to each other. A *round* is one start of the ranks on all
nodes. Ranks know it as an attempt.

    static_rendezvous     a fixed number of nodes with --node-rank, or one node
    dynamic_rendezvous    c10d: nodes may join and leave
    torch_rendezvous      etcd and others: torch's own handler, unchanged

`open_rendezvous` chooses one of them and opens it.

Source: torch/distributed/elastic/rendezvous/api.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from lockstep.errors import LockstepError
from lockstep.machine import network
from lockstep.machine.network import LOOPBACK
from lockstep.run.machines.nodes import (
    HERE,
    LEFT,
    SERVER_NUMBER,
    Node,
    Peers,
    without_replaced_nodes,
)
from lockstep.torch_compat import list_keys

Say = Callable[[str], None]
"""A function that shows a line to the user."""

MAX_PUBLISHED_BYTES = 1 << 20
POLL_INTERVAL_S = 0.02
# How long the server, when it leaves, waits for the other nodes to leave.
LEAVE_TIMEOUT_S = 10.0
LEAVE_TIMEOUT_AFTER_FAILURE_S = 2.0


class Rendezvous(RendezvousHandler):
    """One launcher's part in a run. It may be used as a context manager, which closes it.

    Args:
        parameters: torchrun's flags for the rendezvous.
        peers: the nodes of the run.
        store: the ranks' store on loopback; None if torch's own handler opens it.
        say: function that shows a line to the user.
        interface: name of the network interface that reaches the other nodes, or of loopback on a
            single machine; None if not known. See `machine.interface`.
    """

    can_publish = True
    """True if nodes see the values that other nodes publish. Torch's own handlers cannot do that.
    """

    def __init__(
        self,
        parameters: RendezvousParameters,
        peers: Peers,
        store: TCPStore | None,
        say: Say,
        interface: str | None,
    ) -> None:
        self._parameters = parameters
        self._peers = peers
        self._store: Any = store
        self._say = say
        self.interface = interface
        self.resources = ExitStack()
        """The connections and the network thread, which are closed with the rendezvous."""
        self._closed = False
        self.attempt: int | None = None
        """How many times the ranks have been restarted, a number that all nodes agree on; None if
        not known. It becomes TORCHELASTIC_RESTART_COUNT, by which the ranks of one start find each
        other. The agents' own counts differ once a node has restarted because of another one."""

    @property
    def elastic(self) -> bool:
        """True if the run may go on with another number of nodes."""
        return False

    def request_restart(self) -> None:
        """Asks the other nodes to restart all ranks. Only a dynamic rendezvous needs this."""

    def describe_lost_nodes(self) -> str:
        """Names the lost nodes without which the run can go on; empty if there are none. Never
        waits.
        """
        return ""

    def goes_on_without_lost_nodes(self) -> bool:
        """Returns True if nodes were lost, and the run can go on without them. Never waits."""
        return bool(self.describe_lost_nodes())

    def has_node_left_attempt(self) -> bool:
        """Returns True if a node of the present attempt has gone, or has begun a later one. Never
        waits. Only a dynamic rendezvous needs this.
        """
        return False

    def departed_nodes(self) -> list[Node]:
        """Returns the nodes of the current round that have left early. Never waits."""
        own_round = self._peers.own.requested_round
        if own_round == 0:  # this node has not asked for a round yet
            return []
        nodes = without_replaced_nodes(self._peers.all())
        return [node for node in nodes if node.gone_early and node.requested_round >= own_round]

    def publish(self, key: str, value: Any, to: int | None = None) -> bool:
        """Publishes a value to other nodes, for the present attempt. Never waits.

        Args:
            key: key of the value. A later value with the same key replaces an earlier one.
            value: any value that can be written as JSON.
            to: rank of the only node that receives it; None for all nodes, including this one.

        Returns:
            False if the value was not published because it is longer than 1 MiB.
        """
        if len(json.dumps(value)) > MAX_PUBLISHED_BYTES:
            return False

        # The attempt is published too, so that the value is not mistaken for one of a later
        # attempt.
        published = {key: {"attempt": self.attempt, "value": value}}
        if to is None:
            self._peers.update_own(published=published)
            return True

        # If a launcher was started again, two nodes have its rank. Only the new one gets the value.
        for node in without_replaced_nodes(self._peers.all()):
            if node.rank == to:
                self._peers.send({"published": published}, node.number)
        return True

    def published(self, key: str) -> dict[int, Any]:
        """Returns the values that the nodes have published under a key in this attempt. Never
        waits.

        Returns:
            The values by node rank.
        """
        value_of_rank = {}
        for node in without_replaced_nodes(self._peers.all()):
            entry = node.published.get(key)
            if node.rank is not None and entry is not None and entry["attempt"] == self.attempt:
                value_of_rank[node.rank] = entry["value"]
        return value_of_rank

    def close(self, why: str = "") -> None:
        """Leaves the run, and closes `resources`.

        The other nodes need the store until they have left. So the node that serves it (the server)
        waits for them before it closes: for up to 10 s at the end of the run, and for up to 2 s
        after a failure.

        Args:
            why: the reason for leaving before the end of the run, which the other nodes are told;
                empty if the run has ended.
        """
        if self._closed:
            return
        self._closed = True

        with self.resources:  # closed at the end of this block
            if why:
                # Tell the others at once: they end too, or restart without this node.
                self._peers.update_own(state=LEFT, why=why)
                self._wait_for_others_to_leave(LEAVE_TIMEOUT_AFTER_FAILURE_S)
            else:
                # After a run that has ended well, the server is the last to leave.
                self._wait_for_others_to_leave(LEAVE_TIMEOUT_S)
                self._peers.update_own(state=LEFT)

    def _wait_for_others_to_leave(self, timeout_s: float) -> None:
        """Waits on the server until all other nodes have left; returns at once on other nodes."""

        def only_server_is_present() -> bool:
            return all(node.number == SERVER_NUMBER for node in self._peers.present())

        is_server = self._peers.own_number == SERVER_NUMBER
        if is_server:
            network.wait_until(only_server_is_present, time.monotonic() + timeout_s)

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: object, traceback: object
    ) -> None:
        """Leaves the run. If an error ends the block, the other nodes are told which one."""
        if error_type is None:
            self.close()
        elif isinstance(error, LockstepError) and error.found:
            self.close(error.found)
        else:
            self.close(f"its launcher ended with {error_type.__name__}")

    @property
    def use_agent_store(self) -> bool:
        """True, as the ranks use the store in which the launchers meet."""
        return True

    def get_run_id(self) -> str:
        """Returns torchrun's --rdzv-id."""
        return str(self._parameters.run_id)

    def get_backend(self) -> str:
        """Returns torchrun's --rdzv-backend."""
        return str(self._parameters.backend)

    def is_closed(self) -> bool:
        """Returns False. Torch elastic's agent does not call this."""
        return False

    def set_closed(self) -> None:
        """Does nothing. Torch elastic's agent does not call this."""

    def shutdown(self) -> bool:
        """Does nothing, as `close` tells the other nodes."""
        return True

    def _make_info(self, store: Any, rank: int, num_nodes: int) -> RendezvousInfo:
        """Returns the value that torch elastic's agent expects from `next_rendezvous`."""
        address = RendezvousStoreInfo(LOOPBACK, self._store.port)
        return RendezvousInfo(store, rank, num_nodes, address)

    def _server_is_gone(self) -> bool:
        return self._peers.server.state != HERE


def delete_keys_of_ranks(store: TCPStore) -> None:
    """Deletes the keys that the ranks of an earlier attempt have left in the store.

    Since torch 2.13, the keys of ranks have no prefix with the attempt (`_create_c10d_store` in
    torch/distributed/rendezvous.py), so new ranks would connect to the addresses of earlier ones.

    Only the server may call this: `list_keys` holds the interpreter's lock while it waits for the
    answer, and on other nodes the answer comes through the forwarder, a thread of this process.
    """
    for key in list_keys(store) or ():  # None: see `torch_compat.separate_attempts`
        store.delete_key(key)
