"""For test suites: `assert_same` compares a function on several processes with one process.

It does what `lockstep verify` does for a script. A `RunConfig` says on how many processes and with
which settings the function is run; the *reference* is the run on one process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.errors import RankFailedError
from lockstep.run.start.spawn import launch
from lockstep.run.start.worker import Script
from lockstep.verify.comparison import Comparison
from lockstep.verify.comparison_plan import ComparisonPlan
from lockstep.verify.rank import main
from lockstep.verify.reference_check import check_reference
from lockstep.verify.run_config import RunConfig
from lockstep.verify.run_record import RunRecord
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

    The function is run twice, each time in processes of its own as by `lockstep.launch`, and both
    runs end after the first steps. docs/verify.md says what is compared, and what is switched off
    for the comparison.

    Args:
        fn: a function that trains, with Lockstep or as one rank of a script for torchrun.
        args: the arguments of the function.
        nproc: how many processes are compared with one.
        steps: how many optimizer steps are compared.
        precision: the precision of everything that is computed, `fp64` or `fp32`.
        batch_per_process: the batch size of torch's DataLoaders is that of one process.
        accumulate: the number of micro-batches per step to compare with.
        shares: the shares of the batch to compare with.
        strategy: the strategy to compare with. With `diloco` the one process uses it too.
        timeout: how many seconds each of the two runs may take; None for no limit.

    Raises:
        AssertionError: the verdict, unless it is EQUAL.
        UsageError: there is nothing to compare with: on one process the function fails, or makes no
            optimizer step.
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    function_name = getattr(fn, "__qualname__", repr(fn))
    settings = {"accumulate": accumulate, "shares": shares, "strategy": strategy}
    given_settings = {name: value for name, value in settings.items() if value is not None}
    name_parts = [count_noun(nproc, "process")]
    name_parts += [f"{name} {value}" for name, value in given_settings.items()]
    # Settings of `lockstep.init` that replace those of the function.
    overrides = dict(given_settings)
    if accumulate is not None:
        overrides["min_micro_batches"] = overrides.pop("accumulate")
    config = RunConfig(
        name=", ".join(name_parts),
        nproc=nproc,
        script=Script(path=function_name),
        steps=steps,
        precision=precision,
        overrides=overrides,
    )
    batch_size_factor = nproc if batch_per_process else 1
    plan = ComparisonPlan(reference=config.reference_config(batch_size_factor), ways=[config])
    training = partial(fn, *args)

    def start(folder: Path, config: RunConfig) -> str:
        """Runs the function on its processes, which write their records into the folder.

        Returns:
            What went wrong, or "". It takes the place of the output of a script.
        """
        environment = config.environment()
        try:
            launch(main, (folder, training), config.nproc, timeout=timeout, env=environment)
        except RankFailedError as error:
            return error.found
        return ""

    def check(reference: RunRecord) -> None:
        """Raises UsageError if the run on one process gives nothing to compare with."""
        check_reference(
            reference,
            heading=f"assert_same({function_name})",
            lockstep_options=list(given_settings),
            command=f"{function_name} here",
            subject="function",
        )

    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder:
        (result,) = Comparison(plan, Path(folder), start, check).results()
    if result.verdict.word != "EQUAL":
        raise AssertionError("\n".join(result.verdict.lines()))
