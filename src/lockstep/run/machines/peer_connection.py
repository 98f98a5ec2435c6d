"""Connects the launchers of a run, so that each of them knows the present state of all the others.

Every launcher except one (a *client*) has a connection to the *server*, the launcher that serves
the run's store. A *change* consists of new values for some fields of a `Node`. Each launcher only
changes its own node. The server passes changes on to all clients, or to the one they are meant for,
and every launcher keeps them in its table `Peers`.

Messages are JSON objects, each after its length in four bytes; a length of zero is a heartbeat. A
client begins with its own node. The server answers with the client's number and all nodes, or with
the error for which it refuses the client. From then on both send changes, and a heartbeat every
second. A side that is silent for ten seconds is lost.

Everything runs in the event loop of the `NetworkThread`.
"""

from __future__ import annotations

import asyncio
import json
import struct
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from lockstep.errors import DuplicateRankError, JoinError, MasterUnreachableError, WorldSizeError
from lockstep.run.machines.nodes import (
    HERE,
    LEFT,
    LOST,
    SERVER_NUMBER,
    Node,
    Peers,
    check_same_version,
    describe_departure,
    node_of,
)

CONNECTION_ENDED = "its connection ended"
HEARTBEAT_S = 1.0
MAX_MISSED_HEARTBEATS = 10
"""The number of heartbeats after which a silent side is lost. A network that loses all packets for
5 s must not end a run: by then TCP has doubled its pauses so often that it tries again only 8 s
after the last packet that arrived."""
MAX_MESSAGE_BYTES = 64 << 20
MAX_UNSENT_BYTES = 16 << 20
"""The number of unsent bytes at which a connection is aborted, since the peer does not read."""
HELLO_TIMEOUT_S = 10.0
FLUSH_TIMEOUT_S = 2.0
LENGTH_FORMAT = struct.Struct("!I")
HEARTBEAT_MESSAGE = LENGTH_FORMAT.pack(0)

FIELDS_A_CLIENT_MAY_CHANGE = {
    "rank",
    "requested_round",
    "last_started_round",
    "state",
    "why",
    "published",
}
ERROR_TYPES: dict[str, type[JoinError]] = {
    error_type.__name__: error_type
    for error_type in (DuplicateRankError, WorldSizeError, MasterUnreachableError)
}
"""The errors with which the server may refuse a client, by the name that is sent."""


def encode_message(message: Mapping[str, Any]) -> bytes:
    """Encodes a message for sending: its length, then JSON."""
    body = json.dumps(message).encode()
    return LENGTH_FORMAT.pack(len(body)) + body


class PeerConnection:
    """One connection between two launchers. Heartbeats show each side that the other still
    exists.
    """

    def __init__(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._missed_heartbeats = 0

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message, without waiting until it is sent."""
        self.send_encoded(encode_message(message))

    def send_encoded(self, message: bytes) -> None:
        """Sends a message that is already encoded, because it is sent to several launchers."""
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._writer.transport.abort()
        if not self._writer.is_closing():
            self._writer.write(message)

    async def receive(self) -> dict[str, Any]:
        """Waits for the next message. Skips heartbeats, and JSON values other than objects.

        Raises:
            EOFError: the connection ended.
            OSError: the connection broke.
            ValueError: the data is longer than a message may be, or is not JSON.
        """
        while True:
            length_bytes = await self._reader.readexactly(LENGTH_FORMAT.size)
            (length,) = LENGTH_FORMAT.unpack(length_bytes)
            if length > MAX_MESSAGE_BYTES:
                raise ValueError("a message that is too long")

            is_heartbeat = length == 0
            if is_heartbeat:
                self._missed_heartbeats = 0  # the other side exists
                continue

            message = json.loads(await self._reader.readexactly(length))
            self._missed_heartbeats = 0
            if isinstance(message, dict):  # anything else is ignored
                return message

    async def handle_messages(self, handle: Callable[[dict[str, Any]], None]) -> str:
        """Calls `handle` with each message, and sends heartbeats, until the connection ends.

        Returns:
            Why the connection ended, for a message to the user.
        """
        heartbeats = asyncio.create_task(self._send_heartbeats())
        try:
            while True:
                handle(await self.receive())
        except (OSError, EOFError, ValueError, TypeError, KeyError):
            # ValueError, TypeError and KeyError come from a message that is not valid: `receive`
            # cannot decode it, or `handle` does not find its fields. A launcher sends only valid
            # messages, so such a connection is given up.
            was_aborted_by_heartbeats = self._missed_heartbeats >= MAX_MISSED_HEARTBEATS
            if was_aborted_by_heartbeats:
                return f"no message from it for {MAX_MISSED_HEARTBEATS * HEARTBEAT_S:g} s"
            return CONNECTION_ENDED
        finally:
            heartbeats.cancel()

    async def _send_heartbeats(self) -> None:
        """Sends heartbeats, and aborts the connection if the other side is silent for too long.

        The silence is measured by the heartbeats sent here, and not in seconds, so that a launcher
        that was suspended for a while does not conclude that the others are lost.
        """
        while self._missed_heartbeats < MAX_MISSED_HEARTBEATS:
            self._writer.write(HEARTBEAT_MESSAGE)
            self._missed_heartbeats += 1
            await asyncio.sleep(HEARTBEAT_S)
        self._writer.transport.abort()

    async def close(self) -> None:
        """Sends what has not been sent yet, and ends the connection."""
        self._writer.close()
        with suppress(OSError):
            await asyncio.wait_for(self._writer.wait_closed(), FLUSH_TIMEOUT_S)


class PeerServer:
    """The server's side, which keeps the `Peers` of every client up to date.

    Args:
        peers: the server's own table of the nodes.
        say: function that shows a line to the user.
    """

    def __init__(self, peers: Peers, say: Callable[[str], None]) -> None:
        self._peers = peers
        self._say = say
        self._clients: dict[int, PeerConnection] = {}
        self._unsent_changes: list[dict[str, Any]] = []
        self._closing = False

    async def serve_client(self, reader: StreamReader, writer: StreamWriter, address: str) -> None:
        """Serves one client, which has proved that it has the token, until it leaves.

        Args:
            reader: stream from the client.
            writer: stream to the client.
            address: address from which the client has connected.
        """
        connection = PeerConnection(reader, writer)
        number = await self._admit(connection, address)
        if number is None:
            return

        nodes = [vars(node) for node in self._peers.all()]
        connection.send({"number": number, "nodes": nodes})

        # Tell the other clients about the new node. It is not among the clients yet, as it has just
        # received all nodes.
        fields_of_new_node = vars(self._peers.node(number))
        self.send(fields_of_new_node, of_node=number)

        self._clients[number] = connection
        reason = await connection.handle_messages(
            lambda message: self._handle_message(number, message)
        )
        del self._clients[number]

        has_said_goodbye = self._peers.node(number).state != HERE
        if not has_said_goodbye and not self._closing:
            self._change_everywhere(number, {"state": LOST, "why": reason})

    async def _admit(self, connection: PeerConnection, address: str) -> int | None:
        """Adds a client's node to the table, or tells the client why not.

        Args:
            connection: the connection to the client.
            address: the address of the client, for the message to the user.

        Returns:
            The number of the node; None if it is not admitted.
        """
        try:
            fields = await asyncio.wait_for(connection.receive(), HELLO_TIMEOUT_S)
            candidate = node_of(fields)
        except TypeError:  # these are no fields of a node
            return None
        except (OSError, EOFError, ValueError):  # it sent nothing in time, or no message
            return None

        try:
            return self._peers.admit(candidate).number
        except JoinError as error:
            self._say(
                f"{candidate.process_name} ({address}) was turned away: "
                f"{error.was_set}: {error.found}"
            )
            connection.send({"error": [type(error).__name__, error.was_set, error.found, error.do]})
            await connection.close()
            return None

    def _handle_message(self, number: int, message: Mapping[str, Any]) -> None:
        """Applies the changes that a client has made to its own node, or passes them on.

        Args:
            number: the number of the client's node.
            message: `changes`, the new values by field, and `to`, the number of the launcher that
                they are meant for, or None for all launchers.
        """
        changes = {}
        for name, value in message["changes"].items():
            if name in FIELDS_A_CLIENT_MAY_CHANGE:
                changes[name] = value

        # A client can only say that it leaves (LEFT). Whether it is lost is found out here, when
        # its connection ends.
        if changes.get("state") != LEFT:
            changes.pop("state", None)

        recipient = message.get("to")
        if recipient is None:
            self._change_everywhere(number, changes)
        elif recipient == self._peers.own_number:
            self._peers.write(number, changes)  # only in the server's table
        else:
            self.send(changes, of_node=number, to=recipient)  # only at that client

    def _change_everywhere(self, number: int, changes: Mapping[str, Any]) -> None:
        """Changes a client's node here and at all clients, and tells the user if the node has gone
        before the end of the run.

        A node is gone in one of two states: LEFT if it has said so itself, and LOST if its
        connection has ended without a word.
        """
        was_here = self._peers.node(number).state == HERE
        self._peers.write(number, changes)
        self.send(changes, of_node=number)

        node = self._peers.node(number)
        has_just_gone = was_here and node.gone_early
        if not has_just_gone:
            return

        # A node that has started its ranks leaves early because they failed. The report at the end
        # of the run tells the user about that.
        has_started_ranks = node.last_started_round > 0  # rounds are counted from 1
        if node.state == LEFT and has_started_ranks:
            return

        self._say(describe_departure(node))

    def send(self, changes: Mapping[str, Any], *, of_node: int, to: int | None = None) -> None:
        """Sends changes of a node to the clients.

        Args:
            changes: the new values by field.
            of_node: the number of the node that has changed.
            to: the number of the only client that receives them; None for all clients.
        """
        change = {"number": of_node, "changes": changes}
        if to is None:
            self._collect_for_all(change)
            return

        # Send the collected changes now, so that all changes arrive in the order in which they were
        # made.
        self._send_unsent()
        if to in self._clients:
            self._clients[to].send({"nodes": [change]})

    def _collect_for_all(self, change: dict[str, Any]) -> None:
        """Adds a change to those that are sent to all clients."""
        # Often many launchers come or change at once. So the changes are collected, and sent as one
        # message in the next iteration of the event loop.
        if not self._unsent_changes:
            asyncio.get_running_loop().call_soon(self._send_unsent)
        self._unsent_changes.append(change)

    def _send_unsent(self) -> None:
        """Sends the collected changes to all clients."""
        if self._unsent_changes:
            message = encode_message({"nodes": self._unsent_changes})
            self._unsent_changes = []
            for connection in self._clients.values():
                connection.send_encoded(message)

    async def close(self) -> None:
        """Sends what has not been sent yet, and ends all connections."""
        self._closing = True
        self._send_unsent()
        connections = list(self._clients.values())
        await asyncio.gather(*(connection.close() for connection in connections))


async def join_server(connection: PeerConnection, own: Node) -> Peers:
    """Asks the server to admit this launcher.

    Returns:
        The table of all nodes, including this launcher's.

    Raises:
        JoinError: the server refuses, see `Peers.admit`, or has another version of Lockstep.
        OSError, EOFError, ValueError: the connection ended, or the data is not an answer.
    """
    connection.send(vars(own))
    answer = await asyncio.wait_for(connection.receive(), HELLO_TIMEOUT_S)
    if "error" in answer:
        type_name, was_set, found, advice = answer["error"]
        error_type = ERROR_TYPES.get(type_name, JoinError)
        raise error_type(was_set, found, advice)

    own_number = answer["number"]  # the number that the server has given to this launcher
    fields_of_node = {fields["number"]: fields for fields in answer["nodes"]}
    check_same_version(own, node_of(fields_of_node[SERVER_NUMBER]))

    # The table begins with this launcher's node, which the server has completed by its number.
    own_fields = fields_of_node.pop(own_number)
    peers = Peers(node_of(own_fields))
    for number, fields in fields_of_node.items():
        peers.write(number, fields)

    return peers


async def receive_changes(
    connection: PeerConnection, peers: Peers, on_loss: Callable[[], None]
) -> None:
    """Applies the changes that the server sends, until the connection ends.

    Args:
        connection: the connection to the server.
        peers: this launcher's table of the nodes, which is updated.
        on_loss: function that is called when the connection has ended.
    """

    def apply_changes(message: Mapping[str, Any]) -> None:
        for change in message["nodes"]:
            # Changes of this launcher's own node come back from the server, and may be outdated by
            # then.
            is_own_node = change["number"] == peers.own_number
            if not is_own_node:
                peers.write(int(change["number"]), change["changes"])

    try:
        reason = await connection.handle_messages(apply_changes)
        if peers.server.state != LEFT:
            peers.write(SERVER_NUMBER, {"state": LOST, "why": reason})
    finally:
        on_loss()
