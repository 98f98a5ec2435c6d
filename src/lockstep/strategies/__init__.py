"""The strategies: their options classes, to be given as `strategy=`, and their names.

To add a strategy is to add its file and its line in `_CLASSES`; its name is that of the class in
small letters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from importlib import import_module
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from lockstep.errors import SettingError, unknown_choice_error
from lockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from lockstep.strategies.base import Single as Single
    from lockstep.strategies.data_parallel.strategy import DP as DP
    from lockstep.strategies.ddp import DDP as DDP
    from lockstep.strategies.diloco import DiLoCo as DiLoCo
    from lockstep.strategies.fsdp import FSDP as FSDP
    from lockstep.strategies.fsdp import HSDP as HSDP
    from lockstep.strategies.pipeline.strategy import Pipeline as Pipeline

# Imported when first used: a run needs one of them.
_CLASSES = {
    "Single": "lockstep.strategies.base",
    "DP": "lockstep.strategies.data_parallel.strategy",
    "DDP": "lockstep.strategies.ddp",
    "FSDP": "lockstep.strategies.fsdp",
    "HSDP": "lockstep.strategies.fsdp",
    "Pipeline": "lockstep.strategies.pipeline.strategy",
    "DiLoCo": "lockstep.strategies.diloco",
}
_NAMES = {name.lower(): name for name in _CLASSES}

__all__ = sorted(_CLASSES)


def find_strategy(choice: str | Strategy | None, size: int) -> tuple[Strategy, str]:
    """The strategy that was asked for, or the best for the world size; with the reason.

    Args:
        choice: an options object, or a name with or without options, such as
            `diloco:every=100,compress=int8`; a list is `A:B`.
        size: of the world.

    Raises:
        SettingError: an unknown name or option (the message suggests the nearest), or a value that
            it cannot have.
    """
    if isinstance(choice, Strategy):
        return choice, "set in the script"
    reason = "as set"
    if choice is None:
        choice, reason = ("single", "one process") if size == 1 else ("ddp", f"{size} processes")
    was_set, (name, _, options) = f"strategy={choice!r}", str(choice).partition(":")
    if name not in _NAMES:
        raise unknown_choice_error(was_set, name, "strategies", _NAMES)
    kind = __getattr__(_NAMES[name])
    hints = {each.name: get_type_hints(kind)[each.name] for each in fields(kind)}
    given = {}
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        if key not in hints:
            raise unknown_choice_error(was_set, key, f"options of {name}", hints or ["not there"])
        try:
            given[key] = _read(value, hints[key])
        except ValueError as error:
            raise SettingError(was_set, f"{key} is {error}", "correct it") from None
    return kind(**given), reason


_TYPES = {int: "a whole number", float: "a number", bool: "true or false"}


def _read(value: str, hint: Any) -> Any:
    """An option's value, which stays text unless its annotation has another type."""
    types = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if get_origin(types[0]) is Sequence:
        return [_read(part, *get_args(types[0])) for part in value.split(":")]
    kind = next(filter(_TYPES.get, types), str)
    try:
        return {"true": True, "false": False}[value] if kind is bool else kind(value)
    except (KeyError, ValueError):
        raise ValueError(_TYPES[kind]) from None


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module 'lockstep.strategies' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_CLASSES[name]), name)
    return value


def __dir__() -> list[str]:
    return list(__all__)
