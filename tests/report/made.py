"""Records of runs that never were."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.extensions.report.record_format import COLUMNS, FORMAT_VERSION
from lockstep.session.extension import PHASES

USUAL = {"data": 0.01, "forward": 0.03, "backward": 0.06, "optimizer": 0.01, "other": 0.002}
STEP_S = 0.125


def usual(rank: int, step: int) -> Mapping[str, float]:
    """Seconds of a rank's step by phase, `communication` left out."""
    return USUAL


def logged(
    step: int,
    values: Mapping[str, float],
    called: str = "",
    *,
    weight: float = 1.0,
    training: bool = False,
    complete: bool = True,
    loader: int = 0,
    begun: int | None = None,
    number: int = 1,
) -> dict[str, Any]:
    """The line of one rank about what it has logged in a pass over a loader."""
    return {
        "logged": dict(values),
        "weights": dict.fromkeys(values, weight),
        "step": step,
        "pass": called,
        "training": training,
        "complete": complete,
        "loader": loader,
        "begun": step if begun is None else begun,
        "number": number,
    }


def write(
    folder: Path,
    ranks: int = 2,
    *,
    rows: int = 100,
    number: int = 1,
    first: int = 0,
    work: Callable[[int, int], Mapping[str, float]] = usual,
    loss: Callable[[int], float] = lambda step: 2.0 / math.sqrt(step + 1),
    end: str | None = "ok",
    lines: tuple[Any, ...] = (),
    began: float | None = None,
    **about: Any,
) -> None:
    """Writes one start of a run; the ranks wait for the slowest, and for 13 ms.

    Args:
        folder: where.
        ranks: how many.
        rows: of one step each.
        number: of the start.
        first: step, from 0.
        work: seconds of a rank's step by phase.
        loss: of a step.
        end: how it ended on all ranks; None: they were killed.
        lines: what else rank 0 has written.
        began: as `time.time()`; left out, a billion seconds for each start before it.
        about: what stands in the first lines.
    """
    folder.mkdir(parents=True, exist_ok=True)
    began = 1e9 * number if began is None else began
    of_ranks = [[work(rank, step) for step in range(first, first + rows)] for rank in range(ranks)]
    for rank in range(ranks):
        head = {
            "record": FORMAT_VERSION,
            "rank": rank,
            "ranks": ranks,
            "contributes": True,
            "device": "cpu",
        }
        head |= {"host": f"node{rank // 8 + 1}", "time": began, "columns": COLUMNS}
        head |= {"command": ["train.py", "--width", "256"], "torch": "2.13.0", "strategy": "ddp"}
        written: list[Any] = [head | about]
        at = 0.0
        for row in range(rows):
            own = {phase: of_ranks[rank][row].get(phase, 0.0) for phase in PHASES}
            slowest = max(sum(of[row].values()) for of in of_ranks)
            own["communication"] = slowest + 0.013 - sum(own.values())
            at += sum(own.values())
            value = loss(first + row) * (1 + 0.1 * (rank - (ranks - 1) / 2))
            written.append([first + row + 1, 1, at, sum(own.values()), value, 0.1 * 0.99**row, 256,
                            2**30 + 2**20 * row, 10**6 * row, 0, *own.values()])  # fmt: skip
        if rank == 0:
            written += lines
        if end is not None:
            written.append({"end": end, "time": began + at})
        text = "".join(json.dumps(line) + "\n" for line in written)
        (folder / f"{int(began * 1e9):020d}-aaaa.rank{rank}.record").write_text(text)


def noisy(
    slow: Mapping[int, tuple[str, float]], seed: int = 0
) -> Callable[..., Mapping[str, float]]:
    """Work that varies by some percent; some ranks are slower in a phase, from the middle on."""
    source = random.Random(seed)

    def work(rank: int, step: int) -> Mapping[str, float]:
        found = {phase: s * source.uniform(0.95, 1.05) for phase, s in USUAL.items()}
        phase, more = slow.get(rank, ("other", 0.0))
        found[phase] += more if step > 40 else 0.0
        return found

    return work
