"""Which network interface the ranks talk over, and why.

Gloo takes the address that the host name resolves to. Many systems map the host name to 127.0.1.1
in /etc/hosts; on several machines the ranks then tell each other a loopback address and cannot
connect. Gloo can be told otherwise through GLOO_SOCKET_IFNAME alone, which is why this one file
sets an environment variable, for the moment in which a process group is made.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from lockstep.errors import SettingError
from lockstep.sockets import (
    address_reaching,
    is_loopback_address,
    listing,
    local_addresses,
    means_loopback,
)
from lockstep.topology import Topology

Addresses = Mapping[str, Sequence[str]]
_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def find_interface(environ: Mapping[str, str], topology: Topology) -> tuple[str | None, str]:
    """`choose_interface` for this machine."""
    return choose_interface(
        environ,
        local_addresses(),
        topology.one_node,
        address_reaching(topology.master_addr),
        hostname_address(),
    )


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
    outward = [name for name, own in addresses.items() if own and not is_loopback_address(own[0])]
    if len(outward) == 1:
        return outward[0], f"{trap}; {outward[0]} is the only interface to the outside"
    raise SettingError(
        "a run on several machines",
        f"{trap}, and it is not clear which of these interfaces to use: {listing(addresses)}",
        f"set {_GLOO} (and {_NCCL} for GPUs) to one of them",
    )


@contextmanager
def gloo_interface(name: str | None) -> Iterator[None]:
    """Makes process groups created inside the block talk over this interface (None: no change)."""
    before = os.environ.get(_GLOO)
    if name is None or before:
        yield
        return
    os.environ[_GLOO] = name
    try:
        yield
    finally:
        del os.environ[_GLOO]


def further_groups(topology: Topology, backend: str) -> AbstractContextManager[None]:
    """Makes groups created inside the block talk over the interface of the run's first one.

    Gloo itself would take the address of the host name.
    """
    name = None if backend == "mpi" else find_interface(os.environ, topology)[0]
    return gloo_interface(name)


def hostname_address() -> str | None:
    """What the own host name resolves to; None when it does not."""
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    except OSError:
        return None


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
    if len(matching) > 1:
        return None
    return matching[0], f"{_NCCL} is set to {environ[_NCCL]}"


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
