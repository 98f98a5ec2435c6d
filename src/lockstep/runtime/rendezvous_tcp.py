"""Meeting at a host and port: rank 0 serves a TCPStore there, the others connect to it.

torch's own store listens on all interfaces; ours is given a socket that listens on one. Before
torch's client is built, a plain socket finds out what is behind the port, since the client waits
without end for something that listens but is not a store, and reports all causes alike.
"""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

from lockstep.errors import MasterUnreachableError, PortTakenError
from lockstep.runtime.store import Store, TCPStore, wait_until
from lockstep.sockets import (
    ANY_OUTSIDE_ADDRESS,
    LOOPBACK,
    address_reaching,
    is_loopback_address,
    local_addresses,
    owner_of,
    resolve,
    serve_store,
)

_ATTEMPT_S = 2.0
"""How long one attempt to connect, or to be answered, may take."""
# The first two requests of torch's client: VALIDATE with its magic number, PING with a number
# that the store sends back.
_GREETING = struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 0x10C5)
_ANSWER = struct.pack("<I", 0x10C5)


@dataclass(frozen=True)
class Endpoint:
    """Where rank 0 serves the store."""

    host: str
    port: int
    one_node: bool
    """All ranks are on this machine, so that loopback serves."""

    @property
    def text(self) -> str:
        """The endpoint in the notation of init methods."""
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


@dataclass(frozen=True)
class _Sight:
    """What one attempt to reach the store came to; true when it is there."""

    address: str
    """The one that was tried last; empty when the host name does not resolve."""
    hindrance: str = ""

    def __bool__(self) -> bool:
        return not self.hindrance


_UNRESOLVED = "the host name does not resolve"
_REFUSED = "the machine answers, but nothing listens on that port"
_NO_ANSWER = "no answer"
_NOT_A_STORE = "something listens there, but it is not a torch store"
_ADVICE = {
    _UNRESOLVED: "check the spelling, or give the address of rank 0's machine",
    _REFUSED: "look at rank 0's output: it has not started, has ended, or uses another port",
    _NO_ANSWER: "check the address, and that no firewall stands between the machines",
    _NOT_A_STORE: "choose a free port, the same on all ranks",
}


def serve(endpoint: Endpoint, timeout: float) -> Store:
    """Serves a store at the endpoint, on loopback or on one address of this machine.

    Raises:
        MasterUnreachableError: the host does not resolve, or is not this machine.
        OSError: the port cannot be bound (EADDRINUSE: it is taken).
    """
    address = _listening_address(endpoint, timeout)
    return serve_store(address, endpoint.port, timedelta(seconds=timeout))


def connect(endpoint: Endpoint, timeout: float) -> Store:
    """Connects to the store at the endpoint, trying again until the timeout.

    Raises:
        MasterUnreachableError: there is no store; says what there is instead.
        PortTakenError: another program of this machine has the port.
    """
    deadline = time.monotonic() + timeout
    sight = wait_until(lambda: _look(endpoint, deadline), deadline)
    if not sight:
        if sight.hindrance == _NOT_A_STORE and _is_here(sight.address):
            raise port_taken(endpoint)
        where = f" ({sight.address})" if sight.address not in ("", endpoint.host) else ""
        raise MasterUnreachableError(
            f"rank 0 at {endpoint.text}{where}",
            f"{sight.hindrance} (tried for {timeout:g} s)",
            _ADVICE[sight.hindrance],
        )
    try:
        return TCPStore(
            sight.address,
            endpoint.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=max(deadline - time.monotonic(), _ATTEMPT_S)),
        )
    except RuntimeError:
        raise MasterUnreachableError(
            f"rank 0 at {endpoint.text}",
            "its store answered once and then went away",
            "look at rank 0's error: it failed first",
        ) from None


def is_store(endpoint: Endpoint) -> bool:
    """Whether a torch store is behind the endpoint now."""
    return bool(_look(endpoint, time.monotonic() + _ATTEMPT_S))


def port_taken(endpoint: Endpoint, owner: str | None = None) -> PortTakenError:
    """The error for a port that something else has."""
    owner = owner or owner_of(endpoint.port)
    return PortTakenError(
        f"rank 0 serves the run at {endpoint.text}",
        f"port {endpoint.port} is taken by {owner}",
        "set MASTER_PORT (or the port of tcp://) to a free port, or end that program",
    )


def _look(endpoint: Endpoint, deadline: float) -> _Sight:
    """One attempt at each address of the endpoint."""
    addresses = resolve(endpoint.host)
    if not addresses:
        return _Sight("", _UNRESOLVED)
    if endpoint.one_node and any(map(_is_here, addresses)):
        addresses = [_loopback(addresses)]
    for address in addresses:
        limit = min(_ATTEMPT_S, max(deadline - time.monotonic(), 0.1))
        sight = _Sight(address, _hindrance(address, endpoint.port, limit))
        if sight:
            break
    return sight


def _hindrance(address: str, port: int, limit: float) -> str:
    """Why there is no store at the address; empty when there is one."""
    try:
        link = socket.create_connection((address, port), timeout=limit)
    except ConnectionRefusedError:
        return _REFUSED
    except OSError:
        return _NO_ANSWER
    with link:
        return "" if _answers(link) or not _greeting_is_current() else _NOT_A_STORE


def _answers(link: socket.socket) -> bool:
    """Whether a store is at the other end of a connection; the link has a timeout."""
    try:
        link.sendall(_GREETING)
        return link.recv(len(_ANSWER), socket.MSG_WAITALL) == _ANSWER
    except OSError:
        return False


@cache
def _greeting_is_current() -> bool:
    """Whether this torch's stores understand our greeting, tried on one; else all may be stores."""
    store = serve_store(LOOPBACK, 0, timedelta(seconds=_ATTEMPT_S))
    with socket.create_connection((LOOPBACK, store.port), timeout=_ATTEMPT_S) as link:
        return _answers(link)


def _listening_address(endpoint: Endpoint, timeout: float) -> str:
    """Loopback when all ranks are here; else the master's address; else the one to the outside.

    The last case is a host name that means loopback on its own machine (127.0.1.1 in /etc/hosts),
    or the address of a forwarder in front of this machine, as in Kubernetes.
    """
    addresses = wait_until(lambda: resolve(endpoint.host), time.monotonic() + timeout)
    if not addresses:
        raise MasterUnreachableError(
            f"rank 0 serves the run at {endpoint.text}", _UNRESOLVED, _ADVICE[_UNRESOLVED]
        )
    here = [address for address in addresses if _is_here(address)]
    if endpoint.one_node and here:
        return _loopback(here)
    outward = [address for address in here if not is_loopback_address(address)]
    if not endpoint.one_node and not outward:
        own = [a for each in local_addresses().values() for a in each if not is_loopback_address(a)]
        routed = address_reaching(ANY_OUTSIDE_ADDRESS)
        outward = own if len(own) == 1 else [routed] if routed in own else []
    if not outward:
        raise MasterUnreachableError(
            f"rank 0 serves the run at {endpoint.text}",
            f"{', '.join(addresses)} is not an address of rank 0's machine, which has "
            + "; ".join(", ".join(own) for own in local_addresses().values()),
            "set MASTER_ADDR (or the host of tcp://) to the address of the machine of rank 0",
        )
    return outward[0]


def _is_here(address: str) -> bool:
    return is_loopback_address(address) or any(address in own for own in local_addresses().values())


def _loopback(addresses: list[str]) -> str:
    return "::1" if all(":" in address for address in addresses) else LOOPBACK
