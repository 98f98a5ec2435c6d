"""Keeps a launcher's table of all nodes of the run, and their states.

A *node* is one launcher of the run; usually there is one on each machine. The *server* is the node
that serves the run's store, always number 0. A node has a *number*, in the order in which the
launchers came, and a *rank*, which is torchrun's --node-rank. The *round* of a node counts the
starts of its ranks, beginning with 1. Each launcher has a table `Peers` with one `Node` per
launcher; `peer_connection` sends the changes of a node to the other launchers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from lockstep.errors import (
    DuplicateRankError,
    JoinError,
    MasterUnreachableError,
    WorldSizeError,
)

SERVER_NUMBER = 0
"""The number of the node that serves the run's store."""

# The states of a node.
HERE = "here"
LEFT = "left"
LOST = "lost"


@dataclass(frozen=True, kw_only=True)
class Node:
    """One launcher. Its fields are plain values, because nodes are sent as JSON."""

    number: int = -1
    """The number of the launcher, in the order in which they came; -1 while not known."""
    rank: int | None
    """The rank of the node; None while not known (dynamic rendezvous)."""
    host: str
    pid: int
    run_id: str
    """torchrun's --rdzv-id."""
    nodes: str
    """The value of --nnodes, as `MIN:MAX`."""
    version: str = ""
    """The version of Lockstep. Other versions may send other messages."""
    requested_round: int = 0
    """The round that the node has asked for, or takes part in."""
    last_started_round: int = 0
    """The last round that the node has started, after all nodes were ready for it."""
    state: str = HERE
    """HERE, LEFT if it has said that it leaves, or LOST if its connection ended or was silent."""
    why: str = ""
    """Why it is not here; empty if the run has ended."""
    published: Mapping[str, Any] = field(default_factory=dict)
    """The values that the node publishes for the others, see `Rendezvous.publish`."""
    decided: Mapping[str, Any] = field(default_factory=lambda: {"round": 0, "nodes": []})
    """Set by the server of a dynamic rendezvous: a round, and the numbers of the nodes that take
    part in it, in the order of their ranks."""

    @property
    def name(self) -> str:
        """The node's name in messages: "node 1 on host b"."""
        if self.rank is None:
            return self.process_name
        return f"node {self.rank} on host {self.host}"

    @property
    def process_name(self) -> str:
        """The launcher's name in messages: "process 123 on host b"."""
        return f"process {self.pid} on host {self.host}"

    @property
    def gone_early(self) -> bool:
        """True if the node has gone, LEFT or LOST, before the end of the run."""
        return self.state == LOST or (self.state == LEFT and bool(self.why))


def node_of(values: Mapping[str, Any]) -> Node:
    """Builds the node that another launcher has sent, without fields that this version lacks.

    Raises:
        TypeError: fields are missing that every version has.
    """
    names = {known.name for known in fields(Node)}
    return Node(**{name: value for name, value in values.items() if name in names})


class Peers:
    """The table of all nodes that have come. It may be used from any thread, and never blocks for
    long.
    """

    def __init__(self, own: Node) -> None:
        self._lock = threading.Lock()
        self._nodes = {own.number: own}
        self.own_number = own.number
        self.send: Callable[[Mapping[str, Any], int | None], object] = lambda changes, to: None
        """Sends changes of the own node to the node with the given number, or to all others if the
        number is None. Set by whoever opens the connection."""

    @property
    def own(self) -> Node:
        """This launcher's node."""
        return self.node(self.own_number)

    @property
    def server(self) -> Node:
        """The node that serves the store."""
        return self.node(SERVER_NUMBER)

    def node(self, number: int) -> Node:
        """Returns the node with a number."""
        with self._lock:
            return self._nodes[number]

    def all(self) -> list[Node]:
        """Returns every node, in the order in which they came."""
        with self._lock:
            return [self._nodes[number] for number in sorted(self._nodes)]

    def present(self) -> list[Node]:
        """Returns the nodes that are here, in the order in which they came."""
        return [node for node in self.all() if node.state == HERE]

    def write(self, number: int, changes: Mapping[str, Any]) -> None:
        """Changes fields of a node in this table, without sending the changes.

        Args:
            number: the number of the node. If it is new, `changes` contains all of its fields.
            changes: the new values by field. Those of `published` are merged into the present ones.
        """
        with self._lock:
            node = self._nodes.get(number)
            if node is None:  # a launcher that has just come
                self._nodes[number] = Node(**changes)
                return

            published = {**node.published, **changes.get("published", {})}
            new_values = {**changes, "published": published}
            self._nodes[number] = replace(node, **new_values)

    def update_own(self, **changes: Any) -> None:
        """Changes fields of this launcher's own node, here and at all other launchers."""
        self.write(self.own_number, changes)
        self.send(changes, None)  # to all other launchers

    def admit(self, candidate: Node) -> Node:
        """Admits a launcher that wants to join, and numbers it. Only the server calls this.

        Args:
            candidate: the launcher's description of itself.

        Returns:
            Its node in this table.

        Raises:
            MasterUnreachableError: the launcher belongs to another run.
            WorldSizeError: it has another --nnodes.
            DuplicateRankError: its rank is taken. (All three are a JoinError.)
            JoinError: it has another version of Lockstep.
        """
        nodes = self.all()
        check_same_version(candidate, self.own)
        _check_may_join(candidate, self.own, nodes)

        # Nodes stay in the table when they leave, so their count is the next free number. A node
        # that has just come is here, and has not published anything, whatever it may have sent.
        admitted = replace(candidate, number=len(nodes), state=HERE, why="", published={})
        self.write(admitted.number, vars(admitted))  # adds it to this table
        return admitted


def _check_may_join(candidate: Node, server: Node, known_nodes: Sequence[Node]) -> None:
    """Checks that a launcher belongs to the run of a server.

    Args:
        candidate: the launcher's description of itself.
        server: the node of the server.
        known_nodes: all nodes that have come.

    Raises:
        MasterUnreachableError: the launcher belongs to another run.
        WorldSizeError: it has another --nnodes.
        DuplicateRankError: its rank is taken.
    """
    if candidate.run_id != server.run_id:
        raise MasterUnreachableError(
            f"run {candidate.run_id!r} (--rdzv-id)",
            f"the launcher there serves another run, {server.run_id!r}: {server.process_name}",
            "start all nodes with the same --rdzv-id, or this run with another port",
        )

    nnodes = candidate.nodes
    nnodes_of_server = server.nodes
    if nnodes != nnodes_of_server:
        raise WorldSizeError(
            f"--nnodes {format_nnodes(nnodes)} on {candidate.host}",
            f"{server.name} was started with --nnodes {format_nnodes(nnodes_of_server)}",
            "start all nodes with the same --nnodes",
        )

    for node in known_nodes:
        is_same_rank = candidate.rank is not None and node.rank == candidate.rank
        if is_same_rank and node.state == HERE:
            raise DuplicateRankError(
                f"--node-rank {candidate.rank} on {candidate.host} (process {candidate.pid})",
                f"node {candidate.rank} has already come: {node.process_name}",
                "give each machine its own --node-rank; the one that came first continues",
            )


def check_same_version(joining: Node, server: Node) -> None:
    """Raises JoinError if two launchers have different versions of Lockstep."""
    if joining.version == server.version:
        return
    version_there = joining.version or "(unknown)"
    version_here = server.version or "(unknown)"
    raise JoinError(
        f"Lockstep {version_there} on {joining.host}",
        f"{server.name} has Lockstep {version_here}",
        "install the same version of Lockstep on all machines",
    )


def format_nnodes(nodes: str) -> str:
    """Returns --nnodes in the form in which the user wrote it: "2:2" -> "2", "1:4" -> "1:4"."""
    min_nodes, max_nodes = nodes.split(":")
    if min_nodes == max_nodes:
        return min_nodes
    return nodes


def without_replaced_nodes(nodes: Iterable[Node]) -> list[Node]:
    """Returns the nodes without those that have been replaced by another node of the same rank.

    A launcher that is started again gets a new node, with the rank of its old one. In an elastic
    run, an older node may also get the rank of a newer one that was lost. Of the nodes of a rank,
    one is returned: the newest that is here or, if none is here, the node that worked longest.
    Nodes without a rank are all returned.
    """
    nodes = list(nodes)
    node_of_rank: dict[int, Node] = {}
    for newer in sorted(nodes, key=lambda node: node.number):  # in the order in which they came
        if newer.rank is not None:
            older = node_of_rank.get(newer.rank)
            if older is None or _replaces(newer, older):
                node_of_rank[newer.rank] = newer

    return [node for node in nodes if node.rank is None or node_of_rank[node.rank] is node]


def _replaces(newer: Node, older: Node) -> bool:
    """Returns True if a node replaces an older one of the same rank, and False if the older one
    replaces it.
    """
    if newer.state == HERE:
        return True
    if older.state == HERE:
        return False

    # Both are gone. The one that has started the later round has worked until the end of the run,
    # and the launchers wait for its report.
    return newer.last_started_round >= older.last_started_round


def describe_present(nodes: Iterable[Node]) -> str:
    """Names the nodes that are here, for a message."""
    names = [node.name for node in nodes if node.state == HERE]
    return ", ".join(names) or "nobody"


def describe_missing(nodes: Sequence[Node], num_nodes: int, round_number: int) -> str:
    """Says which nodes are not ready for a round.

    Args:
        nodes: all nodes that have come.
        num_nodes: the number of nodes of the run. Their ranks count from 0.
        round_number: the round that is to begin.

    Returns:
        A text for the user, or an empty string if all nodes are ready.
    """
    # A launcher that was started again has two nodes with its rank. Only the present one matters.
    node_of_rank = {node.rank: node for node in without_replaced_nodes(nodes)}
    reasons = []
    for rank in range(num_nodes):
        node = node_of_rank.get(rank)
        if node is None:
            reasons.append(f"node {rank} of {num_nodes} has not joined")
        elif node.state != HERE:
            reasons.append(describe_departure(node))
        elif node.requested_round < round_number:
            # A node asks for a round once its ranks of the round before have ended.
            reasons.append(f"{node.name} is still ending its previous start")

    if not reasons:
        return ""
    return f"{'; '.join(reasons)}; here: {describe_present(nodes)}"


def describe_departure(node: Node) -> str:
    """Says that a node has left, and why: `node 1 on host b has left (its connection ended)`."""
    text = f"{node.name} has left"
    if node.why:
        text += f" ({node.why})"
    return text
