"""Matches the samples of two runs, so that their inputs, outputs and gradients can be compared.

A *row* holds the numbers that stand for one sample in one forward pass. Rows of two runs belong to
the same sample if their inputs are equal within rounding, so no DataLoader is needed to recognise
samples, and their order does not matter.
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

    model: str
    expected: Forward
    actual: Forward
    # The rank of each row of `actual`.
    rank_of_row: Array
    # Places in `expected` and in `actual` of the samples that both have, in the same order.
    expected_places: Array
    actual_places: Array

    @property
    def num_missing(self) -> int:
        """Number of samples that only the reference run has."""
        return len(self.expected.inputs) - len(self.expected_places)

    @property
    def extra_places(self) -> Array:
        """Places in `actual` of samples that the reference run does not have."""
        return np.setdiff1d(np.arange(len(self.actual.inputs)), self.actual_places)

    @property
    def has_same_inputs(self) -> bool:
        """Whether both runs computed the same samples."""
        return self.num_missing == 0 and self.extra_places.size == 0

    def matched_rows(self, field_name: str) -> tuple[Array, Array] | None:
        """Returns a field of `Forward` for the samples that both runs have, in the same order.

        Returns None if the field has no row for each sample.
        """
        expected = getattr(self.expected, field_name)
        actual = getattr(self.actual, field_name)
        if len(expected) != len(self.expected.inputs) or len(actual) != len(self.actual.inputs):
            return None
        return expected[self.expected_places], actual[self.actual_places]

    def differing_rows(self, field_name: str) -> Array:
        """Returns, for each sample that both runs have, whether a field of `Forward` differs.

        The result is empty if the field has no row for each sample.
        """
        rows = self.matched_rows(field_name)
        if rows is None:
            return np.zeros(0, dtype=bool)
        expected, actual = rows
        max_difference = MAX_ERROR_OF_SAME_ROW * max(largest(expected), largest(actual))
        differs: Array = np.abs(expected - actual).max(axis=1, initial=0.0) > max_difference
        return differs


def match_forwards(expected: Update, actual: Update) -> list[MatchedForward]:
    """Matches the forward passes of an update, in the order in which the models were called.

    Returns an empty list if the runs called other models or gave them samples of other shapes.
    """
    expected_forwards = joined_forwards(expected)
    actual_forwards = joined_forwards(actual)
    if list(expected_forwards) != list(actual_forwards):
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
    """Returns, by model, the rows of all ranks one after the other, and the rank of each row.

    The ranks are an array with one number for each row.
    """
    forwards_of_model: dict[str, list[tuple[int, Forward]]] = defaultdict(list)
    for number, rank in enumerate(update):
        if not rank.contributes:
            continue
        for forward in rank.forwards:
            forwards_of_model[forward.model].append((number, forward))
    joined = {}
    for model, numbered_forwards in forwards_of_model.items():
        forwards = [forward for _, forward in numbered_forwards]
        ranks = [np.full(len(forward.inputs), rank) for rank, forward in numbered_forwards]
        joined[model] = _join(forwards), np.concatenate(ranks)
    return joined


def _join(forwards: Sequence[Forward]) -> Forward:
    """Returns one `Forward` with the rows of several, one after the other.

    A field whose rows have several widths, as those of padded texts may have, is left empty.
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
    """Returns, for each row, whether it is one of the known rows."""
    max_difference = MAX_ERROR_OF_SAME_ROW * max(largest(rows), largest(known_rows))
    is_known = []
    for row in rows:
        is_equal = (np.abs(known_rows - row) <= max_difference).all(axis=1)
        is_known.append(bool(is_equal.any()))
    return np.array(is_known, dtype=bool)


def _match_rows(expected: Forward, actual: Forward) -> tuple[Array, Array]:
    """Finds for each row of `expected` a row of `actual` with the same inputs.

    If several have the same inputs, it takes the one whose other fields are nearest. The inputs
    have the shape (samples, 2): two numbers stand for each sample.

    Returns:
        The places in `expected` and in `actual` of the rows that belong together.
    """
    max_difference = MAX_ERROR_OF_SAME_ROW * max(largest(expected.inputs), largest(actual.inputs))
    # Sorted by the first of the two numbers, so that candidates are found by bisection.
    order = np.argsort(actual.inputs[:, 0], kind="stable")
    first_numbers = actual.inputs[order, 0]

    field_names = []
    for field_name in _FIELDS_THAT_TELL_ROWS_APART:
        in_expected = len(getattr(expected, field_name)) == len(expected.inputs)
        in_actual = len(getattr(actual, field_name)) == len(actual.inputs)
        if in_expected and in_actual:
            field_names.append(field_name)
    expected_rows = np.concatenate([getattr(expected, name) for name in field_names], axis=1)
    actual_rows = np.concatenate([getattr(actual, name) for name in field_names], axis=1)

    is_free = np.ones(len(order), dtype=bool)
    expected_places = []
    actual_places = []
    for place, (first, second) in enumerate(expected.inputs):
        low, high = np.searchsorted(first_numbers, [first - max_difference, first + max_difference])
        candidates = []
        for candidate in order[low:high]:
            is_same = abs(actual.inputs[candidate, 1] - second) <= max_difference
            if is_same and is_free[candidate]:
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


def without_rows_that_are_no_samples(
    updates: Sequence[Update], *other_runs: Sequence[Update]
) -> list[Update]:
    """Leaves out inputs and forward passes of models whose rows are not samples.

    The rows of a batch of graphs are nodes, for example. A model is left out of all runs if its
    rows are no samples in one of them.

    Args:
        updates: of the run that is returned.
        other_runs: the runs with which it is compared.
    """
    models_without_samples = set()
    for run in (updates, *other_runs):
        for update in run:
            for rank in update:
                for forward in rank.forwards:
                    if not forward.rows_are_samples:
                        models_without_samples.add(_class_of(forward))
    if not models_without_samples:
        return list(updates)
    return [
        Update(_without_models(rank, models_without_samples) for rank in update)
        for update in updates
    ]


def _class_of(forward: Forward) -> str:
    """Returns the class in a model's description, such as "Net, forward pass 1"."""
    return forward.model.partition(",")[0]


def _without_models(rank: RankUpdate, model_classes: Set[str]) -> RankUpdate:
    """Leaves out the forward passes of these models, and the contents of batches without a loader.

    Batches with indices keep their contents, since they could be split into samples.
    """
    model_inputs = [replace(batch, contents=()) for batch in rank.model_inputs]
    if rank.batches == rank.model_inputs:
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
