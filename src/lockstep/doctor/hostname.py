"""The host name: does it resolve, and to an address that other machines reach; and the way back."""

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
    if ":" not in address:  # torch's sockets take both kinds, and so give the newer form
        address = f"::ffff:{address}"
    begun = time.monotonic()
    with suppress(OSError):
        socket.getnameinfo((address, 0, 0, 0), 0)
    waited = time.monotonic() - begun
    return {"name": name, "addresses": resolve(name), "address": address, "waited_s": waited}


def judge(facts: Facts) -> Finding:
    """A name that others may not use; on one machine that harms nothing. Names that come late."""
    name, addresses, problems = facts["name"], facts["addresses"], []
    do = f"write the address of this machine before {name} in /etc/hosts, as root"
    if not addresses:
        problems.append(Finding(WARNING, f"{name} does not resolve", do))
    elif all(map(is_loopback_address, addresses)):
        found = "loopback, which other machines cannot reach; Lockstep goes around it, other"
        problems.append(Finding(WARNING, f"{found} programs may not", do))
    if facts["waited_s"] > _SLOW_S:
        address, waited = facts["address"], facts["waited_s"]
        found = (
            f"to look for the name of {address} takes {waited:.0f} s, at every connection of torch"
        )
        do = (
            "repair the name server in /etc/resolv.conf; or write in /etc/hosts, as root, the lines"
        )
        lines = f" '::ffff:{LOOPBACK} localhost' and '{address} {name}'"
        problems.append(Finding(WARNING, found, do + lines))
    return verdict(f"{name} is {', '.join(addresses)}" if addresses else "", problems)
