"""Compares digests of samples, to find out whether two readings are of the same samples.

The *parts* of a sample are its components, such as an image and a label; each has a name and a
digest. If the images differ between two readings but the labels are the same, these are the same
samples, and the images were augmented or computed differently. A part can only show this if it
tells the samples apart: labels that are all equal prove nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

RELATIVE_TOLERANCE = 1e-3
"""How much measured numbers may differ, because machines decode images a little differently."""
ABSOLUTE_TOLERANCE = 1e-9
MAX_VALUES_AS_PARTS = 16
"""Up to this number, each value in a list is a part of its own. More values, such as the tokens of
a text, are a single part."""

Parts = Mapping[str, Any]
"""The parts of a sample: the digest of each part, by name."""


class Match(Enum):
    """The result of comparing two readings of some samples."""

    SAME = "the samples are the same"
    CHANGED = "something in all samples is the same, such as the labels, and something differs"
    OTHER = "nothing that tells the samples apart is the same"


def match_samples(before: Sequence[Any], now: Sequence[Any]) -> Match:
    """Compares the digests of samples in two readings.

    If one reading has more samples than the other, the additional ones are ignored.
    """
    parts_before = [parts_of(sample) for sample in before]
    parts_now = [parts_of(sample) for sample in now]
    return match_parts(parts_before, parts_now)


def match_parts(before: Sequence[Parts], now: Sequence[Parts]) -> Match:
    """Compares two readings of samples that are already divided into parts.

    If one reading has more samples than the other, the additional ones are ignored.

    Args:
        before: the parts of each sample in the first reading.
        now: the parts of each sample in the second reading.

    Returns:
        `SAME` if all parts are equal, or if there are no samples to compare; `CHANGED` if these are
        the same samples with other contents; `OTHER` if they are other samples.
    """
    pairs = list(zip(before, now, strict=False))  # both readings of each sample
    if all(samples_match(old, new) for old, new in pairs):
        return Match.SAME

    # Look for a part, such as the label, that is the same in both readings of every sample. It
    # shows that these are the same samples, of which only other parts have changed, e.g. images
    # that are augmented differently. (There is a pair: without any, all samples would match.)
    first_sample, _ = pairs[0]
    for name in first_sample:
        values_before = [old.get(name) for old, _ in pairs]

        # A part with the same value in all samples proves nothing: it would have this value in
        # other samples too. With a single sample this cannot be known, and any part counts.
        is_single_sample = len(pairs) == 1
        if not is_single_sample and all_digests_match(values_before):
            continue

        if _part_is_unchanged(name, pairs):
            return Match.CHANGED

    return Match.OTHER


def _part_is_unchanged(name: str, pairs: Sequence[tuple[Parts, Parts]]) -> bool:
    """Returns True if a part is the same in both readings of every sample.

    Args:
        name: name of the part.
        pairs: for each sample, its parts in the first and in the second reading.
    """
    for old, new in pairs:
        if name not in new or not digests_match(old.get(name), new[name]):
            return False
    return True


def samples_match(one: Parts, other: Parts) -> bool:
    """Returns True if two samples are the same in every part."""
    if one.keys() != other.keys():
        return False
    return all(digests_match(one[name], other[name]) for name in one)


def first_differing_sample(before: Sequence[Any], now: Sequence[Any]) -> int | None:
    """Returns the position of the first sample that differs, if the samples are not the same.

    Args:
        before: digests of the samples in the first reading.
        now: digests of the samples in the second reading.

    Returns:
        The position, or None if the readings are of the same samples.
    """
    if match_samples(before, now) is not Match.OTHER:
        return None
    for place, (old, new) in enumerate(zip(before, now, strict=False)):
        if not digests_match(old, new):
            return place
    return None


def parts_of(digest: Any, name: str = "sample") -> dict[str, Any]:
    """Divides the digest of a sample into the digests of its parts.

    The digest of a mapping is a list of pairs of a key and a digest. From
    `[["image", 0.5], ["label", 3]]` follow the parts `sample['image']: 0.5` and
    `sample['label']: 3`. An item of any other list has its place in its name: from `[0.5, 3]`
    follow `sample[0]: 0.5` and `sample[1]: 3`.

    Args:
        digest: result of `batch.digest.digest`.
        name: beginning of the names of the parts.

    Returns:
        The digest of each part, by name.
    """
    if not _has_parts(digest):
        return {name: digest}

    parts: dict[str, Any] = {}
    for place, item in enumerate(digest):
        if _is_key_and_value(item):  # as in the digest of a mapping: `["label", 3]`
            key, value = item
            parts |= parts_of(value, f"{name}[{key!r}]")
        else:
            parts |= parts_of(item, f"{name}[{place}]")

    return parts


def _has_parts(digest: Any) -> bool:
    """Returns True for the digest of a container, False for one of a single value or array.

    A long list of values, such as the tokens of a text, counts as a single value.
    """
    if not isinstance(digest, list):
        return False
    return not _is_array(digest) and not _is_long_list_of_values(digest)


def _is_key_and_value(digest: Any) -> bool:
    """Returns True for `[key, value]`, an item in the digest of a mapping.

    It is recognised by its first item, a text: the digest of a text is a number, so only a key can
    be a text. The digest of an array begins with a text, too: `["float32", [3, 4]]`, its dtype and
    its shape.
    """
    if not isinstance(digest, list) or len(digest) != 2:
        return False
    return isinstance(digest[0], str) and not _is_array(digest)


def _is_array(digest: list[Any]) -> bool:
    """Returns True for the digest of an array, which begins with its dtype and its shape."""
    if len(digest) < 2 or not isinstance(digest[0], str) or not isinstance(digest[1], list):
        return False
    return all(type(size) is int for size in digest[1])


def _is_long_list_of_values(digest: list[Any]) -> bool:
    """Returns True for a list of values that is a single part, such as the tokens of a text."""
    if len(digest) <= MAX_VALUES_AS_PARTS:
        return False
    return not any(isinstance(item, list) for item in digest)


def digests_match(one: Any, other: Any) -> bool:
    """Returns True if two digests of samples or parts match.

    Floats are compared with a tolerance, everything else exactly.
    """
    if isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            return False
        return all(digests_match(a, b) for a, b in zip(one, other, strict=True))

    if isinstance(one, float) and isinstance(other, float):
        if math.isnan(one) and math.isnan(other):
            return True
        return math.isclose(one, other, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)

    return bool(one == other)


def all_digests_match(digests: Sequence[Any]) -> bool:
    """Returns True if all digests match the first one."""
    return all(digests_match(digest, digests[0]) for digest in digests)
