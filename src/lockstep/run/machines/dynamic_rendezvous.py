"""Implements the rendezvous for `--nnodes MIN:MAX` and the backend c10d: nodes may join and leave.

A *round* is one start of the ranks on all nodes, counted from 1. A node asks for a round by setting
`Node.requested_round`, and sets `Node.last_started_round` when it starts its ranks. The *server*,
the node that serves the store, decides which nodes take part in a round (`Node.decided`) as soon as
all nodes that are present have asked for it. Before the first round it waits a while for more nodes
(`last_call_timeout`).

Torch's own dynamic rendezvous takes up to 45 s for a restart, because it waits for the heartbeats
of a lost node and for more nodes to come.

Source: torch/distributed/elastic/rendezvous/dynamic_rendezvous.py.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousInfo

from lockstep.errors import MissingRankError
from lockstep.run.machines.nodes import (
    LOST,
    SERVER_NUMBER,
    Node,
    describe_departure,
    describe_present,
    format_nnodes,
)
from lockstep.run.machines.rendezvous import POLL_INTERVAL_S, Rendezvous, delete_keys_of_ranks
from lockstep.run.machines.rendezvous_settings import join_timeout, last_call_timeout
from lockstep.run.machines.wait_announcer import WaitAnnouncer


class DynamicRendezvous(Rendezvous):
    """A rendezvous whose server decides which nodes take part in each round."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._enough_nodes_since: float | None = None
        """The time (monotonic) since which at least MIN nodes are present; None if too few are."""

    @property
    def elastic(self) -> bool:
        """True if the run may go on with another number of nodes."""
        return bool(self._parameters.min_nodes < self._parameters.max_nodes)

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits until a new round is decided in which this node takes part.

        Raises:
            MissingRankError: too few nodes have come within the join timeout, or the server has
                left.
        """
        round_number, participants = self._wait_for_round()
        self.attempt = round_number - 1  # rounds are counted from 1, attempts from 0

        node_rank = participants.index(self._peers.own_number)
        self._peers.update_own(rank=node_rank, last_started_round=round_number)

        store = PrefixStore(f"{self.get_run_id()}/{self.attempt}", self._store)
        return self._make_info(store, node_rank, len(participants))

    def _wait_for_round(self) -> tuple[int, Sequence[int]]:
        """Waits until a round is decided in which this node takes part.

        Meanwhile it asks for such a round again and again, as the nodes that are present change.

        Returns:
            The round, and the numbers of the nodes that take part in it, in the order of their
            ranks.

        Raises:
            MissingRankError: see `next_rendezvous`.
        """
        deadline = time.monotonic() + join_timeout(self._parameters)
        announcer = WaitAnnouncer(self._say)
        while True:
            present = self._peers.present()
            if self._server_is_gone():
                raise self._missing_nodes_error(describe_departure(self._peers.server))

            has_too_few_nodes = len(present) < self._parameters.min_nodes
            if has_too_few_nodes and time.monotonic() > deadline:
                raise self._missing_nodes_error(
                    "too few nodes have come within the join timeout; "
                    f"here: {describe_present(present)}"
                )

            # The server's last decision may be about a round that is over for this node.
            decided = self._peers.server.decided
            if self._takes_part(decided):
                return decided["round"], decided["nodes"]

            self._ask_for_round(self._choose_round(present))
            num_wanted = format_nnodes(self._peers.own.nodes)
            announcer.say_waiting(
                f"waiting for {num_wanted} nodes; here: {describe_present(present)}"
            )
            time.sleep(POLL_INTERVAL_S)

    def _ask_for_round(self, round_number: int) -> None:
        """Asks for a round, unless this node has done so. The server also decides on it."""
        own = self._peers.own
        has_asked = own.requested_round >= round_number
        if not has_asked:
            self._peers.update_own(requested_round=round_number)

        is_server = own.number == SERVER_NUMBER
        if is_server:
            self._decide_participants(round_number)

    def _takes_part(self, decided: Mapping[str, Any]) -> bool:
        """Returns True if this node must start its ranks now, for a decided round.

        Args:
            decided: the last decision of the server, see `Node.decided`. It may be about an earlier
                round.
        """
        own = self._peers.own
        decided_round = decided["round"]
        if decided_round <= own.last_started_round:
            return False  # this node has started its ranks for that round already
        if decided_round < own.requested_round:
            return False  # this node has asked for a later round since, to restart its ranks

        return own.number in decided["nodes"]

    def request_restart(self) -> None:
        """Asks for the next round, so that the other nodes know why the ranks of this node end."""
        self._peers.update_own(requested_round=self._peers.own.last_started_round + 1)

    def has_node_left_attempt(self) -> bool:
        """Returns True if a node of the present attempt has gone, or has begun a later one.

        The launcher may have asked for the next attempt already. So the rounds are compared that
        the nodes have started, and not those that they have asked for.
        """
        own_started = self._peers.own.last_started_round
        for node in self._peers.all():
            has_begun_later_attempt = node.last_started_round > own_started
            took_part = node.last_started_round == own_started
            has_gone = node.gone_early and took_part
            if has_begun_later_attempt or has_gone:
                return True
        return False

    def describe_lost_nodes(self) -> str:
        """Names the lost nodes, for the announcement of a restart without them. Never waits.

        Returns:
            A text for the user; empty if no node was lost, or if there will be no restart, as the
            others cannot go on without the lost nodes.
        """
        # Of the nodes that have departed, those that have left by themselves (LEFT) are not
        # included: their ranks have failed or ended.
        lost = [node for node in self.departed_nodes() if node.state == LOST]
        if not lost:
            return ""

        has_enough_nodes = len(self._peers.present()) >= self._parameters.min_nodes
        can_go_on = self.elastic and has_enough_nodes and not self._server_is_gone()
        if not can_go_on:
            return ""
        return "; ".join(describe_departure(node) for node in lost)

    def num_nodes_waiting(self) -> int:
        """Returns how many nodes wait for a new round, or 1 if a lost node makes a new round
        necessary.

        Torch elastic's agent restarts all ranks if this is above 0.
        """
        own = self._peers.own
        present = self._peers.present()
        asking = [node for node in present if node.requested_round > own.requested_round]
        if asking:
            return len(asking)
        return 1 if self.describe_lost_nodes() else 0

    def _choose_round(self, present: Sequence[Node]) -> int:
        """Returns the round that this node should ask for.

        A node that took part in the last round restarts its ranks, so it asks for the next round.
        For a node that did not, there are three cases:

            1. the others have asked for round 2, and none has started it    2
            2. the others run round 2, and --nnodes allows no more nodes     as before: it waits
            3. the others run round 2, and there is room for one more node   3: all restart

        Args:
            present: the nodes that are present.
        """
        own = self._peers.own
        started_rounds = [node.last_started_round for node in present]  # 0 before the first round
        last_started_round = max(started_rounds)
        latest_asked_round = max(node.requested_round for node in present)

        took_part_in_last_round = own.last_started_round == last_started_round
        if took_part_in_last_round:
            next_round = last_started_round + 1
            return max(next_round, latest_asked_round)  # all nodes must ask for the same round

        others_begin_a_round = latest_asked_round > last_started_round
        if others_begin_a_round:
            return latest_asked_round  # case 1

        num_running = started_rounds.count(last_started_round)
        if num_running >= self._parameters.max_nodes:
            return own.requested_round  # case 2
        return last_started_round + 1  # case 3

    def _decide_participants(self, round_number: int) -> None:
        """Decides which nodes take part in a round, and tells all nodes. Only the server calls
        this.

        Does nothing if the round is decided already, or if it is too early: too few nodes are
        present, more may come, or not all of them have asked for the round.
        """
        present = self._peers.present()
        if self._must_wait_for_more_nodes(len(present), round_number):
            return

        # The server's node has the last decision, and this node is the server.
        latest_decided_round = self._peers.own.decided["round"]
        is_decided_already = latest_decided_round >= round_number
        all_have_asked = all(node.requested_round >= round_number for node in present)
        if is_decided_already or not all_have_asked:
            return

        delete_keys_of_ranks(self._store)  # the keys of the last round

        # The nodes are ordered by host, as in torch's rendezvous.
        max_nodes = self._parameters.max_nodes
        participants = sorted(present[:max_nodes], key=lambda node: (node.host, node.pid))
        numbers = [node.number for node in participants]
        self._peers.update_own(decided={"round": round_number, "nodes": numbers})

    def _must_wait_for_more_nodes(self, num_present: int, round_number: int) -> bool:
        """Returns True if there are too few nodes, or if more may come before the first round."""
        now = time.monotonic()
        if num_present < self._parameters.min_nodes:
            self._enough_nodes_since = None
            return True
        if self._enough_nodes_since is None:
            self._enough_nodes_since = now

        more_may_come = round_number == 1 and num_present < self._parameters.max_nodes
        last_call_end = self._enough_nodes_since + last_call_timeout(self._parameters)
        return more_may_come and now < last_call_end

    def _missing_nodes_error(self, found: str) -> MissingRankError:
        """Returns the error for a run that cannot start.

        Args:
            found: text that says which nodes are missing.
        """
        return MissingRankError(
            f"--nnodes {format_nnodes(self._peers.own.nodes)}",
            found,
            "look at the output of the launchers on the other machines, or start them",
        )
