"""Where two trainings of the same global batches part first: `lockstep verify`'s comparison.

The first is the reference, on one process. Values are compared per update, in the order in which
they follow from each other: initial parameters, samples, loss and gradients, learning rates,
parameters, buffers. Pure: values go in, a `Divergence` comes out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lockstep.verify.record import (
    Array,
    Sample,
    Update,
    contents_of,
    count_of,
    indices_of,
    largest,
    loss_of,
    losses_of,
    merged,
    scale_of,
    shapes_of,
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


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first place where two trainings differ."""

    update: int
    """Which update, from 0; what is compared before it counts as of update 0."""
    what: str
    """`initial`, `replicas`, `samples`, `contents`, `gradients`, `loss`, `rates`, `parameters`,
    `buffers` or `length`."""
    names: tuple[str, ...] = ()
    """Of the tensors that differ."""
    of: int = 0
    """How many were compared."""


def first_divergence(
    reference: Sequence[Update], other: Sequence[Update], tolerance: Tolerance
) -> Divergence | None:
    """The first place where `other` is not what `reference` is; None: there is none."""
    for number, (one, many) in enumerate(zip(reference, other, strict=False)):
        found = _within(number, one, many, tolerance)
        if found is not None:
            return found
    if len(reference) != len(other):
        return Divergence(update=min(len(reference), len(other)), what="length")
    return None


def _within(number: int, one: Update, many: Update, tolerance: Tolerance) -> Divergence | None:
    if number == 0:
        found = _of_tensors(number, one, many, "before", tolerance)
        if found is not None:
            return replace(found, what="initial")
    parted = tuple(replicas_that_differ(many))
    if parted:
        return Divergence(
            update=number, what="replicas", names=parted, of=len(merged(many, "held"))
        )
    by_index, by_content = same_samples(one, many)
    same = by_index if by_content is None else by_content
    if same is False and by_index is not True:
        return Divergence(update=number, what="samples", of=count_of(one))
    if by_index and by_content is not True:
        other = contents_that_differ(one, many)
        if other:
            return Divergence(update=number, what="contents", names=tuple(map(str, other)))
    found = _of_tensors(number, one, many, "gradients", tolerance)
    if found is None and _losses_differ(one, many, tolerance):
        return Divergence(update=number, what="loss")
    if found is None and not np.allclose(
        one[0].rates, many[0].rates, rtol=tolerance.relative, atol=0
    ):
        return Divergence(update=number, what="rates")
    return (
        found
        or _of_tensors(number, one, many, "parameters", tolerance)
        or _of_tensors(number, one, many, "buffers", tolerance)
    )


def _of_tensors(
    number: int, one: Update, many: Update, what: str, tolerance: Tolerance
) -> Divergence | None:
    names, of = differing(one, many, what, tolerance)
    return Divergence(update=number, what=what, names=names, of=of) if names else None


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
    return (
        _same(indices_of(one), indices_of(many)),
        _same(contents_of(one), contents_of(many))
        if len(shapes_of(one) | shapes_of(many)) == 1
        else None,
    )


def _same(one: list[Sample] | None, many: list[Sample] | None) -> bool | None:
    if one is None or many is None:
        return None
    return Counter(one) == Counter(many)


def differing(
    one: Update, many: Update, what: str, tolerance: Tolerance
) -> tuple[tuple[str, ...], int]:
    """Names of the arrays that are not the reference's on some rank, and how many there are."""
    expected = merged(one, what)
    scale = scale_of(expected)
    wrong = {
        name
        for rank in many
        for name, array in getattr(rank, what).items()
        if name not in expected or tolerance.differ(expected[name], array, scale)
    }
    wrong |= expected.keys() - merged(many, what).keys()
    names = [*expected, *sorted(wrong - expected.keys())]
    return tuple(name for name in names if name in wrong), len(names)


def ranks_that_differ(update: Update, what: str, tolerance: Tolerance) -> dict[str, list[int]]:
    """By name, the ranks whose array is not that of the first rank that has it."""
    scale = max(scale_of(getattr(rank, what)) for rank in update)
    first = merged(update, what)
    found: dict[str, list[int]] = {}
    for number, rank in enumerate(update):
        for name, array in getattr(rank, what).items():
            if tolerance.differ(first[name], array, scale):
                found.setdefault(name, []).append(number)
    return found


def replicas_that_differ(update: Update) -> dict[str, list[int]]:
    """By name, the ranks that held another parameter before the update than rank 0."""
    first: dict[str, str] = {}
    found: dict[str, list[int]] = {}
    for number, rank in enumerate(update):
        for name, digest in rank.held.items():
            if digest != first.setdefault(name, digest):
                found.setdefault(name, []).append(number)
    return found


def contents_that_differ(one: Update, many: Update) -> list[int | str]:
    """Samples that have an index, and other content than the reference's under it.

    Only where the samples have one shape: batches padded to their longest have several.
    """
    expected = _contents(one)
    return [
        sample
        for key, (sample, digests) in _contents(many).items()
        if key in expected and digests != expected[key][1]
    ]


def _contents(update: Update) -> Mapping[tuple[object, ...], tuple[int | str, set[str]]]:
    found: dict[tuple[object, ...], tuple[int | str, set[str]]] = {}
    for rank in update:
        for taken in rank.taken:
            if taken.ids is None or len(taken.ids) != len(taken.contents):
                continue
            for sample, digest in zip(taken.ids, taken.contents, strict=True):
                key = taken.loader, taken.epoch, taken.shape, sample
                found.setdefault(key, (sample, set()))[1].add(digest)
    return found
