"""A fingerprint identifies the data of a dataset with an index. Pure functions.

A position in an epoch means the same samples only while the data are the same, and another split of
a dataset often has the same length. So a checkpoint and the sample ledger hold a `Fingerprint`. It
has what is cheap to know for certain, and a few samples:

- a checksum over the indices of each `Subset`, which `random_split` makes too. Other indices are
  other samples;
- the `_fingerprint` of a dataset of Hugging Face's `datasets`. Equal ones mean equal data. Unequal
  ones mean nothing: functions that cannot be hashed get a random one;
- digests of up to 32 samples, spread over the dataset, as many as can be read in a quarter of a
  second. Each is read twice, and what differs (random numbers that no seed reaches) is left out.

`data_identity` reads fingerprints. A stream has none, because its samples cannot be read by index;
its first samples in an epoch are compared instead if a run is resumed inside of that epoch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.batch.digest_matching import Match, Parts, match_parts, samples_match
from lockstep.wording import join_first

MAX_SAMPLES_IN_TEXT = 8


@dataclass(frozen=True)
class Fingerprint:
    """What distinguishes a dataset with an index from others of its length."""

    subsets: Sequence[int]
    """A checksum over the indices of each `Subset` that the dataset consists of."""
    hugging_face: str | None
    """The `_fingerprint` of a dataset of Hugging Face's."""
    samples: Mapping[int, Parts]
    """The samples that were read, by index."""

    def to_text(self) -> str:
        """Returns it as JSON."""
        samples = [[index, parts] for index, parts in self.samples.items()]
        values = {"subsets": self.subsets, "hugging_face": self.hugging_face, "samples": samples}
        return json.dumps(values)

    @classmethod
    def from_text(cls, text: str) -> Fingerprint:
        """Returns the fingerprint that `to_text` has written."""
        values = json.loads(text)
        return cls(values["subsets"], values["hugging_face"], dict(values["samples"]))


@dataclass(frozen=True)
class Difference:
    """How two fingerprints differ."""

    found: str
    """Describes the difference."""
    other_samples: bool
    """True if the indices stand for other samples. False if they are the same samples, and only
    some parts are read differently: others, such as the labels, are the same."""


def compare(before: Fingerprint, now: Fingerprint) -> Difference | None:
    """Compares the data of two starts of a training.

    The *parts* of a sample are its components, such as image and label, each with a digest by name.

    Args:
        before: the data of the earlier start.
        now: the data of this start.

    Returns:
        How they differ; None: no difference is known.
    """
    # If one of them has more Subsets, the dataset is built differently. It may have the same
    # samples, so these decide.
    same_structure = len(before.subsets) == len(now.subsets)
    if same_structure and list(before.subsets) != list(now.subsets):
        return Difference("the indices of its Subset are others", other_samples=True)

    compared = sorted(before.samples.keys() & now.samples.keys())  # indices that both have read
    samples_before: list[Parts] = []
    samples_now: list[Parts] = []

    differing: list[str] = []  # indices, as text
    for index in compared:
        parts_before, parts_now = _parts_to_compare(before.samples[index], now.samples[index])
        samples_before.append(parts_before)
        samples_now.append(parts_now)
        if not samples_match(parts_before, parts_now):
            differing.append(str(index))

    match = match_parts(samples_before, samples_now)
    if match is Match.SAME:
        return None

    # Two equal fingerprints of Hugging Face's mean equal data, whatever was read differently.
    hugging_face_says_same = (
        before.hugging_face is not None and before.hugging_face == now.hugging_face
    )
    found = f"of {len(compared)} samples that were compared {len(differing)} differ: "
    found += join_first(differing, MAX_SAMPLES_IN_TEXT)
    other_samples = match is Match.OTHER and not hugging_face_says_same
    return Difference(found, other_samples=other_samples)


def _parts_to_compare(sample_before: Parts, sample_now: Parts) -> tuple[Parts, Parts]:
    """Returns the parts of two readings of a sample that are compared, with the same names in both.

    A part that only one reading has may have been random in the other, and was left out there: it
    is not compared. If they have no part in common, they are different samples. Then all parts are
    compared, and each is None in the reading that lacks it.

    Args:
        sample_before: the parts of the sample in the earlier reading.
        sample_now: in the later one.
    """
    names = sample_before.keys() & sample_now.keys()
    if not names and sample_before:
        names = sample_before.keys() | sample_now.keys()
    parts_before = {name: sample_before.get(name) for name in sorted(names)}
    parts_now = {name: sample_now.get(name) for name in sorted(names)}
    return parts_before, parts_now
