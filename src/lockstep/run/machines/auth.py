"""The auth proxy: lets the launchers and ranks of one run reach its store, and nobody else.

A TCPStore asks nobody who they are and lets them write what torch reads back with pickle. On
several machines it therefore listens on loopback alone, and the *auth proxy* listens in its place
on the one address that the other machines use. On every other machine a *forwarder* listens on
loopback and carries each connection through the proxy, so that torch's clients need to know nothing
of it.

    rank or launcher --loopback--> forwarder ===network===> auth proxy --loopback--> store

A connection to the proxy begins with a challenge and a response in both directions (HMAC-SHA256 of
two nonces under the run's token; RFC 2104, and the mutual scheme of ISO/IEC 9798-4), so the token
never crosses the network and cannot be replayed:

    proxy     MAGIC, nonce s (32 bytes)
    client    MAGIC, nonce c (32), purpose (1), HMAC(token, "client" s c purpose)
    proxy     1 and HMAC(token, "server" s c purpose), or 0 and zeros

What follows is neither encrypted nor signed: whoever can alter packets on the way between two
machines of the run can alter the run. And loopback is open to all users of its machine.

The token is the secret that the launchers of one run share; it proves that they belong together. It
is taken from LOCKSTEP_TOKEN. Where that is not set, it is the content of a file in the user's home
folder, made by the first launcher that needs it and readable by the user alone: machines that share
the home folder then need nothing else. (Erlang's `.erlang.cookie` works like this.)
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import socket
import stat
import threading
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from time import monotonic
from typing import Any, TypeVar

from lockstep.distributed.network import CUT, LOOPBACK, NO_ANSWER, REFUSED, wait_until
from lockstep.errors import SettingError

T = TypeVar("T")
Streams = tuple[StreamReader, StreamWriter]
OnPeer = Callable[[StreamReader, StreamWriter, str], Awaitable[None]]

STORE, PEER = b"S", b"P"
"""The purposes of a connection: to the store, or to talk with the other launchers (`peers`)."""
_MAGIC = b"lockstep auth 1\n"
_NONCE = _PROOF = 32
_HANDSHAKE_S = 5.0
_CONNECT_S = 3.0
_CHUNK = 1 << 16
_MAX_UNAUTHENTICATED = 256
"""Connections that may be at the challenge at one time."""

VARIABLE = "LOCKSTEP_TOKEN"
OPEN = "none"
"""The value of LOCKSTEP_TOKEN that lets everybody in."""
_SHORTEST = 16
_VISIBLE_WITHIN_S = 5.0
"""After it was made on another machine, a file of a network file system may be seen this late."""


class ConnectionFailed(Exception):
    """Why one attempt to connect to an auth proxy failed, in words."""


NOT_A_LAUNCHER = "something listens there, but it is not `lockstep run`"
TOKEN_DIFFERS = "its token differs from this machine's"


class NetworkThread:
    """The launcher's thread in which connections are carried."""

    def __init__(self) -> None:
        self._loop, self._closing = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-network", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # it cancels what is left
            runner.run(self._until_closing())

    async def _until_closing(self) -> None:
        await self._closing.wait()
        # A connection that was just accepted needs some turns of the loop to get to its handler,
        # which closes it; a task that is cancelled before it has begun closes nothing.
        for _ in range(5):
            await asyncio.sleep(0)

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs `work` in the thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` in the thread and returns its result; signals may interrupt the waiting."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def soon(self, call: Callable[[], object]) -> None:
        """Has `call` called in the thread, unless that has ended; does not wait."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    def close(self) -> None:
        """Ends every connection, then the thread."""
        self.soon(self._closing.set)
        self._thread.join()


class _Carrier:
    """Listens, and carries each connection that comes; made and used in the event loop's thread."""

    def __init__(self) -> None:
        self._open: set[StreamWriter] = set()

    async def listen(self, listener: socket.socket) -> None:
        """Takes connections on a socket that listens; returns at once."""
        self._server = await asyncio.start_server(self._accept, sock=listener)

    async def close(self) -> None:
        """Takes no more connections."""
        self._server.close()

    async def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._open.add(writer)
        try:
            await self._carry(reader, writer)
        except (OSError, ConnectionFailed):
            pass  # the other side learns it from the end of its connection
        except asyncio.CancelledError:
            writer.transport.abort()  # the launcher ends; asyncio would log it as an error
        finally:
            self._open.discard(writer)
            writer.close()

    async def _carry(self, reader: StreamReader, writer: StreamWriter) -> None:
        raise NotImplementedError


class AuthProxy(_Carrier):
    """Listens for the other machines."""

    def __init__(
        self, token: Token, store_port: int, on_peer: OnPeer, say: Callable[[str], None]
    ) -> None:
        super().__init__()
        self._token, self._store_port, self._on_peer, self._say = token, store_port, on_peer, say
        self._turned_away: set[str] = set()
        self._unauthenticated = 0

    async def _carry(self, reader: StreamReader, writer: StreamWriter) -> None:
        if self._unauthenticated >= _MAX_UNAUTHENTICATED:
            return
        address = str(writer.get_extra_info("peername")[0])
        self._unauthenticated += 1
        try:
            purpose = await asyncio.wait_for(_challenge(reader, writer, self._token), _HANDSHAKE_S)
        except (OSError, EOFError, ConnectionFailed):
            self._turn_away(address, "it does not speak Lockstep's protocol")
            return
        finally:
            self._unauthenticated -= 1
        if purpose == STORE:
            await relay((reader, writer), await _connect(LOOPBACK, self._store_port))
        elif purpose == PEER:
            await self._on_peer(reader, writer, address)
        else:
            self._turn_away(
                address,
                f"its token differs from this machine's, of {self._token.source}; set {VARIABLE} "
                "to the same text on all machines, or copy the token file",
            )

    def _turn_away(self, address: str, why: str) -> None:
        if address not in self._turned_away:
            self._turned_away.add(address)
            self._say(f"a connection from {address} was turned away: {why}")


async def _challenge(reader: StreamReader, writer: StreamWriter, token: Token) -> bytes:
    """The proxy's side; returns the purpose, empty when the client does not have the token.

    Raises:
        ConnectionFailed: the client is no launcher or rank.
    """
    ours = secrets.token_bytes(_NONCE)
    writer.write(_MAGIC + ours)
    await _check_magic(reader)
    theirs = await reader.readexactly(_NONCE)
    purpose = await reader.readexactly(1)
    proof = await reader.readexactly(_PROOF)
    if not hmac.compare_digest(proof, _mac(token, b"client", ours, theirs, purpose)):
        writer.write(bytes(1 + _PROOF))
        await writer.drain()
        return b""
    writer.write(b"\1" + _mac(token, b"server", ours, theirs, purpose))
    return purpose


async def _check_magic(reader: StreamReader) -> None:
    if await reader.readexactly(len(_MAGIC)) != _MAGIC:
        raise ConnectionFailed(NOT_A_LAUNCHER)


def _mac(token: Token, side: bytes, ours: bytes, theirs: bytes, purpose: bytes) -> bytes:
    return hmac.digest(token.key, side + ours + theirs + purpose, "sha256")


async def authenticate(address: str, port: int, token: Token, purpose: bytes) -> Streams:
    """A connection through the auth proxy behind an address.

    Raises:
        ConnectionFailed: there is none, or it does not let us in.
    """
    reader, writer = await _connect(address, port)
    try:
        async with asyncio.timeout(_HANDSHAKE_S):
            await _check_magic(reader)
            theirs, ours = await reader.readexactly(_NONCE), secrets.token_bytes(_NONCE)
            proof = _mac(token, b"client", theirs, ours, purpose)
            writer.write(_MAGIC + ours + purpose + proof)
            answer = await reader.readexactly(1 + _PROOF)
        # A proxy that let us in without having the token would be somebody else's.
        expected = b"\1" + _mac(token, b"server", theirs, ours, purpose)
        if not hmac.compare_digest(answer, expected):
            raise ConnectionFailed(TOKEN_DIFFERS)
    except BaseException as error:
        writer.transport.abort()
        if isinstance(error, TimeoutError):
            raise ConnectionFailed(NOT_A_LAUNCHER) from None
        if isinstance(error, OSError | EOFError):
            raise ConnectionFailed(CUT) from None
        raise
    return reader, writer


class Forwarder(_Carrier):
    """Carries connections of this machine through the auth proxy of another one."""

    def __init__(self, address: str, port: int, token: Token) -> None:
        super().__init__()
        self._proxy = (address, port, token)
        self._closed = False

    async def _carry(self, reader: StreamReader, writer: StreamWriter) -> None:
        if not self._closed:
            await relay((reader, writer), await authenticate(*self._proxy, STORE))

    def cut(self) -> None:
        """Ends all connections: the proxy is out of reach, and clients should not wait for it."""
        self._closed = True
        for writer in list(self._open):
            writer.transport.abort()


async def relay(near: Streams, far: Streams) -> None:
    """Carries bytes between two connections until one of them ends, then ends the other."""

    async def carry(reader: StreamReader, writer: StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(_CHUNK):
                writer.write(data)
                await writer.drain()

    # Clients of a store never close one direction alone.
    both = [
        asyncio.create_task(carry(near[0], far[1])),
        asyncio.create_task(carry(far[0], near[1])),
    ]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:  # the launcher ends; what is not yet sent goes nowhere
        near[1].transport.abort()
        far[1].transport.abort()
        raise
    finally:
        for task in both:
            task.cancel()
        near[1].close()
        far[1].close()


async def _connect(address: str, port: int) -> Streams:
    try:
        return await asyncio.wait_for(asyncio.open_connection(address, port), _CONNECT_S)
    except ConnectionRefusedError:
        raise ConnectionFailed(REFUSED) from None
    except OSError:
        raise ConnectionFailed(NO_ANSWER) from None


@dataclass(frozen=True)
class Token:
    """What launchers prove to each other that they have; it is never sent or printed."""

    key: bytes = field(repr=False)
    source: str
    """Where it comes from, in words."""
    open: bool = False
    """The user has asked to let everybody in."""


def find_token(environ: Mapping[str, str]) -> Token:
    """The token of this user's runs; makes one where there is none.

    Raises:
        SettingError: LOCKSTEP_TOKEN is too short, or the file can be read by others or not at all.
    """
    given = environ.get(VARIABLE, "").strip()
    if given == OPEN:
        return Token(_key(OPEN), f"{VARIABLE}={OPEN}", open=True)
    if given:
        if len(given) < _SHORTEST:
            raise SettingError(
                f"{VARIABLE} (of {len(given)} characters)",
                f"a token of fewer than {_SHORTEST} characters can be guessed",
                "make one with `openssl rand -hex 16` and set it on all machines",
            )
        return Token(_key(given), VARIABLE)
    path = token_file(environ)
    try:
        if not path.exists():
            _make(path)
            wait_until(path.exists, monotonic() + _VISIBLE_WITHIN_S)
        return Token(_key(_read(path)), str(path))
    except OSError as error:
        raise SettingError(
            f"a run on several machines, without {VARIABLE}",
            f"the token cannot be kept in {path}: {error.strerror or error}",
            f"set {VARIABLE} to the same text on all machines, made with `openssl rand -hex 16`",
        ) from None


def token_file(environ: Mapping[str, str]) -> Path:
    """Where the token is kept: below XDG_CONFIG_HOME, else below ~/.config."""
    base = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or Path.home()) / ".config"
    return Path(base) / "lockstep" / "token"


def _key(text: str) -> bytes:
    return hashlib.sha256(b"lockstep token\n" + text.encode()).digest()


def _make(path: Path) -> None:
    """Writes a new token, unless another launcher was first; the file is never half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", dir=path.parent, prefix=f"{path.name}.") as draft:  # of mode 0600
        draft.write(secrets.token_hex(32) + "\n")
        draft.flush()
        os.fsync(draft.fileno())
        with suppress(FileExistsError):
            os.link(draft.name, path)


def _read(path: Path) -> str:
    with path.open() as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise SettingError(
                f"the token of {path}",
                f"other users may read or change the file (its mode is {mode:04o})",
                f"remove it, or run `chmod 600 {path}`, on all machines",
            )
        text = file.read().strip()
    if len(text) < _SHORTEST:
        raise SettingError(
            f"the token of {path}",
            f"the file holds fewer than {_SHORTEST} characters",
            "remove it; the next run makes a new one",
        )
    return text
