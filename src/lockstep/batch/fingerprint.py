"""Defines fingerprints, by which a resumed run recognises the dataset of its checkpoint.

A position in an epoch only means the same samples while the data are the same, and a different
split of a dataset often has the same length. So checkpoints and the sample ledger contain a
`Fingerprint` of each dataset with an index. It consists of:

- a checksum over the indices of each `Subset`, such as those of `random_split`. If the indices
  differ, the samples differ;
- the `_fingerprint` of a dataset of Hugging Face's `datasets`. If these are equal, so are the data.
  If they differ, this means nothing, because functions that cannot be hashed get a random one;
- digests of up to 32 samples, spread over the dataset, as many as can be read in a quarter of a
  second. Each sample is read twice. Parts that differ, because they are random whatever the seed,
  are left out.

`data_identity` reads fingerprints. A stream has none, because its samples cannot be read by index.
If a run is resumed inside an epoch, the first samples of the stream are compared instead.
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
    """Distinguishes a dataset with an index from other datasets of the same length."""

    subsets: Sequence[int]
    """A checksum over the indices of each `Subset` that the dataset consists of."""
    hugging_face: str | None
    """The `_fingerprint` of a dataset of Hugging Face's."""
    samples: Mapping[int, Parts]
    """The samples that were read, by index."""

    def to_text(self) -> str:
        """Returns the fingerprint as JSON."""
        samples = [[index, parts] for index, parts in self.samples.items()]
        values = {"subsets": self.subsets, "hugging_face": self.hugging_face, "samples": samples}
        return json.dumps(values)

    @classmethod
    def from_text(cls, text: str) -> Fingerprint:
        """Parses the result of `to_text`."""
        values = json.loads(text)
        return cls(values["subsets"], values["hugging_face"], dict(values["samples"]))


@dataclass(frozen=True)
class Difference:
    """How two fingerprints differ."""

    found: str
    """Describes the difference."""
    other_samples: bool
    """True if the indices stand for other samples. False if the samples are the same, and only some
    of their parts are read differently, while others, such as the labels, are equal."""


def compare(before: Fingerprint, now: Fingerprint) -> Difference | None:
    """Compares the data of two starts of a training.

    The *parts* of a sample are its components, such as image and label, each with a digest by name.

    Args:
        before: the data of the earlier start.
        now: the data of this start.

    Returns:
        The difference, or None if none is known.
    """
    # A dataset with a different number of Subsets is built differently, but may have the same
    # samples. So indices are only compared if the numbers are equal.
    same_structure = len(before.subsets) == len(now.subsets)
    if same_structure and list(before.subsets) != list(now.subsets):
        return Difference("the indices of its Subset are others", other_samples=True)

    compared = sorted(before.samples.keys() & now.samples.keys())  # indices that both have read
    samples_before: list[Parts] = []
    samples_now: list[Parts] = []
    for index in compared:
        parts_before, parts_now = _parts_to_compare(before.samples[index], now.samples[index])
        samples_before.append(parts_before)
        samples_now.append(parts_now)

    # All samples together show whether they are the same (SAME), the same with some part changed,
    # such as augmented images beside equal labels (CHANGED), or other samples (OTHER).
    match = match_parts(samples_before, samples_now)
    if match is Match.SAME:
        return None

    # A dataset of Hugging Face's that has kept its `_fingerprint` has kept its data. They are only
    # read in another way, for example with another transform: a difference, but no other samples.
    has_same_data = before.hugging_face is not None and before.hugging_face == now.hugging_face
    are_other_samples = match is Match.OTHER and not has_same_data
    found = _describe_differing(compared, samples_before, samples_now)
    return Difference(found, other_samples=are_other_samples)


def _describe_differing(
    indices: Sequence[int], samples_before: Sequence[Parts], samples_now: Sequence[Parts]
) -> str:
    """Describes which samples differ, each compared by itself.

    Args:
        indices: the indices of the samples.
        samples_before: the parts of each sample in the earlier reading.
        samples_now: the parts of each sample in the later reading.
    """
    differing: list[str] = []  # indices, as text
    for index, parts_before, parts_now in zip(indices, samples_before, samples_now, strict=True):
        if not samples_match(parts_before, parts_now):
            differing.append(str(index))

    found = f"of {len(indices)} samples that were compared {len(differing)} differ: "
    return found + join_first(differing, MAX_SAMPLES_IN_TEXT)


def _parts_to_compare(sample_before: Parts, sample_now: Parts) -> tuple[Parts, Parts]:
    """Returns the parts of two readings of a sample that are compared, with the same names in both.

    Args:
        sample_before: the parts of the sample in the earlier reading, by name.
        sample_now: the parts of the sample in the later reading, by name.

    Returns:
        The parts that both readings have. If there are none, all parts, with None for those that a
        reading lacks, so that they count as different.
    """
    # First case: all parts of the earlier reading were random and left out. Nothing is compared.
    if not sample_before:
        return {}, {}

    # Second case: the readings have common parts. A part that is missing in one of them may have
    # been left out there because it was random, so only the common parts are compared.
    common_names = sample_before.keys() & sample_now.keys()
    if common_names:
        names = sorted(common_names)
        return _parts_named(names, sample_before), _parts_named(names, sample_now)

    # Third case: no common parts, so these are different samples.
    names = sorted(sample_before.keys() | sample_now.keys())
    return _parts_named(names, sample_before), _parts_named(names, sample_now)


def _parts_named(names: Sequence[str], sample: Parts) -> Parts:
    """Returns the parts with these names; None for a part that the sample does not have."""
    return {name: sample.get(name) for name in names}
