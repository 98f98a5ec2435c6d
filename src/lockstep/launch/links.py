"""What launchers tell each other, over one connection from each to the one that serves.

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
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from lockstep.launch.nodes import LEFT, LOST, Board, Node, admit, departure

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
