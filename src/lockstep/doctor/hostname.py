"""The host name: does it resolve, and to an address that other machines reach."""

from __future__ import annotations

import socket
from pathlib import Path

from lockstep.distributed.network import is_loopback_address, resolve
from lockstep.doctor.base import WARNING, Facts, Finding


def gather(folder: Path) -> Facts:
    """The name, and what it resolves to here."""
    name = socket.gethostname()
    return {"name": name, "addresses": resolve(name)}


def judge(facts: Facts) -> Finding:
    """A name that others may not use; on one machine that harms nothing."""
    name, addresses = facts["name"], facts["addresses"]
    do = f"write the address of this machine before {name} in /etc/hosts, as root"
    if not addresses:
        return Finding(WARNING, f"{name} does not resolve", do)
    found = f"{name} is {', '.join(addresses)}"
    if all(map(is_loopback_address, addresses)):
        found += ": loopback, which other machines cannot reach; Lockstep goes around it"
        return Finding(WARNING, f"{found}, other programs may not", do)
    return Finding("ok", found)
