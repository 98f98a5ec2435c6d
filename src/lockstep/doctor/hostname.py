"""The host name: does it resolve, to an address that others reach; and how long the way back is."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from pathlib import Path

from lockstep.distributed.network import LOOPBACK, address_reaching, is_loopback_address, resolve
from lockstep.doctor.base import WARNING, Facts, Finding, verdict

_SLOW_S = 1.0


def gather(folder: Path) -> Facts:
    """The name, what it resolves to here, and how long it takes to find the name of an address."""
    name = socket.gethostname()
    address = address_reaching() or LOOPBACK
    if ":" not in address:  # as torch's sockets show it, which are of IPv6
        address = f"::ffff:{address}"
    begun = time.monotonic()
    with suppress(OSError):
        socket.getnameinfo((address, 0, 0, 0), 0)
    waited = time.monotonic() - begun
    return {"name": name, "addresses": resolve(name), "address": address, "waited_s": waited}


def judge(facts: Facts) -> Finding:
    """A name that others may not use; on one machine that harms nothing. Or a slow lookup."""
    name, addresses, problems = facts["name"], facts["addresses"], []
    do = f"write the address of this machine before {name} in /etc/hosts, as root"
    if not addresses:
        problems.append(Finding(WARNING, f"{name} does not resolve", do))
    elif all(map(is_loopback_address, addresses)):
        found = "that is loopback, which other machines cannot reach"
        found += "; Lockstep goes around it, other programs may not"
        problems.append(Finding(WARNING, found, do))
    address, waited = facts["address"], facts["waited_s"]
    if waited > _SLOW_S:
        found = f"looking up the name of {address} takes {waited:.0f} s"
        found += ", and torch does so for every connection"
        lines = f"'::ffff:{LOOPBACK} localhost' and '{address} {name}'"
        do = f"repair the name server in /etc/resolv.conf, or add {lines} to /etc/hosts, as root"
        problems.append(Finding(WARNING, found, do))
    return verdict(f"{name} is {', '.join(addresses)}" if addresses else "", problems)
