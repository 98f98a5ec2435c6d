"""Implements the rendezvous for a fixed number of nodes with a --node-rank each, or a single node.

A *round* is one start of the ranks on all nodes, counted from 1. A node that wants to start its
ranks, for the first time or again, asks for a round by setting `Node.requested_round`, and waits
until all nodes have asked for it. The *server* is the node that serves the store, node 0. A node
has *left* if it has said so itself, and is *lost* if its connection has ended without a word.

Unlike with torch's own static rendezvous, a restart restarts the ranks of all nodes together.

Source: torch/distributed/elastic/rendezvous/static_tcp_rendezvous.py.
"""

from __future__ import annotations

import time

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousInfo

from lockstep.errors import MissingRankError
from lockstep.run.machines.nodes import (
    LEFT,
    Node,
    describe_departure,
    describe_missing,
    without_replaced_nodes,
)
from lockstep.run.machines.rendezvous import POLL_INTERVAL_S, Rendezvous, delete_keys_of_ranks
from lockstep.run.machines.rendezvous_settings import join_timeout
from lockstep.run.machines.wait_announcer import WaitAnnouncer

READY_KEY = "lockstep/ready"
"""The key that is set in the store when the ranks may use it."""


class StaticRendezvous(Rendezvous):
    """A rendezvous for a fixed number of numbered nodes."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits until all nodes are ready to start their ranks.

        Raises:
            MissingRankError: a node has not come within the join timeout, or has left for good.
        """
        round_number = self._next_round()
        self._peers.update_own(requested_round=round_number)
        self._wait_for_all_nodes(round_number)
        self._peers.update_own(last_started_round=round_number)

        self.attempt = round_number - 1  # rounds are counted from 1, attempts from 0
        store = PrefixStore(f"{self.get_run_id()}/{self.attempt}", self._store)
        rank = self._peers.own.rank
        assert rank is not None  # each node has a --node-rank, and a single node is node 0

        # Node 0 deletes what ranks of an earlier attempt have left in the store. The others wait
        # until the key is set.
        if rank == 0:
            delete_keys_of_ranks(self._store)
            store.set(READY_KEY, "")
        store.get(READY_KEY)

        return self._make_info(store, rank, self._parameters.max_nodes)

    def _next_round(self) -> int:
        """Returns the next round that no node has started yet.

        If both nodes of a run have started round 2, this is round 3; and round 4 if one of them has
        asked for that already.
        """
        present = self._peers.present()  # this node, too
        started_rounds = [node.last_started_round for node in present]  # 0 before the first round
        last_started_round = max(started_rounds)
        latest_asked_round = max(node.requested_round for node in present)
        return max(last_started_round + 1, latest_asked_round)

    def _wait_for_all_nodes(self, round_number: int) -> None:
        """Waits until all nodes have asked for the round, and announces which nodes are missing.

        Raises:
            MissingRankError: they have not within the join timeout, or one of them has left for
                good.
        """
        num_nodes = self._parameters.max_nodes
        timeout = join_timeout(self._parameters)
        deadline = time.monotonic() + timeout
        announcer = WaitAnnouncer(self._say)
        while True:
            missing = describe_missing(self._peers.all(), num_nodes, round_number)
            if not missing:
                return

            found = ""
            node_gone_for_good = self._find_node_gone_for_good(round_number)
            if node_gone_for_good is not None:
                found = describe_departure(node_gone_for_good)
            elif time.monotonic() > deadline:
                found = f"{missing} (waited {timeout:g} s)"

            if found:
                raise MissingRankError(
                    f"--nnodes {num_nodes}",
                    found,
                    "look at the output of the launcher there, or start it",
                )

            announcer.say_waiting(missing)
            time.sleep(POLL_INTERVAL_S)

    def _find_node_gone_for_good(self, round_number: int) -> Node | None:
        """Returns a node that will not come back, if there is one.

        This is the server, if it has left or is lost; or a node that has left after the first
        start. Another node that is lost is not returned, as a scheduler may restart it.
        """
        if self._server_is_gone():
            return self._peers.server

        # Before the first start (round 1), the user may be correcting the command line of a node,
        # and will start it again.
        if round_number == 1:
            return None

        # A node that has left, and whose launcher was started again, has been replaced.
        for node in without_replaced_nodes(self._peers.all()):
            if node.state == LEFT:
                return node
        return None

    def num_nodes_waiting(self) -> int:
        """Returns how many nodes wait for this one to restart its ranks.

        Torch elastic's agent restarts them if this is above 0.
        """
        own_round = self._peers.own.requested_round
        return len([node for node in self._peers.present() if node.requested_round > own_round])
