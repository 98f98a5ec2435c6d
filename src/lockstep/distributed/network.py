"""The addresses of this machine, and the endpoint where one process serves and others connect.

An *endpoint* is the host and port at which the other processes of a run find the one that serves
them: rank 0's store, or the launcher of the first machine. An *interface* is a network device of
this machine, such as `eth0`, with its IP addresses. A *loopback* address, such as 127.0.0.1, can be
reached from its own machine only. `wait_until` is how Lockstep waits for other processes.

What needs torch or psutil imports it inside a function: the launcher uses this module before torch
is imported, and most runs need no psutil.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lockstep.errors import MasterUnreachableError, PortTakenError, SettingError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

T = TypeVar("T")
Addresses = Mapping[str, Sequence[str]]
"""The IP addresses of each interface, by its name."""

LOOPBACK = "127.0.0.1"
ANY_OUTSIDE_ADDRESS = "203.0.113.1"
"""An address of the block reserved for documentation (RFC 5737). Packets to it would take the
default route."""
LOOPBACK_TIMEOUT_S = 3.0
"""A connection to this machine itself takes no time where it works."""
FIRST_PAUSE_S = 0.002
LONGEST_PAUSE_S = 0.05
MAX_ATTEMPTS_PER_SECOND = 4000
"""How often all ranks that wait for the same thing look for it; more would overload the store."""


# This machine


def boot_id() -> str:
    """Returns a random number that Linux draws when the machine is started; else "".

    Together with the host name it tells machines apart, as in NCCL.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def local_addresses() -> dict[str, list[str]]:
    """Returns the IP addresses of each interface, IPv4 first, without link-local IPv6 ones."""
    import psutil

    addresses_of_interface = {}
    for name, entries in psutil.net_if_addrs().items():
        ipv4_addresses = []
        ipv6_addresses = []
        for entry in entries:
            if entry.address.startswith("fe80"):  # link-local
                continue
            if entry.family == socket.AF_INET:
                ipv4_addresses.append(entry.address)
            elif entry.family == socket.AF_INET6:
                ipv6_addresses.append(entry.address)
        addresses = ipv4_addresses + ipv6_addresses
        if addresses:
            addresses_of_interface[name] = addresses
    return addresses_of_interface


def running_interfaces() -> list[str]:
    """Returns the names of the interfaces that are up and have an address, of whatever kind."""
    import psutil

    statistics_of_interface = psutil.net_if_stats()
    names = []
    for name, entries in psutil.net_if_addrs().items():
        has_address = any(entry.family in (socket.AF_INET, socket.AF_INET6) for entry in entries)
        statistics = statistics_of_interface.get(name)
        if has_address and statistics is not None and statistics.isup:
            names.append(name)
    return names


def listing(addresses: Addresses) -> str:
    """Lists interfaces with their addresses: "lo (127.0.0.1), eth0 (10.0.0.5, fd00::5)"."""
    texts = []
    for name, addresses_of_interface in addresses.items():
        texts.append(f"{name} ({', '.join(addresses_of_interface)})")
    return ", ".join(texts)


def facing_outward(addresses: Addresses) -> dict[str, Sequence[str]]:
    """Returns the interfaces that other machines may reach, with their addresses."""
    outward = {}
    for name, addresses_of_interface in addresses.items():
        if addresses_of_interface and not is_loopback_address(addresses_of_interface[0]):
            outward[name] = addresses_of_interface
    return outward


def address_reaching(host: str | None = ANY_OUTSIDE_ADDRESS) -> str | None:
    """Returns the address of this machine from which packets to a host would leave.

    Nothing is sent. Returns None if the host does not resolve or cannot be reached.

    Args:
        host: by default any other machine, so that the address is that of the default route.
    """
    if host is None:
        return None
    any_port = 9  # nothing is sent there
    try:
        info = socket.getaddrinfo(host, any_port, type=socket.SOCK_DGRAM)[0]
        family, kind, _, _, target = info
        with socket.socket(family, kind) as udp_socket:
            udp_socket.connect(target)  # only chooses the route
            return str(udp_socket.getsockname()[0])
    except (OSError, UnicodeError):
        return None


def hostname_address() -> str | None:
    """Returns the address that this machine's own host name resolves to, or None."""
    addresses = resolve(socket.gethostname())
    return addresses[0] if addresses else None


def resolve(host: str) -> list[str]:
    """Returns the addresses that a host name resolves to, IPv4 first; empty if it does not."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError: a label is empty or has over 63 characters
        return []
    # Each `info` is (family, kind, protocol, name, (address, port, ...)). The addresses, each once:
    addresses = list(dict.fromkeys(str(info[4][0]) for info in infos))
    return sorted(addresses, key=_is_ipv6)  # IPv4 first, otherwise in their order


def _is_ipv6(address: str) -> bool:
    return ":" in address


def is_loopback_address(address: str) -> bool:
    """Returns True if an IP address can be reached from its own machine only.

    Raises:
        ValueError: it is no IP address.
    """
    address_without_zone = address.partition("%")[0]  # "fe80::1%eth0"
    return ip_address(address_without_zone).is_loopback


def means_loopback(host: str | None) -> bool:
    """Returns True if a host name or address can only mean the machine it is used on."""
    if host is None:
        return False
    if host == "localhost":
        return True
    try:
        return is_loopback_address(host)
    except ValueError:  # a host name
        return False


def is_here(address: str) -> bool:
    """Returns True if an IP address is one of this machine's."""
    return interface_of(address) is not None


def interface_of(address: str) -> str | None:
    """Returns the interface of this machine that has an address; None if no interface has it."""
    addresses = local_addresses()
    if is_loopback_address(address) and address not in addresses.get("lo", []):
        address = LOOPBACK  # all of 127.0.0.0/8 belongs to the loopback interface
    return find_interface(addresses, lambda candidate: candidate == address)


def find_interface(addresses: Addresses, is_wanted: Callable[[str], bool]) -> str | None:
    """Returns the first interface that has an address of the wanted kind, or None."""
    for name, addresses_of_interface in addresses.items():
        if any(is_wanted(address) for address in addresses_of_interface):
            return name
    return None


# The endpoint where one process serves and the others connect


@dataclass(frozen=True)
class Endpoint:
    """Where the store of a run is served."""

    host: str
    """A name or an address."""
    port: int
    one_node: bool = False
    """True if all processes that use it are on this machine, so that loopback is enough."""

    def __str__(self) -> str:
        if _is_ipv6(self.host):
            return f"[{self.host}]:{self.port}"
        return f"{self.host}:{self.port}"

    def addresses(self) -> list[str]:
        """Returns the addresses to connect to; empty if the host name does not resolve.

        If all processes are on this machine, and the host too, it is a loopback address.
        """
        addresses = resolve(self.host)
        if self.one_node and any(is_here(address) for address in addresses):
            for address in addresses:
                if is_loopback_address(address):
                    return [address]
            return [LOOPBACK]
        return addresses


def serving_address(endpoint: Endpoint, local_addr: str | None = None) -> str:
    """Returns the address of this machine to listen on, so that others find it at the endpoint.

    That is the endpoint's own address, if this machine has it. It has not if the host name means
    loopback on its own machine (127.0.1.1 in /etc/hosts), or belongs to a forwarder in front of
    this machine, as in Kubernetes. Then it is `local_addr`, or the only address that other machines
    may reach, or that of the default route.

    Args:
        endpoint: where the other processes connect to.
        local_addr: a name or address of this machine that the user chose.

    Raises:
        MasterUnreachableError: the host does not resolve, or is not this machine.
        SettingError: `local_addr` is not an address of this machine.
    """
    endpoint_addresses = endpoint.addresses()
    if endpoint.one_node:
        # All processes are on this machine, so loopback is enough.
        for address in endpoint_addresses:
            if is_loopback_address(address):
                return address
    else:
        # The addresses of this machine that other machines may reach.
        outside_addresses = []
        for addresses_of_interface in local_addresses().values():
            for address in addresses_of_interface:
                if not is_loopback_address(address):
                    outside_addresses.append(address)
        for address in endpoint_addresses:
            if address in outside_addresses:
                return address
        # This machine does not have the endpoint's address itself.
        if local_addr:
            return own_address(local_addr)
        if len(outside_addresses) == 1:
            return outside_addresses[0]
        default_route_address = address_reaching()
        if default_route_address is not None and default_route_address in outside_addresses:
            return default_route_address
    if endpoint_addresses:
        subject = ", ".join(endpoint_addresses)
    else:
        subject = "the name does not resolve, and it"
    raise MasterUnreachableError(
        f"this machine serves the run at {endpoint}",
        f"{subject} is not an address of this machine, which has {listing(local_addresses())}",
        "give the address of this machine (MASTER_ADDR, --master-addr, or the host of tcp:// and "
        "--rdzv-endpoint), or --local-addr for the one that the others reach",
    )


def own_address(local_addr: str) -> str:
    """Returns the address of this machine that a name or address stands for.

    Raises:
        SettingError: this machine has no such address.
    """
    for address in resolve(local_addr):
        if is_here(address):
            return address
    raise SettingError(
        f"--local-addr {local_addr}",
        f"it is not an address of this machine, which has {listing(local_addresses())}",
        "set it to one of these, or leave it out to have one chosen",
    )


def listening_socket(address: str, port: int) -> socket.socket:
    """Returns a socket that listens at an address of this machine.

    Args:
        address: an IP address.
        port: 0: a free one.

    Raises:
        OSError: it cannot be bound (EADDRINUSE: the port is taken).
        SettingError: it is a loopback address, and the loopback interface does not work.
    """
    family = socket.AF_INET6 if _is_ipv6(address) else socket.AF_INET
    if is_loopback_address(address):
        _check_loopback(address, family)
    return socket.create_server((address, port), family=family, backlog=128)


def _check_loopback(address: str, family: socket.AddressFamily) -> None:
    """Raises SettingError if a loopback address cannot be reached: a connection to it is tried."""
    try:
        with socket.create_server((address, 0), family=family) as server:
            host_and_port = server.getsockname()[:2]
            socket.create_connection(host_and_port, timeout=LOOPBACK_TIMEOUT_S).close()
    except OSError as error:
        # These say that the interface does not work; a connection that timed out has no number.
        # Other errors, such as too many open files, have nothing to do with it.
        if error.errno not in (None, errno.ENETUNREACH, errno.EADDRNOTAVAIL):
            raise
        raise SettingError(
            f"processes of this machine meet at {address}",
            "it cannot be reached: the loopback interface is down, or lacks this address",
            "set it up (`ip link set lo up`, as root), or take a container that has one",
            may_pass=True,
        ) from None


def serve_store(address: str, port: int, timeout: timedelta) -> TCPStore:
    """Serves a store at one address; torch would listen on all interfaces.

    Args:
        address: of this machine.
        port: 0: a free one.
        timeout: how long the store waits for an answer.

    Raises:
        OSError: the port cannot be bound (EADDRINUSE: it is taken).
    """
    import torch
    from torch.distributed import TCPStore

    with listening_socket(address, port) as listener:
        port = listener.getsockname()[1]  # an IPv6 address has four parts
        return TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),  # the store closes it
            use_libuv=torch.__version__ >= "2.8",  # with it torch 2.6 takes no socket
        )


# The errors of serving and connecting


def listening_error(error: OSError, endpoint: Endpoint) -> PortTakenError | SettingError | OSError:
    """Returns the error to raise for a socket that could not be bound.

    Args:
        error: what the operating system raised; it is returned itself if it is of another kind.
        endpoint: where the socket should be.
    """
    if error.errno == errno.EADDRINUSE:
        return port_taken_error(endpoint)
    if error.errno == errno.EACCES:
        return SettingError(
            f"this machine serves the run at {endpoint}",
            f"this user may not listen on port {endpoint.port}",
            "choose a port above 1023, the same everywhere",
        )
    return error


def port_taken_error(endpoint: Endpoint, owner: str | None = None) -> PortTakenError:
    """Returns the error for a port of this machine that another program uses.

    Args:
        endpoint: where this machine should serve.
        owner: describes that program; None: it is looked up.
    """
    return PortTakenError(
        f"this machine serves the run at {endpoint}",
        f"port {endpoint.port} is taken by {owner or owner_of(endpoint.port)}",
        "choose a free port, the same everywhere (MASTER_PORT, --master-port, or the port of "
        "tcp:// and --rdzv-endpoint), or end that program",
    )


def owner_of(port: int) -> str:
    """Describes the process of this machine that listens on a port.

    If this user may not see it, the description is "another program".
    """
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            if listens and connection.pid:  # None for processes of other users
                command = " ".join(psutil.Process(connection.pid).cmdline())
                return f"process {connection.pid}: {command[:200]}"
    except psutil.Error:
        pass
    return "another program"


UNRESOLVED = "the host name does not resolve"
REFUSED = "the machine answers, but nothing listens on that port"
NO_ANSWER = "no answer"
CUT = "the connection was accepted and then cut"
ADVICE_OF_REASON = {
    UNRESOLVED: "check the spelling, or give the address of the machine of {}",
    REFUSED: "look at the output of {}: it has not started, has ended, or uses another port",
    NO_ANSWER: "check the address, and that no firewall stands between the machines",
    CUT: "look at the output of {}: it has not started, or has ended",
}


def unreachable_error(
    server: str, endpoint: Endpoint, reason: str, *, address: str = "", tried: float = 0.0
) -> MasterUnreachableError:
    """Returns the error for a server that cannot be reached.

    Args:
        server: who serves, such as "rank 0".
        endpoint: where it should be.
        reason: `UNRESOLVED`, `REFUSED`, `NO_ANSWER` or `CUT`. Any other text says which program
            listens there instead.
        address: the address that was tried last; "" if the host has none.
        tried: for how many seconds it was tried; 0 if the message shall not say it.
    """
    where = str(endpoint)
    if address and address != endpoint.host:
        where += f" ({address})"
    found = reason
    if tried:
        found += f" (tried for {tried:g} s)"
    advice = ADVICE_OF_REASON.get(reason, "choose a port that no other program has")
    return MasterUnreachableError(f"{server} at {where}", found, advice.format(server))


# Waiting for other processes


def wait_until(attempt: Callable[[], T], deadline: float, *, ranks: int = 1) -> T:
    """Calls `attempt` until it returns something true, or `time.monotonic()` passes the deadline.

    `Store.wait` would do for keys, but it cannot be interrupted, logs its timeouts, and on files
    looks once a second.

    Args:
        attempt: called at least once.
        deadline: in the seconds of `time.monotonic()`.
        ranks: how many ranks wait for the same thing. The more, the longer are the pauses.

    Returns:
        What the last call returned.
    """
    pause_s = FIRST_PAUSE_S
    longest_pause_s = max(LONGEST_PAUSE_S, ranks / MAX_ATTEMPTS_PER_SECOND)
    while True:
        result = attempt()
        remaining_s = deadline - time.monotonic()
        if result or remaining_s <= 0:
            return result
        time.sleep(min(pause_s, remaining_s))
        pause_s = min(2 * pause_s, longest_pause_s)
