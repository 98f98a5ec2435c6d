"""Checks the host name: whether other machines can use it, and whether lookups are slow.

For every connection that it makes, torch looks up the name of the other machine's address. `gather`
reads facts from this machine, and `judge` says what is wrong with them.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from pathlib import Path

from lockstep.doctor.base import WARNING, Facts, Finding, join_findings
from lockstep.machine.network import (
    LOOPBACK,
    default_route_address,
    is_loopback_address,
    resolve,
)

MAX_LOOKUP_S = 1.0


def gather(folder: Path) -> Facts:
    """Reads the name of this machine and its addresses, and measures how long it takes to look up
    the name of its own address.

    Args:
        folder: not used; the `gather` of every check gets it.
    """
    name = socket.gethostname()

    # The address of this machine from which packets to the internet leave.
    address = default_route_address() or LOOPBACK

    # Torch looks up 10.0.0.1 as ::ffff:10.0.0.1, since its sockets are IPv6. That may take longer
    # than to look up the plain address.
    if ":" not in address:
        address = f"::ffff:{address}"

    begin = time.monotonic()
    with suppress(OSError):  # only the time matters: an address without a name is not a problem
        port = flow_info = scope_id = 0
        socket.getnameinfo((address, port, flow_info, scope_id), 0)
    lookup_s = time.monotonic() - begin

    return {"name": name, "addresses": resolve(name), "address": address, "waited_s": lookup_s}


def judge(facts: Facts) -> Finding:
    """Finds a name that other machines cannot use, and slow lookups."""
    name = facts["name"]
    addresses = facts["addresses"]
    summary = f"{name} resolves to {', '.join(addresses)}" if addresses else ""

    # The texts of the problems follow the summary: `node1 resolves to 127.0.1.1; that is loopback,
    # ...`.
    problems = []
    advice = f"write the address of this machine before {name} in /etc/hosts, as root"
    if not addresses:
        problems.append(Finding(WARNING, f"{name} does not resolve", advice))
    elif all(is_loopback_address(address) for address in addresses):
        found = (
            "that is loopback, which other machines cannot reach; Lockstep goes around it, other "
            "programs may not"
        )
        problems.append(Finding(WARNING, found, advice))

    if facts["waited_s"] > MAX_LOOKUP_S:
        problems.append(_slow_lookup(name, facts["address"], facts["waited_s"]))
    return join_findings(summary, problems)


def _slow_lookup(name: str, address: str, waited_s: float) -> Finding:
    """Returns the finding that the name of this machine's address is looked up slowly.

    Args:
        name: the name of this machine.
        address: its address, in the form in which torch looks it up.
        waited_s: how long the lookup took.
    """
    found = (
        f"looking up the name of {address} takes {waited_s:.0f} s, and torch does so for every "
        "connection"
    )

    # Two lines for /etc/hosts: for connections within this machine, and for those from others.
    # Torch's sockets are IPv6, so it looks up the IPv4 address 127.0.0.1 as ::ffff:127.0.0.1.
    hosts_lines = f"'::ffff:{LOOPBACK} localhost' and '{address} {name}'"
    advice = (
        f"repair the name server in /etc/resolv.conf, or add {hosts_lines} to /etc/hosts, as root"
    )
    return Finding(WARNING, found, advice)
