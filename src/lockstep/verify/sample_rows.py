"""Matches the samples of two runs, so that their inputs, outputs and gradients can be compared.

A `Forward` is the record of a forward pass. Each of its fields ("inputs", "outputs", ...) is an
array of shape (samples, numbers), in which a *row* holds the numbers that stand for one sample.
Rows of two runs belong to the same sample if their inputs are equal within rounding. So samples are
recognized without a DataLoader and in any order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from lockstep.verify.tolerance import Array, largest
from lockstep.verify.training_record import Batch, Forward, RankUpdate, Update

# Rows of the same sample differ at most by this fraction of the largest number in all rows.
MAX_ERROR_OF_SAME_ROW = 1e-9

# Fields of `Forward` with a row for each sample.
_ROW_FIELDS = (
    "inputs",
    "other_inputs",
    "outputs",
    "output_gradients",
    "targets",
    "input_values",
)

# The value of a field of `Forward` that was not recorded.
NO_ROWS = np.zeros((0, 2))

# If several samples have the same inputs, these fields decide which rows belong together.
_FIELDS_THAT_TELL_ROWS_APART = ("inputs", "other_inputs", "outputs", "targets")


@dataclass(frozen=True)
class MatchedForward:
    """A forward pass in both runs, in which the rows of the same samples are matched."""

    # The class of the model, and the number of the pass since the last backward pass.
    model: str
    # The forward pass on one process.
    expected: Forward
    # The forward pass on several processes, with the rows of all ranks in the order of ranks.
    actual: Forward
    # The rank of each row of `actual`.
    rank_of_row: Array
    # Indices of the rows of `expected` and of `actual` for the samples that both have, in the same
    # order.
    expected_indices: Array
    actual_indices: Array

    @property
    def num_missing(self) -> int:
        """Number of samples that only the run on one process has."""
        return len(self.expected.inputs) - len(self.expected_indices)

    @property
    def extra_indices(self) -> Array:
        """Indices of the rows of `actual` whose samples the run on one process does not have."""
        return np.setdiff1d(np.arange(len(self.actual.inputs)), self.actual_indices)

    @property
    def has_same_inputs(self) -> bool:
        """Whether both runs computed the same samples."""
        return self.num_missing == 0 and self.extra_indices.size == 0

    def matched_rows(self, field_name: str) -> tuple[Array, Array] | None:
        """Returns the rows of a field for the samples that both runs have, in the same order.

        Args:
            field_name: name of a field of `Forward`, such as "outputs".

        Returns:
            The rows of the run on one process, and the rows of the other run. None if the field
            does not have a row for each sample.
        """
        expected = getattr(self.expected, field_name)
        actual = getattr(self.actual, field_name)
        if len(expected) != len(self.expected.inputs) or len(actual) != len(self.actual.inputs):
            return None
        return expected[self.expected_indices], actual[self.actual_indices]

    def differing_rows(self, field_name: str) -> Array:
        """Returns, for each sample that both runs have, whether its rows in a field differ.

        Args:
            field_name: name of a field of `Forward`, such as "outputs".

        Returns:
            An array with a bool for each sample; empty if the field does not have a row for each
            sample.
        """
        rows = self.matched_rows(field_name)
        if rows is None:
            return np.zeros(0, dtype=bool)

        expected, actual = rows
        max_difference = MAX_ERROR_OF_SAME_ROW * max(largest(expected), largest(actual))

        # The largest difference in each row; 0 for a row without numbers.
        differences = np.abs(expected - actual).max(axis=1, initial=0.0)
        differs: Array = differences > max_difference
        return differs


def match_forwards(expected: Update, actual: Update) -> list[MatchedForward]:
    """Matches the forward passes of an update, in the order in which the models were called.

    The list is empty if the runs called different models, or called them with samples of different
    shapes.
    """
    expected_forwards = join_forwards_of_ranks(expected)
    actual_forwards = join_forwards_of_ranks(actual)
    if list(expected_forwards) != list(actual_forwards):
        return []

    matched = []
    for model in expected_forwards:
        expected_forward = expected_forwards[model].forward
        actual_forward = actual_forwards[model].forward
        if expected_forward.shape != actual_forward.shape:
            return []

        expected_indices, actual_indices = _match_rows(expected_forward, actual_forward)
        matched.append(
            MatchedForward(
                model=model,
                expected=expected_forward,
                actual=actual_forward,
                rank_of_row=actual_forwards[model].rank_of_row,
                expected_indices=expected_indices,
                actual_indices=actual_indices,
            )
        )

    return matched


class ForwardOfRanks(NamedTuple):
    """One forward pass of a model on all ranks."""

    # The forward pass, with the rows of all ranks in the order of ranks.
    forward: Forward
    # The rank of each row: [0, 0, 0, 0, 1, 1, 1, 1] if each of 2 ranks computed 4 samples.
    rank_of_row: Array


def join_forwards_of_ranks(update: Update) -> dict[str, ForwardOfRanks]:
    """Joins the forward passes of all ranks in one step to one forward pass for each model.

    Returns:
        The forward passes by `Forward.model`, such as "Net, forward pass 1", in the order of calls.
    """
    forwards_of_model: dict[str, list[tuple[int, Forward]]] = defaultdict(list)
    for rank, record in enumerate(update):
        if not record.contributes:  # the rank computes the same samples as another rank
            continue
        for forward in record.forwards:
            forwards_of_model[forward.model].append((rank, forward))

    joined = {}
    for model, ranks_and_forwards in forwards_of_model.items():
        forwards = [forward for _, forward in ranks_and_forwards]
        ranks_of_rows = [np.full(len(forward.inputs), rank) for rank, forward in ranks_and_forwards]
        joined[model] = ForwardOfRanks(_join(forwards), np.concatenate(ranks_of_rows))

    return joined


def _join(forwards: Sequence[Forward]) -> Forward:
    """Joins several forward passes into one `Forward` that has the rows of all of them.

    A field is left empty if its rows have different lengths, as padded texts may have.
    """
    arrays: dict[str, Any] = {}
    for field_name in _ROW_FIELDS:
        parts = [getattr(forward, field_name) for forward in forwards]
        shapes_of_row = {part.shape[1:] for part in parts}
        if len(shapes_of_row) == 1:
            arrays[field_name] = np.concatenate(parts)
        else:
            arrays[field_name] = NO_ROWS

    # The shape of a sample is a text. Samples of two shapes have the shape "3x32x32 or 3x64x64".
    shapes = sorted({forward.shape for forward in forwards})
    return Forward(model=forwards[0].model, shape=" or ".join(shapes), **arrays)


def rows_among(rows: Array, known_rows: Array) -> Array:
    """Returns, for each row, whether it is equal to some known row, within rounding.

    Args:
        rows: array of shape (rows, numbers).
        known_rows: array of shape (known rows, numbers).

    Returns:
        An array with a bool for each row.
    """
    max_difference = MAX_ERROR_OF_SAME_ROW * max(largest(rows), largest(known_rows))
    is_known = []
    for row in rows:
        is_equal = (np.abs(known_rows - row) <= max_difference).all(axis=1)
        is_known.append(bool(is_equal.any()))
    return np.array(is_known, dtype=bool)


class _RowsByInputs:
    """Finds the rows of an array that have some inputs, within rounding.

    Args:
        inputs: array of shape (rows, 2): two numbers stand for the sample of each row.
        max_difference: largest difference between numbers that count as equal.
    """

    def __init__(self, inputs: Array, max_difference: float) -> None:
        self._inputs = inputs
        self._max_difference = max_difference

        # The rows are sorted by the first of their two numbers, to be found by bisection.
        self._sorted_rows = np.argsort(inputs[:, 0], kind="stable")
        self._sorted_first_numbers = inputs[self._sorted_rows, 0]

    def find(self, wanted: Array) -> list[int]:
        """Returns the indices of all rows with the two wanted numbers."""
        first_number, second_number = wanted
        first_range = [first_number - self._max_difference, first_number + self._max_difference]
        low, high = np.searchsorted(self._sorted_first_numbers, first_range)
        rows = []
        for row in self._sorted_rows[low:high]:  # the rows with the same first number
            if abs(self._inputs[row, 1] - second_number) <= self._max_difference:
                rows.append(row)
        return rows


def _match_rows(expected: Forward, actual: Forward) -> tuple[Array, Array]:
    """Finds the rows of `expected` and `actual` that have the same inputs, and so the same sample.

    The inputs have the shape (samples, 2): two numbers stand for each sample. Among several rows
    with the same inputs, the one whose other fields are nearest is chosen. Each row is matched at
    most once.

    Returns:
        The indices in `expected` and in `actual` of the rows that belong together.
    """
    max_difference = MAX_ERROR_OF_SAME_ROW * max(largest(expected.inputs), largest(actual.inputs))

    actual_rows = _RowsByInputs(actual.inputs, max_difference)

    # Rows with the same inputs are told apart by their outputs and other fields.
    expected_full_rows, actual_full_rows = _rows_of_all_fields(expected, actual)

    is_free = np.ones(len(actual.inputs), dtype=bool)  # False for rows that are already matched
    expected_indices = []
    actual_indices = []
    for index, inputs in enumerate(expected.inputs):
        candidates = [row for row in actual_rows.find(inputs) if is_free[row]]
        if not candidates:
            continue

        nearest = _nearest_row(candidates, actual_full_rows, expected_full_rows[index])
        is_free[nearest] = False
        expected_indices.append(index)
        actual_indices.append(nearest)

    return np.array(expected_indices, dtype=int), np.array(actual_indices, dtype=int)


def _nearest_row(candidates: Sequence[int], rows: Array, wanted_row: Array) -> int:
    """Returns the index of the candidate whose row is nearest to the wanted one.

    Args:
        candidates: indices into `rows`.
        rows: array of shape (rows, numbers).
        wanted_row: array of shape (numbers,).
    """

    def distance(candidate: int) -> float:
        return float(np.abs(rows[candidate] - wanted_row).max())

    return min(candidates, key=distance)


def _rows_of_all_fields(expected: Forward, actual: Forward) -> tuple[Array, Array]:
    """Concatenates the columns of all fields that have a row for each sample, for both runs.

    For example, 3 columns of inputs and 2 of outputs become 5. So samples with the same inputs can
    be told apart by their outputs. A field is left out of both results if one of the runs has no
    row for each sample in it. The field "inputs" is never left out.
    """
    field_names = []
    for field_name in _FIELDS_THAT_TELL_ROWS_APART:
        # A field that was not recorded for each sample has fewer rows than "inputs".
        in_expected = len(getattr(expected, field_name)) == len(expected.inputs)
        in_actual = len(getattr(actual, field_name)) == len(actual.inputs)
        if in_expected and in_actual:
            field_names.append(field_name)

    def side_by_side(forward: Forward) -> Array:
        return np.concatenate([getattr(forward, name) for name in field_names], axis=1)

    return side_by_side(expected), side_by_side(actual)


def keep_models_with_sample_rows(
    updates: Sequence[Update], *other_runs: Sequence[Update]
) -> list[Update]:
    """Returns a run with the forward passes of only those models whose rows are samples.

    For example, the rows of a batch of graphs are nodes. If the rows of a model are not samples in
    one of the runs, its forward passes are removed from all runs, so that the runs still have the
    same models.

    Args:
        updates: updates of the run.
        other_runs: updates of the runs that it is compared with.
    """
    models_to_remove: set[str] = set()
    for run in (updates, *other_runs):
        models_to_remove |= _models_whose_rows_are_no_samples(run)

    if not models_to_remove:
        return list(updates)

    new_updates = []
    for update in updates:
        records = [_without_models(record, models_to_remove) for record in update]
        new_updates.append(Update(records))

    return new_updates


def _class_of(forward: Forward) -> str:
    """Returns the class in the description of a model: "Net" for "Net, forward pass 1"."""
    return forward.model.partition(",")[0]


def _models_whose_rows_are_no_samples(updates: Sequence[Update]) -> set[str]:
    """Returns the classes of models with a forward pass whose rows are not samples."""
    models = set()
    for update in updates:
        for record in update:
            for forward in record.forwards:
                if not forward.rows_are_samples:
                    models.add(_class_of(forward))
    return models


def _without_models(record: RankUpdate, model_classes: Set[str]) -> RankUpdate:
    """Returns the record of a rank without the forward passes of models whose rows are no samples.

    Digests of rows that may be no samples are removed too.

    Args:
        record: record of the rank.
        model_classes: classes of the models.
    """
    forwards = []
    for forward in record.forwards:
        if _class_of(forward) not in model_classes:
            forwards.append(forward)

    return replace(_with_digests_of_samples_only(record), forwards=forwards)


def _with_digests_of_samples_only(record: RankUpdate) -> RankUpdate:
    """Returns the record of a rank without the `contents` of rows that may be no samples.

    The rows of a loader's batch are samples if each of them has a dataset index. The rows that a
    model was called with may be something else: it is not recorded which model it was.
    """
    model_inputs = [_without_contents(batch) for batch in record.model_inputs]

    are_from_loader = not record.batches_are_model_inputs
    batches = []
    for batch in record.batches:
        rows_are_samples = are_from_loader and batch.ids is not None
        batches.append(batch if rows_are_samples else _without_contents(batch))

    return replace(record, model_inputs=model_inputs, batches=batches)


def _without_contents(batch: Batch) -> Batch:
    """Returns a copy of the batch without the digests of its rows."""
    return replace(batch, contents=())
