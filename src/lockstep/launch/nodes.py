"""The nodes of a run as every launcher sees them, and what is wrong with them, in words.

Each launcher keeps a `Board`: one `Node` for each launcher that has come. Each writes its own node
alone; `links` carries what is written to the boards of the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lockstep.errors import DuplicateRankError, JoinError, MasterUnreachableError, WorldSizeError

HERE, LEFT, LOST = "here", "left", "lost"
_FIRST_WORD_S, _NEXT_WORD_S = 5.0, 60.0
_KINDS: dict[str, type[JoinError]] = {
    kind.__name__: kind for kind in (DuplicateRankError, WorldSizeError, MasterUnreachableError)
}


@dataclass(frozen=True, kw_only=True)
class Node:
    """One launcher; plain values, so that it can be sent as JSON."""

    number: int = -1
    """The how-manieth it was to come; the one that serves is 0."""
    rank: int | None
    """Of the node; None: not yet known (dynamic rendezvous)."""
    host: str
    pid: int
    run_id: str
    nodes: str
    """`--nnodes` as `MIN:MAX`."""
    round: int = 0
    """The how-manieth start of the ranks it has asked for or takes part in, from 1."""
    started: int = 0
    """The last round for which it has seen all nodes ready."""
    state: str = HERE
    """HERE; LEFT: it said goodbye; LOST: its connection ended, or it fell silent."""
    why: str = ""
    """Why it is not here; empty: it left at the end of the run."""
    told: Mapping[str, Any] = field(default_factory=dict)
    """What it lets the others know, by `Board.write(told=...)`."""

    @property
    def name(self) -> str:
        """The node in words."""
        if self.rank is None:
            return f"process {self.pid} on host {self.host}"
        return f"node {self.rank} on host {self.host}"

    @property
    def process(self) -> str:
        """The launcher in words."""
        return f"process {self.pid} on host {self.host}"

    @property
    def gone(self) -> bool:
        """Whether it went away before the end of the run."""
        return self.state == LOST or (self.state == LEFT and bool(self.why))

    def to_json(self) -> dict[str, Any]:
        """Its fields, as the constructor takes them."""
        return asdict(self)


class Board:
    """The nodes that have come, by number. May be used from any thread; never waits."""

    def __init__(self, own: Node) -> None:
        self._lock = threading.Lock()
        self._nodes: dict[int, Node] = {}
        self.own_number = own.number
        self.put(own)

    @property
    def own(self) -> Node:
        """This launcher's node."""
        return self.node(self.own_number)

    def node(self, number: int) -> Node:
        """The node of a number that has come."""
        with self._lock:
            return self._nodes[number]

    def all(self) -> list[Node]:
        """Every node, in the order of their coming."""
        with self._lock:
            return [self._nodes[number] for number in sorted(self._nodes)]

    def put(self, node: Node) -> None:
        """Adds a node, or replaces the one of the same number."""
        with self._lock:
            self._nodes[node.number] = node

    def write(self, number: int, changes: Mapping[str, Any]) -> None:
        """Changes fields of a node; the keys of `told` are added to those that are there."""
        with self._lock:
            node = self._nodes[number]
            told = {**node.told, **changes.get("told", {})}
            self._nodes[number] = replace(node, **{**changes, "told": told})

    def next_number(self) -> int:
        """The number of the node that comes next."""
        with self._lock:
            return max(self._nodes) + 1


def admit(board: Board, comer: Node) -> tuple[Node | None, Sequence[str]]:
    """Takes a launcher in, or says what is against it.

    Returns:
        The node with its number and no objection; or None and the objection: the name of the
        error's class and its three texts, for `objection_as_error`.
    """
    server = board.own
    fault = _fault(server, board.all(), comer)
    if fault:
        return None, fault
    admitted = replace(comer, number=board.next_number(), state=HERE, why="", told={})
    board.put(admitted)
    return admitted, ()


def _fault(server: Node, nodes: Iterable[Node], comer: Node) -> tuple[str, str, str, str] | None:
    if comer.run_id != server.run_id:
        return (
            "MasterUnreachableError",
            f"run {comer.run_id!r} (--rdzv-id)",
            f"the launcher there serves another run, {server.run_id!r}: {server.process}",
            "start all nodes with the same --rdzv-id, or this run with another port",
        )
    if comer.nodes != server.nodes:
        return (
            "WorldSizeError",
            f"--nnodes {nnodes(comer.nodes)} on {comer.host}",
            f"{server.name} was started with --nnodes {nnodes(server.nodes)}",
            "start all nodes with the same --nnodes",
        )
    twin = next((n for n in nodes if n.rank == comer.rank and n.state == HERE), None)
    if comer.rank is not None and twin is not None:
        return (
            "DuplicateRankError",
            f"--node-rank {comer.rank} on {comer.host} (process {comer.pid})",
            f"node {comer.rank} has already come: {twin.process}",
            "give each machine a --node-rank of its own; the first one goes on without this one",
        )
    return None


def nnodes(text: str) -> str:
    """`--nnodes` as a user writes it, from `MIN:MAX`."""
    fewest, most = text.split(":")
    return fewest if fewest == most else text


def objection_as_error(objection: Sequence[str]) -> JoinError:
    """The error that a launcher raises which was not taken in."""
    kind, was_set, found, do = objection
    return _KINDS.get(kind, JoinError)(was_set, found, do)


def latest(nodes: Iterable[Node]) -> list[Node]:
    """The nodes without those whose rank another launcher has taken over."""
    nodes = list(nodes)
    holders = {n.rank: n.number for n in nodes}
    return [n for n in nodes if n.rank is None or holders[n.rank] == n.number]


def here(nodes: Iterable[Node]) -> str:
    """Who is here, in words."""
    return ", ".join(node.name for node in nodes if node.state == HERE) or "nobody"


def absent(nodes: Sequence[Node], size: int, at_round: int) -> str:
    """Which of `size` numbered nodes are not ready for a round, in words; empty: all are."""
    ready = {n.rank for n in nodes if n.state == HERE and n.round >= at_round}
    missing = sorted(set(range(size)) - ready)
    if not missing:
        return ""
    came = {n.rank: n for n in latest(nodes)}
    texts = []
    for rank in missing:
        node = came.get(rank)
        if node is None:
            texts.append(f"node {rank} of {size} has not come")
        elif node.state == HERE:
            texts.append(f"{node.name} still ends its last start")
        else:
            texts.append(departure(node))
    return f"{'; '.join(texts)}; here: {here(nodes)}"


def departure(node: Node) -> str:
    """How a node went away, in words."""
    return f"{node.name} has left" + (f" ({node.why})" if node.why else "")


def announcer(say: Callable[[str], None]) -> Callable[[str], None]:
    """A function to be called again and again while waiting, with the reason.

    It says the reason after 5 s of waiting, and from then on whenever it changes and once a minute.
    """
    started = time.monotonic()
    said = ""
    due = started + _FIRST_WORD_S

    def announce(reason: str) -> None:
        nonlocal said, due
        now = time.monotonic()
        changed = bool(said) and reason != said
        if now >= due or changed:
            say(f"{reason} (waiting for {now - started:.0f} s)")
            said, due = reason, now + _NEXT_WORD_S

    return announce
