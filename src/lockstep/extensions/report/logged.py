"""What the script gives to `World.log`: to which pass over a loader a value belongs.

A value that is logged inside a loop over a prepared loader belongs to that pass: it counts as the
mean over the samples of the present micro-batch. Every rank keeps weighted sums of its own, in the
`OpenPass`. When the pass is over, and now and then before, the rank writes them into its record;
whoever reads the record adds up those of all ranks, which it knows by the identity of the pass.

A value that is logged outside of any loop is written as it is. So `World.log` never waits for other
ranks, and a script in which rank 0 alone logs does not hang.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lockstep.distributed.process_group import Run
from lockstep.errors import UsageError
from lockstep.extensions.report.metrics import WeightedSums
from lockstep.session.step import OpenPass


def log(run: Run, epoch: int, values: Mapping[str, float | Tensor]) -> None:
    """Adds values to the means of the pass that they belong to; see the top of this file.

    Args:
        run: of this process.
        epoch: the present epoch.
        values: by name, a number or a tensor with one element each.
    """
    outside: dict[str, Any] = {}
    for name, value in values.items():
        open_pass = find_pass(run.step.open_passes, name)
        if open_pass is None:
            outside[name] = value
        else:
            _add_to_pass(run, open_pass, epoch, name, value)
    if outside:
        sums = new_sums(run)
        sums.add(1.0, **outside)
        run.extensions.values_logged(sums, None)


def new_sums(run: Run) -> WeightedSums:
    """Returns empty sums on the device of the run."""
    return WeightedSums(run.collectives.device, contributes=run.collectives.contributes)


def _add_to_pass(run: Run, open_pass: OpenPass, epoch: int, name: str, value: Any) -> None:
    """Adds a value to the sums of a pass; the first one gives the pass its number."""
    run.step.number_pass(open_pass)
    if open_pass.sums is None:
        open_pass.sums = new_sums(run)
        open_pass.description = f"epoch {epoch}" if open_pass.is_training else ""
    if open_pass.training_pass is not None:
        open_pass.delivery_of_name[name] = open_pass.training_pass.in_use
    open_pass.sums.add(open_pass.micro_batch.counted_rows, **{name: value})


def find_pass(open_passes: Sequence[OpenPass], name: str) -> OpenPass | None:
    """Returns the pass that a value logged now belongs to; None outside of any loop.

    It is the one that has handed out a micro-batch last. But a loop over
    `zip(world.progress(one), other)` is two passes of one kind, and what is logged in it is shown.
    """
    return _latest([open_pass for open_pass in open_passes if open_pass.takes(name)])


def _latest(open_passes: Sequence[OpenPass]) -> OpenPass | None:
    """Returns the last of some passes, or one beside it that is shown; None if there are none."""
    if not open_passes:
        return None
    latest = open_passes[-1]
    for open_pass in reversed(open_passes):
        if open_pass.is_shown and open_pass.is_training == latest.is_training:
            return open_pass
    return latest


def means_over_ranks(run: Run) -> dict[str, float]:
    """Returns the means of the present pass, or of the one that ended last; all ranks call it.

    The ranks need not have logged the same names: each mean is over those that have.

    Raises:
        UsageError: the ranks have logged in different passes.
    """
    open_pass = _present_pass(run.step.open_passes) or run.step.last_pass
    own: tuple[Any, dict[str, Any]] = (None, {})
    if open_pass is not None and open_pass.sums is not None:
        own = (open_pass.identity, open_pass.sums.read())
    of_ranks = run.collectives.exchange(own)
    _check_same_pass([identity for identity, _ in of_ranks])
    totals: dict[str, list[float]] = {}
    for _, sums in of_ranks:
        for name, (total, weight) in sums.items():
            so_far = totals.setdefault(name, [0.0, 0.0])
            so_far[0] += total
            so_far[1] += weight
    return {name: total / weight for name, (total, weight) in totals.items() if weight != 0}


def _present_pass(open_passes: Sequence[OpenPass]) -> OpenPass | None:
    """Returns the pass that goes on; None if there is none.

    One whose loader is exhausted is only meant if there is no other: its loop may be over.
    """
    not_exhausted = [open_pass for open_pass in open_passes if not open_pass.is_exhausted]
    return _latest(not_exhausted or open_passes)


def _check_same_pass(identities: Sequence[Any]) -> None:
    """Raises UsageError if ranks have logged in different passes.

    Args:
        identities: of the pass of each rank; None if the rank has logged nothing in its pass.
    """
    rank_of_pass: dict[tuple[int, ...], int] = {}
    for rank, identity in enumerate(identities):
        if identity is not None:
            rank_of_pass.setdefault(tuple(identity), rank)
    if len(rank_of_pass) < 2:
        return
    parts = []
    for (loader, _, begun, _), rank in rank_of_pass.items():
        parts.append(f"rank {rank} over loader {loader}, begun after step {begun}")
    raise UsageError(
        "world.means()",
        f"the ranks have logged in different loops: {'; '.join(parts)}",
        "call it on all ranks after a loop that all of them have gone through, before one rank "
        "alone begins another",
    )
