"""The addresses of this machine, where one process serves and the others find it, how to wait.

What needs torch or psutil imports it when it is called: the launcher is here before torch is, and
most runs need no psutil.

Which network interface the ranks talk over, and why: Gloo takes the address that the host name
resolves to. Many systems map the host name to 127.0.1.1 in /etc/hosts; on several machines the
ranks then tell each other a loopback address and cannot connect. Gloo can be told otherwise through
GLOO_SOCKET_IFNAME alone, which is why this one file sets an environment variable, from the first
process group of a run to its end.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING, TypeVar

from lockstep.errors import MasterUnreachableError, PortTakenError, SettingError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

T = TypeVar("T")
Addresses = Mapping[str, Sequence[str]]
LOOPBACK = "127.0.0.1"
_ANY_OUTSIDE_ADDRESS = "203.0.113.1"
"""Of the block set aside for documentation (RFC 5737): on the way to it lies the default route."""
_LOOPBACK_S = 3.0
"""What takes no time where it works."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05
_ATTEMPTS_A_SECOND = 4000
"""Of all ranks that wait for the same key: more would keep the store from its work."""


# The addresses of this machine


def local_addresses() -> dict[str, list[str]]:
    """Interface name -> its IP addresses, IPv4 first; link-local IPv6 ones are left out."""
    import psutil

    found = {}
    for name, entries in psutil.net_if_addrs().items():
        own = [
            entry.address
            for family in (socket.AF_INET, socket.AF_INET6)
            for entry in entries
            if entry.family == family and not entry.address.startswith("fe80")
        ]
        if own:
            found[name] = own
    return found


def listing(addresses: Mapping[str, Sequence[str]]) -> str:
    """Interfaces and their addresses, as `local_addresses` gives them, in words."""
    return ", ".join(f"{name} ({', '.join(own)})" for name, own in addresses.items())


def facing_outward(addresses: Addresses) -> dict[str, Sequence[str]]:
    """Those interfaces that other machines may reach, with their addresses."""
    return {n: own for n, own in addresses.items() if own and not is_loopback_address(own[0])}


def address_reaching(host: str | None = _ANY_OUTSIDE_ADDRESS) -> str | None:
    """The own address from which packets to `host` would leave; nothing is sent.

    Left out, `host` stands for all others: the address is that of the default route.
    """
    if host is None:
        return None
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return None


def resolve(host: str) -> list[str]:
    """What a host name or address resolves to, IPv4 first; empty when it does not."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError: a label is empty or has over 63 characters
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


def is_here(address: str) -> bool:
    """Whether an IP address is one of this machine's."""
    return interface_of(address) is not None


def interface_of(address: str) -> str | None:
    """The name of the interface that has an address; None: it is not this machine's."""
    own = local_addresses()
    if is_loopback_address(address) and address not in own.get("lo", []):
        address = LOOPBACK  # all of 127.0.0.0/8 is the loopback interface's
    return _owner(own, lambda each: each == address)


# Where one process serves and the others find it


@dataclass(frozen=True)
class Endpoint:
    """Where the store of a run is served."""

    host: str
    """A name or an address."""
    port: int
    one_node: bool = False
    """All that use it are on this machine, so that loopback serves."""

    def __str__(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def addresses(self) -> list[str]:
        """Where to connect to; empty when the host name does not resolve."""
        found = resolve(self.host)
        if self.one_node and any(map(is_here, found)):
            return [next(filter(is_loopback_address, found), LOOPBACK)]
        return found


def serving_address(endpoint: Endpoint, local_addr: str | None = None) -> str:
    """The address of this machine to listen on, so that the others find it at the endpoint.

    That is the endpoint's own where it is one of this machine's. It is not where the host name
    means loopback on its own machine (127.0.1.1 in /etc/hosts), or belongs to a forwarder in front
    of this machine, as in Kubernetes; then it is `local_addr`, or the address to the outside.

    Raises:
        MasterUnreachableError: the host does not resolve, or is not this machine.
        SettingError: `local_addr` is not an address of this machine.
    """
    addresses = endpoint.addresses()
    if endpoint.one_node:
        here = [address for address in addresses if is_loopback_address(address)]
    else:
        own = [a for each in local_addresses().values() for a in each if not is_loopback_address(a)]
        here = [address for address in addresses if address in own]
        if not here and local_addr:
            return own_address(local_addr)
        if not here:
            routed = address_reaching()
            here = own if len(own) == 1 else [routed] if routed in own else []
    if here:
        return here[0]
    raise MasterUnreachableError(
        f"this machine serves the run at {endpoint}",
        f"{', '.join(addresses) or 'the name does not resolve, and it'} is not an address of this "
        f"machine, which has {listing(local_addresses())}",
        "give the address of this machine (MASTER_ADDR, --master-addr, or the host of tcp:// and "
        "--rdzv-endpoint), or --local-addr for the one that the others reach",
    )


def own_address(local_addr: str) -> str:
    """The address of this machine that a name or address stands for.

    Raises:
        SettingError: it is not one of this machine's.
    """
    found = next(filter(is_here, resolve(local_addr)), None)
    if found is None:
        raise SettingError(
            f"--local-addr {local_addr}",
            f"it is not an address of this machine, which has {listing(local_addresses())}",
            "set it to one of these, or leave it out to have one chosen",
        )
    return found


def listening_socket(address: str, port: int) -> socket.socket:
    """A socket that listens at an address (port 0: a free one).

    Raises:
        OSError: it cannot be bound (EADDRINUSE: the port is taken).
        SettingError: it is loopback's, and there is none.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if is_loopback_address(address):
        try:
            with socket.create_server((address, 0), family=family) as probe:
                socket.create_connection(probe.getsockname()[:2], timeout=_LOOPBACK_S).close()
        except OSError as error:
            if error.errno not in (None, errno.ENETUNREACH, errno.EADDRNOTAVAIL):
                raise
            raise SettingError(
                f"processes of this machine meet at {address}",
                "it cannot be reached: the loopback interface is down, or lacks this address",
                "set it up (`ip link set lo up`, as root), or take a container that has one",
            ) from None
    return socket.create_server((address, port), family=family, backlog=128)


def serve_store(address: str, port: int, timeout: timedelta) -> TCPStore:
    """A store at one address; torch's own listens on all interfaces, whatever host it is given.

    Args:
        address: of this machine.
        port: 0: a free one.
        timeout: how long the store waits for an answer.

    Raises:
        OSError: the port cannot be bound (EADDRINUSE: it is taken).
    """
    from torch.distributed import TCPStore

    with listening_socket(address, port) as listener:
        return TCPStore(
            address,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),  # the store closes it
        )


def cannot_listen(error: OSError, endpoint: Endpoint) -> PortTakenError | SettingError | OSError:
    """The error to raise for a socket that could not be bound."""
    if error.errno == errno.EADDRINUSE:
        return port_taken(endpoint)
    if error.errno == errno.EACCES:
        return SettingError(
            f"this machine serves the run at {endpoint}",
            f"this user may not listen on port {endpoint.port}",
            "choose a port above 1023, the same everywhere",
        )
    return error


def port_taken(endpoint: Endpoint, owner: str | None = None) -> PortTakenError:
    """The error for a port that something else has, as far as we may know what."""
    return PortTakenError(
        f"this machine serves the run at {endpoint}",
        f"port {endpoint.port} is taken by {owner or owner_of(endpoint.port)}",
        "choose a free port, the same everywhere (MASTER_PORT, --master-port, or the port of "
        "tcp:// and --rdzv-endpoint), or end that program",
    )


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


UNRESOLVED = "the host name does not resolve"
REFUSED = "the machine answers, but nothing listens on that port"
NO_ANSWER = "no answer"
CUT = "the connection was accepted and then cut"
_ADVICE = {
    UNRESOLVED: "check the spelling, or give the address of the machine of {}",
    REFUSED: "look at the output of {}: it has not started, has ended, or uses another port",
    NO_ANSWER: "check the address, and that no firewall stands between the machines",
    CUT: "look at the output of {}: it has not started, or has ended",
}


def unreachable(
    server: str, endpoint: Endpoint, reason: str, *, address: str = "", tried: float = 0.0
) -> MasterUnreachableError:
    """The error for a server that cannot be reached.

    Args:
        server: who serves, in words.
        endpoint: where it should be.
        reason: one of the texts above, or what else there is.
        address: the one that was tried last.
        tried: seconds.
    """
    where = f" ({address})" if address not in ("", endpoint.host) else ""
    return MasterUnreachableError(
        f"{server} at {endpoint}{where}",
        reason + (f" (tried for {tried:g} s)" if tried else ""),
        _ADVICE.get(reason, "choose a port that no other program has").format(server),
    )


def wait_until(attempt: Callable[[], T], deadline: float, *, ranks: int = 1) -> T:
    """Calls `attempt` until it returns something true, or `time.monotonic()` passes the deadline.

    `Store.wait` would do for keys, but it cannot be interrupted, logs its timeouts, and on files
    looks once a second.

    Args:
        attempt: what is called.
        deadline: in the seconds of `time.monotonic()`.
        ranks: how many wait for the same thing; the more, the longer each comes to pause.

    Returns:
        The last result.
    """
    pause, longest = _FIRST_PAUSE_S, max(_LONGEST_PAUSE_S, ranks / _ATTEMPTS_A_SECOND)
    while not (result := attempt()):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        time.sleep(min(pause, left))
        pause = min(2 * pause, longest)
    return result


# The interface that the ranks talk over

_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_LAZY, _CONNECTED = "TORCH_GLOO_LAZY_INIT", 64
"""Up to so many ranks are all connected with each other, and a broken network shows at once."""
_ours: list[str] = []
"""The variables of Gloo's that are set here, while a run goes on."""


def choose_interface(
    environ: Mapping[str, str],
    addresses: Addresses,
    one_node: bool,
    address_reaching_master: str | None,
    hostname_address: str | None,
) -> tuple[str | None, str]:
    """The interface for Gloo and the reason; None leaves it to Gloo, which follows the host name.

    Args:
        environ: for GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, which win.
        addresses: interface name -> its IP addresses.
        one_node: all ranks are on this machine.
        address_reaching_master: the own address from which packets to the master leave.
        hostname_address: what the own host name resolves to; None: nothing.

    Raises:
        SettingError: a named interface does not exist here, or none can be chosen.
    """
    named = _named(environ, addresses)
    # Several names, with commas between them, are none of `addresses`; they are left to Gloo.
    here = one_node and (named is None or all(map(means_loopback, addresses.get(named[0], ["-"]))))
    if named is not None and not here:
        return named
    if here:
        loopback = _owner(addresses, is_loopback_address)
        return loopback, "all ranks are on this machine: nothing is reachable from outside"
    if hostname_address is not None and not is_loopback_address(hostname_address):
        return None, f"the host name resolves to {hostname_address}, which other machines can reach"
    trap = (
        "the host name does not resolve"
        if hostname_address is None
        else f"the host name resolves to {hostname_address}, which only this machine can reach"
    )
    reaching = _owner(addresses, lambda address: address == address_reaching_master)
    if reaching is not None and not is_loopback_address(addresses[reaching][0]):
        return reaching, f"{trap}; {reaching} ({address_reaching_master}) reaches the master"
    outward = list(facing_outward(addresses))
    if len(outward) == 1:
        return outward[0], f"{trap}; {outward[0]} is the only interface to the outside"
    raise SettingError(
        "a run on several machines",
        f"{trap}, and it is not clear which of these interfaces to use: {listing(addresses)}",
        f"set {_GLOO} (and {_NCCL} for GPUs) to one of them",
    )


def use_gloo_interface(name: str | None, ranks: int = 1) -> None:
    """Makes the process groups of this process talk over an interface; None: as before.

    Gloo itself would take the address of the host name. Of many ranks it connects only those that
    talk to each other, when they do: else each would connect to all, in every group. What the user
    has set stays.
    """
    for variable in _ours:
        os.environ.pop(variable, None)
    wanted = {} if name is None else {_GLOO: name}
    if ranks > _CONNECTED:
        wanted[_LAZY] = "1"
    _ours[:] = [variable for variable in wanted if not os.environ.get(variable)]
    os.environ.update({variable: wanted[variable] for variable in _ours})


def socket_variables(environ: Mapping[str, str], interface: str | None) -> dict[str, str]:
    """The variables that make the ranks' own sockets use an interface.

    Gloo and NCCL connect the ranks directly, and by default Gloo takes the address that the host
    name resolves to (often 127.0.1.1) and NCCL any interface that is up.

    Args:
        environ: what the user has set there is left alone.
        interface: from `Rendezvous.interface`; None: unknown.

    Source: torch's "Common environment variables" of torch.distributed; NCCL's "Environment
    Variables" (`=` before a name: exactly this one).
    """
    if interface is None:
        return {}
    wanted = {_GLOO: interface, _NCCL: f"={interface}"}
    return {name: value for name, value in wanted.items() if not environ.get(name)}


def hostname_address() -> str | None:
    """What the own host name resolves to; None when it does not."""
    return next(iter(resolve(socket.gethostname())), None)


def _named(environ: Mapping[str, str], addresses: Addresses) -> tuple[str, str] | None:
    if environ.get(_GLOO):
        names = environ[_GLOO].split(",")
        if not set(names) <= set(addresses):
            raise _no_such_interface(_GLOO, environ[_GLOO], addresses)
        return environ[_GLOO], f"{_GLOO} is set"
    if not environ.get(_NCCL):
        return None
    matching = [name for name in addresses if nccl_matches(environ[_NCCL], name)]
    if not matching:
        raise _no_such_interface(_NCCL, environ[_NCCL], addresses)
    return (matching[0], f"{_NCCL} is set to {environ[_NCCL]}") if len(matching) == 1 else None


def nccl_matches(pattern: str, name: str) -> bool:
    """NCCL's reading of NCCL_SOCKET_IFNAME: prefixes; `=` before them: names; `^`: all but these.

    Source: NCCL documentation, "Environment Variables", NCCL_SOCKET_IFNAME.
    """
    exclude = pattern.startswith("^")
    rest = pattern.removeprefix("^")
    exact = rest.startswith("=")
    items = rest.removeprefix("=").split(",")
    hit = name in items if exact else any(name.startswith(item) for item in items if item)
    return hit != exclude


def _owner(addresses: Addresses, wanted: Callable[[str], bool]) -> str | None:
    return next((name for name, own in addresses.items() if any(map(wanted, own))), None)


def _no_such_interface(variable: str, value: str, addresses: Addresses) -> SettingError:
    return SettingError(
        f"{variable}={value}",
        f"no such interface on {socket.gethostname()}, which has {listing(addresses)}",
        "set it to one of these, or unset it to have one chosen",
    )
