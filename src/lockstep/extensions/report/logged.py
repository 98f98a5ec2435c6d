"""Takes the values that a script gives to `World.log`, and adds them to the means of a pass.

A *pass* is one loop over a prepared loader. A value that is logged inside such a loop counts as the
mean over the samples of the present micro-batch. Each rank keeps its own weighted sums in the
`OpenPass`, and writes them into its record when the pass ends, and now and then before. Whoever
reads the record adds up the sums of all ranks that have the same pass identity.

A value that is logged outside of any loop is recorded unchanged. So `World.log` never waits for
other ranks, and a script in which only rank 0 logs does not hang.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lockstep.distributed.process_group import Run
from lockstep.errors import UsageError
from lockstep.extensions.report.metrics import WeightedSums
from lockstep.session.logged_passes import OpenPass, PassIdentity


def log(run: Run, epoch: int, values: Mapping[str, float | Tensor]) -> None:
    """Adds each value to the means of its pass. A value outside of any loop is recorded as it is.

    Args:
        run: the run of this process.
        epoch: the number of the present epoch.
        values: numbers, or tensors with one element, by name.
    """
    outside_any_pass: dict[str, Any] = {}
    for name, value in values.items():
        open_pass = find_pass(run.step.logged_passes.open, name)
        if open_pass is None:
            outside_any_pass[name] = value
        else:
            _add_to_pass(run, open_pass, epoch, name, value)

    if outside_any_pass:
        sums = new_sums(run)
        sums.add(1.0, **outside_any_pass)  # with weight 1, their means are the values themselves
        no_pass = None
        run.extensions.values_logged(sums, no_pass)


def new_sums(run: Run) -> WeightedSums:
    """Returns empty sums on the device of the run."""
    return WeightedSums(run.collectives.device, contributes=run.collectives.contributes)


def _add_to_pass(run: Run, open_pass: OpenPass, epoch: int, name: str, value: Any) -> None:
    """Adds a value to the sums of a pass, weighted by the samples of the present micro-batch."""
    # Only passes in which something is logged have a number: this one now has.
    run.step.logged_passes.assign_number(open_pass)

    if open_pass.sums is None:
        open_pass.sums = new_sums(run)
        open_pass.description = f"epoch {epoch}" if open_pass.is_training else ""

    _note_batch_of_value(open_pass, name)
    num_samples = open_pass.micro_batch.counted_rows
    open_pass.sums.add(num_samples, **{name: value})


def _note_batch_of_value(open_pass: OpenPass, name: str) -> None:
    """Notes with which batch of a training loop the value of a name was logged last.

    A script may log "loss" in the loop and once more after it. The second "loss" comes with the
    same batch as the one before, by which `includes_logged_value` recognises it.
    """
    training_pass = open_pass.training_pass
    if training_pass is not None:
        open_pass.batch_of_name[name] = training_pass.batch_in_use


def find_pass(open_passes: Sequence[OpenPass], name: str) -> OpenPass | None:
    """Returns the pass that a value logged now belongs to, or None outside of any loop.

    This is the pass that handed out a micro-batch last. There is one exception: a loop over
    `zip(world.progress(one), other)` runs two passes at once, and its values belong to the pass
    that is shown.
    """
    return _latest([each for each in open_passes if each.includes_logged_value(name)])


def _latest(open_passes: Sequence[OpenPass]) -> OpenPass | None:
    """Returns the last of the passes, or another one of its kind that has a progress bar.

    There are two kinds, training and evaluation. Returns None if there are no passes.
    """
    if not open_passes:
        return None

    latest = open_passes[-1]
    for open_pass in reversed(open_passes):
        is_same_kind = open_pass.is_training == latest.is_training
        if open_pass.is_shown and is_same_kind:
            return open_pass
    return latest


class LoggedValues(NamedTuple):
    """What one rank has logged in a pass."""

    identity: PassIdentity | None
    """None if the rank has logged nothing in it, which fits the pass of any other rank."""
    sums: dict[str, Any]
    """The weighted sum and the sum of the weights, by name."""


class _LoggedByRank(NamedTuple):
    """What each rank sends to the others, to compute means."""

    in_loop_just_left: LoggedValues | None
    """None unless the rank has just left a loop, and has used no other batch since."""
    in_running_or_last_loop: LoggedValues
    """In the loop that is running. If none is running, in the loop that ended last."""


def means_over_ranks(run: Run) -> dict[str, float]:
    """Returns the means over all ranks in the loop that the script has just left, or is in.

    Right after an evaluation within a training loop, these are the means of the evaluation. From
    the next batch of the training loop on, or if the evaluation has logged nothing, they are those
    of the training.

    All ranks must call this. They may have logged different names: each mean is taken over the
    ranks that logged it.

    Raises:
        UsageError: the ranks have logged in different passes.
    """
    passes = run.step.logged_passes
    just_left = passes.ended_since_last_batch  # becomes None when a loop gets its next batch
    running_or_last = _present_pass(passes.open) or passes.last_ended

    # Which of the two loops is meant depends on all ranks, so each sends its values in both.
    logged_here = _LoggedByRank(
        in_loop_just_left=None if just_left is None else _logged_in(just_left),
        in_running_or_last_loop=_logged_in(running_or_last),
    )
    ranks = [_from_lists(lists) for lists in run.collectives.exchange(logged_here)]

    values_of_ranks = _values_to_average(ranks)
    _check_same_pass([values.identity for values in values_of_ranks])
    return _weighted_means(values_of_ranks)


def _from_lists(lists: Sequence[Any]) -> _LoggedByRank:
    """Returns what a rank has sent. The exchange has turned its named tuples into lists."""
    just_left, running_or_last = lists
    return _LoggedByRank(
        in_loop_just_left=None if just_left is None else LoggedValues(*just_left),
        in_running_or_last_loop=LoggedValues(*running_or_last),
    )


def _values_to_average(ranks: Sequence[_LoggedByRank]) -> list[LoggedValues]:
    """Returns, for each rank, its values in the loop whose means are wanted.

    It is the loop that all ranks have just left, if any of them has logged something in it. (A rank
    without samples in an evaluation has not.) Else it is the loop that is running, or the last one.
    """
    values_in_left_loop = []
    for rank in ranks:
        if rank.in_loop_just_left is not None:
            values_in_left_loop.append(rank.in_loop_just_left)

    all_have_left_loop = len(values_in_left_loop) == len(ranks)
    some_have_logged = any(values.identity is not None for values in values_in_left_loop)
    if all_have_left_loop and some_have_logged:
        return values_in_left_loop
    return [rank.in_running_or_last_loop for rank in ranks]


def _weighted_means(values_of_ranks: Sequence[LoggedValues]) -> dict[str, float]:
    """Returns the mean of each name over the ranks that logged it."""
    totals: dict[str, list[float]] = {}  # [weighted sum, sum of weights] by name
    for values in values_of_ranks:
        for name, (total, weight) in values.sums.items():
            so_far = totals.setdefault(name, [0.0, 0.0])
            so_far[0] += total
            so_far[1] += weight
    return {name: total / weight for name, (total, weight) in totals.items() if weight != 0}


def _logged_in(open_pass: OpenPass | None) -> LoggedValues:
    """Returns what this rank has logged in a pass; empty values without a pass."""
    if open_pass is None or open_pass.sums is None:
        return LoggedValues(None, {})
    return LoggedValues(open_pass.identity, open_pass.sums.read())


def _present_pass(open_passes: Sequence[OpenPass]) -> OpenPass | None:
    """Returns the pass that is running, or None if there is none.

    The loop over an exhausted loader may be over already, so its pass is only returned if there is
    no other.
    """
    with_more_batches = []
    for open_pass in open_passes:
        if not open_pass.only_held_batches_remain:
            with_more_batches.append(open_pass)

    return _latest(with_more_batches or open_passes)


def _check_same_pass(identities: Sequence[Any]) -> None:
    """Raises UsageError if ranks have logged in different passes.

    Args:
        identities: for each rank, the `PassIdentity` of the pass in which it has logged, as a list.
            None for a rank that has logged nothing; it is not compared.
    """
    # One rank for each different pass, to name in the error.
    rank_of_pass: dict[PassIdentity, int] = {}
    for rank, identity in enumerate(identities):
        if identity is not None:
            rank_of_pass.setdefault(PassIdentity(*identity), rank)
    if len(rank_of_pass) < 2:
        return

    parts = []
    for identity, rank in rank_of_pass.items():
        loader = identity.loader_number
        parts.append(f"rank {rank} over loader {loader}, begun after step {identity.begun}")
    raise UsageError(
        "world.means()",
        f"the ranks have logged in different loops: {'; '.join(parts)}",
        "call it on all ranks after a loop that all of them have gone through, before one rank "
        "alone begins another",
    )
