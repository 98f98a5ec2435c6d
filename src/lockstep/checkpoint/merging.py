"""Merges the entries that several ranks have of one state, as trees (see `encoding`).

Under a pipeline, for example, each rank has the entries of its own layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merge_entries(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merges the entries that two ranks have of one state.

    If both have an entry, that of the first rank is taken.

    Args:
        first: the tree of the state of a module, or of the entries by number of an optimizer or
            another object; {} if the rank has none of these.
        second: the tree of the same state on the other rank.
    """
    is_module = "$ordered" in first
    return _merge_by_name(first, second) if is_module else _merge_by_number(first, second)


def _merge_by_name(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merges the entries of a module. It has each name, with None if another rank has the entry.

        {"$ordered": [["a", A], ["b", None]]} and {"$ordered": [["a", None], ["b", B]]}
        -> {"$ordered": [["a", A], ["b", B]]}

    Its other keys, such as those of torch's versions, are equal on all ranks.
    """
    second_entries = dict(second["$ordered"])
    pairs = []
    for name, entry in first["$ordered"]:
        pairs.append([name, second_entries.get(name) if entry is None else entry])
    return {**first, "$ordered": pairs}


def _merge_by_number(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merges the entries of another object. Each rank has only its own ones; {} if it has none.

    {"$dict": [[0, A]]} and {"$dict": [[1, B]]} -> {"$dict": [[0, A], [1, B]]}
    """
    entries = dict(first.get("$dict", []))
    for number, entry in second.get("$dict", []):
        entries.setdefault(number, entry)
    return {"$dict": [[number, entries[number]] for number in sorted(entries)]}
