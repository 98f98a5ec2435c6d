"""Rules for gradients that differ because models were called with other inputs.

A *rule* returns the `Cause` of a difference (`case`) between a run on one process and a run on
several ranks, or None if it does not apply. `case.expected` is the optimizer step on one process,
and `case.actual` the same step on the ranks: a `RankUpdate` (record) for each rank, with the fields
listed under "Needs". Samples are recognized by the inputs of a forward pass: each *row* of an array
stands for one sample (see `lockstep.verify.sample_rows`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.verify.cause import Cause
from lockstep.verify.divergence import Divergence
from lockstep.verify.rules.draws import cause_if_loss_is_random
from lockstep.verify.rules.evidence import (
    describe_local_statistics,
    describe_random_numbers_of_one_run,
)
from lockstep.verify.rules.sample_order import trained_by_several_ranks
from lockstep.verify.sample_rows import (
    MatchedForward,
    join_forwards_of_ranks,
    match_forwards,
    rows_among,
)
from lockstep.verify.tolerance import Array
from lockstep.verify.training_record import Batch, Forward, RankUpdate, Update

# For two samples there is always a factor and a shift, so they prove nothing.
MIN_SAMPLES_THAT_SHOW_SCALING = 3
MAX_ERROR_OF_SCALING = 1e-7


def inputs_by_rank(update: Update) -> list[Counter[str]]:
    """Returns how often the models of each rank got each input, identified by its digest.

    Returns:
        A counter for each rank, in the order of the ranks. It is empty if the rank has called no
        model, or computes the same samples as another rank. If any input of any rank is not known,
        nothing can be counted, and the whole list is empty.
    """
    counts_of_ranks = []
    for record in update:
        counts: Counter[str] = Counter()
        if record.contributes:  # otherwise another rank counts the same samples
            for arguments in record.model_inputs:  # of one call of a model
                digests = arguments.contents
                if not digests:  # the arguments could not be split into samples
                    return []
                counts.update(digests)
        counts_of_ranks.append(counts)

    return counts_of_ranks


def inputs_of_ranks(update: Update) -> list[Counter[str]]:
    """Returns the counters of `inputs_by_rank` for those ranks that have called a model."""
    return [counts for counts in inputs_by_rank(update) if counts]


def sum_counts(counts_of_ranks: Sequence[Counter[str]]) -> Counter[str]:
    """Returns how often the models of all ranks together got each input."""
    total: Counter[str] = Counter()
    for counts in counts_of_ranks:
        total.update(counts)
    return total


def all_ranks_had_the_same(counts_of_ranks: Sequence[Counter[str]]) -> bool:
    """True if several ranks had the same inputs.

    False if each rank had only one input: a model may rightly get a constant on all ranks.
    """
    if len(counts_of_ranks) < 2 or len(counts_of_ranks[0]) < 2:
        return False
    return all(counts == counts_of_ranks[0] for counts in counts_of_ranks)


def inputs_differ(case: Divergence) -> bool:
    """True if models had different inputs than on one process, apart from rounding."""
    return any(not forward.has_same_inputs for forward in _matched_forwards(case))


def _matched_forwards(case: Divergence) -> list[MatchedForward]:
    """Returns the forward passes of both runs, with the rows of the same samples matched."""
    return match_forwards(case.expected, case.actual)


def _batches_of_both_runs(case: Divergence) -> list[Batch]:
    """Returns the batches of one process and of all ranks.

    Without a DataLoader, these are the inputs of the models.
    """
    return [batch for record in (*case.expected, *case.actual) for batch in record.batches]


def _has_loader(case: Divergence) -> bool:
    """True if some batch came from a DataLoader.

    Batches of a DataLoader have indices, or None if they are not known. Without a DataLoader, the
    recorded batches are model inputs, with an empty list of indices.
    """
    return any(batch.ids is None or batch.ids for batch in _batches_of_both_runs(case))


def repeated_inputs(case: Divergence) -> Cause | None:
    """Names the cause if the ranks together computed too many inputs, without a DataLoader.

    LS101: all ranks computed the same inputs. LS110: N ranks together computed N times as many
    inputs as one process.

    Needs: `model_inputs` whose contents are known.
    Applies: LS101 if the inputs of all ranks are the same. LS110 if all inputs have the same shape.
    False positives: a model that rightly gets constants on all ranks. A single constant is ignored,
        and so are inputs of which each rank trains a part of its own (`ranks_train_other_rows`).
    Evidence: how many inputs were computed.
    """
    if _has_loader(case) or ranks_train_other_rows(case.actual):
        return None

    # How often the models of each rank got each input. Empty if some input is not known.
    expected = inputs_of_ranks(case.expected)
    actual = inputs_of_ranks(case.actual)
    if not expected or not actual:
        return None

    num_expected = sum_counts(expected).total()
    num_actual = sum_counts(actual).total()
    numbers = (
        f"one process computed {num_expected} inputs in this step, "
        f"{case.num_ranks} processes computed {num_actual}"
    )
    if all_ranks_had_the_same(actual):
        return Cause("LS101", (numbers, "no DataLoader made them, and every rank had the same"))

    shapes_are_equal = len({batch.shape for batch in _batches_of_both_runs(case)}) == 1
    had_n_times_as_many = case.num_ranks > 1 and num_actual == num_expected * case.num_ranks
    if had_n_times_as_many and shapes_are_equal:
        return Cause("LS110", (numbers, "no DataLoader made them"))

    return None


def ranks_train_other_rows(update: Update) -> bool:
    """True if each rank's loss depends on rows of the models' outputs that no other rank's does.

    The ranks then rightly compute the same inputs. For example, all of them compute all nodes of a
    graph, as each node depends on its neighbours, and each rank has the loss of its own nodes. It
    is False if the loss of some rank depends on no row.
    """
    if len(update) < 2:
        return False

    trained_on_lower_ranks: set[tuple[int, int]] = set()
    for record in update:
        trained = _rows_behind_loss(record)
        if not trained or trained & trained_on_lower_ranks:
            return False
        trained_on_lower_ranks |= trained
    return True


def _rows_behind_loss(record: RankUpdate) -> set[tuple[int, int]]:
    """Returns the rows of outputs that the losses of a rank depend on: (forward pass, row)."""
    rows = set()
    for number, forward in enumerate(record.forwards):
        has_gradient = forward.output_gradients.any(axis=1)
        rows |= {(number, int(row)) for row in np.flatnonzero(has_gradient)}
    return rows


def other_inputs(case: Divergence) -> Cause | None:
    """Names the cause of inputs that differ, for the first model with other inputs.

    See `_cause_of_other_inputs` and `_cause_in_additional_inputs` for the codes.

    Needs: `forwards` with the inputs of each sample.
    Applies: if no random numbers were drawn while batches were read, since these would explain the
        difference.
    False positives: a model that rightly gets a constant on all ranks (as LS101).
    Evidence: how many inputs are the same.
    """
    if ranks_train_other_rows(case.actual) and all_ranks_had_the_same(inputs_of_ranks(case.actual)):
        return None

    if _may_have_drawn_while_reading(case):
        return None

    # Models in the order in which they were called.
    for index, forward in enumerate(_matched_forwards(case)):
        if not forward.has_same_inputs:
            # Without a DataLoader, the inputs of the first model are the samples themselves. Inputs
            # of later models may be computed from its outputs.
            are_samples = index == 0 and not _has_loader(case)
            return _cause_of_other_inputs(case, forward, are_samples)

        # The first input of this model is the same. If its output is not, an additional input of
        # the model, such as a hidden state, may be the cause.
        outputs_differ = bool(forward.differing_rows("outputs").any())
        if outputs_differ:
            return _cause_in_additional_inputs(case, forward)

    return None


def _may_have_drawn_while_reading(case: Divergence) -> bool:
    """True if random numbers were, or may have been, drawn while batches were read.

    The draws of worker processes are not recorded, so they may have drawn some.
    """
    return any(batch.random_draws or batch.workers for batch in _batches_of_both_runs(case))


def _cause_in_additional_inputs(case: Divergence, forward: MatchedForward) -> Cause | None:
    """Names the cause of differing outputs, for a model whose first input is the same.

    If inputs after the first one differ, such as a hidden state, they are either random (LS106,
    LS308), or the script passes different ones (LS111). If all inputs are the same, the result is
    None: then the cause is in the model itself, and `other_outputs` looks for it.
    """
    differing_inputs = forward.differing_rows("other_inputs")  # a bool for each sample
    if not differing_inputs.any():
        return None

    # The additional inputs may be random, as in a diffusion model. Then the loss, which is computed
    # from them, depends on numbers that only one of the runs drew.
    sentence = format_differing_additional_inputs(forward, differing_inputs)
    cause = cause_if_loss_is_random(case, sentence)
    if cause is not None:
        return cause

    # The additional inputs may have been computed from statistics over the samples of each rank,
    # such as their mean, so such statistics are named as well.
    return Cause("LS111", (sentence, *describe_local_statistics(case)))


def format_differing_additional_inputs(forward: MatchedForward, differing_inputs: Array) -> str:
    """Says for how many samples the inputs after the first one differ.

    Args:
        forward: forward pass of the model.
        differing_inputs: a bool for each sample, True if its inputs after the first one differ.
    """
    num_differing = differing_inputs.sum()
    num_inputs = len(differing_inputs)
    return (
        f"{forward.model}: its first inputs are the same; what comes with {num_differing} of "
        f"{num_inputs} (such as targets or a hidden state) is not"
    )


@dataclass(frozen=True)
class _ExtraInputs:
    """The inputs of a forward pass that the ranks have beyond those of one process: *extra* inputs.

    For example, one process has inputs a and b in this step, and c in another step. Two ranks have
    a, a, c and d. Then the extra inputs are a (repeated), c (of another step) and d (of no step).
    """

    forward: MatchedForward
    num_extra: int
    # One process has them in the same step, but the ranks have them more often.
    num_repeated: int
    # One process has them only in other steps.
    num_of_other_steps: int
    # The first sentence of evidence.
    sentence_on_numbers: str

    @property
    def num_of_no_step(self) -> int:
        """Number of extra inputs that one process has in no step."""
        return self.num_extra - self.num_repeated - self.num_of_other_steps

    @property
    def all_are_repeated(self) -> bool:
        """True if one process has all extra inputs in the same step, only less often."""
        return self.num_repeated == self.num_extra

    @property
    def all_are_of_some_step(self) -> bool:
        """True if one process has all extra inputs, in this step or in another one."""
        return self.num_of_no_step == 0

    @property
    def left_out_and_repeated(self) -> tuple[str, ...]:
        """Sentences on inputs that no rank computed, and on those that were computed twice."""
        left_out = f"{self.forward.num_missing} inputs of one process were computed by none"
        if self.num_extra == 0:
            return (left_out,)
        return f"{self.num_extra} inputs were computed by several ranks, or twice", left_out


def _cause_of_other_inputs(case: Divergence, forward: MatchedForward, are_samples: bool) -> Cause:
    """Names the cause of inputs that only one of the runs has.

    See `_cause_of_other_samples` and `_cause_of_computed_inputs` for the codes.

    Args:
        case: the difference.
        forward: forward pass with these inputs.
        are_samples: whether the inputs are the samples themselves, without a DataLoader.
    """
    # The inputs of the ranks that are not matched with an input of one process.
    extra_inputs = forward.actual.inputs[forward.extra_indices]

    # For each extra input: does one process have it in the same step, or in any step?
    inputs_of_all_steps = _inputs_of_all_steps(case, forward.expected)
    is_of_same_step = rows_among(extra_inputs, forward.expected.inputs)
    is_of_any_step = rows_among(extra_inputs, inputs_of_all_steps)
    is_only_of_other_step = is_of_any_step & ~is_of_same_step

    num_matched = len(forward.expected_indices)  # the inputs of one process that the ranks have too
    inputs = _ExtraInputs(
        forward,
        num_extra=len(extra_inputs),
        num_repeated=int(is_of_same_step.sum()),
        num_of_other_steps=int(is_only_of_other_step.sum()),
        sentence_on_numbers=(
            f"{forward.model}: {len(forward.expected.inputs)} inputs on one process, "
            f"{len(forward.actual.inputs)} on {case.num_ranks}; "
            f"{num_matched} are the same"
        ),
    )

    if are_samples and inputs.all_are_of_some_step:
        return _cause_of_other_samples(case, inputs)
    return _cause_of_computed_inputs(case, inputs, are_samples)


def _cause_of_other_samples(case: Divergence, inputs: _ExtraInputs) -> Cause:
    """Names the cause of inputs that are samples, all of which one process has in some step.

    The ranks have *extra* samples in this step, which one process does not have in it, or not as
    often (*repeated* ones).

    - LS102: the ranks have no extra samples, and lack some.
    - LS101: all extra samples are repeated.
    - LS105: some belong to other steps of one process, and each rank draws an order of its own.
    - LS109: some belong to other steps of one process, for another reason.
    """
    if inputs.num_extra == 0:
        return Cause("LS102", (inputs.sentence_on_numbers, *inputs.left_out_and_repeated))
    if inputs.all_are_repeated:
        return Cause("LS101", (inputs.sentence_on_numbers, *inputs.left_out_and_repeated))

    of_other_steps = f"{inputs.num_of_other_steps} are inputs of another step of one process"
    evidence_of_own_orders = [*_orders_of_ranks(case), *_inputs_of_several_ranks(case)]
    if evidence_of_own_orders:
        return Cause("LS105", (inputs.sentence_on_numbers, of_other_steps, *evidence_of_own_orders))

    draws = describe_random_numbers_of_one_run(case)
    return Cause("LS109", (inputs.sentence_on_numbers, of_other_steps, *draws))


def _cause_of_computed_inputs(case: Divergence, inputs: _ExtraInputs, are_samples: bool) -> Cause:
    """Names the cause of inputs that the script computes from samples, or that nothing explains.

    LS106, LS308: they are random. LS111, in this order: they are normalized by each rank; they are
    those of one process, some of them repeated; they are of other steps, or of no step.

    Args:
        case: the difference.
        inputs: the inputs that the ranks have beyond those of one process.
        are_samples: whether the inputs are the samples themselves, without a DataLoader.
    """
    numbers = inputs.sentence_on_numbers
    cause_if_random = cause_if_loss_is_random(case, numbers)
    if cause_if_random is not None:
        return cause_if_random

    if are_samples and _is_normalized_by_rank(inputs.forward):
        text = "each rank's are those of one process, shifted and scaled by numbers of its own"
        why = "as if normalized by the mean and deviation of its own samples"
        return Cause("LS111", (numbers, text, why))

    if inputs.all_are_repeated:
        return Cause("LS111", (numbers, *inputs.left_out_and_repeated))

    if inputs.all_are_of_some_step:
        text = "all are of other steps too"
    else:
        text = f"{inputs.num_of_no_step} are not known from one process"

    return Cause("LS111", (numbers, text, *describe_local_statistics(case)))


def _inputs_of_several_ranks(case: Divergence) -> list[str]:
    """Says how many inputs several ranks computed, although one process computes each once.

    The result is one sentence, or an empty list if there are no such inputs.
    """
    inputs_of_one_process = [inputs_by_rank(update) for update in case.reference_run]
    inputs_on_ranks = [inputs_by_rank(update) for update in case.parallel_run]
    return trained_by_several_ranks(inputs_of_one_process, inputs_on_ranks)


def _inputs_of_all_steps(case: Divergence, forward: Forward) -> Array:
    """Returns the inputs that one process gave to the same model in any step, one in each row."""
    inputs = []
    for update in case.reference_run:
        # One process has a single "rank", or one for each replica that it trains.
        for forward_of_ranks in join_forwards_of_ranks(update).values():
            forward_of_step = forward_of_ranks.forward
            is_same_model = forward_of_step.model == forward.model
            # Only samples of the same shape can be compared.
            if is_same_model and forward_of_step.shape == forward.shape:
                inputs.append(forward_of_step.inputs)
    return np.concatenate(inputs)


def _orders_of_ranks(case: Divergence) -> list[str]:
    """Says that each rank drew a sample order of its own, at a line that all ranks ran.

    A script without a DataLoader may draw the indices of its samples, as by `torch.randperm`. The
    loss is computed from these samples, so the draw is recorded as a draw of the loss.

    The result is one sentence with the first such line, or an empty list.
    """
    # For each rank, a digest of the numbers that it drew at each line. (`loss_draws` is a list of
    # such pairs.)
    draws_of_ranks = [dict(record.loss_draws) for record in case.actual if record.contributes]
    if not draws_of_ranks:
        return []

    shared_lines = set(draws_of_ranks[0])
    for draws in draws_of_ranks[1:]:
        shared_lines &= draws.keys()

    for line in sorted(shared_lines):
        if len({draws[line] for draws in draws_of_ranks}) > 1:
            return [f"each rank drew an order of its own: {line}"]

    return []


def _is_normalized_by_rank(forward: MatchedForward) -> bool:
    """True if each rank has shifted and scaled the inputs of one process by numbers of its own.

    The ranks must have the samples in the order of one process: either rank 0 has the first
    samples, rank 1 the next ones and so on, or each rank has every N-th sample.
    """
    # Arrays of shape (samples, values), which are empty if there were too many values to record.
    rows_of_one = forward.expected.input_values
    rows_of_several = forward.actual.input_values
    if rows_of_one.shape != rows_of_several.shape or rows_of_one.size == 0:
        return False

    rows_of_rank = []
    for rank in np.unique(forward.rank_of_row):
        rows_of_rank.append(rows_of_several[forward.rank_of_row == rank])

    # A factor and a shift would fit any two samples. All ranks have about the same number of
    # samples, so it is enough to count those of the first rank.
    if len(rows_of_rank[0]) < MIN_SAMPLES_THAT_SHOW_SCALING:
        return False

    sizes = [len(rows) for rows in rows_of_rank]
    for expected_rows_of_rank in (
        _contiguous(rows_of_one, sizes),
        _interleaved(rows_of_one, sizes),
    ):
        pairs = zip(expected_rows_of_rank, rows_of_rank, strict=True)
        if all(_is_shifted_and_scaled(expected, actual) for expected, actual in pairs):
            return True

    return False


def _contiguous(rows: Array, sizes: Sequence[int]) -> list[Array]:
    """Splits rows so that rank 0 gets the first ones, rank 1 the next ones, and so on.

    For ranks with 3, 3 and 2 rows, the rows are split at 3 and at 6.
    """
    bounds = np.cumsum(sizes)[:-1]
    return np.split(rows, bounds)


def _interleaved(rows: Array, sizes: Sequence[int]) -> list[Array]:
    """Splits rows so that each of N ranks gets every N-th row."""
    num_ranks = len(sizes)
    return [rows[rank::num_ranks] for rank in range(num_ranks)]


def _is_shifted_and_scaled(expected: Array, actual: Array) -> bool:
    """True if each column of `actual` is the column of `expected` times a factor, plus a shift.

    Args:
        expected: array of shape (samples, columns).
        actual: array for the same samples.
    """
    if expected.shape != actual.shape:
        return False

    # Without their means, the columns of actual = f * expected + shift are
    # centered_actual = f * centered_expected.
    centered_expected = expected - expected.mean(axis=0)
    centered_actual = actual - actual.mean(axis=0)

    # By least squares, the factor of each column is
    # f = (centered_expected . centered_actual) / |centered_expected|^2. For a constant column, this
    # would be 0 / 0. Its f is 0 / 1 instead.
    squares = (centered_expected * centered_expected).sum(axis=0)
    products = (centered_expected * centered_actual).sum(axis=0)
    factors = products / np.where(squares > 0, squares, 1.0)

    # What the best factor leaves must be rounding, compared with the largest centered value, or
    # with 1e-30 if all columns are constant.
    remainder = np.abs(centered_actual - factors * centered_expected).max()
    largest_centered_value = max(np.abs(centered_actual).max(), 1e-30)
    return bool(remainder <= MAX_ERROR_OF_SCALING * largest_centered_value)


def other_padding(case: Divergence) -> Cause | None:
    """LS111: the inputs are the same except for the length to which each row is padded.

    Needs: `forwards` with `input_values`.
    Applies: if the rows of both runs are equal once all are padded to the same width.
    False positives: none known.
    Evidence: which widths there are.
    """
    # Arrays of shape (samples, width), with one padded sample in each row. An array is recorded as
    # empty if it has too many values.
    expected_tables = _first_input_values(case.expected)
    actual_tables = _first_input_values(case.actual)
    if not expected_tables or not actual_tables:
        return None

    tables = [*expected_tables, *actual_tables]
    some_values_are_unknown = any(table.size == 0 for table in tables)
    if some_values_are_unknown:
        return None

    widths = {table.shape[1] for table in tables}
    if len(widths) < 2:
        return None

    width = max(widths)
    for padding in _possible_paddings(tables, width):
        # How often each padded row occurs in both runs.
        expected_counts = _counts_of_padded_rows(expected_tables, width, padding)
        actual_counts = _counts_of_padded_rows(actual_tables, width, padding)
        if expected_counts == actual_counts:
            columns = " or ".join(str(table_width) for table_width in sorted(widths))
            text = f"the inputs are the same but for their padding: they have {columns} columns"
            return Cause("LS111", (text,))

    return None


def _possible_paddings(tables: Sequence[Array], width: int) -> set[float]:
    """Returns the last value of each row in the tables of full width, one of which is the padding.

    For example, the rows of the widest table are [5, 7, 0] and [4, 6, 8]. If the first text is
    shorter than the second, the padding is 0; the result is {0, 8}.
    """
    last_values = set()
    for table in tables:
        if table.shape[1] == width:
            last_values |= {float(row[-1]) for row in table}
    return last_values


def _first_input_values(update: Update) -> list[Array]:
    """Returns the inputs of the first forward pass of each rank."""
    return [
        record.forwards[0].input_values
        for record in update
        if record.contributes and record.forwards
    ]


def _counts_of_padded_rows(
    tables: Sequence[Array], width: int, padding: float
) -> Counter[tuple[float, ...]]:
    """Pads all rows to the given width, and returns how often each padded row occurs.

    Two runs pad the same texts to different widths if each batch is padded to its longest text.
    Once all rows have the same width, equal texts are equal rows.
    """
    counts: Counter[tuple[float, ...]] = Counter()
    for table in tables:
        for row in table:
            num_missing = width - len(row)
            added_padding = [padding] * num_missing
            padded_row = (*row, *added_padding)
            counts[padded_row] += 1

    return counts


def code_of_differing_inputs(
    expected_of_ranks: Sequence[Counter[str]],
    actual_of_ranks: Sequence[Counter[str]],
    num_ranks: int,
) -> str:
    """Returns the code for inputs that are known to differ, if no rule names the cause.

    Args:
        expected_of_ranks: how often each input occurs on one process.
        actual_of_ranks: how often each input occurs on each rank.
        num_ranks: number of ranks.

    Returns:
        LS101 if inputs are repeated, LS110 if there are N times as many, LS102 if inputs are left
        out, and otherwise LS111.
    """
    expected = sum_counts(expected_of_ranks)
    actual = sum_counts(actual_of_ranks)

    # The difference of two counters has what the first one has more often.
    num_missing_on_ranks = (expected - actual).total()
    num_added_on_ranks = (actual - expected).total()

    # The ranks have all inputs of one process and no others. As the counts differ, some inputs are
    # repeated.
    if num_missing_on_ranks == 0 and set(actual) == set(expected):
        return "LS101"

    # The ranks have all inputs of one process and others, N times as many in total.
    if num_missing_on_ranks == 0 and actual.total() == num_ranks * expected.total():
        return "LS110"

    # The ranks have only inputs of one process, but not all of them.
    if num_added_on_ranks == 0:
        return "LS102"

    return "LS111"
