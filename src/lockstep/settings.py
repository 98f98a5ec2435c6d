"""The settings of a run: from the script, or from the command line where the script is silent.

`lockstep run --strategy ddp` reaches the script as LOCKSTEP_STRATEGY. What the script says wins by
being the only one to speak: where both speak and differ, that is an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeGuard

from lockstep.errors import LockstepError, SettingError
from lockstep.units import parse_seconds


class Choice(NamedTuple):
    """Something that the run decided or was told, and why."""

    name: str
    value: str
    reason: str


INSTEAD = "LOCKSTEP_VERIFY"
"""Variable: what `lockstep verify` has set in the place of the script's settings, as JSON."""
AUTO = "auto"
"""What is measured instead of given: shares, micro_batch_size."""


def is_whole_number(value: object, least: int = 1) -> TypeGuard[int]:
    """Whether it is a whole number from `least` up; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_whole_number(
    was_set: str, value: object, least: int = 1, kind: type[LockstepError] = SettingError
) -> None:
    """Raises SettingError, or an error of another kind, where it is none."""
    if not is_whole_number(value, least):
        raise kind(was_set, f"it is not a whole number of at least {least}", "give such a number")


def is_auto(setting: Any) -> bool:
    """Whether shares or a size are to be found by measuring; arrays compare item by item."""
    return isinstance(setting, str) and setting == AUTO


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user set; None where nothing was said."""

    strategy: Any = None
    """A name, or an options object of `lockstep.strategies`."""
    seed: int = 0
    precision: str = "fp32"
    backend: str | None = None
    device: str | None = None
    init_method: str | None = None
    shares: Any = None
    """One whole number for each part of the global batch, `"auto"`, or None: equal ones."""
    micro_batch_size: int | str | None = None
    """Samples, `"auto"`, or None: the whole part."""
    num_micro_batches: int | None = None
    """Micro-batches of a global batch, on any number of ranks; None: as few as the size needs."""
    join_timeout_s: float = 30.0
    """Seconds that ranks wait for each other in `init`."""
    collective_timeout_s: float | None = None
    """Seconds that a collective may take; None: torch's default for the backend."""
    sync_batchnorm: bool = True
    measure_link: bool = True
    """Measure the network between machines when the run begins."""
    ledger: str | None = None
    """Folder where every rank writes down which samples it trains; None: nowhere."""
    report: str | None = None
    """Folder where every rank writes down how its steps go; None: nowhere."""
    min_micro_batches: int = 1
    """Micro-batches of a global batch, at least; `lockstep verify --accumulate` asks for them."""
    uncompressed: bool = False
    """Gradients are sent as they are, whatever was chosen; `lockstep verify` compares so."""


def _whole_number_or_auto(text: str) -> int | str:
    return text if text == AUTO else int(text)


_READERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("strategy", "precision", "backend", "device", "init_method"), str),
    **dict.fromkeys(("shares", "ledger", "report"), str),
    "seed": int,
    "micro_batch_size": _whole_number_or_auto,
    "num_micro_batches": int,
    "join_timeout": float,
}
"""What may be set outside of the script, and how it is read."""


def resolve_settings(environ: Mapping[str, str], **given: Any) -> Settings:
    """Merges the arguments of `init` (None: left open) with the LOCKSTEP_* variables.

    What `lockstep verify` sets goes before both.

    Raises:
        SettingError: a value that does not parse, or two that contradict each other.
    """
    values = {name: value for name, value in given.items() if value is not None}
    for name, read in _READERS.items():
        variable = f"LOCKSTEP_{name.upper()}"
        if not environ.get(variable):
            continue
        try:
            outside = read(environ[variable])
        except ValueError:
            raise SettingError(
                f"{variable}={environ[variable]}",
                f"it is not a valid {read.__name__.strip('_').replace('_', ' ')}",
                "correct or unset it",
            ) from None
        if _written(values.setdefault(name, outside)) != _written(outside):
            raise SettingError(
                f"{name}={values[name]!r} in the script and {variable}={outside} outside it",
                "they contradict each other",
                "set it in one place",
            )
    if environ.get(INSTEAD):
        values |= json.loads(environ[INSTEAD])
    for name in ("join_timeout", "collective_timeout"):
        if name in values:
            values[f"{name}_s"] = parse_seconds(name, values.pop(name))
    seed = values.get("seed", 0)
    if not is_whole_number(seed, least=0) or seed >= 2**64:  # as torch takes them
        found = "a seed is a whole number from 0 to 2**64 - 1"
        raise SettingError(f"seed={seed!r}", found, "give such a one")
    check_micro_batches(values.get("num_micro_batches"), values.get("micro_batch_size"))
    return Settings(**values)


def check_micro_batches(number: Any, size: Any) -> None:
    """Raises SettingError where a number of micro-batches is none, or their size is set too."""
    if number is None:
        return
    check_whole_number(f"num_micro_batches={number!r}", number)
    if size is not None:
        raise SettingError(
            f"num_micro_batches={number} and micro_batch_size={size!r}",
            "either says how a global batch is cut",
            "set num_micro_batches, which gives the same micro-batches on any number of ranks, or "
            "micro_batch_size, which bounds what one rank computes at a time",
        )


def _written(value: Any) -> str:
    """How a value is written on the command line, for comparing."""
    if isinstance(value, list | tuple):
        return ":".join(str(part) for part in value)
    if isinstance(value, timedelta):
        return str(value.total_seconds())
    return str(getattr(value, "name", value) if not isinstance(value, int) else float(value))
