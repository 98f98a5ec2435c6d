"""What of a file does not fit a model, as a table that can be read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from lockstep.checkpoint.header import short
from lockstep.checkpoint.modules import Differences, shape_of

_ROWS = 8
"""Of each kind."""
_COMPARED = 2000
"""Names that one is compared with, at most."""


def misfits(differ: Differences, file: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """One line for each name that does not fit, with the nearest name of the other side.

    Args:
        differ: what does not fit.
        file: values by the names of the file.
        own: by those of the model.
    """
    rows = [
        *_rows("missing", differ.missing, own, differ.unexpected, "in the file"),
        *_rows("unexpected", differ.unexpected, file, differ.missing, "in the model"),
        *[("other shape", *text.split(": ", 1)) for text in differ.mismatched[:_ROWS]],
        *_more("other shape", differ.mismatched),
    ]
    width = max((len(name) for _, name, _ in rows), default=0)
    return "\n".join(f"    {kind:<13}{name:<{width}}  {text}".rstrip() for kind, name, text in rows)


def _rows(
    kind: str, names: tuple[str, ...], of: Mapping[str, Any], others: tuple[str, ...], where: str
) -> Iterator[tuple[str, str, str]]:
    for name in names[:_ROWS]:
        shape = shape_of(of[name])
        near = get_close_matches(name, others[:_COMPARED], n=1, cutoff=0.75)
        nearest = f"  nearest {where}: {short(near[0])}" if near else ""
        yield kind, short(name), f"{'' if shape is None else list(shape)}{nearest}"
    yield from _more(kind, names)


def _more(kind: str, names: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    if len(names) > _ROWS:
        yield kind, f"... and {len(names) - _ROWS} more", ""
