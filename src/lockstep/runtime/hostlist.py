"""Slurm's short forms for lists of hosts and of numbers of tasks; pure."""

from __future__ import annotations

import re

from lockstep.errors import SettingError

_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_OUTER_COMMA = re.compile(r",(?![^\[]*\])")


def expand_hostlist(text: str) -> list[str]:
    """`a,n[01-03,7]-ib[0-1]` as a list of host names, in Slurm's order.

    Source: the host list expressions in the manual page of `scontrol` (`show hostnames`).

    Raises:
        SettingError: the text is not a host list.
    """
    hosts = [host for part in _OUTER_COMMA.split(text.strip()) for host in _expand(part, text)]
    if not hosts or not all(re.fullmatch(r"[\w.:-]+", host) for host in hosts):
        raise _malformed("host list", text, "n[01-03,7],login")
    return hosts


def expand_tasks(text: str) -> list[int]:
    """`2(x3),1` as `[2, 2, 2, 1]`: the number of tasks on each node.

    Raises:
        SettingError: the text does not have this form.
    """
    counts: list[int] = []
    for part in text.strip().split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            raise _malformed("list of tasks per node", text, "2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _expand(part: str, whole: str) -> list[str]:
    match = _BRACKET.search(part)
    if match is None:
        return [part]
    numbers: list[str] = []
    for item in match[1].split(","):
        span = _RANGE.fullmatch(item)
        if span is None:
            raise _malformed("host list", whole, "n[01-03,7],login")
        first, last = span[1], span[2] or span[1]
        width = len(first)
        numbers += [f"{number:0{width}}" for number in range(int(first), int(last) + 1)]
    before, after = part[: match.start()], _expand(part[match.end() :], whole)
    return [f"{before}{number}{rest}" for number in numbers for rest in after]


def _malformed(what: str, text: str, example: str) -> SettingError:
    return SettingError(
        f"the {what} {text!r} from Slurm's environment",
        f"it does not read like {example!r}",
        "start the processes with srun, which sets it",
    )
