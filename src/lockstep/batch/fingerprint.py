"""Do two readings of data, by digests of some samples, show the same samples? Pure functions.

A position in an epoch means the same samples only while the data are the same, and another split of
a dataset often has the same length. So a checkpoint and the sample ledger hold a `Fingerprint` of
every dataset with an index. It has what is cheap to know for certain, and a few samples:

- a checksum over the indices of each `Subset`, which `random_split` makes too. Other indices are
  other samples;
- the `_fingerprint` of a dataset of Hugging Face's `datasets`. Equal ones mean equal data. Unequal
  ones mean nothing: functions that cannot be hashed get a random one;
- digests of up to 32 samples, spread over the dataset, as many as can be read in a quarter of a
  second. Each is read twice, and what differs (random numbers that no seed reaches) is left out.

Of a stream no sample can be read by its index. Its first samples in an epoch are compared when the
run is resumed inside of this epoch (`differing_sample`).

`consistency` makes the digests and reads the fingerprints.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from lockstep.wording import join_first

_SHOWN = 8
_TOLERANCE = 1e-3
"""Relative; machines decode images and round sums a little differently."""
_MOST_PARTS = 16
"""Values in a list that are parts of their own; more are one part, such as tokens."""

Parts = Mapping[str, Any]
"""The parts of a sample, such as image and label: a digest by name."""


@dataclass(frozen=True)
class Fingerprint:
    """What tells a dataset with an index from others of its length."""

    subsets: Sequence[int]
    """A checksum over the indices of each `Subset` that the dataset consists of."""
    hugging_face: str | None
    """The `_fingerprint` of a dataset of Hugging Face's."""
    samples: Mapping[int, Parts]
    """By index, those that were read."""

    def to_text(self) -> str:
        """As JSON."""
        samples = [[index, parts] for index, parts in self.samples.items()]
        values = {"subsets": self.subsets, "hugging_face": self.hugging_face, "samples": samples}
        return json.dumps(values)

    @classmethod
    def from_text(cls, text: str) -> Fingerprint:
        """What `to_text` gave."""
        values = json.loads(text)
        return cls(values["subsets"], values["hugging_face"], dict(values["samples"]))


@dataclass(frozen=True)
class Difference:
    """What is not the same in two fingerprints."""

    found: str
    other_samples: bool
    """The indices stand for other samples. Otherwise the samples read differently in some parts,
    and are the same in others, such as the labels."""


def compare(before: Fingerprint, now: Fingerprint) -> Difference | None:
    """What differs between the data of two starts of a training; None: nothing that is known."""
    if len(before.subsets) == len(now.subsets) and list(before.subsets) != list(now.subsets):
        return Difference("the indices of its Subset are others", other_samples=True)
    both = sorted(before.samples.keys() & now.samples.keys())
    old: list[Parts] = []
    new: list[Parts] = []
    differing: list[str] = []
    for index in both:
        names = before.samples[index].keys() & now.samples[index].keys()
        names_before = before.samples[index].keys()
        if not names and names_before:
            names = names_before | now.samples[index].keys()  # it has other parts altogether
        old.append({name: before.samples[index].get(name) for name in sorted(names)})
        new.append({name: now.samples[index].get(name) for name in sorted(names)})
        if not alike_parts(old[-1], new[-1]):
            differing.append(str(index))
    match = match_parts(old, new)
    if match is Match.SAME:
        return None
    same_data = before.hugging_face is not None and before.hugging_face == now.hugging_face
    found = f"of {len(both)} samples that were compared {len(differing)} differ: "
    found += join_first(differing, _SHOWN)
    return Difference(found, other_samples=match is Match.OTHER and not same_data)


def differing_sample(before: Sequence[Any], now: Sequence[Any]) -> int | None:
    """The first of the samples, given as digests, that is another one; None: they are the same."""
    if match_samples(before, now) is not Match.OTHER:
        return None
    pairs = zip(before, now, strict=False)
    return next(place for place, (old, new) in enumerate(pairs) if not alike(old, new))


class Match(Enum):
    """How the same places of two readings of a dataset compare."""

    SAME = "the samples are the same"
    CHANGED = "something in all samples is the same, such as the labels, and something differs"
    OTHER = "nothing that tells the samples apart is the same"


def match_samples(before: Sequence[Any], now: Sequence[Any]) -> Match:
    """Compares the digests of the same samples in two readings; more of one are left out.

    Where one part of the samples differs, an image perhaps, and another one is as before in all of
    them, the label perhaps, they are the same samples, of which something was drawn or computed in
    another way. Only a part that is not the same in all samples can tell this.
    """
    return match_parts([parts_of(each) for each in before], [parts_of(each) for each in now])


def match_parts(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> Match:
    """The same as `match_samples`, of the parts of the samples."""
    pairs = list(zip(before, now, strict=False))
    if all(alike_parts(old, new) for old, new in pairs):
        return Match.SAME
    for name in pairs[0][0]:
        values = [old.get(name) for old, _ in pairs]
        tells_apart = len(pairs) == 1 or not all_alike(values)
        unchanged = all(name in new and alike(old.get(name), new[name]) for old, new in pairs)
        if tells_apart and unchanged:
            return Match.CHANGED
    return Match.OTHER


def alike_parts(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two samples are the same in every part."""
    return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)


def parts_of(found: Any, name: str = "sample") -> dict[str, Any]:
    """The parts of a sample, such as image and label, from its digest; each has a name."""
    if not isinstance(found, list) or _is_array(found) or _is_long_list_of_values(found):
        return {name: found}
    parts: dict[str, Any] = {}
    for number, item in enumerate(found):
        if isinstance(item, list) and len(item) == 2 and isinstance(item[0], str):
            key, value = item  # of a mapping
            if not _is_array(item):
                parts |= parts_of(value, f"{name}[{key!r}]")
                continue
        parts |= parts_of(item, f"{name}[{number}]")
    return parts


def _is_array(found: list[Any]) -> bool:
    """Whether this is the digest of an array: dtype, shape, and what tells its numbers."""
    if len(found) < 2 or not isinstance(found[0], str) or not isinstance(found[1], list):
        return False
    return all(type(size) is int for size in found[1])


def _is_long_list_of_values(found: list[Any]) -> bool:
    """Whether these are the values of one thing, such as tokens, rather than several things."""
    return len(found) > _MOST_PARTS and not any(isinstance(item, list) for item in found)


def alike(one: Any, other: Any) -> bool:
    """Whether two digests are of the same sample."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        both_nan = math.isnan(one) and math.isnan(other)
        return both_nan or math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=1e-9)
    return bool(one == other)


def all_alike(digests: Sequence[Any]) -> bool:
    """Whether all digests are of the same sample."""
    return all(alike(one, digests[0]) for one in digests)
