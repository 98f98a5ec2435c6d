"""Checks the network interfaces: loopback, and the one that a run on several machines will use.

`gather` reads facts from this machine, and `judge` says what is wrong with them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from lockstep.doctor.base import ERROR, WARNING, Facts, Finding, join_findings
from lockstep.errors import SettingError
from lockstep.machine.interface import nccl_matches
from lockstep.machine.network import (
    LOOPBACK,
    default_route_address,
    facing_outward,
    interface_of,
    listening_socket,
    listing,
    local_addresses,
)

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"  # names of interfaces
NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"  # patterns, see `nccl_matches`
MIN_MTU = 1280  # bytes of a packet


def gather(folder: Path) -> Facts:
    """Reads the interfaces, the one with the default route, and the variables that name one.

    The default route leads to other machines. If there is none, `interface` and `address` are None.
    `mtu` (the longest packet in bytes) and `mbits` (the speed) are None if they are not known.
    """
    import psutil

    address = default_route_address()
    interface = None if address is None else interface_of(address)

    mtu = None
    megabits = None
    statistics_of_interface = psutil.net_if_stats()
    if interface in statistics_of_interface:
        mtu = statistics_of_interface[interface].mtu
        megabits = statistics_of_interface[interface].speed or None  # 0 if it is not known

    variables = {}
    for name in (GLOO_VARIABLE, NCCL_VARIABLE):
        if os.environ.get(name):
            variables[name] = os.environ[name]

    return {
        "interfaces": local_addresses(),
        "loopback_problem": _loopback_problem(),
        "address": address,
        "interface": interface,
        "mtu": mtu,
        "mbits": megabits,
        "variables": variables,
    }


def _loopback_problem() -> str | None:
    """Returns why a program cannot listen on loopback, or None if it can."""
    try:
        listening_socket(LOOPBACK, 0).close()
    except SettingError as error:
        return error.found
    except OSError as error:
        return str(error)
    return None


def judge(facts: Facts) -> Finding:
    """Says which interface leads to other machines, and finds problems.

    The problems are a loopback that does not work, variables that name interfaces which do not
    exist, and small packets.
    """
    interfaces = facts["interfaces"]
    problems = []
    if facts["loopback_problem"]:
        found = f"loopback does not work: {facts['loopback_problem']}"
        problems.append(Finding(ERROR, found, "as root: ip link set lo up"))

    for variable, value in facts["variables"].items():
        if not _names_interfaces(variable, value, interfaces):
            found = f"{variable}={value}, and there is no such interface"
            do = f"set it to one of {', '.join(interfaces)}, or unset it"
            problems.append(Finding(ERROR, found, do))

    if facts["interface"] is None:
        # There is no default route, so no single interface reaches all other machines. List the
        # interfaces that could reach some of them.
        other_interfaces = facing_outward(interfaces)
        if other_interfaces:
            summary = f"no default route: {listing(other_interfaces)}"
        else:
            summary = "no route to other machines; runs on this machine use loopback"
        return join_findings(summary, problems)

    summary = f"{facts['interface']} ({facts['address']}) has the default route"
    if facts["mbits"]:
        summary += f", {facts['mbits']} Mb/s"

    if facts["mtu"] is not None:
        summary += f", MTU {facts['mtu']}"
        if facts["mtu"] < MIN_MTU:
            found = "packets are so small that much of the bandwidth is lost"
            problems.append(Finding(WARNING, found, "as root: ip link set ... mtu 1500"))

    return join_findings(summary, problems)


def _names_interfaces(variable: str, value: str, interfaces: Iterable[str]) -> bool:
    """Returns True if the interfaces that a variable names exist.

    Args:
        variable: Gloo's variable, which lists names, or NCCL's, which lists patterns of which one
            must match.
        value: the value of the variable.
        interfaces: the names of this machine's interfaces.
    """
    if variable == GLOO_VARIABLE:
        return all(name in interfaces for name in value.split(","))
    return any(nccl_matches(value, name) for name in interfaces)
