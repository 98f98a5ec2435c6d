"""Finds where two recorded trainings of the same script differ.

The *reference run* uses one process and the *parallel run* several. Each is a list of `Update`s:
optimizer steps, with a `RankUpdate` (record) of every rank. Updates are compared one by one, in the
order in which values follow from each other: initial parameters, samples, gradients and loss,
learning rates, parameters, buffers. The result is a list of `Divergence`s, which
`lockstep.verify.causes` explains.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lockstep.verify.tolerance import FLOAT64, Tolerance, largest_of_all, tolerance_for_dtype
from lockstep.verify.training_record import RankUpdate, Sample, Update

# Rounding errors grow from step to step, while a real difference appears from one step to the next.
# Runs that differ by more than this fraction of the tolerance, in the step before they exceed it,
# differ by rounding.
MIN_FRACTION_OF_GROWING_ROUNDING = 1e-2

# Kinds of differences that follow from a difference in earlier training.
_TRAINED_VALUES = {
    "replicas",
    "kept",
    "unclipped",
    "gradients",
    "loss",
    "parameters",
    "buffers",
}

# The kinds of differences that follow from each kind, and are then not reported.
_KINDS_THAT_FOLLOW = {
    "initial": _TRAINED_VALUES,
    "replicas": _TRAINED_VALUES,
    "samples": _TRAINED_VALUES | {"contents", "length"},
    "contents": _TRAINED_VALUES,
    "kept": _TRAINED_VALUES,
    "unclipped": {"gradients", "loss", "parameters", "buffers"},
    "gradients": {"loss", "parameters", "buffers"},
    "loss": {"loss"},
    "rates": {"parameters"},
}


@dataclass(frozen=True)
class Divergence:
    """One difference between two runs, together with everything that may explain it."""

    reference_run: Sequence[Update]
    parallel_run: Sequence[Update]
    tolerance: Tolerance
    # Number of the update that differs, from 0. Initial parameters belong to update 0.
    update_index: int
    # What differs: `initial` (parameters before the first update), `replicas` (parameters of the
    # ranks from each other), `samples`, `contents` (of samples with the same index), `kept`
    # (parameters that were not kept as the last update left them), `unclipped` (gradients before
    # clipping), `gradients`, `loss`, `rates` (learning rates), `parameters`, `buffers` or `length`
    # (number of updates).
    kind: str
    # Names of the tensors that differ.
    names: tuple[str, ...] = ()
    # Number of tensors that were compared.
    num_compared: int = 0

    @property
    def expected(self) -> Update:
        """The update on one process."""
        return self.reference_run[self.update_index]

    @property
    def actual(self) -> Update:
        """The same update on several processes."""
        return self.parallel_run[self.update_index]

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the parallel run; 0 if it has no update to compare."""
        if not self.parallel_run:
            return 0
        return len(self.parallel_run[0])

    @property
    def num_optimizers(self) -> int:
        """Number of optimizers that step in the reference run."""
        return len({update[0].optimizer for update in self.reference_run})

    @property
    def max_error(self) -> float:
        """Largest fraction of a gradient's norm that counts as rounding, in rules about causes.

        A rule may explain a gradient by other gradients, for example as a multiple of another one.
        It then computes with several rounded values, so more rounding is allowed than in a direct
        comparison.
        """
        return max(1e-7, 10 * self.tolerance.relative)


@dataclass(frozen=True)
class Difference:
    """One difference in one update. See `Divergence` for the fields."""

    kind: str
    names: Sequence[str] = ()
    num_compared: int = 0


def tolerance_of(*runs: Sequence[Update]) -> Tolerance:
    """Returns the tolerance for the lowest precision that any rank of the runs computed in."""
    # The `dtype` of an update is the lowest precision so far, so the last update is enough.
    dtypes = set()
    for updates in runs:
        if updates:
            dtypes |= {record.dtype for record in updates[-1]}

    # The lowest precision has the largest tolerance.
    tolerances = [tolerance_for_dtype(dtype) for dtype in dtypes]
    return max(tolerances, key=lambda tolerance: tolerance.relative, default=FLOAT64)


def updates_before_rounding(
    reference_run: Sequence[Update], parallel_run: Sequence[Update], tolerance: Tolerance
) -> int | None:
    """Returns the number of updates before rounding exceeds the tolerance; None if it never does.

    Rounding grows slowly, while a real difference appears from one update to the next. The largest
    difference of each update, as a fraction of the tolerance, is for example:

    - 0.1, 0.2, 0.6, 1.3: rounding has grown, so only the first 3 updates are compared.
    - 0.0, 0.0, 0.0, 1.3: a real difference, so all updates are compared and it is reported.
    """
    fractions: list[float] = []  # of the updates before the current one
    for expected, actual in zip(reference_run, parallel_run, strict=False):
        fraction = _largest_fraction_of_tolerance(expected, actual, tolerance)
        exceeds_tolerance = fraction > 1
        if exceeds_tolerance:
            is_rounding = bool(fractions) and fractions[-1] > MIN_FRACTION_OF_GROWING_ROUNDING
            num_updates_within_tolerance = len(fractions)
            return num_updates_within_tolerance if is_rounding else None

        fractions.append(fraction)

    return None


def _largest_fraction_of_tolerance(expected: Update, actual: Update, tolerance: Tolerance) -> float:
    """Returns the largest difference of two updates, as a fraction of what the tolerance allows."""
    largest_fraction = 0.0
    for field_name in ("gradients", "parameters", "buffers"):
        expected_arrays = expected.merged(field_name)
        actual_arrays = actual.merged(field_name)
        scale = largest_of_all(expected_arrays)  # the largest value in all of these arrays
        for name, array in expected_arrays.items():
            if name in actual_arrays:
                fraction = tolerance.used_fraction(array, actual_arrays[name], scale)
                largest_fraction = max(largest_fraction, fraction)

    return largest_fraction


def find_divergences(
    reference_run: Sequence[Update], parallel_run: Sequence[Update], tolerance: Tolerance
) -> list[Divergence]:
    """Returns the differences of two runs in the order in which they appear, one of each kind.

    Differences that only follow from an earlier one are left out: if gradients differ, so do the
    parameters after the step and everything that is trained later. Samples and learning rates do
    not depend on the training so far, so they are compared in all updates.
    """
    divergences: dict[str, Divergence] = {}  # by kind
    kinds_that_follow: set[str] = set()  # kinds that follow from the differences found so far

    for number, (expected, actual) in enumerate(zip(reference_run, parallel_run, strict=False)):
        for difference in _differences(expected, actual, tolerance):
            kind = difference.kind
            if kind in divergences or kind in kinds_that_follow:
                continue

            divergences[kind] = Divergence(
                reference_run,
                parallel_run,
                tolerance,
                update_index=number,
                kind=kind,
                names=tuple(difference.names),
                num_compared=difference.num_compared,
            )
            # From here on, in this update and all later ones, what follows from it is left out.
            kinds_that_follow |= _KINDS_THAT_FOLLOW.get(kind, set())

        # If only the losses differ, the gradients are equal and the training continues in the same
        # way. After any other difference, all trained values of the later updates differ too.
        training_differs = bool(divergences.keys() - {"loss"})
        if training_differs:
            kinds_that_follow |= _TRAINED_VALUES

    # One run may have more updates, which may follow from a difference found before: a run with
    # other samples ends earlier, for example.
    lengths_differ = len(reference_run) != len(parallel_run)
    if lengths_differ and "length" not in kinds_that_follow:
        first_missing = min(len(reference_run), len(parallel_run))
        divergences["length"] = Divergence(
            reference_run, parallel_run, tolerance, update_index=first_missing, kind="length"
        )

    return list(divergences.values())


def _differences(expected: Update, actual: Update, tolerance: Tolerance) -> Iterator[Difference]:
    """Yields the differences in one update. Causes come before their consequences.

    See `Divergence.kind` for the kinds: "initial" are the parameters before the first update, for
    example, and "unclipped" the gradients before they were clipped.
    """
    yield from tensor_differences("initial", expected, actual, tolerance)

    # Each rank has a replica of the model. Before the update, the parameters of all replicas must
    # be equal.
    names_that_differ_between_ranks = list(actual.replicas_that_differ())
    if names_that_differ_between_ranks:
        sums_of_all_parameters = actual.merged("parameter_sums")  # by parameter name
        num_compared = len(sums_of_all_parameters)
        yield Difference("replicas", names_that_differ_between_ranks, num_compared)

    difference_of_samples = _compare_samples(expected, actual)
    if difference_of_samples is not None:
        yield difference_of_samples

    yield from _differences_before_step(expected, actual, tolerance)

    # Gradients before clipping are compared only if they are the same on all ranks. In a script
    # that clips before it averages, each rank clips its own gradients.
    is_clipped = bool(expected.clips or actual.clips)
    if is_clipped and not actual.ranks_that_differ("unclipped", tolerance):
        yield from tensor_differences("unclipped", expected, actual, tolerance)

    yield from tensor_differences("gradients", expected, actual, tolerance)

    if _losses_differ(expected, actual, tolerance):
        yield Difference("loss")

    if learning_rates_differ(expected, actual, tolerance):
        yield Difference("rates")

    yield from tensor_differences("parameters", expected, actual, tolerance)
    yield from tensor_differences("buffers", expected, actual, tolerance)


def _differences_before_step(
    expected: Update, actual: Update, tolerance: Tolerance
) -> Iterator[Difference]:
    """Yields a difference if the script has changed parameters since the last step.

    Its kind is "kept", as the parameters were not kept as they were. Parameters are compared by
    their sums. A rank has the sums only of parameters that it holds as a whole.
    """
    expected_sums = expected.merged("parameter_sums")
    actual_sums = actual.merged("parameter_sums")
    scale = largest_of_all(expected_sums)

    names = []
    for name, sums in expected_sums.items():
        if name in actual_sums and tolerance.differ(sums, actual_sums[name], scale):
            names.append(name)

    if names:
        yield Difference("kept", names, len(expected_sums))


def _compare_samples(expected: Update, actual: Update) -> Difference | None:
    """Compares which samples an update was trained on, and their contents.

    Returns:
        A difference of the kind "samples" or "contents"; None if there is none.
    """
    # Each of the two answers is True, False, or None if it is not known.
    same_indices, same_contents = same_samples(expected, actual)
    nothing_is_known = same_indices is None and same_contents is None
    if same_contents or nothing_is_known:
        return None

    # These are the same samples of the dataset. Some may have been augmented differently.
    if same_indices:
        some_contents_differ = bool(indices_with_other_contents(expected, actual))
        return Difference("contents") if some_contents_differ else None

    return Difference("samples", num_compared=expected.samples)


def tensor_differences(
    field_name: str, expected: Update, actual: Update, tolerance: Tolerance
) -> list[Difference]:
    """Compares the arrays of one field of `RankUpdate`, such as "gradients".

    Returns:
        A list with one difference, which names all arrays that differ on any rank, or an empty
        list.
    """
    expected_arrays = expected.merged(field_name)
    actual_names = actual.merged(field_name).keys()  # the names on all ranks
    largest_expected_value = largest_of_all(expected_arrays)  # the tolerance depends on it

    only_in_one_run = expected_arrays.keys() ^ actual_names
    names_that_differ = set(only_in_one_run)
    for record in actual:
        for name, array in getattr(record, field_name).items():
            if name not in expected_arrays:
                continue
            if tolerance.differ(expected_arrays[name], array, scale=largest_expected_value):
                names_that_differ.add(name)

    if not names_that_differ:
        return []

    # In the order of the reference, followed by names that only the parallel run has.
    all_names = [*expected_arrays, *sorted(actual_names - expected_arrays.keys())]
    ordered_names = [name for name in all_names if name in names_that_differ]
    return [Difference(field_name, ordered_names, len(all_names))]


def _losses_differ(expected: Update, actual: Update, tolerance: Tolerance) -> bool:
    """True if the loss of one process is neither the mean nor the sum of the losses of the ranks.

    Which of the two it should be depends on whether the script averages or adds up gradients.
    """
    expected_loss = expected.loss
    losses_of_ranks = actual.losses
    if expected_loss is None or not losses_of_ranks:  # not recorded
        return False

    total = sum(losses_of_ranks)
    mean = total / len(losses_of_ranks)

    scale = max(1.0, abs(expected_loss))
    expected_array = np.array(expected_loss)
    is_mean = not tolerance.differ(expected_array, np.array(mean), scale)
    is_sum = not tolerance.differ(expected_array, np.array(total), scale)

    return not is_mean and not is_sum


def learning_rates_differ(expected: Update, actual: Update, tolerance: Tolerance) -> bool:
    """True if a rank's learning rates differ from those of one process."""
    expected_rates = expected[0].learning_rates
    for record in actual:
        if not record.stepped:  # it leaves the step to other ranks
            continue
        if len(record.learning_rates) != len(expected_rates):
            return True
        if not np.allclose(expected_rates, record.learning_rates, rtol=tolerance.relative, atol=0):
            return True

    return False


def same_samples(expected: Update, actual: Update) -> tuple[bool | None, bool | None]:
    """Compares the samples of two updates by their indices and by their contents.

    Returns:
        Whether the indices are the same, and whether the contents are. Either is None if it is not
        known. The two answers may contradict each other: if ranks have different datasets, the same
        index stands for different samples.
    """
    same_indices = _same_counts(expected.samples_by_index(), actual.samples_by_index())

    # Contents can be compared only if all samples have one shape. No shape is known if no contents
    # were recorded. There are several shapes if batches are padded to their longest sample, and
    # then the same sample may have another shape in each update.
    batches_of_both = [*expected.batches, *actual.batches]
    shapes = {batch.shape for batch in batches_of_both if batch.contents}
    have_one_shape = len(shapes) == 1
    if not have_one_shape:
        return same_indices, None

    return same_indices, _same_counts(expected.samples_by_contents(), actual.samples_by_contents())


def _same_counts(expected: list[Sample] | None, actual: list[Sample] | None) -> bool | None:
    """True if both contain each sample equally often; None if some samples are not known."""
    if expected is None or actual is None:
        return None
    return Counter(expected) == Counter(actual)


def indices_with_other_contents(
    expected: Sequence[RankUpdate], actual: Sequence[RankUpdate]
) -> list[int]:
    """Returns the indices of samples whose contents differ from the reference under the same index.

    Only samples of the same loader, epoch and shape are compared.
    """
    expected_digests = _digests_of_samples(expected)
    indices = []
    for sample, digests in _digests_of_samples(actual).items():
        if sample in expected_digests and digests != expected_digests[sample]:
            indices.append(sample.index_in_dataset)
    return indices


class _IndexedSample(NamedTuple):
    """A sample in the dataset of a loader, with the shape in which it was read."""

    loader: int
    epoch: int
    shape: str
    index_in_dataset: int


def _digests_of_samples(update: Sequence[RankUpdate]) -> Mapping[_IndexedSample, set[str]]:
    """Returns the digests of the contents of all samples.

    A sample has several digests if it was read several times with different contents.
    """
    digests: dict[_IndexedSample, set[str]] = defaultdict(set)
    for record in update:
        for batch in record.batches:
            indices = batch.ids
            digests_of_batch = batch.contents
            if indices is None or len(indices) != len(digests_of_batch):
                continue  # it is not known which digest belongs to which index

            for index, digest in zip(indices, digests_of_batch, strict=True):
                sample = _IndexedSample(batch.loader, batch.epoch, batch.shape, index)
                digests[sample].add(digest)

    return digests
