"""Matches the samples of two runs, so that their inputs, outputs and gradients can be compared.

A `Forward` is the record of a forward pass. Each of its fields ("inputs", "outputs", ...) is an
array of shape (samples, numbers); a *row* holds the numbers that stand for one sample, and its
*place* is its index. Rows of two runs belong to the same sample if their inputs are equal within
rounding, so no DataLoader is needed to recognise samples, and their order does not matter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lockstep.verify.tolerance import Array, largest
from lockstep.verify.training_record import Forward, RankUpdate, Update

# Rows of one sample differ at most by this share of the largest number in all rows.
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

# If several samples have the same inputs, these fields tell which rows belong together.
_FIELDS_THAT_TELL_ROWS_APART = ("inputs", "other_inputs", "outputs", "targets")


@dataclass(frozen=True)
class MatchedForward:
    """One forward pass in both runs, with the rows of the same samples matched."""

    # The model's class, and the number of the pass since the last backward pass.
    model: str
    # On one process.
    expected: Forward
    # On several processes: the rows of all ranks, one rank after the other.
    actual: Forward
    # The rank of each row of `actual`.
    rank_of_row: Array
    # Indices of the rows in `expected` and in `actual` of the samples that both have, in the same
    # order.
    expected_places: Array
    actual_places: Array

    @property
    def num_missing(self) -> int:
        """The number of samples that only the run on one process has."""
        return len(self.expected.inputs) - len(self.expected_places)

    @property
    def extra_places(self) -> Array:
        """The indices in `actual` of samples that the run on one process does not have."""
        return np.setdiff1d(np.arange(len(self.actual.inputs)), self.actual_places)

    @property
    def has_same_inputs(self) -> bool:
        """Whether both runs computed the same samples."""
        return self.num_missing == 0 and self.extra_places.size == 0

    def matched_rows(self, field_name: str) -> tuple[Array, Array] | None:
        """Returns the rows of a field for the samples that both runs have, in the same order.

        Args:
            field_name: a field of `Forward`, such as "outputs".

        Returns:
            The rows of the run on one process, and those of the other run. None if the field has no
            row for each sample.
        """
        expected = getattr(self.expected, field_name)
        actual = getattr(self.actual, field_name)
        if len(expected) != len(self.expected.inputs) or len(actual) != len(self.actual.inputs):
            return None
        return expected[self.expected_places], actual[self.actual_places]

    def differing_rows(self, field_name: str) -> Array:
        """Returns, for each sample that both runs have, whether its row of a field differs.

        Args:
            field_name: a field of `Forward`, such as "outputs".

        Returns:
            A bool for each sample; an empty array if the field has no row for each sample.
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

    Returns an empty list if the runs called other models or gave them samples of other shapes.
    """
    # By model, one `Forward` with the rows of all ranks, and an array with the rank of each row.
    expected_forwards = joined_forwards(expected)
    actual_forwards = joined_forwards(actual)
    if list(expected_forwards) != list(actual_forwards):  # the models, in the order of their calls
        return []

    matched = []
    for model, (expected_forward, _) in expected_forwards.items():
        actual_forward, rank_of_row = actual_forwards[model]
        if expected_forward.shape != actual_forward.shape:
            return []

        expected_places, actual_places = _match_rows(expected_forward, actual_forward)
        matched.append(
            MatchedForward(
                model=expected_forward.model,
                expected=expected_forward,
                actual=actual_forward,
                rank_of_row=rank_of_row,
                expected_places=expected_places,
                actual_places=actual_places,
            )
        )

    return matched


def joined_forwards(update: Update) -> dict[str, tuple[Forward, Array]]:
    """Joins the forward passes of all ranks.

    Returns:
        By model, a `Forward` with the rows of all ranks, one rank after the other, and an array
        with the rank of each row.
    """
    forwards_of_model: dict[str, list[tuple[int, Forward]]] = defaultdict(list)
    for number, rank in enumerate(update):
        if not rank.contributes:  # its samples are those of another rank
            continue
        for forward in rank.forwards:
            forwards_of_model[forward.model].append((number, forward))

    joined = {}
    for model, numbered_forwards in forwards_of_model.items():
        forwards = []
        ranks_of_rows = []
        for rank_number, forward in numbered_forwards:
            forwards.append(forward)
            ranks_of_rows.append(np.full(len(forward.inputs), rank_number))
        joined[model] = _join(forwards), np.concatenate(ranks_of_rows)

    return joined


def _join(forwards: Sequence[Forward]) -> Forward:
    """Returns one `Forward` with the rows of several, one after the other.

    A field whose rows have different lengths, as those of padded texts may have, is left empty.
    """
    arrays: dict[str, Any] = {}
    for field_name in _ROW_FIELDS:
        parts = [getattr(forward, field_name) for forward in forwards]
        shapes_of_row = {part.shape[1:] for part in parts}
        if len(shapes_of_row) == 1:
            arrays[field_name] = np.concatenate(parts)
        else:
            arrays[field_name] = np.zeros((0, 2))

    shapes = sorted({forward.shape for forward in forwards})
    return Forward(model=forwards[0].model, shape=" or ".join(shapes), **arrays)


def rows_among(rows: Array, known_rows: Array) -> Array:
    """Returns, for each row, whether it is one of the known rows, within rounding.

    Args:
        rows: shape (rows, numbers).
        known_rows: shape (known rows, numbers).

    Returns:
        A bool for each row.
    """
    max_difference = MAX_ERROR_OF_SAME_ROW * max(largest(rows), largest(known_rows))
    is_known = []
    for row in rows:
        is_equal = (np.abs(known_rows - row) <= max_difference).all(axis=1)
        is_known.append(bool(is_equal.any()))
    return np.array(is_known, dtype=bool)


def _match_rows(expected: Forward, actual: Forward) -> tuple[Array, Array]:
    """Finds for each row of `expected` a row of `actual` with the same inputs.

    The inputs have the shape (samples, 2): two numbers stand for each sample. If several samples
    have the same inputs, the rows are matched whose other fields are nearest. A row is matched only
    once.

    Returns:
        The indices in `expected` and in `actual` of the rows that belong together.
    """
    max_difference = MAX_ERROR_OF_SAME_ROW * max(largest(expected.inputs), largest(actual.inputs))
    # Sorted by the first of the two numbers, so that candidates are found by bisection.
    order = np.argsort(actual.inputs[:, 0], kind="stable")
    sorted_first_numbers = actual.inputs[order, 0]
    expected_rows, actual_rows = _rows_that_tell_samples_apart(expected, actual)

    is_free = np.ones(len(order), dtype=bool)  # for each row of `actual`
    expected_places = []
    actual_places = []
    for place, (first, second) in enumerate(expected.inputs):
        first_range = [first - max_difference, first + max_difference]
        low, high = np.searchsorted(sorted_first_numbers, first_range)
        candidates = []  # rows of `actual` with the same inputs
        for candidate in order[low:high]:
            has_same_second = abs(actual.inputs[candidate, 1] - second) <= max_difference
            if has_same_second and is_free[candidate]:
                candidates.append(candidate)

        if not candidates:
            continue

        distances = []
        for candidate in candidates:
            distances.append(float(np.abs(actual_rows[candidate] - expected_rows[place]).max()))

        nearest = candidates[distances.index(min(distances))]
        is_free[nearest] = False
        expected_places.append(place)
        actual_places.append(nearest)

    return np.array(expected_places, dtype=int), np.array(actual_places, dtype=int)


def _rows_that_tell_samples_apart(expected: Forward, actual: Forward) -> tuple[Array, Array]:
    """Returns the numbers by which samples with the same inputs are told apart, in both runs.

    These are the fields that have a row for each sample in both runs, one beside the other, so the
    arrays have the shape (samples, numbers of all these fields).
    """
    field_names = []
    for field_name in _FIELDS_THAT_TELL_ROWS_APART:
        in_expected = len(getattr(expected, field_name)) == len(expected.inputs)
        in_actual = len(getattr(actual, field_name)) == len(actual.inputs)
        if in_expected and in_actual:
            field_names.append(field_name)

    expected_rows = np.concatenate([getattr(expected, name) for name in field_names], axis=1)
    actual_rows = np.concatenate([getattr(actual, name) for name in field_names], axis=1)
    return expected_rows, actual_rows


def without_rows_that_are_no_samples(
    updates: Sequence[Update], *other_runs: Sequence[Update]
) -> list[Update]:
    """Returns a run without the forward passes of models whose rows are not samples.

    The rows of a batch of graphs are nodes, for example. A model is left out if its rows are no
    samples in any of the runs, so that all of them have the same models afterwards.

    Args:
        updates: the run, as a list of its optimizer steps.
        other_runs: the runs with which it is compared.
    """
    models_without_samples: set[str] = set()
    for run in (updates, *other_runs):
        models_without_samples |= _models_whose_rows_are_no_samples(run)

    if not models_without_samples:
        return list(updates)

    new_updates = []
    for update in updates:
        new_updates.append(Update(_without_models(rank, models_without_samples) for rank in update))

    return new_updates


def _class_of(forward: Forward) -> str:
    """Returns the class in a model's description, such as "Net, forward pass 1"."""
    return forward.model.partition(",")[0]


def _models_whose_rows_are_no_samples(updates: Sequence[Update]) -> set[str]:
    """Returns the classes of models with a forward pass whose rows are not samples."""
    models = set()
    for update in updates:
        for rank in update:
            for forward in rank.forwards:
                if not forward.rows_are_samples:
                    models.add(_class_of(forward))
    return models


def _without_models(rank: RankUpdate, model_classes: Set[str]) -> RankUpdate:
    """Returns the record of a rank without the forward passes of these models.

    The contents of batches are left out too, since they were made from rows as if these were
    samples. Batches with indices keep them: the indices show that each row is a sample.
    """
    model_inputs = [replace(batch, contents=()) for batch in rank.model_inputs]
    if rank.batches == rank.model_inputs:  # without a loader, the inputs stand for batches
        batches = model_inputs
    else:
        batches = []
        for batch in rank.batches:
            batches.append(replace(batch, contents=()) if batch.ids is None else batch)

    forwards = []
    for forward in rank.forwards:
        if _class_of(forward) not in model_classes:
            forwards.append(forward)

    return replace(rank, forwards=forwards, model_inputs=model_inputs, batches=batches)
