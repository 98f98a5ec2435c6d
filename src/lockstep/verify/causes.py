"""The likely cause of a divergence, from numbers and calls alone, and the verdict on a run.

Each pattern is a code of the catalogue, with what was seen in words. Exact patterns go before
guesses: a gradient that is a whole multiple of the reference's says what it is by itself.

The gradient of several ranks is a sum of what their backward passes left, each times a weight. If
the reference's gradient is such a sum too, with other weights, then only the weighting is wrong,
and the weights say what it should have been.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.errors import name_ranks
from lockstep.verify.catalogue import ENTRIES
from lockstep.verify.compare import (
    FLOAT32,
    FLOAT64,
    Array,
    Divergence,
    RankUpdate,
    Sample,
    ScriptCall,
    Tolerance,
    Update,
    contents_that_differ,
    first_divergence,
    largest,
    same_samples,
)
from lockstep.verify.record import Recorded


@dataclass(frozen=True)
class Cause:
    """What explains a divergence best."""

    code: str
    seen: tuple[str, ...]
    """What it was read from, a sentence each."""
    names: tuple[str, ...] = ()
    """Of the tensors that it is about, where they are not all that differ."""
    ratio: float | None = None
    """How many times as large as on one process, where it is one number for all."""


def _of_initial(case: Divergence) -> Cause:
    apart = case.many.ranks_that_differ("initial", case.tolerance)
    seen = "all ranks began with the same values, which are not those of one process"
    if apart:
        seen = f"before the first step {_ranks(apart)} had other values than rank 0"
    return Cause("LS305", (seen,))


def _of_replicas(case: Divergence) -> Cause:
    apart = case.many.replicas_that_differ()
    number = case.many[0].step
    seen = f"before step {number} {_ranks(apart)} held other parameters than rank 0"
    after = ["the last step itself left all ranks with the same"] if number else []
    return Cause("LS304", (seen, *after))


def _of_gradients(case: Divergence) -> Cause:
    apart = case.many.ranks_that_differ("gradients", case.tolerance)
    if apart:
        return _not_averaged(case, tuple(apart))
    for call in _calls(case.many):
        if call.of_graph and call.name.startswith("all_gather"):
            seen = f"{call.name} was given a tensor with a gradient, which its result has lost"
            return Cause("LS207", (seen, call.line, *_patterns(case)))
    expected, found = case.one.merged("gradients"), case.many.merged("gradients")
    ratio = constant_ratio(expected, found, case.exact)
    if ratio is not None:
        return _of_ratio(case, ratio)
    return _of_weights(case, expected, found) or _of_coupling(case)


def _calls(update: Update) -> list[ScriptCall]:
    return [call for rank in update for call in rank.calls]


def _not_averaged(case: Divergence, names: tuple[str, ...]) -> Cause:
    total = len(case.many.merged("gradients"))
    seen = f"the gradients of {len(names)} of {total} parameters differ between the ranks"
    new = {name for rank in case.many for name in rank.not_averaged}
    if new and set(names) <= new:
        return Cause("LS303", (seen, "DDP was built before they were to be trained"), names)
    lines = [rank.past_wrapper for rank in case.many if rank.past_wrapper]
    if lines:
        return Cause("LS302", (seen, f"around the wrapper: {lines[0]}"), names)
    # What comes too late is among the calls before the next update.
    soon = case.other[case.update : case.update + 2]
    reduced = [call for update in soon for call in _calls(update) if call.of_gradient]
    if reduced:
        late = f"gradients were averaged too late, or others than these: {reduced[0].line}"
        return Cause("LS406", (seen, late), names)
    used = [(rank, name) for rank in case.many for name in names if name in rank.gradients]
    own = all(_is_own(rank, name, case.tolerance) for rank, name in used)
    alone = "each rank used what its own backward pass left" if own else "no rank's is the mean"
    return Cause("LS301", (seen, alone), names)


def _is_own(rank: RankUpdate, name: str, tolerance: Tolerance) -> bool:
    """Whether a gradient is what the rank's own backward passes left."""
    left = [part[name] for part in rank.local if name in part]
    total = np.asarray(sum(left))
    return bool(left) and not tolerance.differ(total, rank.gradients[name], largest(total))


def _of_ratio(case: Divergence, ratio: float) -> Cause:
    size, one, many = case.size, case.one.backward_passes, case.many.backward_passes
    seen = f"all gradients are {_times(ratio, size)} those of one process"
    gathers = [call.line for call in _calls(case.many) if call.name.startswith("all_gather")]
    more = [f"an all-gather was called, whose backward must add up: {at}" for at in gathers[:1]]
    known = [("LS201", size, more), ("LS202", 1 / size, more)]
    if one != many and one and many:
        passes = [_passes(case)]
        known = [("LS203", many / one, passes), ("LS204", one / many, passes), *known]
    for code, expected, why in known:
        if near(ratio, expected, case.exact):
            return Cause(code, (seen, *why), ratio=ratio)
    steps = []
    for one_step, step in zip(case.reference, case.other, strict=False):
        of_step = constant_ratio(one_step.merged("gradients"), step.merged("gradients"), case.exact)
        steps.append("none" if of_step is None else f"{of_step:.6g}")
    others = [f"step by step: {', '.join(steps)}"] if len(steps) > 1 else []
    return Cause("LS209", (seen, *others), ratio=ratio)


def _of_weights(
    case: Divergence, expected: Mapping[str, Array], found: Mapping[str, Array]
) -> Cause | None:
    """Whether other weights of what the ranks' backward passes left would be right."""
    parts = [piece for rank in case.many if rank.counts for piece in rank.local]
    right, used = weights(expected, parts, case.exact), weights(found, parts, case.exact)
    if right is None or used is None:
        return None
    text = (
        "the gradient of one process is a sum of the same parts with other weights",
        f"the backward passes of the ranks weigh {_ratio_text(used)}; "
        f"they should weigh {_ratio_text(right)}",
    )
    clipped = any(call.name == "clip" for call in _calls(case.many))
    if clipped and _all_equal(right, case.exact) and not _all_equal(used, case.exact):
        return Cause("LS404", (*text, "gradients were clipped before they were averaged"))
    # A part's own scale says nothing where the ranks weigh it unequally themselves.
    relative = [r / u if u else 0.0 for r, u in zip(right, used, strict=True)]
    for key, counts in _counts(case, len(parts)).items():
        if proportional(relative, counts):
            numbers = ", ".join(f"{count:g}" for count in counts)
            code = "LS206" if key == "samples" else "LS205"
            return Cause(code, (*text, f"that is by their {key}: {numbers}"))
    least = 1e-6 * max(abs(weight) for weight in right)
    foreign = sum(abs(r) < least and u != 0.0 for r, u in zip(right, used, strict=True))
    if foreign:
        seen = (
            f"the gradient of one process is made of {len(parts) - foreign} of the {len(parts)} "
            "backward passes of the ranks; the others computed batches that one process does not "
            "have"
        )
        return Cause("LS110", (seen,))
    return Cause("LS404" if clipped else "LS205", text)


def _counts(case: Divergence, parts: int) -> dict[str, list[float]]:
    """What each backward pass may weigh, by what was counted in its batch."""
    batches = case.many.batches
    if len(batches) != parts:
        return {}
    # What is plainest first: samples, labels that count, then what is not padding.
    kinds = ("samples", "labels", "non-zero", "ones")
    found = dict.fromkeys(key for batch in batches for key in batch.weights)
    keys = [key for kind in kinds for key in found if key.startswith(kind)]
    return {key: [batch.weights.get(key, 0.0) for batch in batches] for key in keys}


def _of_coupling(case: Divergence) -> Cause:
    """Gradients in which samples have to do with each other, or with chance."""
    patterns = _patterns(case)
    layers = _local_statistics(case)
    if layers:
        return Cause("LS306", (layers, *patterns))
    draws = [rank.draw_line for rank in (*case.one, *case.many) if rank.drew]
    if draws:
        seen = "random numbers were drawn between a batch and its step"
        return Cause("LS308", (seen, *filter(None, draws[:1]), *patterns))
    moved = any(name.endswith("running_mean") for name in case.many.merged("buffers"))
    if moved and case.one.backward_passes != case.many.backward_passes:
        return Cause("LS307", (_passes(case), *patterns))
    if any(rank.local for rank in case.many) and case.size > 1:
        seen = "no weighting of the ranks' own gradients gives that of one process"
        return Cause("LS208", (seen, *patterns))
    return Cause("LS210", patterns)


def _patterns(case: Divergence) -> tuple[str, ...]:
    """How many gradients are right, and what the others are."""
    expected, found = case.one.merged("gradients"), case.many.merged("gradients")
    wrong = [name for name in case.names if name in expected]
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in (name for name in wrong if name in found):
        ratio = constant_ratio({name: expected[name]}, {name: found[name]}, case.exact)
        kinds["in no constant ratio" if ratio is None else _times(ratio, case.size)].append(name)
    right = len(expected) - len(wrong)
    words = [f"{right} of {len(expected)} gradients are right"] if right else []
    words += [f"{key}: {shown(names)}" for key, names in list(kinds.items())[:3]]
    return tuple(words)


def _of_loss(case: Divergence) -> Cause:
    one, many = case.one.loss, case.many.loss
    seen = f"{one:.9g} on one process, {many:.9g} on {case.size}, with equal gradients"
    return Cause("LS501", (seen,))


def _of_rates(case: Divergence) -> Cause:
    one, many = case.one[0].rates, case.many[0].rates
    texts = [", ".join(f"{rate:.6g}" for rate in rates) for rates in (one, many)]
    seen = f"{texts[0]} on one process, {texts[1]} on {case.size}"
    ratio = many[0] / one[0] if one and many and one[0] else math.nan
    number = case.update + 1
    turns = _scheduled(case.reference[:number]), _scheduled(case.other[:number])
    if turns[0] != turns[1]:
        text = f"the scheduler had stepped {turns[0]} times, on {case.size} processes {turns[1]}"
        return Cause("LS401", (seen, text), ratio=ratio)
    if number <= len({rank[0].optimizer for rank in case.reference}):
        size = case.size
        kinds = {size: f"{size} times", math.sqrt(size): f"the square root of {size} times"}
        word = next((w for c, w in kinds.items() if near(ratio, c)), f"{ratio:.6g} times")
        return Cause("LS402", (seen, f"{word} as high"), ratio=ratio)
    return Cause("LS401", (seen, "they were equal in the steps before"), ratio=ratio)


def _scheduled(updates: Sequence[Update]) -> int:
    return sum(call.name == "schedule" for update in updates for call in update[0].calls)


def _of_parameters(case: Divergence) -> Cause:
    apart = case.many.ranks_that_differ("parameters", case.tolerance)
    seen = "gradients and learning rates are equal, and the parameters after the step are not"
    if apart:
        return Cause("LS304", (seen, f"rank 0 has others than {_ranks(apart)}"), tuple(apart))
    return Cause("LS403", (seen,))


def _of_buffers(case: Divergence) -> Cause:
    ends = ("running_mean", "running_var", "num_batches_tracked")
    if not all(name.endswith(ends) for name in case.names):
        return Cause("LS309", (f"after the step: {shown(case.names)}",))
    layers = _local_statistics(case)
    equal = case.one.backward_passes == case.many.backward_passes
    return Cause("LS306" if layers or equal else "LS307", (layers or _passes(case),))


def _of_length(case: Divergence) -> Cause:
    one, many = len(case.reference), len(case.other)
    return Cause("LS405", (f"one process took {one} steps, {case.size} took {many}",))


def _passes(case: Divergence) -> str:
    one, many = case.one.backward_passes, case.many.backward_passes
    return f"backward passes for this step: {one} on one process, {many} on each rank"


def _local_statistics(case: Divergence) -> str:
    """The BatchNorm layers with statistics of a part of the batch, in words; empty: none."""
    layers = sorted({layer for rank in case.many for layer in rank.statistics})
    if not layers or case.size == 1:
        return ""
    return f"each rank's part alone gave the statistics of BatchNorm layers: {shown(layers)}"


def _all_equal(values: Sequence[float], exact: float) -> bool:
    return all(near(values[0], value, max(exact, 1e-6)) for value in values)


def _times(ratio: float, size: int) -> str:
    return f"1/{size} of" if near(ratio, 1 / size) else f"{ratio:.6g} times"


def _ratio_text(weights: Sequence[float]) -> str:
    total = sum(weights)
    return " : ".join(f"{weight / total:.4g}" if total else f"{weight:.4g}" for weight in weights)


def _ranks(apart: Mapping[str, Sequence[int]]) -> str:
    return name_ranks({rank for ranks in apart.values() for rank in ranks})


Identity = Callable[[Update], list[Sample] | None]


def _of_samples(case: Divergence) -> Cause:
    # Where indices and contents differ, the contents say more: ranks may have other datasets.
    by_content = same_samples(case.one, case.many)[1] is not None
    identity: Identity = Update.contents if by_content else Update.indices
    expected, found = Counter(identity(case.one)), Counter(identity(case.many))
    total, wanted = found.total(), expected.total()
    numbers = f"one process trained {wanted} samples in this step, {case.size} trained {total}"
    before = _all(case.other[: case.update], identity).keys() - expected.keys()
    again = [s for s, n in found.items() if n > max(1, expected[s]) or s in before]
    if again:
        per_rank = [Counter(identity(Update([rank]))) for rank in case.many if rank.counts]
        every = all(one == per_rank[0] for one in per_rank)
        what = "every rank trained the same ones" if every else _which(again, case)
        text = f"{len(again)} of them were trained before, or by several ranks: {what}"
        return Cause("LS108" if case.many.indices() is None else "LS101", (numbers, text))
    if wanted and total > wanted and total % wanted == 0:
        text = f"the global batch is {total // wanted} times as large, in as few steps"
        return Cause("LS110", (numbers, text))
    if total < wanted and not found - expected:
        return Cause("LS102", (numbers, f"left out: {_which(expected - found, case)}"))
    text = "over all steps compared they are the same samples"
    if _all(case.reference, identity) != _all(case.other, identity):
        other = (found - expected).total()
        text = f"{other} of them are in another step of one process, or in none"
    return Cause("LS109", (numbers, text))


def _of_contents(case: Divergence) -> Cause:
    samples = contents_that_differ(case.one, case.many)
    text = f"{len(samples)} samples have other content under the same index: {shown(samples)}"
    reference = [batch for update in case.reference for rank in update for batch in rank.taken]
    known = {digest for batch in reference for digest in batch.contents}
    batches = [batch for rank in case.many for batch in rank.taken]
    wrong = set(samples)
    other = [
        digest
        for batch in batches
        for sample, digest in zip(batch.ids or (), batch.contents, strict=False)
        if sample in wrong
    ]
    moved = sum(digest in known for digest in other)
    if 2 * moved >= len(other):
        where = f"{moved} of them stand under another index on one process"
        return Cause("LS105", (text, where))
    if any(batch.stream for batch in batches):
        streams = [rank.taken[0].stream for rank in case.many if rank.taken]
        if len(streams) > 1 and len(set(streams)) == 1:
            return Cause("LS106", (text, "all ranks drew the same random numbers to read theirs"))
        return Cause("LS107", (text, "random numbers of the process were drawn to read them"))
    if case.size > 1 and not contents_that_differ(case.one, case.many[:1]):
        return Cause("LS104", (text, "rank 0 has the content of one process, other ranks have not"))
    return Cause("LS107", (text, "no draw of a random number was seen"))


def _which(samples: Iterable[Sample], case: Divergence) -> str:
    """Samples by their indices on one process, where those are known."""
    index_of = {
        content: index
        for update in case.reference
        for content, index in zip(update.contents() or (), update.indices() or (), strict=False)
    }
    return shown([index_of.get(sample, sample) for sample in samples])


def _all(updates: Sequence[Update], identity: Identity) -> Counter[Sample]:
    return Counter(sample for update in updates for sample in identity(update) or ())


def constant_ratio(
    reference: Mapping[str, Array], found: Mapping[str, Array], exact: float = 1e-7
) -> float | None:
    """`c` where all of `found` is `c` times the reference; None: there is no such number.

    Args:
        reference: tensors.
        found: others of these names.
        exact: the largest remainder, against `found` itself, that counts as none.
    """
    a, b = flat(reference), flat(found)
    square = float(a @ a) if a.shape == b.shape else 0.0
    if square == 0.0:
        return None
    ratio = float(a @ b) / square
    return ratio if _norm(b - ratio * a) <= exact * _norm(b) and ratio != 0.0 else None


def weights(
    target: Mapping[str, Array], parts: Sequence[Mapping[str, Array]], exact: float = 1e-7
) -> tuple[float, ...] | None:
    """The numbers by which `parts` are multiplied in a sum that is `target`.

    Args:
        target: a gradient.
        parts: what each backward pass left; a tensor that one lacks counts as zero.
        exact: the largest remainder.

    Returns:
        One number a part; None where there is no such sum, or it could be one by chance.
    """
    goal = flat(target)
    if not parts or goal.size < 4 * len(parts):
        return None
    zeros = {name: np.zeros_like(array) for name, array in target.items()}
    columns = np.stack([flat({n: part.get(n, zeros[n]) for n in target}) for part in parts], axis=1)
    scale = np.linalg.norm(columns, axis=0)
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
    return tuple(result.tolist())


def proportional(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two lists of numbers are multiples of each other."""
    return constant_ratio({"": np.array(one)}, {"": np.array(other)}, 1e-5) is not None


def near(one: float, other: float, exact: float = 1e-6) -> bool:
    """Equal but for rounding."""
    return math.isclose(one, other, rel_tol=exact)


def flat(arrays: Mapping[str, Array]) -> Array:
    """All values in one row."""
    return np.concatenate([np.zeros(0), *(a.ravel().astype(np.float64) for a in arrays.values())])


def _norm(values: Array) -> float:
    return float(np.linalg.norm(values))


def shown(things: Sequence[object]) -> str:
    """The first of several things, in words."""
    words = [str(t[-1]) if isinstance(t, tuple) else str(t) for t in things[:6]]
    return ", ".join(words) + (f" and {len(things) - 6} more" if things[6:] else "")


_KINDS: dict[str, tuple[Callable[[Divergence], Cause], str]] = {
    "initial": (_of_initial, "the parameters before the first step"),
    "replicas": (_of_replicas, "the parameters of the ranks"),
    "samples": (_of_samples, "the samples of the global batch"),
    "contents": (_of_contents, "the content of samples"),
    "gradients": (_of_gradients, "gradients"),
    "loss": (_of_loss, "the loss"),
    "rates": (_of_rates, "the learning rate"),
    "parameters": (_of_parameters, "the parameters after the step"),
    "buffers": (_of_buffers, "the buffers after the step"),
    "length": (_of_length, "the number of steps"),
}
"""Where trainings part: what finds the cause, and the place in words."""


def cause_of(case: Divergence) -> Cause:
    """The cause of a divergence."""
    return _KINDS[case.what][0](case)


@dataclass(frozen=True)
class Verdict:
    """Of one way, against the reference."""

    reference: Recorded
    other: Recorded
    divergence: Divergence | None = None
    cause: Cause | None = None

    @property
    def word(self) -> str:
        """`EQUAL`, `DIFFERENT`, or `FAILED`: the script ended with an error of another kind."""
        if self.other.error and not self.other.code:
            return "FAILED"
        return "EQUAL" if self.cause is None else "DIFFERENT"

    @property
    def names(self) -> list[str]:
        """Of the tensors that the cause is about."""
        names = self.cause.names if self.cause is not None else ()
        if not names and self.divergence is not None:
            names = self.divergence.names
        return [name.partition("/")[2] or name for name in names]

    def as_json(self) -> dict[str, Any]:
        """In plain values."""
        found = []
        if self.cause is not None:
            divergence, updates = self.divergence, self.reference.updates
            number = None if divergence is None else divergence.update
            if number is not None and number < len(updates):
                number = updates[number][0].step
            entry = ENTRIES.get(self.cause.code)
            found.append(
                {
                    "code": self.cause.code,
                    "title": "" if entry is None else entry.title,
                    "what": "" if divergence is None else divergence.what,
                    "step": number,
                    "names": self.names,
                    "seen": list(self.cause.seen),
                    **({} if self.cause.ratio is None else {"ratio": self.cause.ratio}),
                }
            )
        return {
            "verdict": self.word,
            "way": self.other.way.name,
            "processes": self.other.way.nproc,
            "steps": len(self.reference.updates),
            "losses": [update.loss for update in self.reference.updates],
            "switched_off": list(self.other.notes),
            "findings": found,
        }

    def lines(self) -> list[str]:
        """For people."""
        head = f"{self.word:9}  {self.other.way.name}"
        if self.cause is None:
            return [f"{head}: {_compared(self.reference.updates)}"]
        lines = [f"{head}, first in {_place(self.divergence)}" if self.divergence else head]
        entry = ENTRIES.get(self.cause.code)
        if entry is not None:
            lines.append(f"  cause   {entry.code}: {entry.title}")
        for text in self.cause.seen:
            first, *rest = text.splitlines()
            lines += [f"  seen    {first}", *(f"          {line}" for line in rest)]
        if self.names:
            lines.append(f"  where   {shown(self.names)}")
        if entry is not None:
            lines.append(f"  do      lockstep explain {entry.code} says what to write instead")
        printed = self.other.output.splitlines() if self.word == "FAILED" else []
        return lines + [f"  | {line}" for line in printed]


def judge(reference: Recorded, other: Recorded) -> Verdict:
    """Compares a run with the reference."""
    if other.error:
        seen = f"on {other.way.nproc} processes the script ended with: {other.error}"
        return Verdict(reference, other, cause=Cause(other.code, (seen,)))
    tolerance = FLOAT64 if other.way.precision == "fp64" else FLOAT32
    found = first_divergence(reference.updates, other.updates, tolerance)
    return Verdict(reference, other, found, None if found is None else cause_of(found))


def _place(divergence: Divergence) -> str:
    what = _KINDS[divergence.what][1]
    if divergence.what == "length":
        return what
    if divergence.names:
        what += f" ({len(divergence.names)} of {divergence.of})"
    update = divergence.one[0]
    several = len({update[0].optimizer for update in divergence.reference}) > 1
    of_optimizer = f" of optimizer {update.optimizer}" if several else ""
    return f"{what}, step {update.step}{of_optimizer}"


def _compared(updates: Sequence[Update]) -> str:
    if not updates:
        return "nothing was compared"
    first = updates[0]
    kinds = [
        f"{len(updates)} optimizer steps",
        f"{first.samples} samples each" if first.samples else "",
        "losses" if first.loss is not None else "",
        f"{len(first.merged('gradients'))} gradients",
        f"{len(first.merged('parameters'))} parameters",
        f"{len(first.merged('buffers'))} buffers" if first.merged("buffers") else "",
        "learning rates",
    ]
    return ", ".join(filter(None, kinds))
