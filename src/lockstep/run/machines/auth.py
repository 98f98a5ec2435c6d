"""Implements the auth proxy, which lets only the launchers and ranks of one run reach its store.

The *store* is torch's TCPStore, which accepts every client and unpickles what clients write. With
several machines, it therefore listens only on loopback. The *auth proxy* listens in its place on
the address that the other machines use. Every other machine has a *forwarder*, which listens on
loopback and carries connections to the proxy, so that torch's clients need no change.

    rank or launcher --loopback--> forwarder ===network===> auth proxy --loopback--> store

A connection to the proxy begins with a handshake, in which both sides prove that they know the
run's token: each answers the other's nonce (a random number) with an HMAC-SHA256 under the token
(RFC 2104; the mutual scheme of ISO/IEC 9798-4). So the token never crosses the network, and a
recorded handshake is of no use to anybody:

    proxy     MAGIC, nonce s (32 bytes)
    client    MAGIC, nonce c (32), purpose (1), HMAC(token, "client" s c purpose)
    proxy     1 and HMAC(token, "server" s c purpose), or 0 and zeros

The data that follows is neither encrypted nor signed: whoever can alter packets between two
machines of the run can alter the run. And loopback is open to all users of a machine.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from lockstep.machine.network import CONNECTION_CUT, LOOPBACK, NO_ANSWER, REFUSED
from lockstep.run.machines.run_token import TOKEN_VARIABLE, Token

OnPeer = Callable[[StreamReader, StreamWriter, str], Awaitable[None]]
"""A function that handles a connection from another launcher. It is called with both streams and
the address from which the launcher has connected."""

# The purposes of a connection.
TO_STORE = b"S"
TO_LAUNCHER = b"P"

MAGIC = b"lockstep auth 1\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
ACCEPTED = b"\1"
REFUSAL = bytes(1 + PROOF_BYTES)
HANDSHAKE_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 3.0
RELAY_CHUNK_BYTES = 1 << 16
MAX_HANDSHAKES_AT_ONCE = 256

NOT_A_LAUNCHER = "something listens there, but it is not `lockstep run`"
TOKEN_DIFFERS = "its token differs from this machine's"


class ConnectionFailed(Exception):
    """An attempt to connect to an auth proxy failed. The text of the error says why."""


class _WrongTokenError(Exception):
    """A client of an auth proxy has another token."""


@dataclass(frozen=True)
class Streams:
    """The two directions of a connection."""

    reader: StreamReader
    writer: StreamWriter


class ConnectionServer:
    """Accepts connections on a socket, and handles each. It is only used in the network thread."""

    def __init__(self) -> None:
        self._open_writers: set[StreamWriter] = set()

    async def listen(self, listener: socket.socket) -> None:
        """Starts to accept connections on a listening socket; returns at once."""
        self._server = await asyncio.start_server(self._accept, sock=listener)

    async def close(self) -> None:
        """Stops accepting connections."""
        self._server.close()

    async def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Handles one connection, and closes it. asyncio calls this for each connection."""
        self._open_writers.add(writer)
        try:
            await self._handle_connection(Streams(reader, writer))
        except (OSError, ConnectionFailed):
            pass  # the other side notices that its connection ends
        except asyncio.CancelledError:
            # The launcher ends. If this were raised again, asyncio would log it as an error.
            writer.transport.abort()
        finally:
            self._open_writers.discard(writer)
            writer.close()

    async def _handle_connection(self, client: Streams) -> None:
        """Handles a connection; it is closed when this returns."""
        raise NotImplementedError


class AuthProxy(ConnectionServer):
    """Accepts connections from the other machines, and authenticates them.

    Args:
        token: the token of the run.
        store_port: the port on loopback at which the store listens.
        on_peer: function that handles connections of other launchers.
        say: function that shows a line to the user when a connection is refused.
    """

    def __init__(
        self, token: Token, store_port: int, on_peer: OnPeer, say: Callable[[str], None]
    ) -> None:
        super().__init__()
        self._token = token
        self._store_port = store_port
        self._on_peer = on_peer
        self._say = say
        self._reported_addresses: set[str] = set()
        self._num_handshakes = 0

    async def _handle_connection(self, client: Streams) -> None:
        """Authenticates a client, and then carries its connection to the store or to `on_peer`."""
        # The caller closes the connection when this returns.
        if self._num_handshakes >= MAX_HANDSHAKES_AT_ONCE:
            return  # too many strangers at once

        address = str(client.writer.get_extra_info("peername")[0])
        purpose = await self._authenticate_client(client, address)
        if purpose == TO_STORE:
            await relay(client, await _connect(LOOPBACK, self._store_port))
        elif purpose == TO_LAUNCHER:
            await self._on_peer(client.reader, client.writer, address)

    async def _authenticate_client(self, client: Streams, address: str) -> bytes | None:
        """Returns the purpose of a client's connection; None, after a report, if it is refused.

        Args:
            client: the connection.
            address: the address from which the client has connected, for the report.
        """
        self._num_handshakes += 1
        try:
            # The time is limited, so that a stranger that sends nothing does not stay for long.
            handshake = _handshake_with_client(client, self._token)
            return await asyncio.wait_for(handshake, HANDSHAKE_TIMEOUT_S)
        except _WrongTokenError:
            self._report_refused(
                address,
                f"its token differs from this machine's, of {self._token.source}; set "
                f"{TOKEN_VARIABLE} to the same text on all machines, or copy the token file",
            )
            return None
        except (TimeoutError, OSError, EOFError, ConnectionFailed):
            # It sent nothing in time, closed the connection, or sent something else.
            self._report_refused(address, "it does not speak Lockstep's protocol")
            return None
        finally:
            self._num_handshakes -= 1

    def _report_refused(self, address: str, reasons: str) -> None:
        """Tells the user about a refused client, once for each address as clients try again and
        again.
        """
        if address not in self._reported_addresses:
            self._reported_addresses.add(address)
            self._say(f"a connection from {address} was turned away: {reasons}")


class Forwarder(ConnectionServer):
    """Accepts connections on loopback, and carries them to the auth proxy of another machine.

    Args:
        address: the address of the auth proxy.
        port: the port of the auth proxy.
        token: the token of the run.
    """

    def __init__(self, address: str, port: int, token: Token) -> None:
        super().__init__()
        self._address = address
        self._port = port
        self._token = token
        self._aborted = False

    async def _handle_connection(self, client: Streams) -> None:
        """Carries a connection of this machine to the store behind the proxy."""
        if self._aborted:
            return  # which closes the connection
        proxy = await authenticate(self._address, self._port, self._token, TO_STORE)
        await relay(client, proxy)

    def abort(self) -> None:
        """Ends all connections, and refuses new ones.

        This is called when the proxy can no longer be reached, so that the clients of the store do
        not wait for it.
        """
        self._aborted = True
        for writer in list(self._open_writers):
            writer.transport.abort()


async def _handshake_with_client(client: Streams, token: Token) -> bytes:
    """Performs the proxy's side of the handshake.

    Returns:
        The purpose of the connection, which the client has sent: TO_STORE or TO_LAUNCHER.

    Raises:
        _WrongTokenError: the client has another token, and has been told so.
        ConnectionFailed: the client does not speak this protocol.
        EOFError: the client closed the connection.
    """
    reader = client.reader
    own_nonce = secrets.token_bytes(NONCE_BYTES)
    client.writer.write(MAGIC + own_nonce)
    await _check_magic(reader)

    client_nonce = await reader.readexactly(NONCE_BYTES)
    purpose = await reader.readexactly(1)
    proof = await reader.readexactly(PROOF_BYTES)
    if not hmac.compare_digest(proof, _hmac(token, b"client", own_nonce, client_nonce, purpose)):
        client.writer.write(REFUSAL)
        await client.writer.drain()  # sent before the caller closes the connection
        raise _WrongTokenError

    # The caller keeps this connection open, so the answer is sent without a `drain`.
    client.writer.write(ACCEPTED + _hmac(token, b"server", own_nonce, client_nonce, purpose))
    return purpose


async def authenticate(address: str, port: int, token: Token, purpose: bytes) -> Streams:
    """Connects to an auth proxy, and performs the client's side of the handshake.

    Args:
        address: the address of the proxy.
        port: the port of the proxy.
        token: the token of the run.
        purpose: where the proxy carries the connection: TO_STORE or TO_LAUNCHER.

    Raises:
        ConnectionFailed: nothing answers, it is not an auth proxy, or it has another token.
    """
    proxy = await _connect(address, port)
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            await _check_magic(proxy.reader)
            proxy_nonce = await proxy.reader.readexactly(NONCE_BYTES)
            own_nonce = secrets.token_bytes(NONCE_BYTES)
            proof = _hmac(token, b"client", proxy_nonce, own_nonce, purpose)
            proxy.writer.write(MAGIC + own_nonce + purpose + proof)
            answer = await proxy.reader.readexactly(len(ACCEPTED) + PROOF_BYTES)

        # The proxy must prove that it has the token too, as another program may be listening there.
        expected = ACCEPTED + _hmac(token, b"server", proxy_nonce, own_nonce, purpose)
        if not hmac.compare_digest(answer, expected):
            raise ConnectionFailed(TOKEN_DIFFERS)
    except TimeoutError:
        # Some program accepted the connection and then sent nothing, which no auth proxy does.
        proxy.writer.transport.abort()
        raise ConnectionFailed(NOT_A_LAUNCHER) from None
    except (OSError, EOFError):
        # The connection broke, or the other side closed it.
        proxy.writer.transport.abort()
        raise ConnectionFailed(CONNECTION_CUT) from None
    except BaseException:
        proxy.writer.transport.abort()
        raise

    return proxy


async def _connect(address: str, port: int) -> Streams:
    """Opens a connection.

    Raises:
        ConnectionFailed: nothing answers.
    """
    opening = asyncio.open_connection(address, port)
    try:
        reader, writer = await asyncio.wait_for(opening, CONNECT_TIMEOUT_S)
    except ConnectionRefusedError:
        raise ConnectionFailed(REFUSED) from None
    except OSError:  # the TimeoutError of `wait_for` is an OSError, too
        raise ConnectionFailed(NO_ANSWER) from None
    return Streams(reader, writer)


async def _check_magic(reader: StreamReader) -> None:
    """Reads the beginning of the handshake.

    Raises:
        ConnectionFailed: the other side sends something else.
    """
    if await reader.readexactly(len(MAGIC)) != MAGIC:
        raise ConnectionFailed(NOT_A_LAUNCHER)


def _hmac(
    token: Token, side: bytes, proxy_nonce: bytes, client_nonce: bytes, purpose: bytes
) -> bytes:
    """Returns the proof of one side ("client" or "server") that it has the token.

    The nonces are random numbers of this connection, so that the proof is not valid for any other.
    """
    return hmac.digest(token.key, side + proxy_nonce + client_nonce + purpose, "sha256")


async def relay(client: Streams, target: Streams) -> None:
    """Copies bytes in both directions until one connection ends, then closes both."""

    async def copy_bytes(reader: StreamReader, writer: StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(RELAY_CHUNK_BYTES):
                writer.write(data)
                await writer.drain()

    to_target = asyncio.create_task(copy_bytes(client.reader, target.writer))
    to_client = asyncio.create_task(copy_bytes(target.reader, client.writer))
    try:
        # The store's clients never close only one direction, so the end of one is the end of both.
        await asyncio.wait([to_target, to_client], return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:  # the launcher ends, and the unsent bytes are not needed
        client.writer.transport.abort()
        target.writer.transport.abort()
        raise
    finally:
        to_target.cancel()
        to_client.cancel()
        client.writer.close()  # bytes that were written before are still sent
        target.writer.close()
