"""The last lines of a run: how fast it was, where things are, what to try next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.report.console import say
from lockstep.report.text import duration, rate, thousands
from lockstep.runtime.step import Step

_NAME_WIDTH = 12


def say_closing(step: Step, folders: Sequence[str]) -> None:
    """Prints the lines of a training; for rank 0 alone.

    Args:
        step: of the run.
        folders: of its checkpoints.
    """
    if step.number:
        folder = folders[-1] if folders else None
        lines = closing_lines(checkpoint=folder, samples=step.samples, seconds=step.seconds)
        for line in lines:
            say(line)


def closing_lines(
    *,
    checkpoint: str | Path | None = None,
    samples: int = 0,
    seconds: float = 0.0,
    try_next: Sequence[tuple[str, str]] = (),
) -> list[str]:
    """The lines, for `console.say`; what is not given is left out.

    Args:
        checkpoint: the folder of the last checkpoint.
        samples: computed by all ranks in the whole run.
        seconds: it took.
        try_next: what one could do, and the command that does it.
    """
    rows: list[tuple[str, str]] = []
    if samples:
        speed = f"{thousands(samples)} samples in {duration(seconds)}, {rate(samples, seconds)}"
        rows.append(("trained", speed))
    if checkpoint is not None:
        rows.append(("checkpoint", str(checkpoint)))
    width = max((len(what) for what, _ in try_next), default=0)
    for place, (what, command) in enumerate(try_next):
        rows.append(("" if place else "try next", f"{what.ljust(width)}  {command}"))
    return [f"  {name.ljust(_NAME_WIDTH)}{text}" for name, text in rows]
