"""Rebuilds dataclasses from the plain values that `dataclasses.asdict` and JSON have made of them.

The type of each field says what to build. Values that occur often may be *numbered*: they are
stored once in a table, and everywhere else only their index in the table is written.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from types import MappingProxyType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

_T = TypeVar("_T")

Tables = Mapping[type, Sequence[Any]]
"""For each type whose values are numbered, the table of its values."""

_NO_TABLES: Tables = MappingProxyType({})
_TUPLES_OF_PLAIN_ITEMS = (tuple[int, ...], tuple[str, ...])
_types_of_fields = functools.cache(get_type_hints)


def from_values(kind: type[_T], values: Any, tables: Tables = _NO_TABLES) -> _T:
    """Builds a value of the given type from plain values.

    Args:
        kind: a dataclass or a tuple. Its fields may be dataclasses, tuples, strings, numbers, or
            one of these or None. Fields of any other type, such as a Literal or a Mapping, are kept
            as they are.
        values: the fields by name, or the items of the tuple.
        tables: the tables of the types whose values are numbered.

    Raises:
        TypeError, AttributeError, IndexError: the values do not fit the type.
    """
    return cast(_T, _build(kind, values, tables))


def _build(kind: Any, values: Any, tables: Tables) -> Any:
    """Builds a value of any type that a field may have.

    Args:
        kind: the type, such as a dataclass, `int`, `str | None` or `tuple[int, ...]`.
        values: the JSON value: the fields of a dataclass by name, the items of a tuple, the index
            of a numbered value, or the value itself.
        tables: the tables of the types whose values are numbered.
    """
    if kind in tables:
        index = values
        return tables[kind][index]

    if is_dataclass(kind):
        types = _types_of_fields(cast(Any, kind))
        fields = {}
        for name, value in values.items():
            if name in types:  # a newer version may have written more fields: left out
                fields[name] = _build(types[name], value, tables)
        return cast(Any, kind)(**fields)

    if values is None:
        return None

    # A shortcut for long tuples of numbers, such as the list of all ranks of a group.
    if kind in _TUPLES_OF_PLAIN_ITEMS:
        return tuple(values)

    arguments = get_args(kind)
    if get_origin(kind) is tuple:
        return _build_tuple(arguments, values, tables)

    # The type is `X | None`, which every field writes in this order, and the value is not None.
    if type(None) in arguments:
        type_unless_none = arguments[0]
        return _build(type_unless_none, values, tables)

    # A string, a number, or a value of a type that is kept as it is.
    return values


def _build_tuple(arguments: tuple[Any, ...], values: Any, tables: Tables) -> tuple[Any, ...]:
    """Builds a tuple from its items.

    Args:
        arguments: the arguments of its type: `(X, ...)` for `tuple[X, ...]`, which may have any
            length, or `(X, Y)` for `tuple[X, Y]`, with one type for each item.
        values: the JSON values of the items.
        tables: the tables of the types whose values are numbered.
    """
    if arguments[-1] is Ellipsis:
        item_type = arguments[0]
        return tuple(_build(item_type, value, tables) for value in values)

    # The type says how many items there are. A newer version may have written more: left out.
    types_and_values = zip(arguments, values, strict=False)
    return tuple(_build(item_type, value, tables) for item_type, value in types_and_values)
