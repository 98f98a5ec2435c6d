"""Checks that a resumed training reads the same data as before, and in the same order.

The data are compared by fingerprints. A *fingerprint* consists of a few checksums and of digests
(short hashes) of some samples; `fingerprint` says when two of them differ. A stream has none. The
*parts* of a sample are its components, such as an image and a label. The order matters if a sampler
of the user's has given it, and is compared by a checksum.
"""

from __future__ import annotations

import zlib
from typing import Any

from lockstep.batch.consistency import read_samples
from lockstep.batch.digest_matching import Parts, parts_of
from lockstep.batch.fingerprint import Fingerprint, compare
from lockstep.batch.plan import CustomPlan
from lockstep.batch.source import IterableSource, Source, index_bytes, subset_indices
from lockstep.errors import CheckpointError, warn
from lockstep.wording import describe_type, with_article

HUGGING_FACE_FINGERPRINT = "_fingerprint"
"""The attribute of `datasets.Dataset` that its documentation calls the fingerprint."""
NUM_SAMPLES = 32
STRIDE = 13
"""The distance between samples that are read one after the other. It has no divisor in common with
the number of samples, so that even the first few are spread over the dataset."""


def read_fingerprint(source: Source, seed: int) -> Fingerprint | None:
    """Reads the fingerprint of a dataset with an index; returns None for a stream.

    It consists of checksums over the indices of subsets, the fingerprint of a Hugging Face dataset,
    and digests of some samples. Random parts of samples, such as augmented images, are left out.
    """
    if isinstance(source, IterableSource):
        return None

    # The dataset may be a `Subset`, or consist of several. Each has a checksum over its indices.
    subset_checksums: list[int] = []
    for indices_of_subset in subset_indices(source.dataset):
        subset_checksums.append(zlib.crc32(index_bytes(indices_of_subset)))

    hugging_face = getattr(source.dataset, HUGGING_FACE_FINGERPRINT, None)
    if not isinstance(hugging_face, str):
        hugging_face = None

    digests_of_samples = _digest_repeatable_parts(source, seed)
    return Fingerprint(subset_checksums, hugging_face, digests_of_samples)


def _digest_repeatable_parts(source: Source, seed: int) -> dict[int, Parts]:
    """Reads some samples twice, and returns digests of the parts that are equal in both readings.

    The *parts* of a sample are its components, such as an image and a label; each has a name and a
    digest. A part that differs was drawn at random, so it cannot identify the sample.

    Args:
        source: the dataset and its loader options.
        seed: seed of the run.

    Returns:
        The parts of each sample, by its index.
    """
    # Find the parts that differ between the two readings of a sample.
    parts_by_index: dict[int, Parts] = {}
    random_parts: set[str] = set()
    for index, first, second in _read_twice(source, seed):
        if first is None or second is None:  # the sample cannot be read
            continue
        parts_by_index[index] = parts_of(first)
        random_parts |= _unequal_parts(parts_of(first), parts_of(second))

    # A part that is random in one sample is left out of all samples: in some of them, two random
    # values may have been equal by chance.
    samples: dict[int, Parts] = {}
    for index, parts in parts_by_index.items():
        samples[index] = {name: part for name, part in parts.items() if name not in random_parts}
    return samples


def _read_twice(source: Source, seed: int) -> list[tuple[int, Any, Any]]:
    """Reads some samples twice in a row, until the time limit of `read_samples`.

    Returns:
        For each sample its index, and the digests of the first and of the second reading.
    """
    indices = _spread_indices(len(source.dataset))  # type: ignore[arg-type]
    indices_twice = []
    for index in indices:
        indices_twice += [index, index]
    digests = read_samples(source, seed, indices_twice, file_names=True)
    # If time ran out, there are fewer digests, and the last sample may have been read only once.
    # `zip` leaves out samples without a second reading.
    return list(zip(indices, digests[0::2], digests[1::2], strict=False))


def _spread_indices(length: int) -> list[int]:
    """Returns up to `NUM_SAMPLES` indices of a dataset, in the order in which they are read."""
    indices: list[int] = []
    if length == 0:
        return indices

    last = length - 1
    for number in range(NUM_SAMPLES):
        # The places are 0, 13, 26, 7, 20, ...: each number from 0 to 31 once, in jumps. So if time
        # runs out after a few samples, these are already spread over the whole dataset. Place 0 is
        # the first sample of the dataset, and place 31 the last one.
        place = number * STRIDE % NUM_SAMPLES
        index = last * place // (NUM_SAMPLES - 1)
        if index not in indices:  # in a short dataset several places may be the same sample
            indices.append(index)

    return indices


def _unequal_parts(first: Parts, second: Parts) -> set[str]:
    """Returns the names of the parts that are not exactly equal in two readings of a sample."""
    unequal = set()
    for name, part in first.items():
        # Compared as text, because NaN is not equal to itself as a number.
        if repr(part) != repr(second.get(name)):
            unequal.add(name)
    return unequal


def check_fingerprint(source: Source, before: Fingerprint, now: Fingerprint) -> None:
    """Compares the data of a checkpoint with the data of the run that resumes it.

    Warns if the samples seem to be the same, but some of their parts are read differently.

    Args:
        source: the data of this run.
        before: the fingerprint in the checkpoint.
        now: the fingerprint of `source`.

    Raises:
        CheckpointError: the samples are not the same.
    """
    difference = compare(before, now)
    if difference is None:
        return

    name = type(source.dataset).__name__
    was_set = f"resuming a loader of {with_article(name)} of {source.length} samples"
    if difference.other_samples:
        raise CheckpointError(
            was_set,
            f"it is not the data of the checkpoint, although the length is the same: "
            f"{difference.found}",
            "continue with the data that the training began with; if they were split or drawn at "
            "random, do so after lockstep.init(seed=...) and before world.prepare, or with a seed "
            "of their own; to train on other data, leave the loader out of the checkpoint",
        )

    # Only some parts of the samples differ, for example the images but not the labels.
    warn(
        was_set,
        found=f"{difference.found}; other parts of them, such as the labels, are as in the "
        "checkpoint",
        do="nothing, if you changed how samples are prepared; otherwise continue with the data of "
        "the checkpoint",
    )


def bring_sampler_to_epoch(source: Source, seed: int, epoch: int, crc_before: int) -> None:
    """Brings the user's sampler to where it was when the run was interrupted; warns if it cannot.

    A sampler may count its epochs itself, for example to take another part of the data in each.
    After a restart it would begin to count anew. A sampler with `set_epoch` is told the epoch by
    the script, and is not asked.

    Args:
        source: the data of this run, with a sampler of the user's.
        seed: seed of the run.
        epoch: the latest epoch that was begun before the interruption.
        crc_before: the checksum of its order.
    """
    if source.follows_set_epoch:
        return

    # The usual case: the sampler keeps no state, and its order depends only on what is seeded for
    # each epoch. The right order then shows that nothing is lost. (`plan_if_stateless` returns None
    # for a sampler that may keep a state, such as a count of the epochs.)
    plan_of_epoch = source.plan_if_stateless(seed, epoch)
    if plan_of_epoch is not None and plan_of_epoch.crc_of_order == crc_before:
        return

    # Ask the sampler for each epoch up to this one, as the run did before the interruption. Only
    # the order of the last one is compared; the earlier calls bring the sampler there.
    for earlier_epoch in range(epoch):
        source.plan(seed, earlier_epoch)
    plan = source.plan(seed, epoch)
    if isinstance(plan, CustomPlan) and plan.crc_of_order == crc_before:
        return

    # Not `or`: a sampler may be an array of indices, which is neither true nor false.
    sampler = source.sampler if source.batch_sampler is None else source.batch_sampler
    warn(
        f"resuming with the order of {describe_type(sampler)}",
        found=f"it gives epoch {epoch} another order than before the interruption, so the order "
        "depends on something that is not in the checkpoint; later epochs may have other samples, "
        "or another order, than in an uninterrupted run",
        do="let the order depend on the epoch (set_epoch), or on what is seeded for each epoch: "
        "torch.randperm, or a generator in an attribute of the sampler; otherwise restore the "
        "sampler yourself",
    )
