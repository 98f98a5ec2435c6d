"""Where two trainings of the same global batches part first: `lockstep verify`'s comparison.

The first is the reference, on one process. Values are compared per update, in the order in which
they follow from each other: initial parameters, samples, loss and gradients, learning rates,
parameters, buffers. Pure: values go in, a `Divergence` comes out.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.verify.record import (
    Array,
    Sample,
    Update,
    batches_of,
    contents_of,
    count_of,
    indices_of,
    largest,
    loss_of,
    losses_of,
    merged,
    scale_of,
)


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """What counts as equal: `|a - b| <= relative * max|tensor| + absolute * max|all tensors|`."""

    relative: float = 1e-9
    absolute: float = 1e-12

    def differ(self, a: Array, b: Array, scale: float) -> bool:
        """Whether two arrays are not equal.

        Args:
            a: one.
            b: the other.
            scale: the largest absolute value of all tensors of the kind.
        """
        if a.shape != b.shape:
            return True
        most = self.relative * max(largest(a), largest(b)) + self.absolute * scale
        return not largest(a - b) <= most  # NaN differs from everything


FLOAT64 = Tolerance()
FLOAT32 = Tolerance(relative=1e-3, absolute=1e-5)


@dataclass(frozen=True)
class Divergence:
    """The first place where two trainings differ, with all that may explain it."""

    reference: Sequence[Update]
    other: Sequence[Update]
    tolerance: Tolerance
    update: int
    """Which update, from 0; what is compared before it counts as of update 0."""
    what: str
    """`initial`, `replicas`, `samples`, `contents`, `gradients`, `loss`, `rates`, `parameters`,
    `buffers` or `length`."""
    names: tuple[str, ...] = ()
    """Of the tensors that differ."""
    of: int = 0
    """How many were compared."""

    @property
    def one(self) -> Update:
        """The reference's update in which they part."""
        return self.reference[self.update]

    @property
    def many(self) -> Update:
        """The other's."""
        return self.other[self.update]

    @property
    def size(self) -> int:
        """Processes of the other."""
        return len(self.other[0])

    @property
    def exact(self) -> float:
        """The largest remainder, against a gradient itself, that counts as none."""
        return max(1e-7, 10 * self.tolerance.relative)


def first_divergence(
    reference: Sequence[Update], other: Sequence[Update], tolerance: Tolerance
) -> Divergence | None:
    """The first place where `other` is not what `reference` is; None: there is none."""
    for number, (one, many) in enumerate(zip(reference, other, strict=False)):
        first = next(_differences(one, many, tolerance, begins=number == 0), None)
        if first is not None:
            what, names, of = first
            return Divergence(reference, other, tolerance, number, what, tuple(names), of)
    if len(reference) != len(other):
        shorter = min(len(reference), len(other))
        return Divergence(reference, other, tolerance, shorter, "length")
    return None


def _differences(
    one: Update, many: Update, tolerance: Tolerance, *, begins: bool
) -> Iterator[tuple[str, Iterable[str], int]]:
    """What differs in an update, the names of it, and how many were compared: causes first."""
    if begins:
        yield from _of_tensors("initial", "before", one, many, tolerance)
    parted = replicas_that_differ(many)
    if parted:
        yield "replicas", parted, len(merged(many, "held"))
    by_index, by_content = same_samples(one, many)
    same = by_index if by_content is None else by_content
    if same is False and by_index is not True:
        yield "samples", (), count_of(one)
    if by_index and by_content is not True and contents_that_differ(one, many):
        yield "contents", (), 0
    yield from _of_tensors("gradients", "gradients", one, many, tolerance)
    if _losses_differ(one, many, tolerance):
        yield "loss", (), 0
    if not np.allclose(one[0].rates, many[0].rates, rtol=tolerance.relative, atol=0):
        yield "rates", (), 0
    for what in ("parameters", "buffers"):
        yield from _of_tensors(what, what, one, many, tolerance)


def _of_tensors(
    what: str, kind: str, one: Update, many: Update, tolerance: Tolerance
) -> Iterator[tuple[str, Iterable[str], int]]:
    """The arrays of a kind that are not the reference's on some rank, if any."""
    expected, found = merged(one, kind), merged(many, kind)
    scale = scale_of(expected)
    wrong = expected.keys() ^ found.keys()
    for rank in many:
        for name, array in getattr(rank, kind).items():
            if name in expected and tolerance.differ(expected[name], array, scale):
                wrong.add(name)
    names = [*expected, *sorted(found.keys() - expected.keys())]
    if wrong:
        yield what, [name for name in names if name in wrong], len(names)


def _losses_differ(one: Update, many: Update, tolerance: Tolerance) -> bool:
    a, each = loss_of(one), losses_of(many)
    if a is None or not each:
        return False
    # A script that averages or adds up gradients itself has losses that mean the one or the other.
    return all(
        tolerance.differ(np.array(a), np.array(b), max(1.0, abs(a)))
        for b in (sum(each) / len(each), sum(each))
    )


def same_samples(one: Update, many: Update) -> tuple[bool | None, bool | None]:
    """Whether the indices are the same, and whether the contents are; None: it is not known.

    Contents are comparable where all samples have one shape: batches that are padded to their
    longest have several. Indices of datasets that are not the same on all ranks mean nothing where
    the contents are known.
    """
    shapes = {batch.shape for batch in batches_of([*one, *many]) if batch.contents}
    by_content = _same(contents_of(one), contents_of(many)) if len(shapes) == 1 else None
    return _same(indices_of(one), indices_of(many)), by_content


def _same(one: list[Sample] | None, many: list[Sample] | None) -> bool | None:
    if one is None or many is None:
        return None
    return Counter(one) == Counter(many)


def ranks_that_differ(update: Update, what: str, tolerance: Tolerance) -> dict[str, list[int]]:
    """By name, the ranks whose array is not that of the first rank that has it."""
    scale = max(scale_of(getattr(rank, what)) for rank in update)
    return _apart(update, what, lambda one, other: tolerance.differ(one, other, scale))


def replicas_that_differ(update: Update) -> dict[str, list[int]]:
    """By name, the ranks that held another parameter before the update than rank 0."""
    return _apart(update, "held", operator.ne)


def _apart(update: Update, what: str, differ: Callable[[Any, Any], bool]) -> dict[str, list[int]]:
    first = merged(update, what)
    found: dict[str, list[int]] = defaultdict(list)
    for number, rank in enumerate(update):
        for name, value in getattr(rank, what).items():
            if differ(first[name], value):
                found[name].append(number)
    return found


def contents_that_differ(one: Update, many: Update) -> list[int]:
    """Samples that have an index, and other content than the reference's under it.

    Only where the samples have one shape: batches padded to their longest have several.
    """
    expected, found = _contents(one), _contents(many)
    return [key[-1] for key in found if key in expected and found[key] != expected[key]]


def _contents(update: Update) -> Mapping[tuple[int, int, str, int], set[str]]:
    """By loader, epoch, shape and index."""
    found: dict[tuple[int, int, str, int], set[str]] = defaultdict(set)
    for batch in (batch for rank in update for batch in rank.taken):
        if batch.ids is not None and len(batch.ids) == len(batch.contents):
            for sample, digest in zip(batch.ids, batch.contents, strict=True):
                found[batch.loader, batch.epoch, batch.shape, sample].add(digest)
    return found
