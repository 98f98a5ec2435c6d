"""The interfaces: loopback works, and which one runs on several machines will use."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.distributed.network import (
    LOOPBACK,
    address_reaching,
    facing_outward,
    interface_of,
    listening_socket,
    listing,
    local_addresses,
    nccl_matches,
)
from lockstep.doctor.base import ERROR, WARNING, Facts, Finding, verdict
from lockstep.errors import SettingError

_NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SMALLEST_MTU = 1280


def gather(folder: Path) -> Facts:
    """Interfaces, the one on the default route, and the variables that name one."""
    import psutil

    problem = None
    try:
        listening_socket(LOOPBACK, 0).close()
    except (OSError, SettingError) as error:
        problem = str(getattr(error, "found", error))
    address = address_reaching()
    name = None if address is None else interface_of(address)
    stats = psutil.net_if_stats()
    return {
        "interfaces": local_addresses(),
        "loopback_problem": problem,
        "address": address,
        "interface": name,
        "mtu": stats[name].mtu if name in stats else None,
        "mbits": stats[name].speed or None if name in stats else None,
        "variables": {n: os.environ[n] for n in _NAMES if os.environ.get(n)},
    }


def judge(facts: Facts) -> Finding:
    """No loopback, no way out, or a variable that names what is not there."""
    problems, names = [], facts["interfaces"]
    if facts["loopback_problem"]:
        found = f"loopback does not work: {facts['loopback_problem']}"
        problems.append(Finding(ERROR, found, "as root: ip link set lo up"))
    for variable, value in facts["variables"].items():
        gloo = variable.startswith("GLOO")
        given = value.split(",") if gloo else [value]
        there = [any(n == g if gloo else nccl_matches(g, n) for n in names) for g in given]
        if not all(there):
            found = f"{variable}={value}, and there is no such interface"
            problems.append(Finding(ERROR, found, f"choose of {', '.join(names)}, or unset it"))
    if facts["interface"] is None:
        others = facing_outward(names)
        summary = "no way to other machines; runs on this one use loopback"
        return verdict(f"no default route: {listing(others)}" if others else summary, problems)
    summary = f"{facts['interface']} ({facts['address']}) has the default route"
    summary += f", {facts['mbits']} Mb/s" if facts["mbits"] else ""
    if facts["mtu"] is not None:
        summary += f", MTU {facts['mtu']}"
        if facts["mtu"] < _SMALLEST_MTU:
            found = "packets are so short that much of the link is lost"
            problems.append(Finding(WARNING, found, "as root: ip link set ... mtu 1500"))
    return verdict(summary, problems)
