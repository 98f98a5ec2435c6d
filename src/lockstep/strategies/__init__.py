"""The strategies: their names, and the classes with their options, for the argument `strategy=`.

To add a strategy, add its file and a line in `MODULE_OF_CLASS`; its name is the lower-case name of
the class. Importing this package does not import torch: a class is imported when it is first used,
because a run needs only one of them, and `lockstep run` needs only their names.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.strategies.data_parallel.strategy import DP as DP
    from lockstep.strategies.ddp import DDP as DDP
    from lockstep.strategies.diloco.strategy import DiLoCo as DiLoCo
    from lockstep.strategies.fsdp import FSDP as FSDP, HSDP as HSDP
    from lockstep.strategies.pipeline.strategy import Pipeline as Pipeline
    from lockstep.strategies.single import Single as Single

MODULE_OF_CLASS = {
    "Single": "lockstep.strategies.single",
    "DP": "lockstep.strategies.data_parallel.strategy",
    "DDP": "lockstep.strategies.ddp",
    "FSDP": "lockstep.strategies.fsdp",
    "HSDP": "lockstep.strategies.fsdp",
    "Pipeline": "lockstep.strategies.pipeline.strategy",
    "DiLoCo": "lockstep.strategies.diloco.strategy",
}
CLASS_NAME_OF_STRATEGY = {class_name.lower(): class_name for class_name in MODULE_OF_CLASS}
"""The options class of each name that `strategy=` and `--strategy` take."""

__all__ = sorted(MODULE_OF_CLASS)


def __getattr__(name: str) -> Any:
    if name not in MODULE_OF_CLASS:
        raise AttributeError(f"module 'lockstep.strategies' has no attribute {name!r}")
    options_class = getattr(import_module(MODULE_OF_CLASS[name]), name)
    globals()[name] = options_class
    return options_class


def __dir__() -> list[str]:
    return list(__all__)
