"""Checks the host name: whether other machines can use it, and whether lookups are slow.

For every connection that it makes, torch looks up the name of the other machine's address. `gather`
reads facts from this machine, and `judge` says what is wrong with them.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from pathlib import Path

from lockstep.distributed.network import LOOPBACK, address_reaching, is_loopback_address, resolve
from lockstep.doctor.base import WARNING, Facts, Finding, join_findings

MAX_LOOKUP_S = 1.0


def gather(folder: Path) -> Facts:
    """Reads the name of this machine and its addresses, and measures how long it takes to look up
    the name of its own address.
    """
    name = socket.gethostname()

    # The address of this machine from which packets to other machines leave. (Without an argument:
    # to any machine outside of this network.)
    address = address_reaching() or LOOPBACK

    # Torch looks up an IPv4 address in this form, since its sockets are IPv6. A system may answer
    # the one form at once and the other one late.
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
    summary = f"{name} is {', '.join(addresses)}" if addresses else ""

    # The texts of the problems follow the summary: `node1 is 127.0.1.1; that is loopback, ...`.
    problems = []
    do = f"write the address of this machine before {name} in /etc/hosts, as root"
    if not addresses:
        problems.append(Finding(WARNING, f"{name} does not resolve", do))
    elif all(is_loopback_address(address) for address in addresses):
        found = (
            "that is loopback, which other machines cannot reach; Lockstep goes around it, other "
            "programs may not"
        )
        problems.append(Finding(WARNING, found, do))

    if facts["waited_s"] > MAX_LOOKUP_S:
        found = (
            f"looking up the name of {facts['address']} takes {facts['waited_s']:.0f} s, and torch "
            "does so for every connection"
        )

        # Two lines are added: one for connections to this machine from others, and one for those
        # within it, at the loopback address. Torch's sockets are IPv6, so it looks up IPv4
        # addresses in the form ::ffff:127.0.0.1.
        hosts_lines = f"'::ffff:{LOOPBACK} localhost' and '{facts['address']} {name}'"
        do = (
            f"repair the name server in /etc/resolv.conf, or add {hosts_lines} to /etc/hosts, as "
            "root"
        )
        problems.append(Finding(WARNING, found, do))

    return join_findings(summary, problems)
