"""Which address and interface this machine shows to the other machines of a run."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from ipaddress import ip_address

import psutil

from lockstep.errors import MasterUnreachableError, SettingError

_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
# Of the block set aside for documentation (RFC 5737): on the way to it lies the default route.
_ANY_OUTSIDE_ADDRESS = "203.0.113.1"


def socket_variables(environ: Mapping[str, str], interface: str | None) -> dict[str, str]:
    """The variables that make the ranks' own sockets use an interface.

    Gloo and NCCL connect the ranks directly, and by default Gloo takes the address that the host
    name resolves to (often 127.0.1.1) and NCCL any interface that is up.

    Args:
        environ: what the user has set there is left alone.
        interface: from `Meeting.interface`; None: unknown.

    Source: torch's "Common environment variables" of torch.distributed; NCCL's "Environment
    Variables" (`=` before a name: exactly this one).
    """
    if interface is None:
        return {}
    wanted = {_GLOO: interface, _NCCL: f"={interface}"}
    return {name: value for name, value in wanted.items() if not environ.get(name)}


def serving_address(host: str, local_addr: str | None) -> str:
    """The address of this machine that the others reach as `host`.

    That is `host` itself where it is one of this machine's. It is not where the host name means
    loopback on its own machine (127.0.1.1 in /etc/hosts), or belongs to a forwarder in front of
    this machine, as in Kubernetes; then it is `local_addr`, or the address to the outside.

    Args:
        host: name or address of the master.
        local_addr: `--local-addr`, if given.

    Raises:
        MasterUnreachableError: it is not clear which of several addresses is meant.
        SettingError: `local_addr` is not an address of this machine.
    """
    if host == "localhost" or _is_loopback_literal(host):
        return "127.0.0.1" if host == "localhost" else host
    own = [a for each in local_addresses().values() for a in each if not is_loopback(a)]
    addresses = resolve(host)
    outward = [address for address in addresses if address in own]
    if outward:
        return outward[0]
    if local_addr:
        return own_address(local_addr)
    routed = address_reaching(_ANY_OUTSIDE_ADDRESS)
    if len(own) == 1:
        return own[0]
    if routed in own:
        return routed
    raise MasterUnreachableError(
        f"this machine serves the run at {host}",
        f"{', '.join(addresses) or 'the name does not resolve, and it'} is not an address of this "
        f"machine, which has {_listing()}",
        "set --master-addr (or the host of --rdzv-endpoint) to the address of this machine, or "
        "--local-addr to the one that the others reach",
    )


def own_address(local_addr: str) -> str:
    """The address of this machine that a name or address stands for.

    Raises:
        SettingError: it is not one of this machine's.
    """
    found = next((address for address in resolve(local_addr) if is_here(address)), None)
    if found is None:
        raise SettingError(
            f"--local-addr {local_addr}",
            f"it is not an address of this machine, which has {_listing()}",
            "set it to one of these, or leave it out to have one chosen",
        )
    return found


def resolve(host: str) -> list[str]:
    """What a host name or address resolves to, IPv4 first; empty when it does not."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted(dict.fromkeys(str(info[4][0]) for info in found), key=lambda a: ":" in a)


def is_here(address: str) -> bool:
    """Whether an address is one of this machine's."""
    return is_loopback(address) or interface_of(address) is not None


def is_loopback(address: str) -> bool:
    """Whether an IP address is reachable from its own machine only."""
    return ip_address(address.partition("%")[0]).is_loopback


def interface_of(address: str) -> str | None:
    """The name of the interface that has an address; None: it is not this machine's."""
    own = local_addresses()
    if address not in own.get("lo", []) and is_loopback(address):
        address = "127.0.0.1"  # all of 127.0.0.0/8 is the loopback interface's
    return next((name for name, addresses in own.items() if address in addresses), None)


def local_addresses() -> dict[str, list[str]]:
    """Interface name -> its IP addresses, IPv4 first; link-local IPv6 ones are left out."""
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


def address_reaching(host: str) -> str | None:
    """The own address from which packets to `host` would leave; nothing is sent."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def owner_of(port: int) -> str:
    """The process of this machine that listens on a port, in words, as far as we may know it."""
    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            if listens and connection.pid:
                command = " ".join(psutil.Process(connection.pid).cmdline())
                return f"process {connection.pid}: {command[:200]}"
    except psutil.Error:
        pass
    return "another program"


def _is_loopback_literal(host: str) -> bool:
    try:
        return is_loopback(host)
    except ValueError:
        return False


def _listing() -> str:
    return ", ".join(f"{name} ({', '.join(own)})" for name, own in local_addresses().items())
