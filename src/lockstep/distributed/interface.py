"""Chooses the network interfaces that the ranks talk over, and tells Gloo and NCCL.

By default Gloo takes the address that the *host name* resolves to. Many systems map the host name
to 127.0.1.1 in /etc/hosts; on several machines the ranks then tell each other a *loopback* address,
which only their own machine can reach, and cannot connect. Gloo can be told otherwise only through
the environment variable GLOO_SOCKET_IFNAME, which is why this module sets an environment
variable, from the first process group of a run to its end.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence

from lockstep.distributed.network import (
    Addresses,
    facing_outward,
    find_interface,
    is_loopback_address,
    listing,
    means_loopback,
)
from lockstep.errors import SettingError

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
    """Returns the interface for Gloo and the reason; None lets Gloo follow the host name.

    Args:
        environ: for GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, which win.
        addresses: the IP addresses of each interface, by its name.
        one_node: all ranks are on this machine.
        address_reaching_master: the own address from which packets to the master leave.
        hostname_address: what the own host name resolves to; None: nothing.

    Raises:
        SettingError: a named interface does not exist here, or none can be chosen.
    """
    from_environment = _interface_from_environment(environ, addresses)
    if from_environment is not None:
        name, _ = from_environment
        # Several names, separated by commas, are not in `addresses`; they are left to Gloo.
        is_loopback = name in addresses and all(map(means_loopback, addresses[name]))
        # On one machine the loopback interface is chosen anyway, for a reason that says more.
        would_be_chosen_anyway = one_node and is_loopback
        if not would_be_chosen_anyway:
            return from_environment
    if one_node:
        loopback = find_interface(addresses, is_loopback_address)
        return loopback, "all ranks are on this machine: nothing is reachable from outside"
    return _interface_between_machines(addresses, address_reaching_master, hostname_address)


def _interface_between_machines(
    addresses: Addresses, address_reaching_master: str | None, hostname_address: str | None
) -> tuple[str | None, str]:
    """Returns the interface for a run on several machines, and the reason; see `choose_interface`.

    None, so that Gloo follows the host name, if that does not resolve to a loopback address.
    Otherwise the interface that reaches the master, or the only one to the outside.
    """
    if hostname_address is None:
        problem = "the host name does not resolve"
    elif is_loopback_address(hostname_address):
        problem = f"the host name resolves to {hostname_address}, which only this machine can reach"
    else:
        return None, f"the host name resolves to {hostname_address}, which other machines can reach"
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
    """Returns the interface that the user has set for Gloo or NCCL, and the reason; else None.

    If NCCL's variable matches several interfaces, none is chosen.

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
    if len(matching) > 1:  # NCCL can use several, and Gloo one
        return None
    return matching[0], f"{NCCL_INTERFACE} is set to {nccl_pattern}"


def nccl_matches(pattern: str, name: str) -> bool:
    """Returns True if NCCL_SOCKET_IFNAME has a value that lets NCCL use an interface.

    The value is a list of prefixes ("eth,ib"), of names ("=eth0,ib0"), or of what NCCL shall not
    use ("^docker", "^=eth1").

    Source: NCCL documentation, "Environment Variables", NCCL_SOCKET_IFNAME.
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
        may_pass=True,  # an interface comes up and goes down
    )


def use_gloo_interface(name: str | None, ranks: int = 1) -> None:
    """Makes the process groups of this process talk over an interface, by environment variables.

    Variables that an earlier call has set are removed first; those of the user stay as they are.

    Args:
        name: the interface; None: Gloo chooses, as it did before the first call.
        ranks: the number of ranks. If there are many, Gloo connects two of them when they first
            talk to each other; by default each would connect to all, in every group.
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
    """Unsets GLOO_SOCKET_IFNAME if `lockstep run` has set it to loopback.

    It does so for a process that is alone in its run. If the script itself has this process join
    those of other machines (`tcp://`), Gloo has to reach them.

    Args:
        addresses: the IP addresses of each interface, by its name.
    """
    name = os.environ.get(GLOO_INTERFACE, "")
    is_loopback = name in addresses and all(map(means_loopback, addresses[name]))
    if is_loopback and os.environ.get("LOCKSTEP_LAUNCHER"):
        del os.environ[GLOO_INTERFACE]


def use_nccl_interfaces(value: str) -> None:
    """Makes the NCCL of this process talk over some interfaces, until `use_gloo_interface(None)`.

    Args:
        value: of NCCL_SOCKET_IFNAME, from `choose_nccl_interfaces`. It must not be set.
    """
    os.environ[NCCL_INTERFACE] = value
    _variables_set_here.append(NCCL_INTERFACE)


def gloo_variables(environ: Mapping[str, str], interface: str | None) -> dict[str, str]:
    """Returns the variable that makes the ranks' Gloo use an interface; nothing if the user has.

    Gloo connects the ranks directly. By default it takes the address that the host name resolves
    to (often 127.0.1.1).

    Args:
        environ: the launcher's environment variables.
        interface: from `Rendezvous.interface`; None: unknown.

    Source: torch's "Common environment variables" of torch.distributed.
    """
    if interface is None or environ.get(GLOO_INTERFACE):
        return {}
    return {GLOO_INTERFACE: interface}


def choose_nccl_interfaces(
    environ: Mapping[str, str], interfaces: Sequence[str], reaching_master: str | None
) -> tuple[str, str] | None:
    """Returns a value for NCCL_SOCKET_IFNAME and the reason; None leaves the choice to NCCL.

    NCCL takes InfiniBand, or else all interfaces but loopback and docker0, which is right on most
    machines: over several interfaces it is faster than over one. But it takes other bridges of
    containers for a network, too, and waits forever for machines that cannot be reached by them.

    Args:
        environ: NCCL_SOCKET_IFNAME and NCCL_COMM_ID, if they are set, tell NCCL what to take.
        interfaces: the names of those that are up, see `network.running_interfaces`.
        reaching_master: the one that reaches the master, from `Rendezvous.interface`; loopback if
            all ranks are on this machine; None: unknown.

    Source: NCCL documentation, "Environment Variables", NCCL_SOCKET_IFNAME (`=` before names:
    exactly these).
    """
    if environ.get(NCCL_INTERFACE) or environ.get("NCCL_COMM_ID"):
        return None
    if reaching_master is not None and nccl_matches("lo", reaching_master):
        return None  # on this machine all interfaces reach all ranks
    present = list(interfaces)
    if reaching_master is not None and reaching_master not in present:
        present.append(reaching_master)  # the kernel may say a second late that it is up
    taken: list[str] = []
    for pattern in NCCL_PREFERENCES:
        taken = [name for name in present if nccl_matches(pattern, name)]
        if taken:
            break
    usable = []
    unusable = []
    for name in taken:
        leads_nowhere = nccl_matches("lo", name) or CONTAINER_INTERFACE.match(name)
        if leads_nowhere and name != reaching_master:
            unusable.append(name)
        else:
            usable.append(name)
    if not unusable:
        return None
    if not usable and reaching_master is not None:
        usable = [reaching_master]
    if not usable:
        return None
    reason = (
        f"by itself NCCL would use {', '.join(unusable)}, by the name loopback or an interface to "
        "containers of this machine"
    )
    return "=" + ",".join(usable), reason
