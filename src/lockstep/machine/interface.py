"""Chooses the network interfaces over which the ranks communicate, and configures Gloo and NCCL.

By default, Gloo uses the address that the *host name* resolves to. Many systems map the host name
to 127.0.1.1 in /etc/hosts. This is a *loopback* address, which other machines cannot reach, so the
ranks of several machines could not connect. Gloo can only be configured through the environment
variable GLOO_SOCKET_IFNAME. That is why this module sets environment variables while a run goes on.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence

from lockstep.errors import SettingError
from lockstep.machine.network import (
    Addresses,
    facing_outward,
    find_interface,
    is_loopback_address,
    listing,
)
from lockstep.machine.topology import LAUNCHER_VARIABLE

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
NCCL_PREFERENCES = ("ib", "^docker,lo", "docker", "lo")
"""What NCCL looks for if nobody tells it: it takes all interfaces that match the first pattern that
any matches (`ncclFindInterfaces` in NCCL 2.28; newer versions put `virbr` beside `docker`)."""
CONTAINER_INTERFACE = re.compile(
    r"docker|br-[0-9a-f]{12}$|veth|podman|cni|flannel|cali|vxlan\.calico|cilium|kube|lxc|lxdbr"
    r"|virbr|vnet\d"
)
"""How the names begin of interfaces that lead to the containers and virtual machines of this
machine. Their addresses mean nothing on other machines, or something else."""
GLOO_LAZY_CONNECTIONS = "TORCH_GLOO_LAZY_INIT"
MAX_FULLY_CONNECTED_RANKS = 64
"""Up to this number all ranks connect to each other at once, which shows a broken network early."""

_variables_set_here: list[str] = []
"""The variables of Gloo's and NCCL's that are set here, while a run goes on."""


def choose_interface(
    environ: Mapping[str, str],
    addresses: Addresses,
    one_node: bool,
    address_reaching_master: str | None,
    hostname_address: str | None,
) -> tuple[str | None, str]:
    """Chooses the network interface for Gloo.

    Args:
        environ: the environment variables. GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME take
            precedence over any other choice.
        addresses: the IP addresses of each interface, by its name.
        one_node: True if all ranks are on this machine.
        address_reaching_master: the address of this machine from which packets to the master leave.
        hostname_address: the address that this machine's host name resolves to, or None.

    Returns:
        The name of the interface and the reason, for the log. The name is None if Gloo should use
        the address of the host name.

    Raises:
        SettingError: the user named an interface that does not exist here, or none can be chosen.
    """
    chosen_by_user = _interface_from_environment(environ, addresses)
    if chosen_by_user is not None:
        name, _ = chosen_by_user  # may be several names, such as "eth0,eth1"
        is_loopback = name in addresses and _has_only_loopback(addresses[name])

        # On one machine, loopback is chosen below anyway, with a better reason for the log.
        if not (one_node and is_loopback):
            return chosen_by_user

    if one_node:
        loopback = find_interface(addresses, is_loopback_address)
        return loopback, "all ranks are on this machine: nothing is reachable from outside"

    return _interface_between_machines(addresses, address_reaching_master, hostname_address)


def _has_only_loopback(addresses_of_interface: Sequence[str]) -> bool:
    """Returns True if an interface has no address that other machines could reach."""
    return all(is_loopback_address(address) for address in addresses_of_interface)


def _interface_between_machines(
    addresses: Addresses, address_reaching_master: str | None, hostname_address: str | None
) -> tuple[str | None, str]:
    """Chooses the interface for a run on several machines.

    If other machines can reach the address of the host name, no interface is chosen (None), and
    Gloo uses that address. Otherwise, it is the interface that reaches the master, or else the only
    interface that is not loopback.

    Args:
        addresses: the IP addresses of each interface, by its name.
        address_reaching_master: the address of this machine from which packets to the master leave.
        hostname_address: the address that this machine's host name resolves to, or None.

    Returns:
        The name of the interface or None, and the reason, for the log.
    """
    if hostname_address is None:
        problem = "the host name does not resolve"
    elif is_loopback_address(hostname_address):
        problem = f"the host name resolves to {hostname_address}, which only this machine can reach"
    else:
        return None, f"the host name resolves to {hostname_address}, which other machines can reach"

    # The interface that reaches the master. Gloo uses its first address, so the first one must not
    # be loopback.
    interface = find_interface(addresses, lambda address: address == address_reaching_master)
    if interface is not None and not is_loopback_address(addresses[interface][0]):
        return interface, f"{problem}; {interface} ({address_reaching_master}) reaches the master"

    outward_interfaces = list(facing_outward(addresses))
    if len(outward_interfaces) == 1:
        interface = outward_interfaces[0]
        return interface, f"{problem}; {interface} is the only interface to the outside"

    raise SettingError(
        "a run on several machines",
        f"{problem}, and it is not clear which of these interfaces to use: {listing(addresses)}",
        f"set {GLOO_INTERFACE} (and {NCCL_INTERFACE} for GPUs) to one of them",
    )


def _interface_from_environment(
    environ: Mapping[str, str], addresses: Addresses
) -> tuple[str, str] | None:
    """Returns the interface that the user has set in a variable of Gloo or NCCL, and the reason.

    The value of Gloo's variable is returned as it is, even if it names several interfaces:
    "eth0,eth1". NCCL's variable is a pattern, such as "eth", and is only used if it matches a
    single interface here. Otherwise, and if neither variable is set, the result is None.

    Raises:
        SettingError: this machine has no such interface.
    """
    gloo_names = environ.get(GLOO_INTERFACE)
    if gloo_names:
        for name in gloo_names.split(","):
            if name not in addresses:
                raise _no_such_interface_error(GLOO_INTERFACE, gloo_names, addresses)
        return gloo_names, f"{GLOO_INTERFACE} is set"

    nccl_pattern = environ.get(NCCL_INTERFACE)
    if not nccl_pattern:
        return None

    matching = [name for name in addresses if nccl_matches(nccl_pattern, name)]
    if not matching:
        raise _no_such_interface_error(NCCL_INTERFACE, nccl_pattern, addresses)
    if len(matching) > 1:
        return None
    return matching[0], f"{NCCL_INTERFACE} is set to {nccl_pattern}"


def nccl_matches(pattern: str, name: str) -> bool:
    """Returns True if a value of NCCL_SOCKET_IFNAME allows NCCL to use an interface.

    The value is a list of prefixes ("eth,ib") or, after "=", of exact names ("=eth0,ib0"). A "^" in
    front means that the listed interfaces must not be used ("^docker", "^=eth1").

    Source: NCCL documentation, "Environment Variables", NCCL_SOCKET_IFNAME.

    Args:
        pattern: the value of NCCL_SOCKET_IFNAME.
        name: the name of the interface.
    """
    is_exclusion = pattern.startswith("^")
    pattern = pattern.removeprefix("^")
    has_exact_names = pattern.startswith("=")
    items = pattern.removeprefix("=").split(",")

    if has_exact_names:
        is_listed = name in items
    else:
        is_listed = any(name.startswith(item) for item in items if item)

    return not is_listed if is_exclusion else is_listed


def _no_such_interface_error(variable: str, value: str, addresses: Addresses) -> SettingError:
    return SettingError(
        f"{variable}={value}",
        f"no such interface on {socket.gethostname()}, which has {listing(addresses)}",
        "set it to one of these, or unset it to have one chosen",
        may_be_temporary=True,  # an interface comes up and goes down
    )


def use_gloo_interface(name: str | None, ranks: int = 1) -> None:
    """Makes Gloo use an interface in this process, by environment variables.

    Variables that an earlier call of this module has set are removed first. Variables that the user
    has set are not changed.

    Args:
        name: the interface. If None, Gloo chooses one by itself again.
        ranks: the number of ranks. If there are more than `MAX_FULLY_CONNECTED_RANKS`, Gloo is told
            to connect two ranks only when they first communicate. By default, it connects each rank
            to all others whenever a group is opened.
    """
    for variable in _variables_set_here:
        os.environ.pop(variable, None)
    _variables_set_here.clear()

    wanted_values = {}
    if name is not None:
        wanted_values[GLOO_INTERFACE] = name
    if ranks > MAX_FULLY_CONNECTED_RANKS:
        wanted_values[GLOO_LAZY_CONNECTIONS] = "1"

    for variable, value in wanted_values.items():
        if not os.environ.get(variable):
            os.environ[variable] = value
            _variables_set_here.append(variable)


def forget_loopback_of_launcher(addresses: Addresses) -> None:
    """Unsets GLOO_SOCKET_IFNAME if `lockstep run` has set it to the loopback interface.

    `lockstep run` sets it if it starts a single process. The script may then let this process join
    processes on other machines (`tcp://`), which cannot be reached over loopback.

    Args:
        addresses: the IP addresses of each interface, by its name.
    """
    name = os.environ.get(GLOO_INTERFACE, "")
    is_loopback = name in addresses and _has_only_loopback(addresses[name])
    if is_loopback and os.environ.get(LAUNCHER_VARIABLE):
        del os.environ[GLOO_INTERFACE]


def use_nccl_interfaces(value: str) -> None:
    """Sets NCCL_SOCKET_IFNAME for this process, until `use_gloo_interface` is called again.

    The user must not have set it.

    Args:
        value: the value that `choose_nccl_interfaces` has returned.
    """
    os.environ[NCCL_INTERFACE] = value
    _variables_set_here.append(NCCL_INTERFACE)


def gloo_variables(environ: Mapping[str, str], interface: str | None) -> dict[str, str]:
    """Returns the environment variable that a launcher sets so that Gloo uses an interface.

    The result is empty if the interface is not known, or if the user has set the variable.

    Args:
        environ: the launcher's environment variables.
        interface: the value of `Rendezvous.interface`; None if it is not known.

    Source: torch's "Common environment variables" of torch.distributed.
    """
    if interface is None or environ.get(GLOO_INTERFACE):
        return {}
    return {GLOO_INTERFACE: interface}


def _taken_by_nccl(interfaces: Sequence[str]) -> list[str]:
    """Returns which of these interfaces NCCL uses if NCCL_SOCKET_IFNAME is not set."""
    for pattern in NCCL_PREFERENCES:
        matching = [name for name in interfaces if nccl_matches(pattern, name)]
        if matching:
            return matching
    return []


def _is_named_loopback(interface: str) -> bool:
    """Returns True if NCCL takes an interface for loopback, by its name: it begins with "lo"."""
    return interface.startswith("lo")


def choose_nccl_interfaces(
    environ: Mapping[str, str], interfaces: Sequence[str], reaching_master: str | None
) -> tuple[str, str] | None:
    """Chooses a value for NCCL_SOCKET_IFNAME if NCCL by itself would use unusable interfaces.

    By itself, NCCL uses InfiniBand, or else all interfaces except loopback and docker0. This is
    right on most machines, and several interfaces are faster than one. But NCCL also uses other
    bridges to containers on this machine, and then waits forever, as they lead to no other machine.

    Args:
        environ: the environment variables. If the user has set NCCL_SOCKET_IFNAME or NCCL_COMM_ID,
            the choice is left to NCCL.
        interfaces: the names of the interfaces that are up (see `network.running_interfaces`).
        reaching_master: the interface that reaches the master: loopback if all ranks are on this
            machine, None if it is not known.

    Returns:
        The value and the reason, for the log; None if the choice is left to NCCL.

    Source: NCCL documentation, "Environment Variables", NCCL_SOCKET_IFNAME (`=` before names:
    exactly these).
    """
    if environ.get(NCCL_INTERFACE) or environ.get("NCCL_COMM_ID"):
        return None
    if reaching_master is not None and _is_named_loopback(reaching_master):
        return None  # all ranks are on this machine, so any interface reaches them

    present = list(interfaces)
    if reaching_master is not None and reaching_master not in present:
        present.append(reaching_master)  # the kernel may report a second late that it is up

    chosen_by_nccl = _taken_by_nccl(present)
    unusable = []
    for name in chosen_by_nccl:
        if _stays_on_this_machine(name) and name != reaching_master:
            unusable.append(name)
    if not unusable:  # NCCL's own choice is right
        return None

    better = [name for name in chosen_by_nccl if name not in unusable]
    if not better and reaching_master is not None:
        better = [reaching_master]
    if not better:  # nothing better is known
        return None

    reason = (
        f"by itself NCCL would use {', '.join(unusable)}, by the name loopback or an interface to "
        "containers of this machine"
    )
    return "=" + ",".join(better), reason


def _stays_on_this_machine(interface: str) -> bool:
    """Returns True if, by its name, an interface is loopback, or leads to containers only."""
    return _is_named_loopback(interface) or CONTAINER_INTERFACE.match(interface) is not None
