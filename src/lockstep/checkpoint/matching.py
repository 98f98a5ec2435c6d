"""Which tensor of a file belongs to which of a model, when wrappers have changed the names.

DDP and DataParallel put `module.` before every name below them, `torch.compile` puts `_orig_mod.`,
and people's own classes `model.` or `net.`. Nothing is stripped blindly: every combination of
taking such parts away and putting them on is tried against the model's own names, and the one that
makes most of them equal is used.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import product

Shape = tuple[int, ...] | None
"""None where there is none (extra state, lazy parameters)."""

_WRAPPERS = ("_orig_mod", "module")  # may stand anywhere in a name
_PREFIXES = frozenset({*_WRAPPERS, "model", "net"})  # may stand in front


@dataclass(frozen=True)
class Match:
    """The best correspondence found."""

    names: Mapping[str, str]
    """Name in the file -> name in the model, for those that have one."""
    fitting: int
    """How many of them have the same shape on both sides."""
    changes: tuple[str, ...]
    """What was done to the file's names, in words."""


def match_names(file: Mapping[str, Shape], model: Mapping[str, Shape]) -> Match:
    """Finds the renaming under which most names of the file are names of the model.

    Equal shapes count first, equal names second, few changes third. A name is either changed like
    all others or left out; two names never become one.
    """
    best, best_score = Match({}, 0, ()), (-1, -1, 0)
    added_choices = _leading(model)
    for dropped in ((), ("_orig_mod",), ("module",), _WRAPPERS):
        inner = {name: _without(name, dropped) for name in file}
        if len(set(inner.values())) < len(inner) or (dropped and list(inner) == [*inner.values()]):
            continue
        for removed, added in product(_leading(inner.values()), added_choices):
            names = {
                name: target
                for name, short in inner.items()
                if short.startswith(removed) and (target := added + short[len(removed) :]) in model
            }
            fitting = sum(file[name] == model[target] for name, target in names.items())
            cost = len(dropped) + removed.count(".") + added.count(".")
            if (score := (fitting, len(names), -cost)) > best_score:
                best = Match(names, fitting, _in_words(dropped, removed, added))
                best_score = score
    return best


def _leading(names: Collection[str]) -> list[str]:
    """Every run of known prefixes that some name begins with; the empty one first."""
    found = {""}
    for name in names:
        lead = ""
        for part in name.split(".")[:-1]:
            if part not in _PREFIXES:
                break
            lead += f"{part}."
            found.add(lead)
    return sorted(found, key=lambda lead: (len(lead), lead))


def _without(name: str, dropped: Collection[str]) -> str:
    *parts, last = name.split(".")
    return ".".join([*(part for part in parts if part not in dropped), last])


def _in_words(dropped: Collection[str], removed: str, added: str) -> tuple[str, ...]:
    changes = [f"removed every {part + '.'!r}" for part in dropped]
    if removed:
        changes.append(f"removed the prefix {removed!r}")
    if added:
        changes.append(f"added the prefix {added!r}")
    return tuple(changes)
