"""Compares the names and shapes of a saved state with those of a model, and lists what differs.

A name is *missing* if only the model has it, and *unexpected* if only the saved state has it. It is
*mismatched* if both have it with tensors of different shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple

from torch import Tensor, nn

from lockstep.checkpoint.formats.text import short
from lockstep.checkpoint.lazy_tensor import LazyTensor, Shape
from lockstep.wording import join_first

OptionalShape = Shape | None
"""None for values without a shape: those that are no tensors, and parameters of modules such as
`nn.LazyLinear` that have not seen a batch yet."""

MAX_ROWS_OF_A_KIND = 8
MAX_NAMES_COMPARED = 2000
"""The most similar name is looked for among this many names at most: it takes long."""
MIN_SIMILARITY = 0.75
"""How similar the nearest name must be, from 0 to 1 (see `difflib.get_close_matches`)."""


def shape_of(value: object) -> OptionalShape:
    """Returns a tensor's shape; None if it has none yet, or is not a tensor."""
    if isinstance(value, LazyTensor):
        return value.shape
    if not isinstance(value, Tensor) or nn.parameter.is_lazy(value):
        return None
    return tuple(value.shape)


def describe_conflict(saved: object, own: object) -> str | None:
    """Describes two shapes if they differ: "[2, 8] in the file, [5, 8] in the model".

    Args:
        saved: a tensor of a file.
        own: the model's tensor of that name.

    Returns:
        The description, or None if the shapes are equal or one of the values has no shape.
    """
    saved_shape = shape_of(saved)
    own_shape = shape_of(own)
    if saved_shape is None or own_shape is None or saved_shape == own_shape:
        return None
    return f"{list(saved_shape)} in the file, {list(own_shape)} in the model"


@dataclass(frozen=True)
class Differences:
    """The names and shapes of a saved state that do not fit a module.

    An instance is true if there are any. As a string it lists, for each kind, how many there are
    and the first names: "2 missing (fc.weight, fc.bias)".
    """

    missing: tuple[str, ...]
    """Names that only the module has."""
    unexpected: tuple[str, ...]
    """Names that only the saved state has."""
    mismatched: Mapping[str, str]
    """Both shapes by name: {"weight": "[2, 8] in the file, [5, 8] in the model"}."""

    @property
    def mismatched_texts(self) -> tuple[str, ...]:
        """The same as texts: "weight: [2, 8] in the file, [5, 8] in the model"."""
        return tuple(f"{name}: {shapes}" for name, shapes in self.mismatched.items())

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        texts = [f"{count} ({join_first(names, 3)})" for count, names in self.counted()]
        return "; ".join(texts)

    def counted(self) -> list[tuple[str, tuple[str, ...]]]:
        """Returns pairs ("2 missing", the missing names), for each kind that has any names."""
        counted = []
        for kind, names in (
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("of another shape", self.mismatched_texts),
        ):
            if names:
                counted.append((f"{len(names)} {kind}", names))
        return counted


def find_differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> Differences:
    """Compares the names and shapes of a saved state with those of a module's own state.

    Args:
        saved: the values of the saved state by plain names (without those that wrappers add).
        own: the values of the module's state by plain names.
    """
    mismatched = {}
    for name in own:
        if name in saved:
            conflict = describe_conflict(saved[name], own[name])
            if conflict is not None:
                mismatched[name] = conflict
    return Differences(
        missing=tuple(name for name in own if name not in saved),
        unexpected=tuple(name for name in saved if name not in own),
        mismatched=mismatched,
    )


class _Row(NamedTuple):
    """A line of the table of differences."""

    kind: str
    name: str
    text: str


def table_of_differences(
    differences: Differences, saved: Mapping[str, Any], own: Mapping[str, Any]
) -> str:
    """Builds a table with a line for each name that does not fit, and the most similar other name.

    Args:
        differences: the names and shapes that do not fit.
        saved: the values of the file by their names.
        own: the values of the model by their names.
    """

    def text_of_missing(name: str) -> str:
        return _shape_and_nearest(own[name], name, differences.unexpected, "in the file")

    def text_of_unexpected(name: str) -> str:
        return _shape_and_nearest(saved[name], name, differences.missing, "in the model")

    def text_of_mismatched(name: str) -> str:
        return differences.mismatched[name]

    rows = [
        *_rows_of_kind("missing", differences.missing, text_of_missing),
        *_rows_of_kind("unexpected", differences.unexpected, text_of_unexpected),
        *_rows_of_kind("other shape", tuple(differences.mismatched), text_of_mismatched),
    ]
    width = max((len(row.name) for row in rows), default=0)
    lines = [f"    {row.kind:<13}{row.name:<{width}}  {row.text}".rstrip() for row in rows]
    return "\n".join(lines)


def _shape_and_nearest(
    value: object, name: str, names_of_other_side: Sequence[str], where: str
) -> str:
    """Returns the shape of a value and the most similar name: "[2, 8]  nearest in the file: fc.w".

    Args:
        value: a tensor, or a value without a shape.
        name: the name of the value.
        names_of_other_side: the names among which the most similar one is found.
        where: where these names are: "in the file" or "in the model".
    """
    texts = []
    shape = shape_of(value)
    if shape is not None:
        texts.append(str(list(shape)))

    candidates = names_of_other_side[:MAX_NAMES_COMPARED]
    similar = get_close_matches(name, candidates, n=1, cutoff=MIN_SIMILARITY)
    if similar:
        texts.append(f"nearest {where}: {short(similar[0])}")
    return "  ".join(texts)


def _rows_of_kind(kind: str, names: Sequence[str], text_of: Callable[[str], str]) -> list[_Row]:
    """Returns a row for each of the first names, and a row "... and 3 more" if there are others.

    Args:
        kind: the kind of difference.
        names: the names that differ in this way.
        text_of: returns what the row says about a name.
    """
    rows = [_Row(kind, short(name), text_of(name)) for name in names[:MAX_ROWS_OF_A_KIND]]
    num_left_out = len(names) - MAX_ROWS_OF_A_KIND
    if num_left_out > 0:
        rows.append(_Row(kind, f"... and {num_left_out} more", ""))
    return rows
