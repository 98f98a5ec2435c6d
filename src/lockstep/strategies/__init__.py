"""The strategies: their options classes, to be given as `strategy=`, and their names.

To add a strategy is to add its file and its line in `_CLASSES`; its name is that of the class in
small letters.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lockstep.errors import not_among
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

    Raises:
        SettingError: an unknown name; the message suggests the nearest.
    """
    if isinstance(choice, Strategy):
        return choice, "set in the script"
    reason = "as set"
    if choice is None:
        choice, reason = ("single", "one process") if size == 1 else ("ddp", f"{size} processes")
    if choice not in _NAMES:
        raise not_among(f"strategy={choice!r}", choice, "strategies", _NAMES)
    return __getattr__(_NAMES[choice])(), reason


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module 'lockstep.strategies' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_CLASSES[name]), name)
    return value


def __dir__() -> list[str]:
    return list(__all__)
