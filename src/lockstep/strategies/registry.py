"""Strategies by name; each is imported when it is asked for."""

from __future__ import annotations

import difflib
from importlib import import_module

from lockstep.errors import SettingError
from lockstep.strategies.base import Strategy

_STRATEGIES = {
    "single": ("lockstep.strategies.single", "Single"),
    "dp": ("lockstep.strategies.data_parallel.strategy", "DP"),
    "ddp": ("lockstep.strategies.ddp", "DDP"),
    "fsdp": ("lockstep.strategies.fsdp", "FSDP"),
    "hsdp": ("lockstep.strategies.fsdp", "HSDP"),
    "pipeline": ("lockstep.strategies.pipeline.strategy", "Pipeline"),
}


def strategy(choice: str | Strategy | None, size: int) -> tuple[Strategy, str]:
    """The strategy that was asked for, or the best for the world size; with the reason.

    Raises:
        SettingError: an unknown name; the message suggests the nearest.
    """
    if isinstance(choice, Strategy):
        return choice, "set in the script"
    if choice is None:
        name = "single" if size == 1 else "ddp"
        return _load(name), "one process" if size == 1 else f"{size} processes"
    if choice not in _STRATEGIES:
        near = difflib.get_close_matches(choice, _STRATEGIES, n=1, cutoff=0.3)
        raise SettingError(
            f"strategy={choice!r}",
            "strategies are " + ", ".join(_STRATEGIES),
            f"did you mean {near[0]!r}?" if near else "choose one of them",
        )
    return _load(choice), "as set"


def _load(name: str) -> Strategy:
    module, attribute = _STRATEGIES[name]
    made = getattr(import_module(module), attribute)()
    if not isinstance(made, Strategy):
        raise TypeError(f"{module}.{attribute} is registered as a strategy and is none")
    return made
