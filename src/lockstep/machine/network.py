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
    """Returns the boot id: a random text that Linux creates when the machine starts.

    The host name and the boot id together identify a machine, as they do for NCCL. On other systems
    this returns "".
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
    """Returns the names of the interfaces that are up and have an IP address of any kind."""
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


def default_route_address() -> str | None:
    """Returns the address of this machine on its default route, or None if there is no route.

    Packets to machines outside of this network leave from there.
    """
    return address_reaching(ANY_OUTSIDE_ADDRESS)


def address_reaching(host: str | None) -> str | None:
    """Returns the address of this machine from which packets to a host would leave.

    Nothing is sent. Returns None if the host does not resolve or cannot be reached.

    Args:
        host: host name or address. None if the caller knows no host; then the result is None too.
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

    # Each `info` is (family, kind, protocol, name, (address, port, ...)).
    addresses = [str(info[4][0]) for info in infos]
    unique_addresses = list(dict.fromkeys(addresses))
    return sorted(unique_addresses, key=_is_ipv6)  # a stable sort, which moves IPv4 to the front


def _is_ipv6(address: str) -> bool:
    return ":" in address


def is_loopback_address(address: str) -> bool:
    """Returns True if an IP address can only be reached from its own machine.

    Raises:
        ValueError: the text is not an IP address.
    """
    address_without_zone = address.partition("%")[0]  # "fe80::1%eth0"
    return ip_address(address_without_zone).is_loopback


def means_loopback(host: str | None) -> bool:
    """Returns True if a host name or address always refers to the machine on which it is used."""
    if host is None:
        return False
    if host == "localhost":
        return True
    try:
        return is_loopback_address(host)
    except ValueError:  # a host name
        return False


def is_here(address: str) -> bool:
    """Returns True if an IP address belongs to this machine."""
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
    processes_meet_at_loopback: bool = False
    """True if all processes that use it are on this machine, and use its loopback address."""

    def __str__(self) -> str:
        if _is_ipv6(self.host):
            return f"[{self.host}]:{self.port}"
        return f"{self.host}:{self.port}"

    def addresses(self) -> list[str]:
        """Returns the addresses to connect to; empty if the host name does not resolve.

        If the host is this machine, and all processes meet at loopback, the result is a single
        loopback address.
        """
        addresses_of_host = resolve(self.host)

        host_is_this_machine = any(is_here(address) for address in addresses_of_host)
        if not (host_is_this_machine and self.processes_meet_at_loopback):
            return addresses_of_host

        for address in addresses_of_host:
            if is_loopback_address(address):
                return [address]
        return [LOOPBACK]


def serving_address(endpoint: Endpoint, local_addr: str | None = None) -> str:
    """Chooses the address of this machine to listen on, so that others reach it at the endpoint.

    Usually this is the endpoint's own address. But this machine may not have that address itself:
    /etc/hosts may map its host name to 127.0.1.1, or the endpoint may be a forwarder in front of
    this machine, as in Kubernetes. Then the first of these that exists is used: `local_addr`; the
    only address that is not loopback; the address of the default route.

    Args:
        endpoint: the endpoint to which the other processes connect.
        local_addr: a name or address of this machine that the user chose.

    Raises:
        MasterUnreachableError: the host name does not resolve, or is not that of this machine.
        SettingError: `local_addr` is not an address of this machine.
    """
    endpoint_addresses = endpoint.addresses()

    if endpoint.processes_meet_at_loopback:
        for address in endpoint_addresses:
            if is_loopback_address(address):
                return address
        raise _not_an_own_address_error(endpoint, endpoint_addresses)

    # The usual case: this machine has the endpoint's address itself, and others may reach it there.
    outside_addresses = _addresses_for_others()
    for address in endpoint_addresses:
        if address in outside_addresses:
            return address

    # The endpoint's address is not one of this machine, so another one is chosen.
    if local_addr:
        return own_address(local_addr)
    if len(outside_addresses) == 1:
        return outside_addresses[0]

    outgoing_address = default_route_address()
    if outgoing_address is not None and outgoing_address in outside_addresses:
        return outgoing_address

    raise _not_an_own_address_error(endpoint, endpoint_addresses)


def _addresses_for_others() -> list[str]:
    """Returns the addresses of this machine that are not loopback."""
    addresses = []
    for addresses_of_interface in local_addresses().values():
        for address in addresses_of_interface:
            if not is_loopback_address(address):
                addresses.append(address)
    return addresses


def _not_an_own_address_error(
    endpoint: Endpoint, endpoint_addresses: Sequence[str]
) -> MasterUnreachableError:
    """Returns the error to raise if this machine has no address at which to serve the run.

    Args:
        endpoint: the endpoint to which the other processes connect.
        endpoint_addresses: its addresses; empty if its host name does not resolve.
    """
    own_addresses = listing(local_addresses())
    if endpoint_addresses:
        addresses = ", ".join(endpoint_addresses)
        found = f"{addresses} is not an address of this machine, which has {own_addresses}"
    else:
        found = (
            "the name does not resolve, and it is not an address of this machine, which has "
            f"{own_addresses}"
        )
    return MasterUnreachableError(
        f"this machine serves the run at {endpoint}",
        found,
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
    """Opens a socket that listens on an address of this machine.

    Args:
        address: an IP address of this machine.
        port: the port; 0 for any free one.

    Raises:
        OSError: the socket cannot be bound; for example, EADDRINUSE if the port is taken.
        SettingError: the address is a loopback address, and the loopback interface does not work.
    """
    family = socket.AF_INET6 if _is_ipv6(address) else socket.AF_INET
    if is_loopback_address(address):
        _check_loopback(address, family)
    return socket.create_server((address, port), family=family, backlog=128)


def _check_loopback(address: str, family: socket.AddressFamily) -> None:
    """Raises SettingError if no connection can be made to a loopback address."""
    try:
        with socket.create_server((address, 0), family=family) as server:
            host_and_port = server.getsockname()[:2]
            socket.create_connection(host_and_port, timeout=LOOPBACK_TIMEOUT_S).close()
    except OSError as error:
        # Errors such as "too many open files" have nothing to do with the interface. A connection
        # that timed out has no error number.
        interface_is_broken = error.errno in (None, errno.ENETUNREACH, errno.EADDRNOTAVAIL)
        if not interface_is_broken:
            raise

        raise SettingError(
            f"processes of this machine meet at {address}",
            "it cannot be reached: the loopback interface is down, or lacks this address",
            "set it up (`ip link set lo up`, as root), or take a container that has one",
            may_be_temporary=True,  # a later start may succeed
        ) from None


def serve_store(address: str, port: int, timeout: timedelta) -> TCPStore:
    """Serves a TCPStore that listens on one address. By itself, torch listens on all interfaces.

    Args:
        address: an IP address of this machine.
        port: the port; 0 for any free one.
        timeout: how long a request to the store may take.

    Raises:
        OSError: the port cannot be bound; for example, EADDRINUSE if it is taken.
    """
    import torch
    from torch.distributed import TCPStore

    # With libuv, torch before 2.8 does not accept a socket that is already open. Version numbers
    # are compared here, not texts: `torch.__version__` is a `TorchVersion`.
    libuv_accepts_sockets = torch.__version__ >= "2.8"

    with listening_socket(address, port) as listener:
        bound_port = listener.getsockname()[1]  # a free one if `port` is 0
        return TCPStore(
            address,
            bound_port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),  # the store closes it
            use_libuv=libuv_accepts_sockets,
        )


# The errors of serving and connecting


def explain_listening_error(
    error: OSError, endpoint: Endpoint
) -> PortTakenError | SettingError | OSError:
    """Returns the error to raise if a socket could not be bound.

    Args:
        error: the error of the operating system. It is returned unchanged unless it says that the
            port is taken or not allowed.
        endpoint: the endpoint at which the socket should listen.
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
    """Returns the error to raise if another program uses the port.

    Args:
        endpoint: the endpoint at which this machine should serve.
        owner: a description of the other program; None to look it up.
    """
    return PortTakenError(
        f"this machine serves the run at {endpoint}",
        f"port {endpoint.port} is taken by {owner or owner_of(endpoint.port)}",
        "choose a free port, the same everywhere (MASTER_PORT, --master-port, or the port of "
        "tcp:// and --rdzv-endpoint), or end that program",
    )


def owner_of(port: int) -> str:
    """Describes the process on this machine that listens on a port.

    Example: "process 4711: python train.py". If this user is not allowed to see the process, it is
    "another program".
    """
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            if listens and connection.pid:  # None for processes of other users
                arguments = psutil.Process(connection.pid).cmdline()
                # An argument may be a program of several lines, as of `python -c`.
                command = " ".join(" ".join(arguments).split())
                return f"process {connection.pid}: {command[:200]}"
    except psutil.Error:
        pass
    return "another program"


UNRESOLVED = "the host name does not resolve"
REFUSED = "the machine answers, but nothing listens on that port"
NO_ANSWER = "no answer"
CONNECTION_CUT = "the connection was accepted and then cut"
ADVICE_OF_REASON = {
    UNRESOLVED: "check the spelling, or give the address of the machine of {}",
    REFUSED: "look at the output of {}: it has not started, has ended, or uses another port",
    NO_ANSWER: "check the address, and that no firewall stands between the machines",
    CONNECTION_CUT: "look at the output of {}: it has not started, or has ended",
}


def unreachable_error(
    server: str, endpoint: Endpoint, reason: str, *, address: str = "", tried: float = 0.0
) -> MasterUnreachableError:
    """Returns the error to raise if a server cannot be reached.

    Args:
        server: the name of the server, such as "rank 0".
        endpoint: the endpoint at which it should be.
        reason: what was found, for the message: `UNRESOLVED`, `REFUSED`, `NO_ANSWER` or
            `CONNECTION_CUT`; or any other text, which says that another program listens there.
        address: the address that was tried last; "" if the host has none.
        tried: how many seconds were spent on trying; 0 to leave this out of the message.
    """
    where = str(endpoint)
    if address and address != endpoint.host:
        where += f" ({address})"

    found = reason
    if tried:
        found += f" (tried for {tried:g} s)"

    another_program_listens = reason not in ADVICE_OF_REASON
    if another_program_listens:
        advice = "choose a port that no other program has"
    else:
        advice = ADVICE_OF_REASON[reason].format(server)  # "look at the output of {}: ..."
    return MasterUnreachableError(f"{server} at {where}", found, advice)


# Waiting for other processes


def wait_until(attempt: Callable[[], T], deadline: float, *, ranks: int = 1) -> T:
    """Calls a function again and again, until it returns a true value or the deadline has passed.

    This is also used to wait for keys of a store. `Store.wait` cannot be interrupted, logs its
    timeouts, and looks only once a second if the store is a file.

    Args:
        attempt: the function to call. It is called at least once.
        deadline: the time of `time.monotonic()` at which to give up.
        ranks: the number of ranks that wait for the same thing. If there are many, each waits
            longer between two calls, so as not to overload the store.

    Returns:
        The result of the last call.
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
