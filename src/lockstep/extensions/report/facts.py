"""Lists what was run: the command, its arguments, the code, the machines and Lockstep's choices.

A *start* is one attempt of a run. These facts come from the first line of each rank's file
(`record`), and from the choices that rank 0 printed.
"""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.extensions.report.reading import Start
from lockstep.wording import count_noun, format_ranks, join_first


class UserText(str):
    """A text that comes from the user, such as the name of a file. It is never translated."""

    __slots__ = ()


class Fact(NamedTuple):
    """A row of the table of what was run."""

    name: str
    value: str
    reason: str = ""


class _Device(NamedTuple):
    """What a rank computes on. A host may have ranks on GPUs and ranks on its CPU."""

    name: str
    is_gpu: bool


def command_line(header: Mapping[str, Any]) -> str:
    """Returns the command line of a start, as one would type it; empty if it is not known."""
    return shlex.join(header.get("command") or [])


def run_facts(start: Start) -> list[Fact]:
    """Returns what was run in a start, and what Lockstep chose for it and why."""
    header = start.main.header
    facts = []
    if header.get("command"):
        script, *arguments = header["command"]
        facts.append(Fact("script", UserText(script)))
        facts += _script_arguments(arguments)

    facts += _settings(header)
    facts += _code(header)
    facts += _hosts(start)
    facts += [Fact(name, value, reason) for name, value, reason in start.main.choices]

    for name in ("lockstep", "torch", "cuda", "python"):
        if header.get(name):
            facts.append(Fact(name, str(header[name])))
    return facts


def _script_arguments(words: Sequence[str]) -> list[Fact]:
    """Returns the arguments of the script as names and values.

    `["--lr", "0.1", "--deep", "--size=8", "model.width=9", "data"]` gives ("--lr", "0.1"),
    ("--deep", ""), ("--size", "8"), ("model.width", "9") and ("argument", "data"). Any word without
    a dash after an option is taken for its value, here "0.1".
    """
    facts: list[Fact] = []
    option_without_value = ""  # the option of the last fact, if its value may follow
    for word in words:
        is_option = word.startswith("-") and not _is_number(word)
        if option_without_value and not is_option:
            facts[-1] = Fact(UserText(option_without_value), UserText(word))
            option_without_value = ""
            continue

        name, equals_sign, value = word.partition("=")
        if equals_sign:  # --lr=0.1, or model.width=8, which begins with no dash
            facts.append(Fact(UserText(name), UserText(value)))
            option_without_value = ""
        elif is_option:
            facts.append(Fact(UserText(word), ""))
            option_without_value = word
        else:
            facts.append(Fact("argument", UserText(word)))
    return facts


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _settings(header: Mapping[str, Any]) -> list[Fact]:
    """Returns the settings that decide on the numbers of a run."""
    names = ("seed", "precision")
    return [Fact(name, str(header[name])) for name in names if header.get(name) is not None]


def _code(header: Mapping[str, Any]) -> list[Fact]:
    """Returns which commit was run, and which files differed from it."""
    git = header.get("git")
    if not isinstance(git, dict) or not git.get("commit"):
        return []

    commit = str(git["commit"])[:12]
    if git.get("branch"):
        commit += f" ({git['branch']})"

    changed = git.get("changed")
    if not isinstance(changed, list):  # it is not known which files differed
        return [Fact("git commit", commit)]
    if not changed:
        return [Fact("git commit", commit, "no tracked file was changed")]

    files = count_noun(int(git.get("num_changed", len(changed))), "changed file")
    first_names = join_first([str(name) for name in changed])  # such as "a.py, b.py, ..."
    return [Fact("git commit", f"{commit}, with {files}", UserText(first_names))]


def _hosts(start: Start) -> list[Fact]:
    """Returns a row for each host: its ranks, and what devices they used."""
    if not start.reached_init:
        return []

    ranks_of_host: defaultdict[str, list[int]] = defaultdict(list)
    devices_of_host: defaultdict[str, Counter[_Device]] = defaultdict(Counter)
    for rank, record in sorted(start.records.items()):
        host = str(record.header.get("host", "not known"))
        device = str(record.header.get("device") or "")  # such as "cuda:0"
        name = str(record.header.get("device_name") or device)  # such as "H100"
        used_device = _Device(name, is_gpu=device.startswith("cuda"))
        ranks_of_host[host].append(rank)
        devices_of_host[host][used_device] += 1

    facts = []
    for host, ranks in ranks_of_host.items():
        devices = []
        for (name, is_gpu), num_ranks in devices_of_host[host].items():
            # Each rank has a GPU of its own, so two ranks use "2 × H100". But they may share a CPU.
            devices.append(f"{num_ranks} × {name}" if num_ranks > 1 and is_gpu else name)
        facts.append(Fact("host", f"{host}: {format_ranks(ranks)}", ", ".join(devices)))
    return facts


def all_facts(start: Start) -> dict[str, str]:
    """Returns the facts of a start by name, to compare them with those of another run.

    Hosts are left out, and so are names that occur more than once, except "script". Of the script,
    only the file name is compared, since its folder may differ between machines.
    """
    facts_of_start = run_facts(start)
    occurrences = Counter(fact.name for fact in facts_of_start)

    facts = {}
    for fact in facts_of_start:
        if fact.name == "script":
            facts["script"] = Path(fact.value).name
        elif occurrences[fact.name] == 1 and fact.name != "host":
            facts[fact.name] = fact.value
    return facts
