"""The addresses of this machine, and the sockets that listen on one of them.

What needs torch or psutil imports it when it is called: the launcher is here before torch is, and
most runs need no psutil.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"
ANY_OUTSIDE_ADDRESS = "203.0.113.1"
"""Of the block set aside for documentation (RFC 5737): on the way to it lies the default route."""


def local_addresses() -> dict[str, list[str]]:
    """Interface name -> its IP addresses, IPv4 first; link-local IPv6 ones are left out."""
    import psutil

    found = {}
    for name, entries in psutil.net_if_addrs().items():
        own = [e.address for e in entries if e.family == socket.AF_INET]
        own += [
            e.address
            for e in entries
            if e.family == socket.AF_INET6 and not e.address.startswith("fe80")
        ]
        if own:
            found[name] = own
    return found


def listing(addresses: Mapping[str, Sequence[str]]) -> str:
    """Interfaces and their addresses, as `local_addresses` gives them, in words."""
    return ", ".join(f"{name} ({', '.join(own)})" for name, own in addresses.items())


def address_reaching(host: str | None) -> str | None:
    """The own address from which packets to `host` would leave; nothing is sent."""
    if host is None:
        return None
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def resolve(host: str) -> list[str]:
    """What a host name or address resolves to, IPv4 first; empty when it does not."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted(dict.fromkeys(str(info[4][0]) for info in found), key=lambda a: ":" in a)


def is_loopback_address(address: str) -> bool:
    """Whether an IP address is reachable from its own machine only.

    Raises:
        ValueError: it is no IP address.
    """
    return ip_address(address.partition("%")[0]).is_loopback


def means_loopback(host: str | None) -> bool:
    """Whether a host name or address can only mean the machine it is used on."""
    try:
        return host == "localhost" or is_loopback_address(host or "")
    except ValueError:
        return False


def owner_of(port: int) -> str:
    """The process of this machine that listens on a port, in words, as far as we may know it."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            if listens and connection.pid:
                command = " ".join(psutil.Process(connection.pid).cmdline())
                return f"process {connection.pid}: {command[:200]}"
    except psutil.Error:
        pass
    return "another program"


def listening_socket(address: str, port: int) -> socket.socket:
    """A socket that listens at an address (port 0: a free one).

    Raises:
        OSError: it cannot be bound (EADDRINUSE: the port is taken).
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener


def serve_store(address: str, port: int, timeout: timedelta) -> TCPStore:
    """A store at one address; torch's own listens on all interfaces, whatever host it is given.

    Args:
        address: of this machine.
        port: 0: a free one.
        timeout: how long the store waits for an answer.

    Raises:
        OSError: the port cannot be bound (EADDRINUSE: it is taken).
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with listening_socket(address, port) as listener:
        return TCPStore(
            address,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),  # the store closes it
        )
