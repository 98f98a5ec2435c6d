"""The options classes of the strategies, to be given as `strategy=`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.strategies.data_parallel.strategy import DP as DP
    from lockstep.strategies.ddp import DDP as DDP
    from lockstep.strategies.fsdp import FSDP as FSDP
    from lockstep.strategies.fsdp import HSDP as HSDP
    from lockstep.strategies.pipeline.strategy import Pipeline as Pipeline
    from lockstep.strategies.single import Single as Single

# Imported when first used: a run needs one of them.
_WHERE = {
    "DDP": "lockstep.strategies.ddp",
    "DP": "lockstep.strategies.data_parallel.strategy",
    "FSDP": "lockstep.strategies.fsdp",
    "HSDP": "lockstep.strategies.fsdp",
    "Pipeline": "lockstep.strategies.pipeline.strategy",
    "Single": "lockstep.strategies.single",
}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'lockstep.strategies' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_WHERE[name]), name)
    return value


def __dir__() -> list[str]:
    return list(__all__)
