"""What is wrong between machines; pure, from what each of them has said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.communication.link import Link
from lockstep.distributed.network import is_loopback_address
from lockstep.doctor.base import ERROR, WARNING, Facts, Finding, verdict
from lockstep.errors import counted

_MUST_BE_ALIKE = ("python", "torch", "cuda", "nccl", "lockstep")
_SHOWN = 5
_CLOCK_S, _CLOCK_BROKEN_S = 1.0, 60.0
_UNEVEN = 10.0
"""Ways that differ by so much: the slowest is probably broken; a busy machine makes less."""
Machines = Mapping[str, Facts]
"""By the name that the user gave: `checks`, `resolved`, `script`, `clock`, `shared`, `links`,
`data`."""


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
    if any(facts["script"] is not None for facts in machines.values()):
        found["script"] = _script(machines)
    if any(facts["data"] is not None for facts in machines.values()):
        found["data"] = _data(machines)
    return found


def _differences(values: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """`numpy 2.1 on a, 2.2 on b, c`: what is not alike on all machines."""
    names = dict.fromkeys(name for of in values.values() for name in of)
    found = []
    for name in names:
        by_value: dict[str, list[str]] = {}
        for machine, of in values.items():
            by_value.setdefault(str(of.get(name, "none")), []).append(machine)
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


def _of(machines: Machines, check: str) -> dict[str, Facts]:
    return {name: facts["checks"].get(check, {}) for name, facts in machines.items()}


def _versions(machines: Machines) -> Finding:
    software = _of(machines, "software")
    of = {name: {k: v.get(k) for k in _MUST_BE_ALIKE} for name, v in software.items()}
    if found := _differences(of):
        return Finding(ERROR, _listed(found), "install the same everywhere, at the same path")
    return Finding("ok", "the same Python, torch, CUDA, NCCL and Lockstep everywhere")


def _packages(machines: Machines) -> Finding:
    of = {name: facts.get("packages", {}) for name, facts in _of(machines, "software").items()}
    if found := _differences(of):
        return Finding(WARNING, _listed(found), "make the same environment everywhere")
    return Finding("ok", f"the same {len(next(iter(of.values())))} everywhere")


def _variables(machines: Machines) -> Finding:
    if found := _differences(_of(machines, "variables")):
        do = "set them alike; what lockstep run --hosts sends from here is counted as theirs"
        return Finding(WARNING, _listed(found), do)
    return Finding("ok", "those of torch and its libraries are the same everywhere")


def _clocks(machines: Machines) -> Finding:
    off = {name: facts["clock"] for name, facts in machines.items()}
    late = {name: seconds for name, seconds in off.items() if abs(seconds) > _CLOCK_S}
    if late:
        words = [f"{name} is {_signed(seconds)}" for name, seconds in late.items()]
        worst = max(map(abs, late.values()))
        level = ERROR if worst > _CLOCK_BROKEN_S else WARNING
        return Finding(level, _listed(words), "timedatectl set-ntp true, or start chrony, as root")
    most = max(map(abs, off.values()))
    return Finding("ok", f"within {max(most, 0.001):.3f} s of this machine")


def _signed(seconds: float) -> str:
    return f"{abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'} this machine"


def _names(machines: Machines) -> Finding:
    problems = []
    for here, facts in machines.items():
        for name, addresses in facts["resolved"].items():
            if not addresses:
                problems.append(Finding(ERROR, f"{here} does not know {name}", _HOSTS))
            elif len(machines) > 1 and all(map(is_loopback_address, addresses)):
                found = f"on {here}, {name} is {addresses[0]}: loopback"
                level = WARNING if name == here else ERROR
                problems.append(Finding(level, found, _HOSTS))
    return verdict(f"those of {len(machines)} machines looked up on each", problems)


_HOSTS = "give the address instead of the name, or write it into /etc/hosts there"


def _links(machines: Machines) -> Finding:
    problems, sound = [], []
    for here, facts in machines.items():
        for there, link in facts["links"].items():
            way = f"{here} to {there}"
            if link.get("error"):
                do = "let the machines reach each other at all ports: Gloo and NCCL choose them"
                problems.append(Finding(ERROR, f"{way}: {link['error']}", do))
            elif link.get("stalled"):
                do = "set the MTU of the interfaces to what the way between them carries"
                found = f"{way}: short messages arrive, long ones do not, as where the MTU is wrong"
                problems.append(Finding(ERROR, found, do))
            else:
                sound.append((link["bandwidth"], link["latency_s"], way))
    if not sound:
        return verdict("none" if len(machines) > 1 else "one machine", problems)
    slowest, fastest = min(sound), max(sound)
    latency = max(latency for _, latency, _ in sound)
    link = Link(latency, slowest[0])
    summary = f"at least {link} (and {latency * 1e3:.2g} ms) each way"
    if slowest[0] * _UNEVEN < fastest[0]:
        found = f"{slowest[2]} is {fastest[0] / slowest[0]:.0f} times as slow as {fastest[2]}"
        problems.append(Finding(WARNING, found, "see to its cable, port and interface"))
    return verdict(summary, problems)


def _folder(machines: Machines) -> Finding:
    apart = [name for name, facts in machines.items() if facts["shared"] is False]
    unknown = [name for name, facts in machines.items() if facts["shared"] is None]
    if unknown:
        return Finding("warning", f"not known: {unknown[0]} cannot write there", "name another")
    if apart:
        do = "checkpoints, ledger and report need one disk that all machines mount"
        return Finding(WARNING, f"not shared: {_few(apart)} does not see what is written", do)
    return Finding("ok", "all machines see the same")


def _script(machines: Machines) -> Finding:
    of = {name: {"it": (facts["script"] or "missing")[:8]} for name, facts in machines.items()}
    if found := _differences(of):
        return Finding(ERROR, f"differs: {found[0].removeprefix('it ')}", "copy it, or --copy")
    return Finding("ok", "the same everywhere")


def _token(machines: Machines) -> Finding:
    of = {
        name: {"it": facts.get("digest") or "none"}
        for name, facts in _of(machines, "token").items()
    }
    if _differences(of):
        found = f"differs: {_differences(of)[0].removeprefix('it ')}"
        do = (
            "launchers that you start by hand on each turn each other away (lockstep run --hosts "
            "sends one): copy the file ~/.config/lockstep/token of one machine to the others"
        )
        return Finding(WARNING, found, do)
    return Finding("ok", "the same everywhere")


def _data(machines: Machines) -> Finding:
    data = {name: facts["data"] for name, facts in machines.items()}
    if missing := [name for name, of in data.items() if of is None]:
        return Finding(ERROR, f"missing on {_few(missing)}", _DATA)
    for what in ("files", "bytes", "sizes", "names", "contents"):
        of = {name: it[what] if isinstance(it[what], dict) else {what: it[what]}
              for name, it in data.items()}  # fmt: skip
        if found := _differences(of):
            return Finding(ERROR, f"differs: {_listed(found)}", _DATA)
    first = next(iter(data.values()))
    files, compared = counted(first["files"], "file"), counted(len(first["contents"]), "of them")
    return Finding("ok", f"the same names and sizes of {files}, and pieces of {compared}")


_DATA = "copy it from one machine to the others (rsync -a), or mount the same disk on all"
