"""Causes that are seen sample by sample: which they are, what is in them, and what became of them.

A way leads from inputs to outputs, from there to the loss; where it parts first the cause lies.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from lockstep.verify.catalogue import Cause, shown
from lockstep.verify.compare import Divergence, contents_that_differ, same_samples
from lockstep.verify.rows import Rows, near_rows, rows_of, tables
from lockstep.verify.tolerance import Array, largest, scale_of
from lockstep.verify.training_record import Forward, Sample, Update

Identity = Callable[[Update], list[Sample] | None]


def of_samples(case: Divergence) -> Cause:
    """Other samples than one process trains, by their indices or their contents."""
    # Where indices and contents differ, the contents say more: ranks may have other datasets.
    by_content = same_samples(case.expected, case.actual)[1] is not None
    identity: Identity = Update.contents if by_content else Update.indices
    expected, found = Counter(identity(case.expected)), Counter(identity(case.actual))
    total, wanted = found.total(), expected.total()
    numbers = f"one process trained {wanted} samples in this step, {case.num_ranks} trained {total}"
    if skips := _skipped(case):
        return Cause("LS405", (numbers, *skips))
    before = _all(case.parallel_run[: case.update_index], identity).keys() - expected.keys()
    again = [s for s, n in found.items() if n > max(1, expected[s]) or s in before]
    again = again if {*(found - expected)} <= {*again} else []
    if again:
        per_rank = [Counter(identity(Update([rank]))) for rank in case.actual if rank.contributes]
        every = all(one == per_rank[0] for one in per_rank)
        what = "every rank trained the same ones" if every else _which(again, case)
        text = f"{len(again)} of them were trained before, or by several ranks: {what}"
        stream = all(batch.iterable for batch in case.actual.batches)
        return Cause("LS108" if stream else "LS101", (numbers, text))
    if wanted and total > wanted and total % wanted == 0:
        text = f"the global batch is {total // wanted} times as large, in as few steps"
        return Cause("LS110", (numbers, text))
    if total < wanted and not found - expected:
        return Cause("LS102", (numbers, f"left out: {_which(expected - found, case)}"))

    def of_ranks(update: Update) -> list[list[Sample]]:
        return [identity(Update([rank])) or [] for rank in update]

    if twice := _on_several_ranks(case, of_ranks):
        return Cause("LS105", (numbers, *twice))
    text = "over all steps compared they are the same samples"
    if _all(case.reference_run, identity) != _all(case.parallel_run, identity):
        other = (found - expected).total()
        text = f"{other} of them are in another step of one process, or in none"
    return Cause("LS109", (numbers, text))


def _skipped(case: Divergence) -> list[str]:
    """That steps are skipped after some backward passes on some processes only, in words.

    It goes by other numbers of backward passes before this step, which are not always as many.
    """
    ranks = [*case.expected, *(rank for rank in case.actual if rank.contributes)]
    passes = [len(rank.losses) for rank in ranks]
    always = [
        len({len(update[n].losses) for update in run}) == 1
        for run in (case.reference_run, case.parallel_run)
        for n in range(len(run[0]))
    ]
    if all(always) or len({*passes}) == 1 or 0 in passes:
        return []
    told = ", ".join(f"{count} on rank {n}" for n, count in enumerate(passes[1:]))
    return [f"backward passes since the step before: {passes[0]} on one process, {told}"]


def of_contents(case: Divergence) -> Cause:
    """Other content under the same index.

    LS105 goes by content that one process has under other indices; LS106 and LS107 by draws while
    it was read, and by workers, whose draws nobody sees; LS104, before workers, by a rank 0 that
    has all as it is on one process and by the absence of draws. A private generator that is seeded
    by the rank looks like LS104 where rank 0 reads what one process reads first.
    """
    samples = contents_that_differ(case.expected, case.actual)
    text = f"{len(samples)} samples have other content under the same index: {shown(samples)}"
    reference = [
        batch for update in case.reference_run for rank in update for batch in rank.batches
    ]
    known = {digest for batch in reference for digest in batch.contents}
    batches = [batch for rank in case.actual for batch in rank.batches]
    pairs = (pair for b in batches for pair in zip(b.ids or (), b.contents, strict=False))
    other = [digest for sample, digest in pairs if sample in samples]
    moved = sum(digest in known for digest in other)
    if 2 * moved >= len(other):
        where = f"{moved} of them stand under another index on one process"
        return Cause("LS105", (text, where))
    drawn = [rank.batches[0].random_draws for rank in case.actual if rank.batches]
    if (
        not any(drawn)
        and case.num_ranks > 1
        and not contents_that_differ(case.expected, case.actual[:1])
    ):
        return Cause("LS104", (text, "rank 0 has the content of one process, other ranks have not"))
    if any(batch.workers for batch in batches):
        return Cause("LS107", (text, "worker processes read them, whose draws are not seen"))
    if any(drawn):
        where = f": {'; '.join(next(filter(None, drawn)))}"
        if len(drawn) > 1 and all([*each.values()] == [*drawn[0].values()] for each in drawn):
            same = f"all ranks drew the same random numbers to read theirs{where}"
            return Cause("LS106", (text, same))
        return Cause("LS107", (text, f"random numbers were drawn to read them{where}"))
    left = "a generator of numpy's or Python's that is the dataset's own, the clock, or the rank"
    seen = f"no draw from torch or a global stream was seen; what is left is {left}"
    return Cause("LS107", (text, seen))


def _which(samples: Iterable[Sample], case: Divergence) -> str:
    """Samples by their indices on one process, where those are known."""
    index_of = {
        content: index
        for update in case.reference_run
        for content, index in zip(update.contents() or (), update.indices() or (), strict=False)
    }
    return shown([index_of.get(sample, sample) for sample in samples])


def _all(updates: Sequence[Update], identity: Identity) -> Counter[Sample]:
    return Counter(sample for update in updates for sample in identity(update) or ())


def draws_that_may_differ(case: Divergence) -> list[tuple[str, str]]:
    """Draws that the losses of one process and of several do not share, by line and digest.

    Where each sample has a draw of its own, the last one of a rank is not the last one of one
    process: these may be the same numbers all the same.
    """
    one, many = (
        Counter(d for rank in each for d in rank.loss_draws)
        for each in (case.expected, case.actual)
    )
    return [draw for draw in {**many, **one} if many[draw] != one[draw] * case.num_ranks]


def draws_of(case: Divergence) -> list[str]:
    """Other random numbers than on one process that the loss is made of, in words.

    What one process and several have both drawn for this step are no other numbers.
    """
    drawn_by_one = frozenset[str]().union(*(rank.drawn_digests for rank in case.expected))
    drawn_by_many = frozenset[str]().union(*(rank.drawn_digests for rank in case.actual))
    drawn_by_both = drawn_by_one & drawn_by_many
    text = "the loss is made of random numbers, drawn for this step: {}"
    for line, numbers in draws_that_may_differ(case):
        if numbers not in drawn_by_both:
            return [text.format(line)]
    return []


def statistics_of(case: Divergence) -> list[str]:
    """Statistics over each rank's own samples that the loss is made of, in words.

    They are not those of one process on some rank; what the ranks have reduced does not count. That
    it is wrong is not known: the greatest length of a batch does no harm.
    """
    text = "each rank's own samples alone gave a statistic that the loss is made of"
    return _other_numbers(case, "batch_statistics", text)


def _numbers_of(case: Divergence) -> list[str]:
    """Statistics over each rank's own samples that became numbers before the loss, in words."""
    text = "each rank's own samples alone gave a number, before the loss was made"
    return _other_numbers(case, "scalar_statistics", text)


def _other_numbers(case: Divergence, what: str, text: str) -> list[str]:
    """Of numbers by line, the first lines that have another one on some rank, in words."""
    lines = [
        line
        for line, number in getattr(case.expected[0], what).items()
        for rank in case.actual
        if case.num_ranks > 1 and (own := getattr(rank, what).get(line)) is not None
        if not math.isclose(number, own, rel_tol=case.max_error, abs_tol=1e-12)
    ]
    return [f"{text}: {line}" for line in dict.fromkeys(lines)][:2]


def of_inputs(case: Divergence) -> Cause | None:
    """Batches of no DataLoader, by what the models were called with.

    LS101 goes by ranks that all had the same inputs, or had some twice; LS110 by so many times the
    inputs of one process, of the same shape, as there are processes; LS102 by inputs that are left
    out; LS109 by inputs of other steps of one process, and LS105 by these and an order that each
    rank drew for itself; LS106 and LS308 by random numbers; LS111 is what is left. A model that
    rightly gets a constant would look like LS101.
    """
    batches = [batch for rank in (*case.expected, *case.actual) for batch in rank.batches]
    one, many = inputs_of(case.expected), inputs_of(case.actual)
    unloaded = not any(batch.ids is None or batch.ids for batch in batches)
    if one and many and unloaded:
        wanted, total = sum(map(Counter.total, one)), sum(map(Counter.total, many))
        numbers = (
            f"one process computed {wanted} inputs in this step, {case.num_ranks} computed {total}"
        )
        if repeated(many):
            return Cause("LS101", (numbers, "no DataLoader made them, and every rank had the same"))
        if (
            total == wanted * case.num_ranks > wanted
            and len({batch.shape for batch in batches}) == 1
        ):
            return Cause("LS110", (numbers, "no DataLoader made them"))
    if any(batch.random_draws or batch.workers for batch in batches):
        return None
    for number, rows in enumerate(rows_of(case.expected, case.actual)):
        if rows.missing or rows.more.size:
            return _of_other_rows(case, rows, whole=unloaded and not number)
        beside, outputs = rows.differ("other_inputs"), rows.differ("outputs").any()
        if beside.any() and outputs:
            seen = _beside(rows, beside)
            return of_draws(case, seen) or Cause("LS111", (seen, *statistics_of(case)))
        if outputs:
            return None
    return None


def _beside(rows: Rows, differ: Array) -> str:
    count = f"{differ.sum()} of {len(differ)}"
    what = "such as targets or a hidden state"
    return f"{rows.model}: its first inputs are the same; what comes with {count} ({what}) is not"


def _of_other_rows(case: Divergence, rows: Rows, *, whole: bool) -> Cause:
    """Inputs that the other training lacks, or has beyond those of the reference."""
    place, model = rows.more, rows.model
    wanted, total = len(rows.one.inputs), len(rows.many.inputs)
    numbers = (
        f"{model}: {wanted} inputs on one process, {total} on {case.num_ranks}; "
        f"{len(rows.pairs[0])} are the same"
    )
    again = near_rows(rows.many.inputs[place], rows.one.inputs)
    steps = [forward for update in case.reference_run for forward, _ in tables(update).values()]
    known = [f for f in steps if (f.model, f.shape) == (model, rows.one.shape)]
    inputs = np.concatenate([f.inputs for f in known])
    elsewhere = again | near_rows(rows.many.inputs[place], inputs)
    left_out = f"{rows.missing} inputs of one process were computed by none"
    twice = f"{len(place)} inputs were computed by several ranks, or twice"
    if whole and not len(place):
        return Cause("LS102", (numbers, left_out))
    if whole and again.all():
        return Cause("LS101", (numbers, twice, left_out))
    draws = draws_of(case)
    if whole and elsewhere.all():
        text = f"{(~again).sum()} are inputs of another step of one process"
        own = [f"each rank drew an order of its own: {line}" for line in _drawn_apart(case)]
        own += _on_several_ranks(case, inputs_of)
        return Cause("LS105" if own else "LS109", (numbers, text, *(own or draws)))
    if draws:
        return of_draws(case, numbers) or Cause("LS111", (numbers,))
    if whole and _shifted(rows):
        text = "each rank's are those of one process, shifted and scaled by numbers of its own"
        return Cause("LS111", (numbers, text, "as by the mean and deviation of its part alone"))
    if again.all():
        return Cause("LS111", (numbers, *([twice] if len(place) else []), left_out))
    others = (~elsewhere).sum()
    unknown = f"{others} are not known from one process" if others else "all are of other steps too"
    return Cause("LS111", (numbers, unknown, *statistics_of(case)))


def _shifted(rows: Rows) -> bool:
    """Whether each rank's inputs are those of one process times and plus numbers of its own.

    The samples are to be in the order of one process, in slices or in turns.
    """
    one, many = rows.one.input_values, rows.many.input_values
    if one.shape != many.shape or not one.size:
        return False
    ranks = [many[rows.ranks == rank] for rank in np.unique(rows.ranks)]
    slices = np.split(one, np.cumsum([len(each) for each in ranks])[:-1])
    turns = [one[number :: len(ranks)] for number in range(len(ranks))]
    return any(
        all(map(_affine, order, ranks)) for order in (slices, turns) if len(ranks[0]) > _ENOUGH
    )


_ENOUGH = 2
"""So many samples fit any line."""


def _affine(one: Array, many: Array) -> bool:
    """Whether each column of one is, times a number and plus another, that of the other."""
    if one.shape != many.shape:
        return False
    a, b = one - one.mean(axis=0), many - many.mean(axis=0)
    square = (a * a).sum(axis=0)
    factor = (a * b).sum(axis=0) / np.where(square > 0, square, 1.0)
    return bool(np.abs(b - factor * a).max() <= 1e-7 * max(np.abs(b).max(), 1e-30))


def _on_several_ranks(case: Divergence, ranks_of: Callable[[Update], Sequence[Any]]) -> list[str]:
    """Samples that several ranks trained, and one process once, until it began anew; in words."""
    known: Counter[Any] = Counter()
    trained: list[set[Any]] = [set() for _ in range(case.num_ranks)]
    for one, many in zip(case.reference_run, case.parallel_run, strict=False):
        new = sum(map(Counter, ranks_of(one)), Counter[Any]())
        if max((new + known).values(), default=0) > 1:
            break
        known += new
        for rank, samples in enumerate(ranks_of(many)):
            trained[rank] |= {*samples}
    twice = sum(n > 1 for n in Counter(s for rank in trained for s in rank).values())
    text = f"in the steps compared {twice} samples were trained by several ranks"
    return [f"{text}, and none twice by one process"] if twice else []


def _drawn_apart(case: Divergence) -> list[str]:
    """Lines at which the ranks drew other numbers from one another; empty: they did not."""
    each = [dict(rank.loss_draws) for rank in case.actual if rank.contributes]
    shared = set(each[0]).intersection(*each[1:]) if each else set()
    return sorted(line for line in shared if len({own[line] for own in each}) > 1)[:1]


def of_draws(case: Divergence, *seen: str) -> Cause | None:
    """LS308: the loss is made of random numbers that are not those of one process.

    LS106: moreover all ranks drew the same ones.
    """
    draws = draws_of(case)
    if not draws:
        return None
    each = [Counter(rank.loss_draws) for rank in case.actual if rank.contributes]
    if len(each) > 1 and each[0] and all(own == each[0] for own in each):
        return Cause("LS106", (*seen, *draws, "all ranks drew the same numbers"))
    return Cause("LS308", (*seen, *draws))


def of_outputs(case: Divergence) -> Cause | None:
    """Models that return something else for the same inputs.

    LS208 goes by a model of which one process's own outputs show that they follow from other
    samples, and by ranks that exchanged nothing before the backward pass; LS309 by tensors that
    the model keeps. Something else may be wrong besides.
    """
    every = rows_of(case.expected, case.actual)
    for rows in every:
        if rows.both("outputs") is None and (beside := rows.differ("other_inputs")).any():
            return Cause("LS111", (_beside(rows, beside),))
    other = next((each for each in every if each.differ("outputs").any()), None)
    if other is None:
        return None
    differ = other.differ("outputs")
    count = f"{differ.sum()} of {len(differ)} inputs"
    seen = f"{other.model}: for {count} it returned something else than on one process"
    if case.expected.first("coupling_model") and not _exchanged(case):
        text = "on one process its output for a sample follows from the others of the batch"
        return Cause("LS208", (seen, text, "no rank exchanged anything in the forward pass"))
    if kept := _kept(case):
        text = f"what the model keeps is not that of one process: {shown(kept)}"
        return Cause("LS309", (seen, text))
    return of_draws(case, seen) or _of_streams(case, seen)


def _of_streams(case: Divergence, *seen: str) -> Cause | None:
    """LS308: random numbers that are not torch's were drawn for this step."""
    ranks = (*case.expected, *case.actual)
    kinds = dict.fromkeys(kind for rank in ranks for kind in rank.random_streams)
    text = "random numbers were drawn for this step, after its batch, from"
    return Cause("LS308", (*seen, f"{text} {' and '.join(kinds)}")) if kinds else None


def _exchanged(case: Divergence) -> bool:
    calls = (call for rank in case.actual for call in rank.calls)
    return any(
        call.passes_before < case.actual.backward_passes and not call.gradient_of for call in calls
    )


def _kept(case: Divergence) -> list[str]:
    """Attributes and buffers that are not those of one process, though of the same size.

    And those that have a part of the size, for a part of the samples, but are alike on all ranks.
    """
    found: dict[str, None] = {}
    for what in ("module_tensors_before", "module_tensors", "buffers"):
        expected = case.expected.merged(what)
        for name, array in expected.items():
            own = [getattr(rank, what)[name] for rank in case.actual if name in getattr(rank, what)]
            sized = what != "buffers"
            same = all(a.shape == array.shape and (not sized or a[-1] == array[-1]) for a in own)
            part = (
                sized
                and case.num_ranks > 1
                and all(a[-1] * case.num_ranks == array[-1] > 0 for a in own)
            )
            alike = part and len(own) > 1 and own[0].any() and not np.ptp(own, axis=0).any()
            wrong = (case.tolerance.differ(array, a, scale_of(expected)) for a in own)
            if (same and any(wrong)) or (alike and own[0][1]):
                found[name.partition("/")[2] or name] = None
    return [*found]


def of_padding(case: Divergence) -> Cause | None:
    """LS111: inputs that are the same but for what ends each row, as of batches padded apart."""
    rows = [
        [f.input_values for f in update] for update in (_first(case.expected), _first(case.actual))
    ]
    if not all(rows) or any(a.size == 0 for each in rows for a in each):
        return None
    width = max(a.shape[1] for each in rows for a in each)
    widths = {a.shape[1] for each in rows for a in each}
    ends = {float(row[-1]) for each in rows for a in each for row in a if len(row) == width}
    for end in ends if len(widths) > 1 else ():
        both = (
            Counter((*row, *[end] * (width - len(row))) for a in each for row in a) for each in rows
        )
        one, many = both
        if one == many:
            told = " or ".join(str(w) for w in sorted(widths))
            text = f"the inputs are the same but for their padding: they have {told} columns"
            return Cause("LS111", (text,))
    return None


def _first(update: Update) -> list[Forward]:
    """The first forward passes of the ranks."""
    return [rank.forwards[0] for rank in update if rank.contributes and rank.forwards]


def of_loss(case: Divergence) -> Cause | None:
    """A loss that makes something else of the same outputs.

    LS112 goes by targets that torch's loss functions were given; LS309 by outputs of earlier steps
    that the ranks have not exchanged; LS212 by the functions' other arguments, or by gradients of
    the outputs that are those of one process but for a number for each sample; LS208 by what each
    rank took over its own samples, unless random numbers may be the cause.
    """
    every = rows_of(case.expected, case.actual)
    if not every or any(rows.differ("outputs").any() for rows in every):
        return None
    targets = every[0].differ("targets")
    if targets.any():
        count = f"{targets.sum()} of {len(targets)} samples with the same inputs"
        told = f"the loss was given other targets for {count}"
        return Cause("LS112", (told, *statistics_of(case)))
    if carried := case.actual.first("earlier_outputs_line"):
        text = "the loss is made of what models returned in earlier steps, which no rank exchanged"
        return Cause("LS309", (f"{text}: {carried}", "outputs of this step are the same"))
    expected, found = case.expected.merged("loss_options"), case.actual.merged("loss_options")
    options = [
        name
        for name, array in expected.items()
        for rank in case.actual
        if name in rank.loss_options and case.tolerance.differ(array, rank.loss_options[name], 0.0)
    ]
    if options and expected.keys() == found.keys():
        return Cause("LS212", (f"not that of one process is {options[0]}", *statistics_of(case)))
    weighs = next(filter(None, (_weights_of_samples(rows, case.num_ranks) for rows in every)), ())
    known = all(rows.both("outputs") is not None for rows in every)
    took = statistics_of(case) or _numbers_of(case)
    if known and took and not draws_that_may_differ(case):
        same = weighs or ["for each sample the models returned the same"]
        return Cause("LS208", (*took, *same))
    return Cause("LS212", weighs) if weighs else None


def _weights_of_samples(rows: Rows, size: int) -> tuple[str, ...]:
    """How otherwise samples weigh, in words; empty: that is not all, or they do not."""
    both = rows.both("output_gradients")
    if both is None or not len(both[0]):
        return ()
    one, many = both[0], both[1] / size
    least = 1e-12 * max(largest(one), largest(many))
    square = (one * one).sum(axis=1)
    counted = [np.abs(each).max(axis=1) > least for each in (one, many)]
    factor = np.where(counted[0], (one * many).sum(axis=1) / np.where(square > 0, square, 1.0), 0.0)
    rest = np.abs(many - factor[:, None] * one).max(axis=1)[counted[0]]
    most = np.abs(factor).max()
    if (rest > 1e-7 * largest(many)).any() or np.ptp(factor) <= 1e-7 * most:
        return ()
    if factor.min() < -1e-7 * most:  # no weight does that, another target may
        return ()
    same = "outputs are the same; by them the loss changes as on one process, times a number"
    dropped, more = (counted[0] & ~counted[1]).sum(), (counted[1] & ~counted[0]).sum()
    if dropped or more:
        which = f"{dropped} samples count on one process only, {more} on several only"
        return (same, which)
    low, high = factor.min(), factor.max()
    return (same, f"of its own for each sample, from {low:.4g} to {high:.4g}")


def inputs_of(update: Update) -> list[Counter[str]]:
    """What the models of each rank were called with; empty: it is not known."""
    ranks = [rank for rank in update if rank.contributes and rank.model_inputs]
    if any(not batch.contents for rank in ranks for batch in rank.model_inputs):
        return []
    return [Counter(c for batch in rank.model_inputs for c in batch.contents) for rank in ranks]


def inputs_differ(case: Divergence) -> bool:
    """Whether models were called with other inputs than on one process; rounding is passed over."""
    every = rows_of(case.expected, case.actual)
    return any(rows.missing or rows.more.size for rows in every)


def repeated(ranks: Sequence[Counter[str]]) -> bool:
    """Whether all ranks had the same, and not by chance or as it is constant."""
    return len(ranks) > 1 and len(ranks[0]) > 1 and all(rank == ranks[0] for rank in ranks)


def what_is_equal(case: Divergence) -> list[str]:
    """How far the way of the samples is that of one process, in words; empty: it is not known."""
    words, every = [], rows_of(case.expected, case.actual)
    outputs = [rows.differ("outputs") for rows in every]
    if outputs and all(map(len, outputs)):
        wrong = [r.model for r, differ in zip(every, outputs, strict=True) if differ.any()]
        same = "for each sample the models returned the same; it is the loss, or later"
        other = f"for the same inputs something else was returned by {shown(wrong)}"
        words.append(other if wrong else same)
    if case.update_index:
        kept = sorted(
            {name.partition("/")[2] for rank in case.actual for name in rank.module_tensors_before}
        )
        text = "until here all steps are equal, so it may be what is carried from step to step"
        words.append(f"{text}: {shown(kept)}" if kept else text)
    return words
