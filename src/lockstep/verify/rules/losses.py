"""Rules for losses that differ although the outputs of the models are the same.

A *rule* returns the `Cause` of a difference (`case`) between a run on one process and a run on
several ranks, or None if it does not apply. `case.expected` is the optimizer step on one process,
and `case.actual` the same step on the ranks: a `RankUpdate` (record) for each rank, with the fields
listed under "Needs". `merged(field)` merges the arrays of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.verify.algebra import near
from lockstep.verify.cause import Cause, format_items
from lockstep.verify.divergence import Divergence
from lockstep.verify.rules.draws import cause_if_loss_is_random
from lockstep.verify.rules.evidence import (
    describe_local_comparison,
    describe_local_scalars,
    describe_local_statistics,
    describe_random_numbers_of_one_run,
    draws_with_wrong_counts,
    gradient_patterns,
    loss_line,
)
from lockstep.verify.sample_rows import MatchedForward, match_forwards
from lockstep.verify.tolerance import Array, largest

# Gradients below this fraction of the largest one are zero but for rounding.
ZERO_GRADIENT_SHARE = 1e-12
# Weights of samples are equal if they differ by at most this fraction of the largest one.
EQUAL_WEIGHT_SHARE = 1e-7


def other_loss_value(case: Divergence) -> Cause:
    """LS501: the loss that the script computed differs, although all gradients are equal.

    Needs: `losses`.
    Applies: always.
    False positives: a loss that is only displayed differently, such as a sum instead of a mean.
    Evidence: both losses.
    """
    text = (
        f"{case.expected.loss:.9g} on one process, {case.actual.loss:.9g} on {case.num_ranks}, "
        "with equal gradients"
    )
    return Cause("LS501", (text,))


def terms_that_scale_differently(case: Divergence) -> Cause | None:
    """LS211: some terms of the loss are the mean over the ranks, and others their sum.

    Needs: `loss_terms`, the numbers that were added up to the loss.
    Applies: if each process computed one loss, and every term is a mean or a sum, or some ranks
        lack terms that others have.
    False positives: a few numbers that fit by chance.
    Evidence: which terms are means, and which are sums.
    """
    description = describe_terms(case)
    if not description.explains_gradients:
        return None
    return Cause("LS211", (*description.sentences, *loss_line(case), *gradient_patterns(case)))


class DescriptionOfTerms(NamedTuple):
    """What is unusual about the terms of a loss: the numbers that were added up to it."""

    sentences: Sequence[str] = ()
    """One sentence; empty if nothing is unusual."""
    explains_gradients: bool = False
    """True if this explains why the gradients are wrong."""


def describe_terms(case: Divergence) -> DescriptionOfTerms:
    """Says how the terms of the loss scale with the number of ranks, if they scale differently.

    A term is one of the numbers that were added up to the loss. On one process, it should be the
    mean of this term over the ranks.
    """
    # Ranks whose losses do not count, such as the first stages of a pipeline, are left out.
    record_by_rank = {rank: r for rank, r in enumerate(case.actual) if r.contributes}

    # `loss_terms` has a list of terms for each backward pass: [[2.0, 6.0]] for a single pass with
    # two terms. With several passes, it is not known which terms correspond.
    record_of_one_process = case.expected[0]
    all_records = [record_of_one_process, *record_by_rank.values()]
    if case.num_ranks == 1 or any(len(record.loss_terms) != 1 for record in all_records):
        return DescriptionOfTerms()

    # The terms of the only backward pass, on one process and on each rank.
    expected_terms = record_of_one_process.loss_terms[0]
    terms_by_rank = {rank: record.loss_terms[0] for rank, record in record_by_rank.items()}

    term_counts_differ = any(len(terms) != len(expected_terms) for terms in terms_by_rank.values())
    if term_counts_differ:
        return _describe_term_counts(expected_terms, terms_by_rank)

    return _describe_scales_of_terms(expected_terms, list(terms_by_rank.values()), case.max_error)


def _describe_term_counts(
    expected_terms: Sequence[float], terms_by_rank: Mapping[int, Sequence[float]]
) -> DescriptionOfTerms:
    """Says how many terms the loss has on one process and on each rank."""
    count_by_rank = {rank: len(terms) for rank, terms in terms_by_rank.items()}
    of_ranks = ", ".join(f"{count} on rank {rank}" for rank, count in count_by_rank.items())
    text = f"the loss is a sum of {len(expected_terms)} terms on one process, of {of_ranks}"

    # If all ranks have the same number of terms, the script may have added up the same loss in
    # another way. Otherwise, some ranks lack terms of others, which explains the difference.
    some_ranks_lack_terms_of_others = len(set(count_by_rank.values())) > 1
    return DescriptionOfTerms([text], explains_gradients=some_ranks_lack_terms_of_others)


def _describe_scales_of_terms(
    expected_terms: Sequence[float], terms_of_ranks: Sequence[Sequence[float]], max_error: float
) -> DescriptionOfTerms:
    """Says which terms of the loss are the mean over the ranks, and which are their sum.

    For example, a loss has two terms:

    - Term 1 is 2 on one process, 1 on rank 0 and 3 on rank 1. It is the mean over the ranks.
    - Term 2 is 6 on one process, 3 on rank 0 and 3 on rank 1. It is the sum over the ranks.

    Then the sentence says that one process has "the mean of term 1, the sum of term 2". Nothing is
    said if all terms are of one kind: means, sums, or neither.

    Args:
        expected_terms: terms on one process.
        terms_of_ranks: the same terms on each rank.
        max_error: largest relative difference that counts as rounding.
    """
    means, sums, neither = _classify_terms(expected_terms, terms_of_ranks, max_error)
    texts = []
    if means:
        texts.append(f"the mean of term {format_items(means)}")
    if sums:
        texts.append(f"the sum of term {format_items(sums)}")
    if neither:
        texts.append(f"neither the mean nor the sum of term {format_items(neither)}")

    all_are_of_one_kind = len(texts) < 2
    if all_are_of_one_kind:
        return DescriptionOfTerms()

    sentence = f"of the loss's terms, one process has, over the ranks, {', '.join(texts)}"
    return DescriptionOfTerms([sentence], explains_gradients=not neither)


def _classify_terms(
    expected_terms: Sequence[float], terms_of_ranks: Sequence[Sequence[float]], max_error: float
) -> tuple[list[int], list[int], list[int]]:
    """Sorts the terms of a loss by how those of one process relate to those of the ranks.

    Args:
        expected_terms: terms on one process.
        terms_of_ranks: the same terms on each rank.
        max_error: largest relative difference that counts as rounding.

    Returns:
        Three lists with numbers of terms, counted from 1. A term of one process is in the first
        list if it is the mean of this term over the ranks, in the second if it is their sum, and in
        the third if it is neither. Terms so small that they may be rounding are left out.
    """
    largest_term = max(abs(term) for terms in (expected_terms, *terms_of_ranks) for term in terms)
    means = []
    sums = []
    neither = []
    for index, expected in enumerate(expected_terms):
        actual = [terms[index] for terms in terms_of_ranks]
        largest_value_of_term = max(abs(term) for term in (expected, *actual))
        may_be_rounding = largest_value_of_term <= max_error * largest_term
        if may_be_rounding:
            continue

        term_number = index + 1
        if near(sum(actual) / len(actual), expected, max_error):
            means.append(term_number)
        elif near(sum(actual), expected, max_error):
            sums.append(term_number)
        else:
            neither.append(term_number)

    return means, sums, neither


def local_comparison(case: Divergence) -> Cause | None:
    """LS208: the loss compares samples with each other, but each rank only compared its own.

    Needs: `loss_compares_samples` of one process, which is found by the second derivative of the
        loss with respect to the outputs of two samples.
    Applies: if no rank gathered outputs.
    False positives: something else may be wrong as well.
    Evidence: the line of the loss, the gradients, and random numbers that differ.
    """
    sentences_on_comparison = describe_local_comparison(case)
    if not sentences_on_comparison:
        return None

    evidence = (
        *sentences_on_comparison,
        *loss_line(case),
        *gradient_patterns(case),
        *describe_random_numbers_of_one_run(case),
    )
    return Cause("LS208", evidence)


def _forwards_with_equal_outputs(case: Divergence) -> list[MatchedForward]:
    """Returns the forward passes of both runs, with the rows of the same samples matched.

    The list is empty if a model returned another output for any sample. Then the loss is not the
    first thing that differs.
    """
    forwards = match_forwards(case.expected, case.actual)
    if any(forward.differing_rows("outputs").any() for forward in forwards):
        return []
    return forwards


def other_targets(case: Divergence) -> Cause | None:
    """LS112: torch's loss function was called with other targets for the same inputs.

    Needs: `forwards` with targets.
    Applies: if the first model's outputs are equal, but its targets are not.
    False positives: random targets.
    Evidence: for how many samples, statistics over each rank's own samples, and the line of the
        loss.
    """
    forwards = _forwards_with_equal_outputs(case)
    if not forwards:
        return None

    # The targets are those of the first model: others may be called with its outputs.
    first_forward = forwards[0]
    differs = first_forward.differing_rows("targets")  # a bool for each sample
    if not differs.any():
        return None

    num_differing = differs.sum()
    num_samples = len(differs)
    text = (
        f"the loss was given other targets for {num_differing} of {num_samples} samples with the "
        "same inputs"
    )

    # Sentences on statistics from which the targets may have been computed, such as the mean of a
    # rank's own returns.
    statistics = describe_local_statistics(case)
    return Cause("LS112", (text, *statistics, *loss_line(case)))


def outputs_of_earlier_steps(case: Divergence) -> Cause | None:
    """LS309: the loss was computed from outputs of earlier steps that the ranks did not exchange.

    Needs: `earlier_outputs_line`.
    Applies: if the outputs of this step are equal.
    False positives: none known.
    Evidence: the line of the earlier forward pass.
    """
    line = case.actual.first_on_any_rank("earlier_outputs_line")
    if not line or not _forwards_with_equal_outputs(case):
        return None
    text = "the loss is computed from outputs of earlier steps, which the ranks did not exchange"
    same = "the outputs of this step are the same"
    return Cause("LS309", (f"{text}: {line}", same, *loss_line(case)))


def other_loss_arguments(case: Divergence) -> Cause | None:
    """LS212: torch's loss functions were called with other arguments, such as class weights.

    Needs: `loss_options`.
    Applies: if both runs have recorded arguments with the same names, and the outputs are equal.
    False positives: none known.
    Evidence: the first argument whose value differs, and its line.
    """
    if not _forwards_with_equal_outputs(case):
        return None

    argument_and_line = _first_differing_option(case)
    if argument_and_line is None:
        return None

    text = f"another value than on one process: {argument_and_line}"
    return Cause("LS212", (text, *describe_local_statistics(case), *loss_line(case)))


def _first_differing_option(case: Divergence) -> str | None:
    """Returns the first argument of a loss function whose value differs from one process.

    It is named with its line: "pos_weight of train.py:5: loss = ...". None if no value differs, or
    if the runs have recorded other arguments.
    """
    expected_options = case.expected.merged("loss_options")
    if expected_options.keys() != case.actual.merged("loss_options").keys():
        return None

    for name, expected in expected_options.items():
        for record in case.actual:
            actual = record.loss_options.get(name)
            if actual is None:  # this rank did not run the line
                continue
            # With `scale=0.0`, the tolerance depends only on the values of this argument.
            if case.tolerance.differ(expected, actual, scale=0.0):
                return name

    return None


def local_statistic_in_loss(case: Divergence) -> Cause | None:
    """LS208: the loss was computed from a statistic over each rank's own samples.

    Needs: `batch_statistics` or `scalar_statistics`, and `forwards` with outputs.
    Applies: if all outputs are known and equal, and random numbers cannot be the cause.
    False positives: a statistic that does no harm, while something else is wrong in the loss.
    Evidence: the line of the statistic, and how the samples are weighted.
    """
    forwards = _forwards_with_equal_outputs(case)
    if not forwards:
        return None

    # Outputs are not known if they have no row for each sample.
    some_outputs_are_unknown = any(forward.matched_rows("outputs") is None for forward in forwards)
    if some_outputs_are_unknown:
        return None

    # The loss may differ because of random numbers instead.
    if draws_with_wrong_counts(case):
        return None

    # Sentences on statistics whose values on the ranks are not that on one process.
    statistics = describe_local_statistics(case) or describe_local_scalars(case)
    if not statistics:
        return None

    # How the samples are weighted. If this is not known, say at least that their outputs are equal.
    sample_texts = _sample_weights(case, forwards)
    if not sample_texts:
        sample_texts = ("for each sample the models returned the same",)

    return Cause("LS208", (*statistics, *sample_texts, *loss_line(case)))


def other_sample_weights(case: Divergence) -> Cause | None:
    """LS212: the loss weights samples differently.

    Needs: `forwards` with the gradients of the outputs.
    Applies: if the gradient of each sample is that of one process times a positive number, and this
        number is not the same for all samples.
    False positives: none known. Other targets would reverse gradients, or change their direction.
    Evidence: the range of these numbers, or how many samples count on some processes only.
    """
    forwards = _forwards_with_equal_outputs(case)
    sentences = _sample_weights(case, forwards)
    if not sentences:
        return None
    return Cause("LS212", (*sentences, *loss_line(case)))


def _sample_weights(case: Divergence, forwards: list[MatchedForward]) -> tuple[str, ...]:
    """Says how samples are weighted, for the first model whose samples are weighted differently."""
    for forward in forwards:
        sentences = _sample_weights_of_model(forward, case.num_ranks)
        if sentences:
            return sentences
    return ()


def _sample_weights_of_model(forward: MatchedForward, num_ranks: int) -> tuple[str, ...]:
    """Says by which factor the gradient of each sample's output differs from one process.

    Two numbers stand for the gradient of a sample's output, so the arrays have the shape (samples,
    2). The result is empty if such factors do not explain the difference, or if they are all equal.

    Args:
        forward: a forward pass of the model in both runs.
        num_ranks: number of ranks.
    """
    rows = forward.matched_rows("output_gradients")
    if rows is None or not len(rows[0]):
        return ()

    # The gradients for the same samples, on one process and on the ranks.
    expected = rows[0]
    actual = rows[1] / num_ranks  # gradients are averaged over the ranks

    # For each sample, whether its gradient is not zero.
    rounding = ZERO_GRADIENT_SHARE * max(largest(expected), largest(actual))
    counts_in_expected = np.abs(expected).max(axis=1) > rounding
    counts_in_actual = np.abs(actual).max(axis=1) > rounding

    # If actual = factor * expected does not hold for some sample, its gradient has another
    # direction, which no weight explains. A sample that does not count on one process has no such
    # factor, and is not looked at here.
    factors = _factor_of_each_sample(expected, actual, counts_in_expected)
    differences = np.abs(actual - factors[:, np.newaxis] * expected)
    error_of_sample = differences.max(axis=1)
    is_wrong = counts_in_expected & (error_of_sample > EQUAL_WEIGHT_SHARE * largest(actual))
    if is_wrong.any():
        return ()

    largest_factor = np.abs(factors).max()
    spread = np.ptp(factors)  # the largest minus the smallest
    all_factors_are_equal = spread <= EQUAL_WEIGHT_SHARE * largest_factor
    if all_factors_are_equal:
        return ()

    # A weight never reverses a gradient, but another target does.
    some_factor_is_negative = factors.min() < -EQUAL_WEIGHT_SHARE * largest_factor
    if some_factor_is_negative:
        return ()

    same = "outputs are the same; the loss's gradient by each is that of one process times a number"
    num_dropped = (counts_in_expected & ~counts_in_actual).sum()
    num_added = (counts_in_actual & ~counts_in_expected).sum()
    if num_dropped or num_added:
        counts = f"{num_dropped} samples count on one process only, {num_added} on several only"
        return (same, counts)

    factor_range = f"from {factors.min():.4g} to {factors.max():.4g}"
    return (same, f"this number is one of its own for each sample, {factor_range}")


def _factor_of_each_sample(expected: Array, actual: Array, counts: Array) -> Array:
    """Returns, for each sample, the factor `f` for which `f * expected` is nearest to `actual`.

    By least squares, f = (expected . actual) / (expected . expected).

    Args:
        expected: array of shape (samples, numbers).
        actual: array of the same shape.
        counts: a bool for each sample; if it is False, the factor is 0.
    """
    squares = (expected * expected).sum(axis=1)
    products = (expected * actual).sum(axis=1)
    factors = products / np.where(squares > 0, squares, 1.0)
    return np.where(counts, factors, 0.0)


def random_numbers_in_loss(case: Divergence) -> Cause | None:
    """LS308 or LS106: the loss was computed from random numbers that only one of the runs drew.

    LS106: several ranks drew, and all of them drew the same numbers. LS308: anything else.

    Needs: `loss_draws` and `drawn_digests`.
    Applies: if the loss of one run was computed from numbers that the other run did not draw.
    False positives: harmless random numbers. So this is the last rule for losses.
    Evidence: the gradients, the line that drew the numbers, and the line of the loss.
    """
    cause = cause_if_loss_is_random(case, *gradient_patterns(case))
    if cause is None:
        return None
    return cause.with_evidence(*loss_line(case))
