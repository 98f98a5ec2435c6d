"""Which address and interface this machine shows to the other machines of a run."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.errors import MasterUnreachableError, SettingError
from lockstep.sockets import (
    ANY_OUTSIDE_ADDRESS,
    LOOPBACK,
    address_reaching,
    is_loopback_address,
    listing,
    local_addresses,
    means_loopback,
    resolve,
)

_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


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
    if means_loopback(host):
        return LOOPBACK if host == "localhost" else host
    own = [a for each in local_addresses().values() for a in each if not is_loopback_address(a)]
    addresses = resolve(host)
    outward = [address for address in addresses if address in own]
    if outward:
        return outward[0]
    if local_addr:
        return own_address(local_addr)
    routed = address_reaching(ANY_OUTSIDE_ADDRESS)
    if len(own) == 1:
        return own[0]
    if routed in own:
        return routed
    raise MasterUnreachableError(
        f"this machine serves the run at {host}",
        f"{', '.join(addresses) or 'the name does not resolve, and it'} is not an address of this "
        f"machine, which has {listing(local_addresses())}",
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
            f"it is not an address of this machine, which has {listing(local_addresses())}",
            "set it to one of these, or leave it out to have one chosen",
        )
    return found


def is_here(address: str) -> bool:
    """Whether an address is one of this machine's."""
    return is_loopback_address(address) or interface_of(address) is not None


def interface_of(address: str) -> str | None:
    """The name of the interface that has an address; None: it is not this machine's."""
    own = local_addresses()
    if address not in own.get("lo", []) and is_loopback_address(address):
        address = LOOPBACK  # all of 127.0.0.0/8 is the loopback interface's
    return next((name for name, addresses in own.items() if address in addresses), None)
