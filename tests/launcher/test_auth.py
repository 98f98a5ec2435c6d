from __future__ import annotations

import asyncio
import hmac
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from namespaces import listening

from lockstep.errors import JoinError
from lockstep.machine import network
from lockstep.machine.network import LOOPBACK, listening_socket
from lockstep.run.machines import auth, nodes, peer_connection
from lockstep.run.machines.network_thread import NetworkThread
from lockstep.run.machines.nodes import LEFT, LOST, Node, Peers
from lockstep.run.machines.run_token import Token, find_token

pytestmark = pytest.mark.netns

TOKEN = find_token({"LOCKSTEP_TOKEN": "a token of the tests"})
OTHER = find_token({"LOCKSTEP_TOKEN": "another token of them"})
MAGIC = b"lockstep auth 1\n"


class Echo:
    """In place of a store: sends back what comes."""

    def __init__(self, thread: NetworkThread) -> None:
        self.connections = 0
        self._server = thread.run(asyncio.start_server(self._echo, LOOPBACK, 0))
        self.port = self._server.sockets[0].getsockname()[1]

    async def _echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while data := await reader.read(1024):
            writer.write(data)
        writer.close()

    async def close(self) -> None:
        self._server.close()


class Proxy:
    """An auth proxy on loopback with an echo behind it."""

    def __init__(self, thread: NetworkThread, attend: auth.OnPeer | None = None) -> None:
        self.thread, self.said = thread, list[str]()
        self.echo = Echo(thread)
        self._proxy = auth.AuthProxy(
            TOKEN, self.echo.port, attend or self._attend, self.said.append
        )
        listener = listening_socket(LOOPBACK, 0)
        self.port = listener.getsockname()[1]
        thread.run(self._proxy.listen(listener))

    async def _attend(self, *_: object) -> None:
        self.said.append("attended")

    def connect(self) -> socket.socket:
        return socket.create_connection((LOOPBACK, self.port), timeout=600)

    def close(self) -> None:
        self.thread.run(self._proxy.close())
        self.thread.run(self.echo.close())


@pytest.fixture
def thread() -> Iterator[NetworkThread]:
    made = NetworkThread()
    yield made
    made.close()


@pytest.fixture
def door(thread: NetworkThread) -> Iterator[Proxy]:
    made = Proxy(thread)
    yield made
    made.close()


@contextmanager
def forwarder(
    thread: NetworkThread, port: int, token: Token
) -> Iterator[tuple[auth.Forwarder, int]]:
    made = auth.Forwarder(LOOPBACK, port, token)
    try:
        listener = listening_socket(LOOPBACK, 0)
        thread.run(made.listen(listener))
        yield made, listener.getsockname()[1]
    finally:
        thread.run(made.close())


def exchange(port: int, data: bytes) -> bytes:
    """Sends to a port and reads as much, or to the end."""
    with socket.create_connection((LOOPBACK, port), timeout=600) as link:
        link.sendall(data)
        return receive(link, len(data))


def receive(link: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        try:
            part = link.recv(size - len(found))
        except ConnectionResetError:
            break
        if not part:
            break
        found += part
    return found


def until(look: Callable[[], bool]) -> None:
    over = threading.Event()
    for _ in range(60_000):
        if look():
            return
        over.wait(0.01)
    pytest.fail("it has not come to pass")


def test_bytes_go_through_both_ways_whatever_their_number(
    thread: NetworkThread, door: Proxy
) -> None:
    with forwarder(thread, door.port, TOKEN) as (_, port):
        data = os.urandom(1 << 20)
        assert exchange(port, data) == data
        assert all(exchange(port, bytes([i])) == bytes([i]) for i in range(20))
    assert door.said == []
    assert door.echo.connections == 21


def test_everything_but_the_proxy_is_on_loopback(thread: NetworkThread, door: Proxy) -> None:
    with forwarder(thread, door.port, TOKEN) as (_, port):
        ours = {place for place in listening() if place[1] in (port, door.port, door.echo.port)}
    assert ours == {(LOOPBACK, p) for p in (port, door.port, door.echo.port)}


def test_a_wrong_token_does_not_pass_and_is_said_once(thread: NetworkThread, door: Proxy) -> None:
    for _ in range(3):
        with pytest.raises(auth.ConnectionFailed, match="token differs"):
            thread.run(auth.authenticate(LOOPBACK, door.port, OTHER, auth.TO_STORE))
    with forwarder(thread, door.port, OTHER) as (_, port):
        assert exchange(port, b"hello") == b""
    (line,) = door.said
    assert "127.0.0.1 was turned away: its token differs" in line
    assert door.echo.connections == 0


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"", "protocol"),
        (b"GET / HTTP/1.1\r\n\r\n", "protocol"),
        (random.Random(0).randbytes(1000), "protocol"),
        (MAGIC + bytes(64), "protocol"),
        (MAGIC + bytes(65), "token differs"),
    ],
    ids=["nothing", "http", "noise", "short", "no proof"],
)
def test_a_stranger_does_not_pass(door: Proxy, sent: bytes, why: str) -> None:
    with door.connect() as link:
        link.sendall(sent)
        link.shutdown(socket.SHUT_WR)
        answer = receive(link, 1000)
    assert answer[: len(MAGIC)] == MAGIC
    assert len(answer) == len(MAGIC) + 32 + (33 if why == "token differs" else 0)
    assert not any(answer[len(MAGIC) + 32 :])
    until(lambda: len(door.said) == 1)
    assert why in door.said[0]
    assert door.echo.connections == 0


def test_a_connection_that_says_nothing_is_closed(
    door: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "HANDSHAKE_TIMEOUT_S", 0.05)
    with door.connect() as link:
        assert len(receive(link, 1000)) == len(MAGIC) + 32
    until(lambda: len(door.said) == 1)


def test_the_proxy_refuses_more_handshakes_at_once_than_it_allows(
    door: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "MAX_HANDSHAKES_AT_ONCE", 1)
    with door.connect() as first:
        assert len(receive(first, len(MAGIC) + 32)) == len(MAGIC) + 32
        with door.connect() as second:
            assert receive(second, 1) == b""


def test_a_replayed_handshake_does_not_open_the_proxy(door: Proxy) -> None:
    def respond(link: socket.socket, nonce: bytes) -> bytes:
        theirs = receive(link, len(MAGIC) + 32)[len(MAGIC) :]
        proof = hmac.digest(TOKEN.key, b"client" + theirs + nonce + auth.TO_STORE, "sha256")
        return MAGIC + nonce + auth.TO_STORE + proof

    nonce = bytes(32)
    with door.connect() as link:
        message = respond(link, nonce)
        link.sendall(message)
        assert receive(link, 33)[:1] == b"\1"
    with door.connect() as link:
        receive(link, len(MAGIC) + 32)
        link.sendall(message)
        assert receive(link, 33) == bytes(33)
    with door.connect() as link:  # nor does the proxy's own proof
        theirs = receive(link, len(MAGIC) + 32)[len(MAGIC) :]
        proof = hmac.digest(TOKEN.key, b"server" + theirs + nonce + auth.TO_STORE, "sha256")
        link.sendall(MAGIC + nonce + auth.TO_STORE + proof)
        assert receive(link, 33) == bytes(33)


def test_a_proxy_without_the_token_is_not_believed(thread: NetworkThread) -> None:
    with socket.create_server((LOOPBACK, 0)) as server:

        def pretend() -> None:
            link, _ = server.accept()
            with link:
                link.sendall(MAGIC + bytes(32))
                receive(link, len(MAGIC) + 65)
                link.sendall(b"\1" + bytes(32))

        pretender = threading.Thread(target=pretend)
        pretender.start()
        with pytest.raises(auth.ConnectionFailed, match="token differs"):
            thread.run(auth.authenticate(*server.getsockname(), TOKEN, auth.TO_LAUNCHER))
        pretender.join()


def test_a_failed_connection_says_what_answers_at_the_port(
    thread: NetworkThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def knock(port: int) -> str:
        with pytest.raises(auth.ConnectionFailed) as hindrance:
            thread.run(auth.authenticate(LOOPBACK, port, TOKEN, auth.TO_LAUNCHER))
        return str(hindrance.value)

    monkeypatch.setattr(auth, "HANDSHAKE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(auth, "CONNECT_TIMEOUT_S", 0.2)
    with socket.create_server((LOOPBACK, 0)) as silent:
        assert knock(silent.getsockname()[1]) == auth.NOT_A_LAUNCHER
        port = silent.getsockname()[1]
    assert knock(port) == network.REFUSED
    with socket.create_server((LOOPBACK, 0)) as server:

        def cut() -> None:
            server.accept()[0].close()

        cutter = threading.Thread(target=cut)
        cutter.start()
        assert knock(server.getsockname()[1]) == network.CONNECTION_CUT
        cutter.join()

    async def lost(*_: object) -> None:
        await asyncio.sleep(30)  # as packets that a firewall drops

    monkeypatch.setattr(asyncio, "open_connection", lost)
    assert knock(port) == network.NO_ANSWER


def test_both_sides_of_a_forwarded_connection_end_together(
    thread: NetworkThread, door: Proxy
) -> None:
    with (
        forwarder(thread, door.port, TOKEN) as (carrier, port),
        socket.create_connection((LOOPBACK, port), timeout=600) as link,
    ):
        link.sendall(b"x")
        assert receive(link, 1) == b"x"
        thread.call_soon(carrier.abort)
        assert receive(link, 1) == b""
        assert exchange(port, b"x") == b"", "nobody should wait for a proxy out of reach"


def node(rank: int) -> Node:
    return Node(number=0, rank=rank, host="h", pid=rank, run_id="r", nodes="2:2")


class Talk:
    """A server behind an auth proxy, and one client."""

    def __init__(self, thread: NetworkThread) -> None:
        self.thread, self.peers = thread, Peers(node(0))
        self.said: list[str] = []
        self.server = peer_connection.PeerServer(self.peers, self.said.append)
        self.door = Proxy(thread, self.server.serve_client)
        self.peers.send = lambda changes, to: thread.call_soon(
            lambda: self.server.send(changes, of_node=0, to=to)
        )
        self.connections: list[peer_connection.PeerConnection] = []
        self.theirs, self.losses = self.join(1), 0
        self.connection = self.connections[0]

    def join(self, rank: int) -> Peers:
        """One more client."""
        streams = self.thread.run(
            auth.authenticate(LOOPBACK, self.door.port, TOKEN, auth.TO_LAUNCHER)
        )
        connection = peer_connection.PeerConnection(streams.reader, streams.writer)
        self.connections.append(connection)
        theirs = self.thread.run(peer_connection.join_server(connection, node(rank)))
        theirs.send = lambda changes, to: self.thread.call_soon(
            lambda: connection.send({"changes": changes, "to": to})
        )
        return theirs

    def _lose(self) -> None:
        self.losses += 1

    def listen(self) -> None:
        self.thread.submit(
            peer_connection.receive_changes(self.connection, self.theirs, self._lose)
        )

    def close(self) -> None:
        for connection in self.connections:
            self.thread.run(connection.close())
        self.door.close()


@pytest.fixture
def talk(thread: NetworkThread) -> Iterator[Talk]:
    made = Talk(thread)
    yield made
    made.close()


def test_a_change_of_one_node_reaches_the_other(talk: Talk) -> None:
    talk.listen()
    assert [n.rank for n in talk.theirs.all()] == [n.rank for n in talk.peers.all()] == [0, 1]
    for side in (talk.peers, talk.theirs):
        side.update_own(requested_round=3, published={"a": list(range(side.own_number + 1))})
    until(lambda: talk.peers.all() == talk.theirs.all())
    assert [n.published for n in talk.peers.all()] == [{"a": [0]}, {"a": [0, 1]}]


def test_what_is_meant_for_one_reaches_no_other(talk: Talk) -> None:
    talk.listen()
    second = talk.join(2)
    second.send({"published": {"a": 2}}, 1)  # a client to a client
    second.send({"published": {"b": 2}}, 0)
    talk.peers.send({"published": {"c": 0}}, 1)
    second.update_own(requested_round=1)  # comes last, as the connections keep the order
    until(lambda: talk.theirs.all()[-1].requested_round == 1)
    assert [n.published for n in talk.theirs.all()] == [{"c": 0}, {}, {"a": 2}]
    assert [n.published for n in talk.peers.all()] == [{}, {}, {"b": 2}]


def test_changes_that_come_together_are_sent_together(talk: Talk) -> None:
    talk.thread.call_soon(
        lambda: [talk.server.send({"requested_round": number}, of_node=0) for number in range(5)]
    )
    _coming, message = (talk.thread.run(talk.connection.receive()) for _ in range(2))
    assert [node["changes"]["requested_round"] for node in message["nodes"]] == list(range(5))


def test_a_client_writes_only_what_is_its_own(talk: Talk) -> None:
    changes = {"state": "lost", "host": "x", "requested_round": 1}
    talk.thread.call_soon(lambda: talk.connection.send({"changes": changes}))
    until(lambda: talk.peers.node(1).requested_round == 1)
    assert (talk.peers.node(1).state, talk.peers.node(1).host) == ("here", "h")


@pytest.mark.parametrize("started", [0, 1])
@pytest.mark.parametrize("why", ["", "rank 3 failed"])
def test_a_node_that_says_why_it_leaves_is_not_lost(talk: Talk, why: str, started: int) -> None:
    talk.listen()
    talk.theirs.update_own(last_started_round=started)
    talk.theirs.update_own(state=LEFT, why=why)
    talk.theirs.update_own(state=LEFT)
    talk.thread.run(talk.connection.close())
    until(lambda: talk.peers.node(1).state == LEFT)
    assert talk.peers.node(1).why == why
    assert talk.said == ([f"node 1 on host h has left ({why})"] if why and not started else [])


def test_a_launcher_of_a_newer_version_is_told_why_it_is_refused(talk: Talk) -> None:
    """Also if its node has fields that this version does not know."""
    streams = talk.thread.run(auth.authenticate(LOOPBACK, talk.door.port, TOKEN, auth.TO_LAUNCHER))
    connection = peer_connection.PeerConnection(streams.reader, streams.writer)
    talk.connections.append(connection)
    connection.send({**vars(node(2)), "version": "9.0", "new": 1})
    answer = talk.thread.run(connection.receive())
    error_type, was_set, found, advice = answer["error"]
    assert error_type == "JoinError"
    assert was_set == "Lockstep 9.0 on h"
    assert found == "node 0 on host h has Lockstep (unknown)"
    assert advice == "install the same version of Lockstep on all machines"
    assert len(talk.peers.all()) == 2
    until(lambda: len(talk.said) == 1)


def test_a_launcher_leaves_a_server_of_another_version(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "check_same_version", lambda joining, server: None)
    talk.peers.write(0, {"version": "9.0"})
    with pytest.raises(JoinError, match=r"node 0 on host h has Lockstep 9\.0"):
        talk.join(2)


def test_the_servers_goodbye_reaches_the_client(talk: Talk) -> None:
    talk.listen()
    talk.peers.update_own(state=LEFT, why="interrupted")
    talk.thread.run(talk.server.close())
    until(lambda: talk.losses == 1)
    assert (talk.theirs.node(0).state, talk.theirs.node(0).why) == (LEFT, "interrupted")
    assert talk.said == []


def test_a_node_that_sends_no_heartbeats_is_lost(
    monkeypatch: pytest.MonkeyPatch, thread: NetworkThread
) -> None:
    monkeypatch.setattr(peer_connection, "HEARTBEAT_S", 0.02)
    talk = Talk(thread)  # its client sends no heartbeats
    until(lambda: talk.peers.node(1).state == LOST)
    assert "no message" in talk.peers.node(1).why
    assert len(talk.said) == 1
    talk.close()


def test_nodes_that_send_heartbeats_are_not_lost(
    monkeypatch: pytest.MonkeyPatch, thread: NetworkThread
) -> None:
    monkeypatch.setattr(peer_connection, "HEARTBEAT_S", 0.05)
    talk = Talk(thread)
    talk.listen()
    threading.Event().wait(1.0)  # 20 heartbeats, of which 7 missing ones would be a loss
    assert [n.state for n in talk.peers.all()] == ["here", "here"]
    assert [n.state for n in talk.theirs.all()] == ["here", "here"]
    talk.close()
