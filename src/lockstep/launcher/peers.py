"""The nodes of a run as every launcher sees them, and what is wrong with them, in words.

Each launcher keeps a `Board`: one `Node` for each launcher that has come. Each writes its own node
alone; `links` carries what is written to the boards of the others.

What launchers tell each other, over one connection from each to the one that serves.

Messages are JSON objects, each behind its length in four bytes. A visitor sends itself (a `Node`);
the server answers with the visitor's number and all nodes, or with its objection. From then on both
send changes of nodes (a visitor: of itself; the server: of itself and of all others), and a beat
every second; who is not heard for seven beats is lost. A goodbye says why. A visitor may also ask
for the store to be freed of what earlier ranks have left there (`handlers.forget_ranks`).

Everything here runs in the thread of `gate`'s event loop.
"""

from __future__ import annotations

import asyncio
import json
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
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


BEAT_S = 1.0
SILENT_BEATS = 7
_MAX_MESSAGE = 64 << 20
_MAX_WAITING = 16 << 20
"""Bytes that may wait for a visitor who does not read."""
_HELLO_S = 10.0
_GOODBYE_S = 2.0
_LENGTH = struct.Struct("!I")
_VISITORS_OWN = {"rank", "round", "started", "told"}

ENDED, SILENT = "its connection ended", f"nothing heard from it for {SILENT_BEATS * BEAT_S:g} s"


class Link:
    """One connection, by which both sides can tell that the other is there."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._unheard = 0
        self.silent = False

    def send(self, message: Mapping[str, Any]) -> None:
        """Hands a message over; does not wait for it to be sent."""
        if self._writer.transport.get_write_buffer_size() > _MAX_WAITING:
            self._writer.transport.abort()
        if self._writer.is_closing():
            return
        body = json.dumps(message).encode()
        self._writer.write(_LENGTH.pack(len(body)) + body)

    async def receive(self) -> dict[str, Any]:
        """The next message that is not a beat.

        Raises:
            EOFError: the connection ended.
            OSError: it broke.
            ValueError: what came is not a message.
        """
        while True:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > _MAX_MESSAGE:
                raise ValueError("a message that is too long")
            message = json.loads(await self._reader.readexactly(length)) if length else None
            self._unheard = 0
            if isinstance(message, dict):
                return message

    async def beat(self) -> None:
        """Sends beats; breaks the connection when the other side is silent for too long.

        Beats are counted, not seconds, so that a launcher that was itself stopped for a while does
        not take the others for lost.
        """
        while self._unheard < SILENT_BEATS:
            self._writer.write(_LENGTH.pack(0))
            self._unheard += 1
            await asyncio.sleep(BEAT_S)
        self.silent = True
        self._writer.transport.abort()

    async def close(self) -> None:
        """Ends the connection after all that was handed over has been sent."""
        self._writer.close()
        with suppress(OSError):
            await asyncio.wait_for(self._writer.wait_closed(), _GOODBYE_S)


class Hub:
    """The serving side: keeps every board equal to its own."""

    def __init__(
        self, board: Board, say: Callable[[str], None], forget: Callable[[str], None]
    ) -> None:
        self._board, self._say, self._forget = board, say, forget
        self._links: dict[int, Link] = {}
        self._closing = False

    async def attend(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str
    ) -> None:
        """Talks with one visitor until it leaves; the connection has passed the gate."""
        link = Link(reader, writer)
        try:
            comer = Node(**await asyncio.wait_for(link.receive(), _HELLO_S))
        except (OSError, EOFError, ValueError, TypeError):
            return
        node, objection = admit(self._board, comer)
        if node is None:
            self._say(f"{comer.process} ({peer}) was turned away: {objection[1]}: {objection[2]}")
            link.send({"objection": list(objection)})
            await link.close()
            return
        everybody = [n.to_json() for n in self._board.all()]
        link.send({"number": node.number, "nodes": everybody})
        self._spread({"node": node.to_json()})
        self._links[node.number] = link
        beating = asyncio.create_task(link.beat())
        try:
            await self._listen(link, node.number)
        finally:
            beating.cancel()
            del self._links[node.number]

    async def _listen(self, link: Link, number: int) -> None:
        while True:
            try:
                message = await link.receive()
            except (OSError, EOFError, ValueError):
                if not self._closing:
                    self._depart(number, LOST, SILENT if link.silent else ENDED)
                return
            if "goodbye" in message:
                self._depart(number, LEFT, str(message["goodbye"]))
                return
            if "forget" in message:
                self._forget(str(message["forget"]))
            changes = message.get("changes", {})
            self._change(number, {k: v for k, v in changes.items() if k in _VISITORS_OWN})

    def _depart(self, number: int, state: str, why: str) -> None:
        self._change(number, {"state": state, "why": why})
        node = self._board.node(number)
        if node.gone:
            self._say(departure(node))

    def _change(self, number: int, changes: Mapping[str, Any]) -> None:
        self._board.write(number, changes)
        self._spread({"number": number, "changes": changes}, but=number)

    def publish(self, changes: Mapping[str, Any]) -> None:
        """Sends changes of the own node, which are on the own board already."""
        self._spread({"number": self._board.own_number, "changes": changes})

    def _spread(self, message: Mapping[str, Any], but: int = -1) -> None:
        for number, link in list(self._links.items()):
            if number != but:
                link.send(message)

    async def close(self, why: str) -> None:
        """Says goodbye to all."""
        self._closing = True
        self.publish({"state": LEFT, "why": why})
        await asyncio.gather(*(link.close() for link in list(self._links.values())))


class Visitor:
    """The other side: writes what the server says on the own board."""

    def __init__(self, link: Link, board: Board, on_loss: Callable[[], None]) -> None:
        self._link, self._board, self._on_loss = link, board, on_loss

    async def begin(self) -> None:
        """Listens from now on, until the server is gone."""
        self._listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        beating = asyncio.create_task(self._link.beat())
        try:
            while True:
                self._take(await self._link.receive())
        except (OSError, EOFError, ValueError, TypeError, KeyError):
            server = self._board.all()[0]
            if server.state != LEFT:
                why = SILENT if self._link.silent else ENDED
                self._board.write(server.number, {"state": LOST, "why": why})
        finally:
            beating.cancel()
            self._on_loss()

    def _take(self, message: Mapping[str, Any]) -> None:
        if "node" in message:
            self._board.put(Node(**message["node"]))
        elif "changes" in message:
            self._board.write(int(message["number"]), message["changes"])

    def publish(self, changes: Mapping[str, Any]) -> None:
        """Sends changes of the own node, which are on the own board already."""
        self._link.send({"changes": changes})

    def forget(self, key: str) -> None:
        """Asks for `handlers.forget_ranks`, and for a key to be set after it."""
        self._link.send({"forget": key})

    async def close(self, why: str) -> None:
        """Says goodbye."""
        self._link.send({"goodbye": why})
        await self._link.close()


async def introduce(link: Link, own: Node) -> tuple[Board | None, list[str]]:
    """Asks the server to be taken in.

    Returns:
        The board, or None and the server's objection (see `nodes.admit`).
    """
    link.send(own.to_json())
    answer = await asyncio.wait_for(link.receive(), _HELLO_S)
    if "objection" in answer:
        return None, list(answer["objection"])
    nodes = {n["number"]: Node(**n) for n in answer["nodes"]}
    board = Board(nodes[answer["number"]])
    for node in nodes.values():
        board.put(node)
    return board, []
