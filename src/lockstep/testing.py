"""For test suites: what `lockstep verify` compares, of a function instead of a script."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.errors import RankFailedError
from lockstep.run.start.spawn import launch
from lockstep.run.start.worker import Script
from lockstep.verify.rank import main
from lockstep.verify.record import Way, record
from lockstep.verify.verdict import check_reference, judge
from lockstep.wording import count_noun

__all__ = ["assert_same"]


def assert_same(
    fn: Callable[..., object],
    args: Sequence[Any] = (),
    nproc: int = 2,
    *,
    steps: int = 3,
    precision: str = "fp64",
    batch_per_process: bool = False,
    accumulate: int | None = None,
    shares: str | None = None,
    strategy: str | None = None,
    timeout: float | None = None,
) -> None:
    """Asserts that `fn(*args)` trains on several processes as it does on one.

    It is run twice, in processes of its own as by `lockstep.launch`, and both end after the first
    steps. What is compared, and what is switched off for it, is said in docs/verify.md.

    Args:
        fn: trains: by Lockstep, or as one rank of a script for torchrun.
        args: its arguments.
        nproc: processes to compare with one.
        steps: optimizer steps to compare.
        precision: what everything is computed in, `fp64` or `fp32`.
        batch_per_process: the batch size of torch's DataLoaders is that of one process.
        accumulate: compare with so many micro-batches a step.
        shares: compare with these shares of the batch.
        strategy: compare with this one; with `diloco` so does the one process.
        timeout: seconds that each of the two runs may take; None: no limit.

    Raises:
        AssertionError: the verdict, unless it is EQUAL.
        UsageError: there is nothing to compare: on one process it fails, or makes no step.
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    name, program = getattr(fn, "__qualname__", repr(fn)), partial(fn, *args)
    given = {"accumulate": accumulate, "shares": shares, "strategy": strategy}
    asked = {option: value for option, value in given.items() if value is not None}
    words = [count_noun(nproc, "process"), *(f"{k} {asked[k]}" for k in asked)]
    way = Way(
        name=", ".join(words),
        nproc=nproc,
        script=Script(path=name),
        steps=steps,
        precision=precision,
        instead={"min_micro_batches" if k == "accumulate" else k: v for k, v in asked.items()},
    )

    def start(folder: Path, way: Way) -> str:
        try:
            launch(main, (folder, program), way.nproc, timeout=timeout, env=way.environment())
        except RankFailedError as error:
            return error.found
        return ""

    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder:
        alone = way.alone(nproc if batch_per_process else 1)
        reference = record(alone, Path(folder) / "reference", start)
        check_reference(reference, f"assert_same({name})", list(asked), f"{name} here", "function")
        verdict = judge(reference, record(way, Path(folder) / "other", start))
    if verdict.word != "EQUAL":
        raise AssertionError("\n".join(verdict.lines()))
