"""Why two trainings were given other samples, or other content under the same index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from lockstep.diagnose.case import Case, Cause, shown
from lockstep.diagnose.equivalence import contents_that_differ, same_samples
from lockstep.diagnose.updates import Sample, Update, contents_of, indices_of

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
