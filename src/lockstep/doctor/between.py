"""What is wrong between machines; pure, from what each of them has said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.communication.link import Link
from lockstep.distributed.network import is_loopback_address
from lockstep.doctor.base import ERROR, UNKNOWN, WARNING, Facts, Finding, verdict
from lockstep.wording import count_noun

_MUST_BE_ALIKE = ("python", "torch", "cuda", "nccl", "lockstep")
_SHOWN = 5
_CLOCK_S, _CLOCK_BROKEN_S = 1.0, 60.0
_UNEVEN = 10.0
"""Ways that differ by so much: the slowest is probably broken; a busy machine makes less."""
Machines = Mapping[str, Facts]
"""By the name that the user gave: `own`, `clock`, `links`, `checks`, `resolved`, `script`, `data`,
`shared`; one that was lost on the way has told the first of these alone."""
_SILENT = {UNKNOWN: "it has not answered"}


def judge(machines: Machines) -> dict[str, Finding]:
    """All that is compared, by check."""
    found = {
        "versions": _versions(machines),
        "packages": _packages(machines),
        "variables": _variables(machines),
        "clocks": _clocks(machines),
        "names": _names(machines),
        "links": _links(machines),
        "folder": _folder(machines),
        "token": _token(machines),
    }
    if any("script" in facts for facts in machines.values()):
        found["script"] = _script(machines)
    if any("data" in facts for facts in machines.values()):
        found["data"] = _data(machines)
    return found


def _differences(values: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """`numpy 2.1 on a, 2.2 on b, c`: what is not alike on all machines."""
    names = dict.fromkeys(name for of in values.values() for name in of)
    found = []
    for name in names:
        by_value: dict[str, list[str]] = {}
        for machine, of in values.items():
            value = of.get(name)
            by_value.setdefault("none" if value is None else str(value), []).append(machine)
        if len(by_value) > 1:
            parts = [f"{value} on {_few(who)}" for value, who in by_value.items()]
            found.append(f"{name} {', '.join(parts)}")
    return found


def _few(machines: Sequence[str]) -> str:
    more = len(machines) - 3
    return ", ".join(machines[:3]) + (f" and {more} more" if more > 0 else "")


def _listed(found: Sequence[str]) -> str:
    more = len(found) - _SHOWN
    return "; ".join(found[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _compared(of: Mapping[str, Facts], level: str, do: str, same: str) -> Finding:
    """What is not alike on all machines that have told it, and who has not."""
    problems = _not_known([name for name, facts in of.items() if UNKNOWN in facts])
    known = {name: facts for name, facts in of.items() if UNKNOWN not in facts}
    if found := _differences(known):
        problems.insert(0, Finding(level, f"differs: {_listed(found)}", do))
    return verdict("" if problems else same, problems)


def _not_known(machines: Sequence[str]) -> list[Finding]:
    do = "see what else is said of that machine"
    return [Finding(WARNING, f"not known of {_few(machines)}", do)] if machines else []


def _of(machines: Machines, check: str) -> dict[str, Facts]:
    return {name: facts["checks"].get(check, _SILENT) for name, facts in machines.items()}


def _part(facts: Facts, name: str) -> Facts:
    """One of the facts, to compare; where they are not known, that."""
    part = facts if UNKNOWN in facts else facts.get(name)
    return part if isinstance(part, Mapping) else {name: part}


def _versions(machines: Machines) -> Finding:
    kept = (*_MUST_BE_ALIKE, UNKNOWN)
    software = _of(machines, "software")
    of = {name: {k: v for k, v in facts.items() if k in kept} for name, facts in software.items()}
    same = "the same Python, torch, CUDA, NCCL and Lockstep everywhere"
    return _compared(of, ERROR, "install the same everywhere, at the same path", same)


def _packages(machines: Machines) -> Finding:
    of = {name: _part(facts, "packages") for name, facts in _of(machines, "software").items()}
    same = f"the same {max(map(len, of.values()))} everywhere"
    return _compared(of, WARNING, "make the same environment everywhere", same)


def _variables(machines: Machines) -> Finding:
    do = "set them alike; what lockstep run --hosts sends from here is counted as theirs"
    same = "those of torch and its libraries are the same everywhere"
    return _compared(_of(machines, "variables"), WARNING, do, same)


def _clocks(machines: Machines) -> Finding:
    off = {name: facts["clock"] for name, facts in machines.items() if "clock" in facts}
    late = {name: seconds for name, seconds in off.items() if abs(seconds) > _CLOCK_S}
    if late:
        words = [f"{name} is {_signed(seconds)}" for name, seconds in late.items()]
        worst = max(map(abs, late.values()))
        level = ERROR if worst > _CLOCK_BROKEN_S else WARNING
        return Finding(level, _listed(words), "timedatectl set-ntp true, or start chrony, as root")
    most = max(map(abs, off.values()), default=0.0)
    return Finding("ok", f"within {max(most, 0.001):.3f} s of this machine")


def _signed(seconds: float) -> str:
    return f"{abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'} this machine"


def _names(machines: Machines) -> Finding:
    """A run uses the address that a machine itself has told; its name only where there is none."""
    resolved = {name: facts.get("resolved", _SILENT) for name, facts in machines.items()}
    problems = _not_known([name for name, of in resolved.items() if UNKNOWN in of])
    by_address = dict[str, None]()
    for here, of in resolved.items():
        for name, addresses in of.items() if UNKNOWN not in of else ():
            if not addresses and machines[name]["own"]:
                by_address[name] = None
            elif not addresses:
                problems.append(Finding(ERROR, f"{here} does not know {name}", _HOSTS))
            elif len(machines) > 1 and all(map(is_loopback_address, addresses)):
                found = f"on {here}, {name} is {addresses[0]}: loopback"
                level = WARNING if name == here else ERROR
                problems.append(Finding(level, found, _HOSTS))
    summary = f"those of {count_noun(len(machines), 'machine')} looked up on each"
    if by_address:
        summary += f"; not all know {_few(list(by_address))}: a run uses the address"
    return verdict(summary, problems)


_COPY = "copy it, as lockstep run --copy does"
_HOSTS = "give the address instead of the name, or write it into /etc/hosts there"


def _links(machines: Machines) -> Finding:
    problems, sound, interfaces = [], [], set[str]()
    for here, facts in machines.items():
        for there, link in facts["links"].items():
            way = f"{here} to {there}"
            interfaces |= {link["interface"]} if link.get("interface") else set()
            if link.get("error"):
                do = "let the machines reach each other at all ports: Gloo and NCCL choose them"
                problems.append(Finding(ERROR, f"{way}: {link['error']}", do))
            elif link.get("stalled"):
                do = "set the MTU of the interfaces to what the way between them carries"
                found = f"{way}: short messages arrive, long ones do not, as where the MTU is wrong"
                problems.append(Finding(ERROR, found, do))
            elif "bandwidth" in link:
                sound.append((link["bandwidth"], link["latency_s"], way))
    if (more := len(problems) - _SHOWN) > 0:
        problems[_SHOWN:] = [problem._replace(found="") for problem in problems[_SHOWN:]]
        problems.append(Finding(ERROR, f"and {more} more"))
    if not sound:
        return verdict("none" if len(machines) > 1 else "one machine", problems)
    slowest, fastest = min(sound), max(sound)
    latency = max(latency for _, latency, _ in sound)
    link = Link(latency, slowest[0])
    ways = len(machines) * (len(machines) - 1)
    tried = sum(len(facts["links"]) for facts in machines.values())
    some = "" if len(sound) == ways else f", {tried} of {ways} ways tried, {len(sound)} measured"
    summary = f"at least {link} (and {latency * 1e3:.2g} ms) each way{some}"
    summary += f", over {', '.join(sorted(interfaces))}" if interfaces else ""
    if slowest[0] * _UNEVEN < fastest[0]:
        found = f"{slowest[2]} is {fastest[0] / slowest[0]:.0f} times as slow as {fastest[2]}"
        problems.append(Finding(WARNING, found, "see to its cable, port and interface"))
    return verdict(summary, problems)


def _folder(machines: Machines) -> Finding:
    shared = {name: facts.get("shared", _SILENT) for name, facts in machines.items()}
    if unknown := [name for name, seen in shared.items() if seen is None]:
        return Finding(WARNING, f"not known: {unknown[0]} cannot write there", "name another")
    problems = _not_known([name for name, seen in shared.items() if seen == _SILENT])
    if apart := [name for name, seen in shared.items() if seen is False]:
        found = f"not shared: what is written is not seen on {_few(apart)}"
        do = "checkpoints, ledger and report need one disk that all machines mount"
        problems.insert(0, Finding(WARNING, found, do))
    return verdict("" if problems else "all machines see the same", problems)


def _script(machines: Machines) -> Finding:
    of = {name: facts.get("script", _SILENT) for name, facts in machines.items()}
    if missing := [name for name, facts in of.items() if facts is None]:
        return Finding(ERROR, f"missing on {_few(missing)}", _COPY)
    return _compared(of, ERROR, _COPY, "the same everywhere")


def _token(machines: Machines) -> Finding:
    of = {name: _part(facts, "digest") for name, facts in _of(machines, "token").items()}
    do = (
        "launchers that you start by hand on each turn each other away (lockstep run --hosts "
        "sends one): copy the file ~/.config/lockstep/token of one machine to the others"
    )
    return _compared(of, WARNING, do, "the same everywhere")


def _data(machines: Machines) -> Finding:
    data = {name: facts.get("data", _SILENT) for name, facts in machines.items()}
    if missing := [name for name, of in data.items() if of is None]:
        return Finding(ERROR, f"missing on {_few(missing)}", _DATA)
    first = next((of for of in data.values() if UNKNOWN not in of), _NO_DATA)
    files, compared = (count_noun(n, "file") for n in (first["files"], len(first["contents"])))
    same = f"the same names and sizes ({files}), and pieces of contents ({compared})"
    for what in ("files", "bytes", "sizes", "names", "contents"):
        of = {name: _part(facts, what) for name, facts in data.items()}
        found = _compared(of, ERROR, _DATA, same)
        if found.level == ERROR:
            break
    return found


_NO_DATA: Facts = {"files": 0, "contents": ()}
_DATA = "copy it from one machine to the others (rsync -a), or mount the same disk on all"
