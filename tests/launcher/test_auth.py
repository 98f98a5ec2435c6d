from __future__ import annotations

import asyncio
import hmac
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from namespaces import listening

from lockstep.distributed import network
from lockstep.distributed.network import LOOPBACK, listening_socket
from lockstep.launcher import auth, peers
from lockstep.launcher.auth import Token, find_token
from lockstep.launcher.peers import LEFT, LOST, Board, Node

TOKEN = find_token({"LOCKSTEP_TOKEN": "a token of the tests"})
OTHER = find_token({"LOCKSTEP_TOKEN": "another token of them"})
MAGIC = 16


class Echo:
    """In place of a store: sends back what comes."""

    def __init__(self, thread: auth.Thread) -> None:
        self.connections = 0
        self._server = thread.wait(asyncio.start_server(self._echo, LOOPBACK, 0))
        self.port = self._server.sockets[0].getsockname()[1]

    async def _echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while data := await reader.read(1024):
            writer.write(data)
        writer.close()

    async def close(self) -> None:
        self._server.close()


class Gate:
    """A gate on loopback with an echo behind it."""

    def __init__(self, thread: auth.Thread, attend: auth.Attend | None = None) -> None:
        self.thread, self.said = thread, list[str]()
        self.echo = Echo(thread)
        self._gate = auth.Gate(TOKEN, self.echo.port, attend or self._attend, self.said.append)
        listener = listening_socket(LOOPBACK, 0)
        self.port = listener.getsockname()[1]
        thread.wait(self._gate.listen(listener))

    async def _attend(self, *_: object) -> None:
        self.said.append("attended")

    def connect(self) -> socket.socket:
        return socket.create_connection((LOOPBACK, self.port), timeout=30)

    def close(self) -> None:
        self.thread.wait(self._gate.close())
        self.thread.wait(self.echo.close())


@pytest.fixture
def thread() -> Iterator[auth.Thread]:
    made = auth.Thread()
    yield made
    made.close()


@pytest.fixture
def door(thread: auth.Thread) -> Iterator[Gate]:
    made = Gate(thread)
    yield made
    made.close()


@contextmanager
def forwarder(thread: auth.Thread, port: int, token: Token) -> Iterator[tuple[auth.Forwarder, int]]:
    made = auth.Forwarder(LOOPBACK, port, token)
    try:
        yield made, thread.wait(made.listen())
    finally:
        thread.wait(made.close())


def exchange(port: int, data: bytes) -> bytes:
    """Sends to a port and reads as much, or to the end."""
    with socket.create_connection((LOOPBACK, port), timeout=30) as link:
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
    for _ in range(3000):
        if look():
            return
        over.wait(0.01)
    pytest.fail("it has not come to pass")


def test_bytes_go_through_both_ways_whatever_their_number(thread: auth.Thread, door: Gate) -> None:
    with forwarder(thread, door.port, TOKEN) as (_, port):
        data = os.urandom(1 << 20)
        assert exchange(port, data) == data
        assert all(exchange(port, bytes([i])) == bytes([i]) for i in range(20))
    assert door.said == []
    assert door.echo.connections == 21


def test_everything_but_the_gate_is_on_loopback(thread: auth.Thread, door: Gate) -> None:
    with forwarder(thread, door.port, TOKEN) as (_, port):
        ours = {place for place in listening() if place[1] in (port, door.port, door.echo.port)}
    assert ours == {(LOOPBACK, p) for p in (port, door.port, door.echo.port)}


def test_a_wrong_token_does_not_pass_and_is_said_once(thread: auth.Thread, door: Gate) -> None:
    for _ in range(3):
        with pytest.raises(auth.Hindrance, match="token differs"):
            thread.wait(auth.knock(LOOPBACK, door.port, OTHER, auth.STORE))
    with forwarder(thread, door.port, OTHER) as (_, port):
        assert exchange(port, b"hello") == b""
    (line,) = door.said
    assert "127.0.0.1 was turned away: its token differs" in line
    assert door.echo.connections == 0


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64), bytes(65)])
def test_a_stranger_does_not_pass(door: Gate, sent: bytes) -> None:
    with door.connect() as link:
        link.sendall(sent)
        link.shutdown(socket.SHUT_WR)
        answer = receive(link, 1000)
    assert answer[:MAGIC] == b"lockstep gate 1\n"
    assert len(answer) == MAGIC + 32 + (33 if len(sent) == 65 else 0)
    assert not any(answer[MAGIC + 32 :])
    until(lambda: len(door.said) == 1)
    assert door.echo.connections == 0


def test_who_says_nothing_is_sent_away(door: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "_HANDSHAKE_S", 0.05)
    with door.connect() as link:
        assert len(receive(link, 1000)) == MAGIC + 32
    until(lambda: len(door.said) == 1)


def test_no_more_strangers_than_it_can_bear(door: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "_MAX_STRANGERS", 1)
    with door.connect() as first:
        assert len(receive(first, MAGIC + 32)) == MAGIC + 32
        with door.connect() as second:
            assert receive(second, 1) == b""


def test_what_was_said_once_does_not_open_the_gate_again(door: Gate) -> None:
    def respond(link: socket.socket, nonce: bytes) -> bytes:
        theirs = receive(link, MAGIC + 32)[MAGIC:]
        proof = hmac.digest(TOKEN.key, b"visitor" + theirs + nonce + auth.STORE, "sha256")
        return nonce + auth.STORE + proof

    nonce = bytes(32)
    with door.connect() as link:
        message = respond(link, nonce)
        link.sendall(message)
        assert receive(link, 33)[:1] == b"\1"
    with door.connect() as link:
        receive(link, MAGIC + 32)
        link.sendall(message)
        assert receive(link, 33) == bytes(33)
    with door.connect() as link:  # nor does the gate's own proof
        theirs = receive(link, MAGIC + 32)[MAGIC:]
        proof = hmac.digest(TOKEN.key, b"gate" + theirs + nonce + auth.STORE, "sha256")
        link.sendall(nonce + auth.STORE + proof)
        assert receive(link, 33) == bytes(33)


def test_a_gate_without_the_token_is_not_believed(thread: auth.Thread) -> None:
    with socket.create_server((LOOPBACK, 0)) as server:

        def pretend() -> None:
            link, _ = server.accept()
            with link:
                link.sendall(b"lockstep gate 1\n" + bytes(32))
                receive(link, 65)
                link.sendall(b"\1" + bytes(32))

        pretender = threading.Thread(target=pretend)
        pretender.start()
        with pytest.raises(auth.Hindrance, match="token differs"):
            thread.wait(auth.knock(*server.getsockname(), TOKEN, auth.LINK))
        pretender.join()


def test_what_is_behind_a_port_is_told_apart(
    thread: auth.Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def knock(port: int) -> str:
        with pytest.raises(auth.Hindrance) as hindrance:
            thread.wait(auth.knock(LOOPBACK, port, TOKEN, auth.LINK))
        return str(hindrance.value)

    monkeypatch.setattr(auth, "_HANDSHAKE_S", 0.2)
    monkeypatch.setattr(auth, "_CONNECT_S", 0.2)
    with socket.create_server((LOOPBACK, 0)) as silent:
        assert knock(silent.getsockname()[1]) == auth.NOT_A_GATE
        port = silent.getsockname()[1]
    assert knock(port) == network.REFUSED
    with socket.create_server((LOOPBACK, 0)) as server:

        def cut() -> None:
            server.accept()[0].close()

        cutter = threading.Thread(target=cut)
        cutter.start()
        assert knock(server.getsockname()[1]) == network.CUT
        cutter.join()

    async def lost(*_: object) -> None:
        await asyncio.sleep(30)  # as packets that a firewall drops

    monkeypatch.setattr(asyncio, "open_connection", lost)
    assert knock(port) == network.NO_ANSWER


def test_connections_end_together(thread: auth.Thread, door: Gate) -> None:
    with (
        forwarder(thread, door.port, TOKEN) as (carrier, port),
        socket.create_connection((LOOPBACK, port), timeout=30) as link,
    ):
        link.sendall(b"x")
        assert receive(link, 1) == b"x"
        thread.soon(carrier.cut)
        assert receive(link, 1) == b""
        assert exchange(port, b"x") == b"", "nobody should wait for a gate out of reach"


def node(rank: int) -> Node:
    return Node(number=0, rank=rank, host="h", pid=rank, run_id="r", nodes="2:2")


class Talk:
    """A hub behind a gate, and one visitor."""

    def __init__(self, thread: auth.Thread) -> None:
        self.thread, self.board = thread, Board(node(0))
        self.said: list[str] = []
        self.forgotten: list[str] = []
        self.hub = peers.Hub(self.board, self.said.append, self.forgotten.append)
        self.door = Gate(thread, self.hub.attend)
        streams = thread.wait(auth.knock(LOOPBACK, self.door.port, TOKEN, auth.LINK))
        self.link = peers.Link(*streams)
        board, objection = thread.wait(peers.introduce(self.link, node(1)))
        assert board is not None, objection
        self.visitors, self.losses = board, 0
        self.visitor = peers.Visitor(self.link, board, self._lose)

    def _lose(self) -> None:
        self.losses += 1

    def listen(self) -> None:
        self.thread.wait(self.visitor.begin())

    def close(self) -> None:
        self.thread.wait(self.link.close())
        self.door.close()


@pytest.fixture
def talk(thread: auth.Thread) -> Iterator[Talk]:
    made = Talk(thread)
    yield made
    made.close()


def test_all_boards_hold_the_same(talk: Talk) -> None:
    talk.listen()
    assert [n.rank for n in talk.visitors.all()] == [n.rank for n in talk.board.all()] == [0, 1]
    for board, side in ((talk.board, talk.hub), (talk.visitors, talk.visitor)):
        changes = {"round": 3, "told": {"a": list(range(board.own_number + 1))}}
        board.write(board.own_number, changes)
        talk.thread.soon(lambda side=side, changes=changes: side.publish(changes))  # type: ignore[misc]
    until(lambda: talk.board.all() == talk.visitors.all())
    assert [n.told for n in talk.board.all()] == [{"a": [0]}, {"a": [0, 1]}]


def test_a_visitor_writes_only_what_is_its_own(talk: Talk) -> None:
    talk.thread.soon(
        lambda: talk.link.send({"changes": {"state": "lost", "host": "x", "round": 1}})
    )
    until(lambda: talk.board.node(1).round == 1)
    assert (talk.board.node(1).state, talk.board.node(1).host) == ("here", "h")


def test_a_visitor_may_have_the_store_freed_of_old_keys(talk: Talk) -> None:
    talk.thread.soon(lambda: talk.visitor.forget("a key"))
    until(lambda: talk.forgotten == ["a key"])


@pytest.mark.parametrize("why", ["", "rank 3 failed"])
def test_a_goodbye_is_no_loss(talk: Talk, why: str) -> None:
    talk.listen()
    talk.thread.wait(talk.visitor.close(why))
    until(lambda: talk.board.node(1).state == LEFT)
    assert talk.board.node(1).why == why
    assert talk.said == ([f"node 1 on host h has left ({why})"] if why else [])


def test_the_servers_goodbye_reaches_the_visitor(talk: Talk) -> None:
    talk.listen()
    talk.thread.wait(talk.hub.close("interrupted"))
    until(lambda: talk.losses == 1)
    assert (talk.visitors.node(0).state, talk.visitors.node(0).why) == (LEFT, "interrupted")
    assert talk.said == []


def test_silence_is_a_loss(monkeypatch: pytest.MonkeyPatch, thread: auth.Thread) -> None:
    monkeypatch.setattr(peers, "BEAT_S", 0.02)
    talk = Talk(thread)  # its visitor never beats
    until(lambda: talk.board.node(1).state == LOST)
    assert "nothing heard" in talk.board.node(1).why
    assert len(talk.said) == 1
    talk.close()


def test_two_that_beat_are_not_lost(monkeypatch: pytest.MonkeyPatch, thread: auth.Thread) -> None:
    monkeypatch.setattr(peers, "BEAT_S", 0.05)
    talk = Talk(thread)
    talk.listen()
    threading.Event().wait(1.0)  # 20 beats, of which 7 missing ones would be a loss
    assert [n.state for n in talk.board.all()] == ["here", "here"]
    assert [n.state for n in talk.visitors.all()] == ["here", "here"]
    talk.close()
