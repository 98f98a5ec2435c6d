"""The nodes of a run as every launcher sees them, and what launchers tell each other.

Each launcher keeps a `Peers`: one `Node` for each launcher that has come. Each changes its own node
alone; what it changes is sent to the others, over one connection from each to the one that serves.

Messages are JSON objects, each behind its length in four bytes. A client sends itself (a `Node`);
the server answers with the client's number and all nodes, or with the error for which it does not
take it in. From then on both send changes of nodes (a client: of itself; the server: of itself and
of all others), and a heartbeat every second; who is not heard for ten of them is lost. A change may
be meant for one node alone.

The connections belong to the event loop of `auth.NetworkThread`.
"""

from __future__ import annotations

import asyncio
import json
import struct
import threading
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.errors import DuplicateRankError, JoinError, MasterUnreachableError, WorldSizeError

HERE, LEFT, LOST = "here", "left", "lost"
ENDED = "its connection ended"
HEARTBEAT_S = 1.0
MISSED_HEARTBEATS = 10
"""After 5 s in which all packets are lost, TCP has doubled its pauses so far that it tries again up
to 8 s after the last word."""
_FIRST_WORD_S, _NEXT_WORD_S = 5.0, 60.0
_MAX_MESSAGE = 64 << 20
_MAX_UNSENT = 16 << 20
"""Bytes that may wait for a peer that does not read."""
_HELLO_S = 10.0
_FLUSH_S = 2.0
_LENGTH = struct.Struct("!I")
_CLIENTS_OWN = {"rank", "round", "started", "state", "why", "published"}
_ERRORS: dict[str, type[JoinError]] = {
    kind.__name__: kind for kind in (DuplicateRankError, WorldSizeError, MasterUnreachableError)
}


@dataclass(frozen=True, kw_only=True)
class Node:
    """One launcher; plain values, so that it can be sent as JSON."""

    number: int = -1
    """Counts the launchers as they come; the one that serves is 0."""
    rank: int | None
    """Of the node; None: not yet known (dynamic rendezvous)."""
    host: str
    pid: int
    run_id: str
    nodes: str
    """`--nnodes` as `MIN:MAX`."""
    round: int = 0
    """The start of the ranks that it has asked for or takes part in, counted from 1."""
    started: int = 0
    """The last round for which it has seen all nodes ready."""
    state: str = HERE
    """HERE; LEFT: it said so; LOST: its connection ended, or it fell silent."""
    why: str = ""
    """Why it is not here; empty: it left at the end of the run."""
    published: Mapping[str, Any] = field(default_factory=dict)
    """What it lets the others know, see `Rendezvous.publish`."""
    decided: Mapping[str, Any] = field(default_factory=lambda: {"round": 0, "nodes": []})
    """By the launcher that serves, where machines may come and go: the numbers of those that take
    part in a round, in the order of their ranks."""

    @property
    def name(self) -> str:
        """The node in words."""
        return self.process if self.rank is None else f"node {self.rank} on host {self.host}"

    @property
    def process(self) -> str:
        """The launcher in words."""
        return f"process {self.pid} on host {self.host}"

    @property
    def gone(self) -> bool:
        """Whether it went away before the end of the run."""
        return self.state == LOST or (self.state == LEFT and bool(self.why))


class Peers:
    """The nodes that have come, by number. May be used from any thread; never waits."""

    def __init__(self, own: Node) -> None:
        self._lock = threading.Lock()
        self._nodes = {own.number: own}
        self.own_number = own.number
        self.send: Callable[[Mapping[str, Any], int | None], object] = lambda changes, to: None
        """Sends changes of the own node to the node of a number, with None to all others."""

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

    def write(self, number: int, changes: Mapping[str, Any]) -> None:
        """Changes fields of a node; the keys of `published` are added to those that are there.

        Of a node that is not known yet these are all fields.
        """
        with self._lock:
            node = self._nodes.get(number) or Node(**changes)
            published = {**node.published, **changes.get("published", {})}
            self._nodes[number] = replace(node, **{**changes, "published": published})

    def update(self, **changes: Any) -> None:
        """Changes fields of the own node, here and at all other launchers."""
        self.write(self.own_number, changes)
        self.send(changes, None)

    def admit(self, comer: Node) -> Node:
        """Takes a launcher in, and gives it its number.

        Raises:
            JoinError: it belongs to another run, has another `--nnodes`, or its rank is taken.
        """
        server, nodes = self.own, self.all()
        if comer.run_id != server.run_id:
            raise MasterUnreachableError(
                f"run {comer.run_id!r} (--rdzv-id)",
                f"the launcher there serves another run, {server.run_id!r}: {server.process}",
                "start all nodes with the same --rdzv-id, or this run with another port",
            )
        if comer.nodes != server.nodes:
            raise WorldSizeError(
                f"--nnodes {nnodes(comer.nodes)} on {comer.host}",
                f"{server.name} was started with --nnodes {nnodes(server.nodes)}",
                "start all nodes with the same --nnodes",
            )
        twin = next((n for n in nodes if n.rank == comer.rank and n.state == HERE), None)
        if comer.rank is not None and twin is not None:
            raise DuplicateRankError(
                f"--node-rank {comer.rank} on {comer.host} (process {comer.pid})",
                f"node {comer.rank} has already come: {twin.process}",
                "give each machine a --node-rank of its own; the first one goes on without it",
            )
        number = len(nodes)
        admitted = replace(comer, number=number, state=HERE, why="", published={})
        self.write(admitted.number, vars(admitted))
        return admitted


# Nodes in words


def nnodes(text: str) -> str:
    """`--nnodes` as a user writes it, from `MIN:MAX`."""
    fewest, most = text.split(":")
    return fewest if fewest == most else text


def latest(nodes: Iterable[Node]) -> list[Node]:
    """The nodes without those whose rank another launcher has taken over."""
    nodes = list(nodes)
    in_turn = sorted(nodes, key=lambda n: (n.state == HERE, n.number))
    holders = {n.rank: n.number for n in in_turn}
    return [n for n in nodes if n.rank is None or holders[n.rank] == n.number]


def here(nodes: Iterable[Node]) -> str:
    """Who is here, in words."""
    return ", ".join(node.name for node in nodes if node.state == HERE) or "nobody"


def absent(nodes: Sequence[Node], size: int, at_round: int) -> str:
    """Which of `size` numbered nodes are not ready for a round, in words; empty: all are."""
    came = {n.rank: n for n in latest(nodes)}
    texts = []
    for rank in range(size):
        node = came.get(rank)
        if node is None:
            texts.append(f"node {rank} of {size} has not come")
        elif node.state != HERE:
            texts.append(departure(node))
        elif node.round < at_round:
            texts.append(f"{node.name} still ends its last start")
    return f"{'; '.join(texts)}; here: {here(nodes)}" if texts else ""


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
        if now >= due or (said and reason != said):
            say(f"{reason} (waiting for {now - started:.0f} s)")
            said, due = reason, now + _NEXT_WORD_S

    return announce


# The connections between launchers


def packed(message: Mapping[str, Any]) -> bytes:
    """A message as it is sent."""
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body


class Connection:
    """One connection, by which both sides can tell that the other is there."""

    def __init__(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._missed = 0

    def send(self, message: Mapping[str, Any]) -> None:
        """Hands a message over; does not wait for it to be sent."""
        self.send_packed(packed(message))

    def send_packed(self, message: bytes) -> None:
        """The same, of one that is for several connections."""
        if self._writer.transport.get_write_buffer_size() > _MAX_UNSENT:
            self._writer.transport.abort()
        if not self._writer.is_closing():
            self._writer.write(message)

    async def receive(self) -> dict[str, Any]:
        """The next message that is not a heartbeat.

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
            self._missed = 0
            if isinstance(message, dict):
                return message

    async def handle_all(self, handle: Callable[[dict[str, Any]], None]) -> str:
        """Hands every message over and sends heartbeats, until the connection ends.

        Returns:
            Why it ended, in words.
        """
        heartbeats = asyncio.create_task(self._send_heartbeats())
        try:
            while True:
                handle(await self.receive())
        except (OSError, EOFError, ValueError, TypeError, KeyError):
            if self._missed < MISSED_HEARTBEATS:
                return ENDED
            return f"nothing heard from it for {MISSED_HEARTBEATS * HEARTBEAT_S:g} s"
        finally:
            heartbeats.cancel()

    async def _send_heartbeats(self) -> None:
        """Breaks the connection when the other side is silent for too long.

        Heartbeats are counted, not seconds, so that a launcher that was itself stopped for a while
        does not take the others for lost.
        """
        while self._missed < MISSED_HEARTBEATS:
            self._writer.write(_LENGTH.pack(0))
            self._missed += 1
            await asyncio.sleep(HEARTBEAT_S)
        self._writer.transport.abort()

    async def close(self) -> None:
        """Ends the connection after all that was handed over has been sent."""
        self._writer.close()
        with suppress(OSError):
            await asyncio.wait_for(self._writer.wait_closed(), _FLUSH_S)


class Server:
    """The side that serves: keeps the peers of every client equal to its own."""

    def __init__(self, peers: Peers, say: Callable[[str], None]) -> None:
        self._peers, self._say = peers, say
        self._clients: dict[int, Connection] = {}
        self._unsent: list[dict[str, Any]] = []
        self._closing = False

    async def attend(self, reader: StreamReader, writer: StreamWriter, address: str) -> None:
        """Talks with one client until it leaves; it has shown that it has the token."""
        connection = Connection(reader, writer)
        try:
            comer = Node(**await asyncio.wait_for(connection.receive(), _HELLO_S))
        except (OSError, EOFError, ValueError, TypeError):
            return
        try:
            number = self._peers.admit(comer).number
        except JoinError as error:
            self._say(
                f"{comer.process} ({address}) was turned away: {error.was_set}: {error.found}"
            )
            texts = [type(error).__name__, error.was_set, error.found, error.do]
            connection.send({"error": texts})
            await connection.close()
            return
        nodes = [vars(node) for node in self._peers.all()]
        connection.send({"number": number, "nodes": nodes})
        self.send(vars(self._peers.node(number)), number)
        self._clients[number] = connection
        ended = await connection.handle_all(lambda message: self._handle(number, message))
        del self._clients[number]
        if self._peers.node(number).state == HERE and not self._closing:
            self._change(number, {"state": LOST, "why": ended})

    def _handle(self, number: int, message: Mapping[str, Any]) -> None:
        own = {name: value for name, value in message["changes"].items() if name in _CLIENTS_OWN}
        if own.get("state") != LEFT:
            own.pop("state", None)
        to = message.get("to")
        if to is None:
            self._change(number, own)
        elif to == self._peers.own_number:
            self._peers.write(number, own)
        else:
            self.send(own, number, to)

    def _change(self, number: int, changes: Mapping[str, Any]) -> None:
        before = self._peers.node(number)
        self._peers.write(number, changes)
        self.send(changes, number)
        node = self._peers.node(number)
        # One that leaves when its ranks have started has its part in the verdict that ends the run.
        if node.gone and before.state == HERE and (node.state == LOST or not node.started):
            self._say(departure(node))

    def send(self, changes: Mapping[str, Any], number: int = 0, to: int | None = None) -> None:
        """Sends changes of a node, else of the own one, to the others or one; see `Peers.send`."""
        change = {"number": number, "changes": changes}
        if to is not None:
            self._send_all()
            if to in self._clients:
                self._clients[to].send({"nodes": [change]})
            return
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send_all)
        self._unsent.append(change)

    def _send_all(self) -> None:
        """Sends what has changed since, in one message: many launchers come or change at once."""
        if self._unsent:
            message = packed({"nodes": self._unsent})
            self._unsent = []
            for connection in self._clients.values():
                connection.send_packed(message)

    async def close(self) -> None:
        """Ends all connections after all that was handed over has been sent."""
        self._closing = True
        self._send_all()
        await asyncio.gather(*(connection.close() for connection in [*self._clients.values()]))


async def introduce(connection: Connection, own: Node) -> Peers:
    """Asks the server to be taken in.

    Raises:
        JoinError: it refuses; see `Peers.admit`.
        OSError, EOFError, ValueError: the connection ended, or what came is not an answer.
    """
    connection.send(vars(own))
    answer = await asyncio.wait_for(connection.receive(), _HELLO_S)
    if "error" in answer:
        kind, was_set, found, do = answer["error"]
        raise _ERRORS.get(kind, JoinError)(was_set, found, do)
    nodes = {node["number"]: node for node in answer["nodes"]}
    peers = Peers(Node(**nodes[answer["number"]]))
    for number, node in nodes.items():
        peers.write(number, node)
    return peers


async def listen(connection: Connection, peers: Peers, on_loss: Callable[[], None]) -> None:
    """Takes over what the server says, until it is gone."""

    def handle(message: Mapping[str, Any]) -> None:
        for node in message["nodes"]:
            if node["number"] != peers.own_number:
                peers.write(int(node["number"]), node["changes"])

    try:
        ended = await connection.handle_all(handle)
        if peers.node(0).state != LEFT:
            peers.write(0, {"state": LOST, "why": ended})
    finally:
        on_loss()
