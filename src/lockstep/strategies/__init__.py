"""The strategies: their names, and the classes with their options, for the argument `strategy=`.

`registry` lists them. Importing this package does not import torch: a class is imported when it is
first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lockstep.strategies.registry import ENTRIES

if TYPE_CHECKING:
    from lockstep.strategies.data_parallel.strategy import DP as DP
    from lockstep.strategies.ddp import DDP as DDP
    from lockstep.strategies.diloco.strategy import DiLoCo as DiLoCo
    from lockstep.strategies.fsdp import FSDP as FSDP, HSDP as HSDP
    from lockstep.strategies.pipeline.strategy import Pipeline as Pipeline
    from lockstep.strategies.single import Single as Single

_MODULE_OF_CLASS = {entry.class_name: f"lockstep.strategies.{entry.module}" for entry in ENTRIES}

__all__ = sorted(_MODULE_OF_CLASS)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF_CLASS:
        raise AttributeError(f"module 'lockstep.strategies' has no attribute {name!r}")
    options_class = getattr(import_module(_MODULE_OF_CLASS[name]), name)
    globals()[name] = options_class
    return options_class


def __dir__() -> list[str]:
    return list(__all__)
