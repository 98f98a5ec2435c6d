"""The likely cause of a divergence, from numbers and calls alone.

Each pattern is a code of the catalogue, with what was seen in words. Exact patterns go before
guesses: a gradient that is a whole multiple of the reference's says what it is by itself.

Why two trainings were given other samples, or other content under the same index.

Patterns of gradients that are not the reference's: constant ratios, and other weights.

The gradient of several ranks is a sum of what their backward passes left, each times a weight. If
the reference's gradient is such a sum too, with other weights, then only the weighting is wrong,
and the weights say what it should have been.

A divergence with all that may explain it, and what explains it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.errors import name_ranks
from lockstep.verify.compare import (
    Divergence,
    Tolerance,
    contents_that_differ,
    ranks_that_differ,
    replicas_that_differ,
    same_samples,
)
from lockstep.verify.record import (
    Array,
    Call,
    Sample,
    Update,
    backward_passes,
    contents_of,
    indices_of,
    largest,
    loss_of,
    merged,
)


def cause_of(case: Case) -> Cause:
    """The cause of a divergence."""
    explain = {
        "initial": _of_initial,
        "replicas": _of_replicas,
        "samples": of_samples,
        "contents": of_contents,
        "gradients": _of_gradients,
        "loss": _of_loss,
        "rates": _of_rates,
        "parameters": _of_parameters,
        "buffers": _of_buffers,
        "length": _of_length,
    }
    return explain[case.divergence.what](case)


def _of_initial(case: Case) -> Cause:
    apart = ranks_that_differ(case.many, "before", case.tolerance)
    if apart:
        seen = f"before the first step {_ranks(apart)} had other values than rank 0"
    else:
        seen = "all ranks began with the same values, which are not those of one process"
    return Cause("LS305", (seen,), case.divergence.names)


def _of_replicas(case: Case) -> Cause:
    apart = replicas_that_differ(case.many)
    number = case.many[0].step
    seen = f"before step {number} {_ranks(apart)} held other parameters than rank 0"
    after = "the last step itself left all ranks with the same" if number else ""
    return Cause("LS304", tuple(filter(None, (seen, after))), case.divergence.names)


def _of_gradients(case: Case) -> Cause:
    apart = ranks_that_differ(case.many, "gradients", case.tolerance)
    if apart:
        return _not_averaged(case, apart)
    expected, found = merged(case.one, "gradients"), merged(case.many, "gradients")
    gathered = [call for rank in case.many for call in rank.calls if _cuts_graph(call)]
    ratio = constant_ratio(expected, found, case.exact)
    if gathered:
        call = gathered[0]
        seen = f"{call.name} was given a tensor with a gradient, which its result has lost"
        return Cause("LS207", (seen, call.line, *_patterns(case)), case.divergence.names)
    if ratio is not None:
        return _of_ratio(case, ratio)
    weighed = _of_weights(case, expected)
    if weighed is not None:
        return weighed
    return _of_coupling(case)


def _cuts_graph(call: Call) -> bool:
    return call.of_graph and call.name.startswith("all_gather")


def _not_averaged(case: Case, apart: Mapping[str, Sequence[int]]) -> Cause:
    names = tuple(apart)
    total = len(merged(case.many, "gradients"))
    seen = f"the gradients of {len(names)} of {total} parameters differ between the ranks"
    new = {name for rank in case.many for name in rank.not_averaged}
    if new and set(names) <= new:
        return Cause("LS303", (seen, "DDP was built before they were to be trained"), names)
    lines = [rank.past_wrapper for rank in case.many if rank.past_wrapper]
    if lines:
        return Cause("LS302", (seen, f"around the wrapper: {lines[0]}"), names)
    local = [_sum(rank.local) for rank in case.many]
    own = all(
        name in part
        and not case.tolerance.differ(part[name], rank.gradients[name], largest(part[name]))
        for rank, part in zip(case.many, local, strict=True)
        for name in names
        if name in rank.gradients
    )
    # What comes too late is among the calls before the next update.
    near = case.other[case.divergence.update : case.divergence.update + 2]
    reduced = [call for one in near for rank in one for call in rank.calls if call.of_gradient]
    if reduced:
        seen_calls = f"gradients were averaged too late, or others than these: {reduced[0].line}"
        return Cause("LS406", (seen, seen_calls), names)
    alone = "each rank used what its own backward pass left" if own else "no rank's is the mean"
    return Cause("LS301", (seen, alone), names)


def _of_ratio(case: Case, ratio: float) -> Cause:
    size, names = case.size, case.divergence.names
    one, many = backward_passes(case.one), backward_passes(case.many)
    seen = f"all gradients are {_times(ratio, size)} those of one process"
    if one != many and one and many:
        if near(ratio, many / one, case.exact):
            return Cause("LS203", (seen, _passes(case)), names, {"ratio": ratio})
        if near(ratio, one / many, case.exact):
            return Cause("LS204", (seen, _passes(case)), names, {"ratio": ratio})
    gathers = [c.line for rank in case.many for c in rank.calls if c.name.startswith("all_gather")]
    more = [f"an all-gather was called, whose backward must add up: {at}" for at in gathers[:1]]
    if near(ratio, size, case.exact):
        return Cause("LS201", (seen, *more), names, {"ratio": ratio})
    if near(ratio, 1 / size, case.exact):
        return Cause("LS202", (seen, *more), names, {"ratio": ratio})
    return Cause("LS209", (seen, *_other_ratios(case)), names, {"ratio": ratio})


def _other_ratios(case: Case) -> tuple[str, ...]:
    found = []
    for one, many in zip(case.reference, case.other, strict=False):
        ratio = constant_ratio(merged(one, "gradients"), merged(many, "gradients"), case.exact)
        found.append("none" if ratio is None else f"{ratio:.6g}")
    return (f"step by step: {', '.join(found)}",) if len(found) > 1 else ()


def _of_weights(case: Case, expected: Mapping[str, Array]) -> Cause | None:
    """Whether other weights of what the ranks' backward passes left would be right."""
    parts = [piece for rank in case.many if rank.counts for piece in rank.local]
    right = weights(expected, parts, case.exact)
    if right is None:
        return None
    used = weights(merged(case.many, "gradients"), parts, case.exact)
    if used is None:
        return None
    names = case.divergence.names
    text = (
        "the gradient of one process is a sum of the same parts with other weights",
        f"the backward passes of the ranks weigh {_ratio_text(used)}; "
        f"they should weigh {_ratio_text(right)}",
    )
    clipped = any(call.name == "clip" for rank in case.many for call in rank.calls)
    if clipped and _all_equal(right, case.exact) and not _all_equal(used, case.exact):
        return Cause("LS404", (*text, "gradients were clipped before they were averaged"), names)
    # A part's own scale says nothing where the ranks weigh it unequally themselves.
    relative = [r / u if u else 0.0 for r, u in zip(right, used, strict=True)]
    for key, counts in _counts(case, len(parts)).items():
        if proportional(relative, counts):
            code = "LS206" if key == "samples" else "LS205"
            numbers = ", ".join(f"{count:g}" for count in counts)
            return Cause(code, (*text, f"that is by their {key}: {numbers}"), names)
    least = 1e-6 * max(abs(weight) for weight in right)
    foreign = sum(abs(r) < least and u != 0.0 for r, u in zip(right, used, strict=True))
    if foreign:
        seen = (
            f"the gradient of one process is made of {len(parts) - foreign} of the {len(parts)} "
            "backward passes of the ranks; the others computed batches that one process does not "
            "have"
        )
        return Cause("LS110", (seen,), names)
    return Cause("LS404" if clipped else "LS205", text, names)


def _counts(case: Case, parts: int) -> dict[str, list[float]]:
    """What each backward pass may weigh, by what was counted in its batch; samples first."""
    batches = [taken for rank in case.many if rank.counts for taken in rank.taken]
    if len(batches) != parts:
        return {}
    # What is plainest first: samples, labels that count, then what is not padding.
    kinds = ("samples", "labels", "non-zero", "ones")
    found = dict.fromkeys(key for batch in batches for key in batch.weights)
    keys = [key for kind in kinds for key in found if key.startswith(kind)]
    return {key: [batch.weights.get(key, 0.0) for batch in batches] for key in keys}


def _of_coupling(case: Case) -> Cause:
    names = case.divergence.names
    patterns = _patterns(case)
    layers = _local_statistics(case)
    if layers:
        return Cause("LS306", (layers, *patterns), names)
    draws = [rank.draw_line for rank in (*case.one, *case.many) if rank.drew]
    if draws:
        seen = "random numbers were drawn between a batch and its step"
        return Cause("LS308", (seen, *filter(None, draws[:1]), *patterns), names)
    if backward_passes(case.one) != backward_passes(case.many) and _statistics_moved(case):
        return Cause("LS307", (_passes(case), *patterns), names)
    if any(rank.local for rank in case.many) and case.size > 1:
        seen = "no weighting of the ranks' own gradients gives that of one process"
        return Cause("LS208", (seen, *patterns), names)
    return Cause("LS210", patterns, names)


def _statistics_moved(case: Case) -> bool:
    buffers = merged(case.many, "buffers")
    return any(name.endswith("running_mean") for name in buffers)


def _patterns(case: Case) -> tuple[str, ...]:
    """How many gradients are right, and what the others are."""
    expected, found = merged(case.one, "gradients"), merged(case.many, "gradients")
    wrong = [name for name in case.divergence.names if name in expected]
    kinds: dict[str, list[str]] = {}
    for name, ratio in ratios(
        {name: expected[name] for name in wrong}, {n: found[n] for n in wrong if n in found}
    ).items():
        key = "in no constant ratio" if ratio is None else _times(ratio, case.size)
        kinds.setdefault(key, []).append(name)
    right = len(expected) - len(wrong)
    words = [f"{right} of {len(expected)} gradients are right"] if right else []
    words += [f"{key}: {shown(names)}" for key, names in list(kinds.items())[:3]]
    return tuple(words)


def _of_loss(case: Case) -> Cause:
    one, many = loss_of(case.one), loss_of(case.many)
    assert one is not None
    assert many is not None
    seen = f"{one:.9g} on one process, {many:.9g} on {case.size}, with equal gradients"
    return Cause("LS501", (seen,))


def _of_rates(case: Case) -> Cause:
    one, many = case.one[0].rates, case.many[0].rates
    seen = f"{_numbers(one)} on one process, {_numbers(many)} on {case.size}"
    ratio = many[0] / one[0] if one and many and one[0] else math.nan
    number = case.divergence.update + 1
    turns = _scheduled(case.reference[:number]), _scheduled(case.other[:number])
    if turns[0] != turns[1]:
        text = f"the scheduler had stepped {turns[0]} times, on {case.size} processes {turns[1]}"
        return Cause("LS401", (seen, text), data={"ratio": ratio})
    if number <= len({rank[0].optimizer for rank in case.reference}):
        size = case.size
        kinds = {size: f"{size} times", math.sqrt(size): f"the square root of {size} times"}
        word = next((w for c, w in kinds.items() if near(ratio, c)), f"{ratio:.6g} times")
        return Cause("LS402", (seen, f"{word} as high"), data={"ratio": ratio})
    return Cause("LS401", (seen, "they were equal in the steps before"), data={"ratio": ratio})


def _scheduled(updates: Sequence[Update]) -> int:
    return sum(call.name == "schedule" for update in updates for call in update[0].calls)


def _of_parameters(case: Case) -> Cause:
    names = case.divergence.names
    apart = ranks_that_differ(case.many, "parameters", case.tolerance)
    seen = "gradients and learning rates are equal, and the parameters after the step are not"
    if apart:
        others = f"rank 0 has others than {_ranks(apart)}"
        return Cause("LS304", (seen, others), tuple(apart))
    return Cause("LS403", (seen,), names)


def _of_buffers(case: Case) -> Cause:
    names = case.divergence.names
    ends = ("running_mean", "running_var", "num_batches_tracked")
    if all(name.endswith(ends) for name in names):
        layers = _local_statistics(case)
        if layers:
            return Cause("LS306", (layers,), names)
        equal = backward_passes(case.one) == backward_passes(case.many)
        return Cause("LS306" if equal else "LS307", (_passes(case),), names)
    return Cause("LS309", (f"after the step: {shown(names)}",), names)


def _of_length(case: Case) -> Cause:
    one, many = len(case.reference), len(case.other)
    return Cause("LS405", (f"one process took {one} steps, {case.size} took {many}",))


def _passes(case: Case) -> str:
    one, many = backward_passes(case.one), backward_passes(case.many)
    return f"backward passes for this step: {one} on one process, {many} on each rank"


def _local_statistics(case: Case) -> str:
    """The BatchNorm layers with statistics of a part of the batch, in words; empty: none."""
    layers = sorted({layer for rank in case.many for layer in rank.statistics})
    if not layers or case.size == 1:
        return ""
    return f"each rank's part alone gave the statistics of BatchNorm layers: {shown(layers)}"


def _sum(parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    total: dict[str, Array] = {}
    for part in parts:
        for name, array in part.items():
            total[name] = total[name] + array if name in total else array
    return total


def _all_equal(values: Sequence[float], exact: float) -> bool:
    return all(near(values[0], value, max(exact, 1e-6)) for value in values)


def _times(ratio: float, size: int) -> str:
    if near(ratio, 1 / size):
        return f"1/{size} of"
    return f"{ratio:.6g} times"


def _ratio_text(weights: Sequence[float]) -> str:
    total = sum(weights)
    return " : ".join(f"{weight / total:.4g}" if total else f"{weight:.4g}" for weight in weights)


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values)


def _ranks(apart: Mapping[str, Sequence[int]]) -> str:
    return name_ranks({rank for ranks in apart.values() for rank in ranks})


Identity = Callable[[Update], list[Sample] | None]


def of_samples(case: Case) -> Cause:
    """Of other samples in a step."""
    # Where indices and contents differ, the contents say more: ranks may have other datasets.
    by_content = same_samples(case.one, case.many)[1] is not None
    identity: Identity = contents_of if by_content else indices_of
    expected, found = Counter(identity(case.one)), Counter(identity(case.many))
    total, wanted = found.total(), expected.total()
    numbers = f"one process trained {wanted} samples in this step, {case.size} trained {total}"
    before = set(_all(case.other[: case.divergence.update], identity))
    again = [
        s for s, n in found.items() if n > max(1, expected[s]) or s in before - expected.keys()
    ]
    if again:
        per_rank = [Counter(identity([rank])) for rank in case.many if rank.counts]
        every = all(one == per_rank[0] for one in per_rank)
        what = "every rank trained the same ones" if every else _which(again, case)
        text = f"{len(again)} of them were trained before, or by several ranks: {what}"
        return Cause("LS108" if indices_of(case.many) is None else "LS101", (numbers, text))
    if wanted and total > wanted and total % wanted == 0:
        text = f"the global batch is {total // wanted} times as large, in as few steps"
        return Cause("LS110", (numbers, text))
    if total < wanted and not found - expected:
        return Cause("LS102", (numbers, f"left out: {_which(expected - found, case)}"))
    if _all(case.reference, identity) == _all(case.other, identity):
        return Cause("LS109", (numbers, "over all steps compared they are the same samples"))
    other = (found - expected).total()
    return Cause(
        "LS109", (numbers, f"{other} of them are in another step of one process, or in none")
    )


def of_contents(case: Case) -> Cause:
    """Of other content of the same samples."""
    samples = contents_that_differ(case.one, case.many)
    text = f"{len(samples)} samples have other content under the same index: {shown(samples)}"
    known = {
        digest
        for update in case.reference
        for rank in update
        for batch in rank.taken
        for digest in batch.contents
    }
    wrong = set(samples)
    other = [
        digest
        for rank in case.many
        for batch in rank.taken
        for sample, digest in zip(batch.ids or (), batch.contents, strict=False)
        if sample in wrong
    ]
    moved = sum(digest in known for digest in other)
    if 2 * moved >= len(other):
        where = f"{moved} of them stand under another index on one process"
        return Cause("LS105", (text, where))
    if any(batch.drew for rank in case.many for batch in rank.taken):
        streams = [rank.taken[0].stream for rank in case.many if rank.taken]
        if len(streams) > 1 and len(set(streams)) == 1:
            return Cause("LS106", (text, "all ranks drew the same random numbers to read theirs"))
        return Cause("LS107", (text, "random numbers of the process were drawn to read them"))
    first = contents_that_differ(case.one, case.many[:1])
    if not first and case.size > 1:
        return Cause("LS104", (text, "rank 0 has the content of one process, other ranks have not"))
    return Cause("LS107", (text, "no draw of a random number was seen"))


def _which(samples: Iterable[Sample], case: Case) -> str:
    """Samples by their indices on one process, where those are known."""
    index_of = {
        content: index
        for update in case.reference
        for content, index in zip(contents_of(update) or (), indices_of(update) or (), strict=False)
    }
    return shown([index_of.get(sample, sample) for sample in samples])


def _all(updates: Sequence[Update], identity: Identity) -> Counter[Sample]:
    return Counter(sample for update in updates for sample in identity(update) or ())


_EXACT = 1e-7
"""The largest remainder, against the gradient itself, that counts as none."""


def constant_ratio(
    reference: Mapping[str, Array], found: Mapping[str, Array], exact: float = _EXACT
) -> float | None:
    """`c` where all of `found` is `c` times the reference; None: there is no such number."""
    a, b = flat(reference), flat(found)
    if a.shape != b.shape or not a.size:
        return None
    square = float(a @ a)
    if square == 0.0:
        return None
    ratio = float(a @ b) / square
    return ratio if _norm(b - ratio * a) <= exact * _norm(b) and ratio != 0.0 else None


def ratios(reference: Mapping[str, Array], found: Mapping[str, Array]) -> dict[str, float | None]:
    """The constant ratio of each tensor by itself; None: it has none."""
    return {
        name: constant_ratio({name: reference[name]}, {name: found[name]})
        for name in reference
        if name in found
    }


def weights(
    target: Mapping[str, Array], parts: Sequence[Mapping[str, Array]], exact: float = _EXACT
) -> tuple[float, ...] | None:
    """The numbers by which `parts` are multiplied in a sum that is `target`.

    Args:
        target: a gradient.
        parts: what each backward pass left; a tensor that one lacks counts as zero.
        exact: the largest remainder.

    Returns:
        One number a part; None where there is no such sum, or it could be one by chance.
    """
    names = list(target)
    goal = flat(target)
    if not parts or goal.size < 4 * len(parts):
        return None
    columns = np.stack(
        [
            flat({n: part[n] if n in part else np.zeros_like(target[n]) for n in names})
            for part in parts
        ],
        axis=1,
    )
    scale = np.sqrt((columns**2).sum(axis=0))
    used = scale > 0
    if not used.any():
        return None
    # Scaled: parts may be of very different sizes, and the rank is judged against the largest.
    scaled = columns[:, used] / scale[used]
    solution, _, rank, _ = np.linalg.lstsq(scaled, goal, rcond=1e-10)
    if rank < used.sum() or _norm(goal - scaled @ solution) > exact * _norm(goal):
        return None
    result = np.zeros(len(parts))
    result[used] = solution / scale[used]
    return tuple(float(w) for w in result)


def proportional(one: Sequence[float], other: Sequence[float], exact: float = 1e-5) -> bool:
    """Whether two lists of numbers are multiples of each other."""
    a, b = np.asarray(one, dtype=float), np.asarray(other, dtype=float)
    if not a.any() or not b.any():
        return False
    a, b = a / _norm(a), b / _norm(b)
    return bool(_norm(a - b) <= exact)


def near(one: float, other: float, exact: float = 1e-6) -> bool:
    """Equal but for rounding."""
    return abs(one - other) <= exact * max(abs(one), abs(other))


def flat(arrays: Mapping[str, Array]) -> Array:
    """All values in one row."""
    return np.concatenate([np.zeros(0), *(a.ravel().astype(np.float64) for a in arrays.values())])


def _norm(values: Array) -> float:
    return float(np.linalg.norm(values))


@dataclass(frozen=True)
class Cause:
    """What explains a divergence best."""

    code: str
    seen: tuple[str, ...]
    """What it was read from, a sentence each."""
    names: tuple[str, ...] = ()
    """Of tensors or samples that it is about."""
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A divergence with all that may explain it."""

    reference: Sequence[Update]
    other: Sequence[Update]
    divergence: Divergence
    tolerance: Tolerance

    @property
    def one(self) -> Update:
        """The reference's update in which they part."""
        return self.reference[self.divergence.update]

    @property
    def many(self) -> Update:
        """The other's."""
        return self.other[self.divergence.update]

    @property
    def size(self) -> int:
        """Processes of the other."""
        return len(self.other[0])

    @property
    def exact(self) -> float:
        """The largest remainder that counts as none."""
        return max(1e-7, 10 * self.tolerance.relative)


def shown(things: Sequence[object]) -> str:
    """The first of several things, in words."""
    words = [str(t[-1]) if isinstance(t, tuple) else str(t) for t in things[:6]]
    return ", ".join(words) + (f" and {len(things) - 6} more" if things[6:] else "")
