"""Rules that compare the values of gradients that are wrong but the same on all ranks.

A *rule* returns the `Cause` of a difference (`case`) between one process and several ranks, or
None. `case.expected` is the step on one process, `case.actual` the same step on the ranks (a
`RankUpdate` each, with the fields under "Needs"), and `expected` and `actual` are its gradients. A
*part* is the gradient of one backward pass on one rank.

The gradient of several ranks is a weighted sum of parts. If the gradient of one process is a sum of
the same parts with other weights, then only the weights are wrong, and they can be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lockstep.verify.algebra import (
    all_near,
    constant_ratio,
    fit_weights,
    flat,
    mean_of,
    near,
    norm,
    proportional,
    sum_of_passes,
)
from lockstep.verify.cause import Cause, format_items
from lockstep.verify.divergence import Divergence, same_samples
from lockstep.verify.names import path_of
from lockstep.verify.rules.evidence import (
    describe_local_comparison,
    describe_local_statistics,
    draws_with_wrong_counts,
    first_clip_line,
    format_backward_passes,
    format_ratio,
    format_weights,
    gradient_patterns,
    loss_line,
)
from lockstep.verify.rules.losses import (
    describe_terms,
    local_comparison,
    local_statistic_in_loss,
    other_loss_arguments,
    other_sample_weights,
    other_targets,
    outputs_of_earlier_steps,
    random_numbers_in_loss,
    terms_that_scale_differently,
)
from lockstep.verify.rules.model_inputs import (
    code_of_differing_inputs,
    inputs_differ,
    inputs_of_ranks,
    other_padding,
    sum_counts,
)
from lockstep.verify.rules.model_outputs import (
    batchnorm_in_other_passes,
    later_inputs_of_model,
    local_batchnorm,
    other_outputs,
)
from lockstep.verify.sample_rows import match_forwards
from lockstep.verify.tolerance import Array
from lockstep.verify.training_record import Update
from lockstep.wording import format_ranks

Gradients = Mapping[str, Array]

# The beginnings of the descriptions of counts in `Batch.weights`, with the simplest kind first.
KINDS_OF_COUNTS = ("samples", "labels", "non-zero", "ones", "values")

# Weights below this fraction of the largest weight are zero but for rounding.
ZERO_WEIGHT_SHARE = 1e-6

# Norms that differ by at most this fraction are equal.
MAX_ERROR_OF_EQUAL_NORMS = 1e-5


def explain_gradients(case: Divergence, expected: Gradients, actual: Gradients) -> Cause:
    """Returns the cause of wrong gradients, from the first rule that applies.

    Args:
        case: the difference.
        expected: gradients of one process, by parameter name.
        actual: gradients that the ranks used, or would have used without clipping.
    """
    for value_rule in VALUE_RULES:
        cause = value_rule(case, expected, actual)
        if cause is not None:
            return cause

    # The gradients alone do not tell the cause, but what they were computed from may tell it:
    # samples, outputs, losses, random numbers.
    for rule in RULES_WITHOUT_VALUES:
        cause = rule(case)
        if cause is not None:
            return cause

    return cause_if_no_rule_applies(case)


# Gradients that are a multiple of the right ones


def equal_within_rounding(case: Divergence, expected: Gradients, actual: Gradients) -> Cause | None:
    """LS210: the gradients are right apart from rounding.

    Needs: `gradients`.
    Applies: if all gradients are the right ones times a number that is 1 within rounding.
    False positives: none.
    Evidence: that the difference is rounding.
    """
    ratio = constant_ratio(expected, actual, case.max_error)
    if ratio is None or not near(ratio, 1):
        return None
    return Cause("LS210", ("they are those of one process but for rounding, as in float32",))


def multiple_by_a_count(case: Divergence, expected: Gradients, actual: Gradients) -> Cause | None:
    """All gradients are wrong by a factor that reveals the cause by itself.

    LS201: they are N times as large for N ranks (summed instead of averaged). LS202: 1/N. LS203:
    multiplied by the number of micro-batches. LS204: divided by it.

    Needs: `gradients`, and `losses`, one for each backward pass.
    Applies: if the ratio is such a number. LS203 and LS204 also need different numbers of backward
        passes on one process and on the ranks.
    False positives: several of these numbers may be equal. Then all codes that fit are mentioned.
    Evidence: the ratio, and an all-gather that may be the reason.
    """
    ratio = constant_ratio(expected, actual, case.max_error)
    if ratio is None:
        return None

    passes_of_one = case.expected.num_backward_passes
    passes_of_rank = case.actual.num_backward_passes

    # The ratio that each cause would lead to. If several causes lead to the same ratio, the first
    # one is reported: LS203 and LS204 come first, because other numbers of backward passes are a
    # fact that supports them.
    ratio_of_code: dict[str, float] = {}
    passes_are_known = passes_of_one > 0 and passes_of_rank > 0
    if passes_are_known and passes_of_one != passes_of_rank:
        # One process makes 1 pass, for example, and each rank makes 4, one for each micro-batch.
        ratio_of_code["LS203"] = passes_of_rank / passes_of_one  # 4: multiplied by their number
        ratio_of_code["LS204"] = passes_of_one / passes_of_rank  # 1/4: divided by it

    ratio_of_code["LS201"] = case.num_ranks  # summed instead of averaged
    ratio_of_code["LS202"] = 1 / case.num_ranks

    fitting_codes = []
    for code, ratio_of_cause in ratio_of_code.items():
        if near(ratio, ratio_of_cause, case.max_error):
            fitting_codes.append(code)

    if not fitting_codes:
        return None

    code, *other_codes = fitting_codes
    is_about_micro_batches = code in ("LS203", "LS204")
    if is_about_micro_batches:
        reasons = [format_backward_passes(case)]
    else:
        # A frequent reason for a factor N or 1/N is a gather whose gradient was added up wrongly.
        reasons = _describe_gather_without_gradient(case)

    # With another number of processes, the codes lead to different ratios.
    also = [f"it may be {other} as well; another --nproc tells" for other in other_codes]
    evidence = (_multiple(case, ratio), *loss_line(case), *reasons, *also)
    return Cause(code, evidence, ratio=ratio)


def _multiple(case: Divergence, ratio: float) -> str:
    """Says by which factor all gradients are wrong."""
    return f"all gradients are {format_ratio(ratio, case.num_ranks)} those of one process"


def _describe_gather_without_gradient(case: Divergence) -> list[str]:
    """Names the first all-gather whose input autograd does not track.

    It may be the reason for a wrong factor. A loss over gathered outputs then only has a gradient
    with respect to this rank's own outputs, which must be summed over the ranks, and not averaged.
    """
    for call in case.actual.calls:
        if call.name.startswith("all_gather") and not call.carries_gradient:
            text = "if the loss is computed from this all-gather, sum its gradient over ranks"
            return [f"{text}: {call.line}"]
    return []


def multiplied_after_passes(
    case: Divergence, expected: Gradients, actual: Gradients
) -> Cause | None:
    """LS403: the backward passes left the right gradients, which were then multiplied by a number.

    For example, a gradient was 6 in both runs. One process multiplied it by 0.5, which makes 3, and
    the ranks by 1. Then the ratio of the gradients is 6 / 3, and that of the factors 1 / 0.5.

    Needs: `gradient_factor` of both runs.
    Applies: if the ratio of the two factors is the ratio of the gradients.
    False positives: ranks that clip gradients to another norm than one process does, because
        clipping multiplies gradients too.
    Evidence: the factors, and the line that clips.
    """
    ratio = constant_ratio(expected, actual, case.max_error)
    if ratio is None:
        return None

    # The number that each run multiplied all its gradients by. It is 1 if they were not changed,
    # and NaN if it is not known.
    factor_of_one = case.expected[0].gradient_factor
    factor_of_ranks = case.actual[0].gradient_factor
    if factor_of_one == 0:
        return None

    # If a factor is NaN, so is the ratio, and `near` returns False.
    ratio_of_factors = factor_of_ranks / factor_of_one
    if not near(ratio_of_factors, ratio):
        return None

    text = (
        "they were right after the last backward pass, and then multiplied "
        f"by {factor_of_ranks:.6g}, on one process by {factor_of_one:.6g}"
    )
    return Cause("LS403", (text, *first_clip_line(case)))


def other_multiple(case: Divergence, expected: Gradients, actual: Gradients) -> Cause | None:
    """LS209: all gradients are wrong by one factor, which nothing explains.

    Needs: `gradients`.
    Applies: if all gradients are the right ones times one number.
    False positives: a loss with another weight, or a wrong factor anywhere after it.
    Evidence: the factor, and the line of the loss.
    """
    ratio = constant_ratio(expected, actual, case.max_error)
    if ratio is None:
        return None
    return Cause("LS209", (_multiple(case, ratio), *loss_line(case)), ratio=ratio)


# Gradients that were changed after a backward pass


def clipped_between_passes(
    case: Divergence, expected: Gradients, actual: Gradients
) -> Cause | None:
    """LS404: gradients were clipped before the last backward pass of the step.

    Needs: `calls` that clip, with `num_passes_before`, and `losses`, one for each backward pass.
    Applies: if such a call changed a gradient, in either run.
    False positives: something else may be wrong as well.
    Evidence: the backward pass before the call, its line, and the factors by which gradients are
        wrong.
    """
    for rank_update in (*case.actual, *case.expected):
        num_passes = len(rank_update.losses)  # of the whole step
        for call in rank_update.calls:
            if call.name != "clip" or not call.has_clipped:
                continue

            # If more backward passes follow, they add their gradients to the clipped ones.
            passes_before = call.num_passes_before
            more_passes_follow = passes_before < num_passes
            if more_passes_follow:
                text = f"clipped after backward pass {passes_before} of {num_passes}: {call.line}"
                return Cause("LS404", (text, *gradient_patterns(case)))

    return None


def changed_after_right_passes(
    case: Divergence, expected: Gradients, actual: Gradients
) -> Cause | None:
    """Names what was done to gradients after the backward passes had left the right ones.

    LS213: a communication hook of DDP. LS404: each rank multiplied its gradients by a number of its
    own before they were summed. LS406: gradients were changed before they were averaged. LS210:
    unknown.

    Needs: `local_gradients`; `comm_hook_line` and `calls`.
    Applies: if the mean of the ranks' local gradients equals the gradient of one process (perhaps
        times a number), but the ranks used a gradient that is no multiple of this mean.
    False positives: none known.
    Evidence: that the mean is right, and what was done.
    """
    names = list(actual)  # the gradients that the ranks used

    # The sum of each rank's local gradients over its backward passes; empty if it is not known.
    # Ranks whose losses do not count, such as the first stages of a pipeline, are left out.
    local_sums = []
    for record in case.actual:
        if record.contributes:
            local_sums.append(sum_of_passes(record.local_gradients, names))

    gradient_of_one_process = sum_of_passes(case.expected[0].local_gradients, names)
    all_sums_are_known = bool(gradient_of_one_process) and all(local_sums)
    if case.num_ranks == 1 or not all_sums_are_known:
        return None

    # Is the mean right, perhaps times a number? It is if mean = ratio * gradient_of_one_process. If
    # there is no such ratio, the backward passes themselves were wrong, and another rule applies.
    mean = mean_of(local_sums)
    ratio = constant_ratio(gradient_of_one_process, mean, case.max_error)
    if ratio is None:
        return None

    # Did the ranks use the mean, perhaps times a number? Then they have averaged correctly, and
    # nothing was done to the gradients afterwards.
    ranks_used_mean = constant_ratio(mean, actual, case.max_error) is not None
    if ranks_used_mean:
        return None

    if near(ratio, 1):
        mean_text = (
            "what the backward passes left is, on average over the ranks, that of one process"
        )
    else:
        mean_text = (
            f"what the backward passes left is, on average over the ranks, {ratio:.6g} times that "
            "of one process"
        )

    return _cause_of_change_after_passes(case, actual, local_sums, mean_text)


def _cause_of_change_after_passes(
    case: Divergence, actual: Gradients, local_sums: Sequence[Gradients], mean_text: str
) -> Cause:
    """Names what was done to gradients after the backward passes of the ranks.

    The mean of the ranks' local gradients is right, but they did not step with this mean. See
    `changed_after_right_passes` for the codes. For example, the evidence for LS404 is:

        what the backward passes left is, on average over the ranks, that of one process
        each rank multiplied its own gradients before they were added: 0.25 : 0.75

    Args:
        case: the difference.
        actual: gradients that the ranks used.
        local_sums: the sum of each rank's local gradients over its backward passes.
        mean_text: first sentence of evidence, which says that the mean of these sums is right:
            "what the backward passes left is, on average over the ranks, that of one process".
    """
    patterns = gradient_patterns(case)

    hook_line = case.actual.first_on_any_rank("comm_hook_line")
    if hook_line:
        text = "what DDP's communication hook made of it is not its mean"
        return Cause("LS213", (mean_text, text, hook_line, *patterns))

    # Each rank has multiplied its gradients by another number before they were summed:
    # actual = used_weights[0] * local_sums[0] + used_weights[1] * local_sums[1] + ...
    used_weights = fit_weights(actual, local_sums, case.max_error)
    if used_weights is not None and not all_near(used_weights, case.max_error):
        text = (
            "each rank multiplied its own gradients before they were added: "
            f"{format_weights(used_weights)}"
        )
        return Cause("LS404", (mean_text, text, *_describe_equal_norms(local_sums, used_weights)))

    for call in case.actual.calls:
        if call.gradient_changed:
            text = f"each rank changed its own gradients before they were averaged: {call.line}"
            return Cause("LS406", (mean_text, text, *patterns))

    # A hook that changed each rank's gradients after they were recorded.
    sentences_on_hook = _describe_gradient_hook(case)
    if sentences_on_hook:
        return Cause("LS406", (mean_text, *sentences_on_hook, *patterns))

    # It is not known what the ranks did to the right mean.
    return Cause("LS210", (f"{mean_text}; what was made of it afterwards is not", *patterns))


def _describe_equal_norms(
    gradients_of_ranks: Sequence[Gradients], factors: Sequence[float]
) -> list[str]:
    """Says that the gradients of all ranks have the same norm after they were multiplied.

    Clipping makes them equal. The result is one sentence, or an empty list if the norms differ.

    Args:
        gradients_of_ranks: gradients of each rank.
        factors: number by which each rank has multiplied its gradients.
    """
    norms_after = []
    for gradients, factor in zip(gradients_of_ranks, factors, strict=True):
        norms_after.append(norm(flat(gradients)) * abs(factor))

    if all_near(norms_after, MAX_ERROR_OF_EQUAL_NORMS):
        return ["that gave the gradients of all ranks the same norm, as clipping does"]
    return []


# Gradients that are a sum of the same parts with other weights


def unused_parameters(case: Divergence, expected: Gradients, actual: Gradients) -> Cause | None:
    """LS312: a rank's backward passes do not reach some parameters that those of one process reach.

    Needs: `local_gradients`.
    Applies: if all gradients that differ belong to such parameters.
    False positives: none known.
    Evidence: which ranks.
    """
    names_on_one_process = _names_with_gradients(case.expected[0].local_gradients)
    missing_names: set[str] = set()  # parameters without a gradient on some rank
    ranks = []
    for rank, record in enumerate(case.actual):
        gradients_are_known = record.contributes and bool(record.local_gradients)
        if not gradients_are_known:
            continue

        missing_on_rank = names_on_one_process - _names_with_gradients(record.local_gradients)
        if missing_on_rank:
            missing_names |= missing_on_rank
            ranks.append(rank)

    explains_all = set(case.names) <= missing_names
    if not missing_names or not explains_all:
        return None

    text = f"the backward passes of {format_ranks(ranks)} left no gradient of these parameters"
    text_on_one_process = "on one process they have gradients, and all other gradients are right"
    return Cause("LS312", (text, text_on_one_process), case.names)


def _names_with_gradients(passes: Sequence[Gradients]) -> set[str]:
    """Returns the names of parameters that got a gradient in some backward pass."""
    names: set[str] = set()
    for gradients in passes:
        names |= gradients.keys()
    return names


def other_weights(case: Divergence, expected: Gradients, actual: Gradients) -> Cause | None:
    """The gradient of one process is a sum of the same parts with other weights.

    LS206: the weights should be the numbers of samples. LS205: they should be another count, such
    as tokens; a mean of means was computed instead. LS208: the loss compares samples, or was
    computed from a statistic. LS110: one process has only some of the parts. LS406: a hook changed
    the gradients. LS210: unknown.

    Needs: `local_gradients`; counts in `batches` and `loss_divisors`; `gradient_hook_line`.
    Applies: if the gradient of one process is a weighted sum of the parts. LS205 without a known
        count needs parts that are weighted equally, and right weights with the same sum.
    False positives: with few parts and small counts, another count may fit by chance.
    Evidence: the weights that were used, and those that would be right.
    """
    # A part is the gradient of one backward pass on one rank. Ranks whose losses do not count, such
    # as the first stages of a pipeline, have no parts.
    parts = []
    for record in case.actual:
        if record.contributes:
            parts += record.local_gradients

    # The weights with which the ranks should have added the parts up:
    # expected = right_weights[0] * parts[0] + right_weights[1] * parts[1] + ...
    right_weights = fit_weights(expected, parts, case.max_error)
    if right_weights is None:
        return None

    # The weights with which the ranks did add them up:
    # actual = used_weights[0] * parts[0] + used_weights[1] * parts[1] + ...
    used_weights = fit_weights(actual, parts, case.max_error)

    # The ranks stepped with something that is no sum of the parts. If the right weights are equal,
    # the plain sum of the parts would have been right, so something was done to it afterwards.
    if used_weights is None:
        plain_sum_is_right = all_near(right_weights, case.max_error)
        if not plain_sum_is_right:
            return None
        text = "the sum of what the ranks' backward passes left is right up to a factor"
        sentences_on_hook = _describe_gradient_hook(case)
        if sentences_on_hook:
            return Cause("LS406", (text, *sentences_on_hook, *gradient_patterns(case)))
        return cause_by_inputs_or_unknown(case, f"{text}; what was made of it afterwards is not")

    # A right weight of 0 means that one process did not train this part at all. A negative weight
    # occurs in no mean. In both cases, no count can explain the weights.
    rounded_weights = _with_tiny_weights_as_zero(case, right_weights)
    all_weights_are_positive = min(rounded_weights) > 0.0
    if not all_weights_are_positive:
        return _cause_of_parts_without_weight(case, rounded_weights, used_weights)

    evidence = (
        "the gradient of one process is a sum of the same parts with other weights",
        f"the backward passes of the ranks weigh {format_weights(used_weights)}; "
        f"they should weigh {format_weights(right_weights)}",
        *loss_line(case),
    )

    return _cause_of_other_weights(case, evidence, right_weights, used_weights)


def _cause_of_other_weights(
    case: Divergence,
    evidence: tuple[str, ...],
    right_weights: Sequence[float],
    used_weights: Sequence[float],
) -> Cause:
    """Names the cause of wrong weights of the parts.

    LS206, LS205: they should be the numbers of samples, or another count, such as tokens. LS208:
    the loss compares samples, or was computed from a statistic. LS210: unknown.

    Args:
        case: the difference.
        evidence: sentences about the weights, which come first.
        right_weights: weights with which the parts add up to the gradient of one process.
        used_weights: weights with which the parts add up to the gradient of the ranks.
    """
    # Sentences on lines that computed a statistic over a rank's samples, such as the sum of a mask.
    statistics = describe_local_statistics(case)

    # 1. The weights should have been proportional to a count that is known.
    cause = _cause_of_missing_count(case, evidence, right_weights, used_weights)
    if cause is not None:
        return cause

    # 2. The loss compares samples, so it is no mean over samples, and no weights make it right.
    comparison = describe_local_comparison(case)
    if comparison:
        return Cause("LS208", (*evidence, *comparison))

    # 3. The ranks computed a mean of means, so the parts should be weighted by some count: none of
    # the counts above, but perhaps one of the statistics.
    if _is_mean_of_means(right_weights, used_weights, case.max_error):
        if statistics:
            return Cause("LS205", (*evidence, *statistics))
        text = "nothing that was counted in the batches is proportional to these weights"
        return Cause("LS205", (*evidence, text))

    # 4. A statistic is the only thing that is known to differ from one process, so the ranks have
    # probably multiplied their losses by it.
    random_numbers_may_be_reason = bool(draws_with_wrong_counts(case))
    if statistics and not random_numbers_may_be_reason:
        return Cause("LS208", (*evidence, *statistics))

    # 5. The cause is not known.
    return Cause("LS210", evidence)


def _cause_of_missing_count(
    case: Divergence,
    evidence: tuple[str, ...],
    right_weights: Sequence[float],
    used_weights: Sequence[float],
) -> Cause | None:
    """Names the count by which the parts should have been weighted; None if no known count fits.

    For example, the ranks gave parts of 8 and 4 samples the weights 1/2 and 1/2, and 2/3 and 1/3
    are right. The weights must be corrected by the factors 4/3 and 2/3. These are proportional to 8
    and 4, so the number of samples is what the weights leave out. The evidence for it is "that is
    by their samples: 8, 4".

    Args:
        case: the difference.
        evidence: sentences about the weights, which come first.
        right_weights: weights with which the parts add up to the gradient of one process.
        used_weights: weights with which the parts add up to the gradient of the ranks.
    """
    # The factors from the used to the right weights, such as 4/3 and 2/3.
    corrections = _corrections_of_weights(right_weights, used_weights)
    # Nouns, each with a count for each part: "samples" with [8, 4].
    counts_by_noun = _counts_of_parts(case, num_parts=len(right_weights))
    for noun, counts in counts_by_noun.items():
        if proportional(corrections, counts):
            code = "LS206" if noun == "samples" else "LS205"
            numbers = ", ".join(f"{count:g}" for count in counts)
            return Cause(code, (*evidence, f"that is by their {noun}: {numbers}"))

    return None


def _is_mean_of_means(
    right_weights: Sequence[float], used_weights: Sequence[float], max_error: float
) -> bool:
    """True if the ranks used equal weights that have the same sum as the right ones.

    For example, they used 1/2 and 1/2, and the right weights are 2/3 and 1/3.
    """
    weights_are_equal = all_near(used_weights, max_error)
    have_same_sum = near(sum(right_weights), sum(used_weights), 1e-5)
    return weights_are_equal and have_same_sum


def _corrections_of_weights(
    right_weights: Sequence[float], used_weights: Sequence[float]
) -> list[float]:
    """Returns the number by which the ranks should have multiplied the weight of each part.

    For example, the ranks gave parts of 8 and 4 samples the weights 1/2 and 1/2, and 2/3 and 1/3
    are right. Then the numbers are 4/3 and 2/3, which are proportional to the numbers of samples.
    """
    corrections = []
    for right, used in zip(right_weights, used_weights, strict=True):
        corrections.append(right / used if used else 0.0)
    return corrections


def _with_tiny_weights_as_zero(case: Divergence, right_weights: Sequence[float]) -> list[float]:
    """Sets the weights to 0 that differ from zero only by rounding.

    Such a weight belongs to a part that is not in the gradient of one process.
    """
    largest_weight = max(abs(weight) for weight in right_weights)
    limit = max(ZERO_WEIGHT_SHARE, case.max_error) * largest_weight

    rounded_weights = []
    for weight in right_weights:
        rounded_weights.append(weight if abs(weight) > limit else 0.0)
    return rounded_weights


def _is_mean_of_some_parts(weights_of_parts: Sequence[float]) -> bool:
    """True if a sum with these weights is a mean of some parts, or a multiple of it.

    For example, the weights 1/2, 0 and 1/2 belong to the mean of the first and the third part.
    """
    nonzero_weights = [weight for weight in weights_of_parts if weight != 0]
    if not nonzero_weights or min(nonzero_weights) < 0:
        return False
    return all_near(nonzero_weights, 1e-5)


def _cause_of_parts_without_weight(
    case: Divergence, right_weights: Sequence[float], used_weights: Sequence[float]
) -> Cause:
    """Names the cause of weights that are right if they are zero or negative for some part.

    LS110: one process trains only some of the parts, so the ranks have too many samples. For
    example, the right weights of four parts are 1/2, 1/2, 0 and 0, and the ranks used 1/4 for each.
    LS210: anything else.

    Args:
        case: the difference.
        right_weights: weights with which the parts add up to the gradient of one process; 0 for a
            part that is not in it.
        used_weights: weights with which the parts add up to the gradient of the ranks.
    """
    one_process_has_mean_of_some = _is_mean_of_some_parts(right_weights)
    ranks_have_mean_of_all = all_near(used_weights, max_error=1e-5)
    ranks_seem_to_train_more = one_process_has_mean_of_some and ranks_have_mean_of_all
    if ranks_seem_to_train_more and not _are_known_to_have_same_samples(case):
        return Cause("LS110", (*_describe_parts_of_one_process(right_weights), *loss_line(case)))

    text = "the gradient of one process is a sum of the same parts, but not a mean of them"
    return Cause("LS210", (text, *loss_line(case), *gradient_patterns(case)))


def _are_known_to_have_same_samples(case: Divergence) -> bool:
    """True if both runs train the same samples. False if they do not, or if it is not known."""
    same_indices, same_contents = same_samples(case.expected, case.actual)
    return same_indices is True or same_contents is True


def _describe_parts_of_one_process(right_weights: Sequence[float]) -> tuple[str, str]:
    """Says which parts are in the gradient of one process, and what a part is.

    For example, the weights [1, 0, 0] give "the gradient of one process is that of part 1 of 3
    alone".

    Args:
        right_weights: weight of each part in the gradient of one process; 0 for a part that is not
            in it.
    """
    part_numbers = []  # of the parts in the gradient of one process, counted from 1
    for part_number, weight in enumerate(right_weights, start=1):
        if weight > 0:
            part_numbers.append(part_number)

    numbers = format_items(part_numbers)
    plural = "s" if len(part_numbers) > 1 else ""
    text = (
        f"the gradient of one process is that of part{plural} {numbers} of {len(right_weights)} "
        "alone"
    )
    what_is_a_part = "a part is what one backward pass of one rank left, in the order of ranks"
    return text, what_is_a_part


def _counts_of_parts(case: Divergence, num_parts: int) -> dict[str, list[float]]:
    """Returns counts by which the parts may have to be weighted, such as their numbers of samples.

    A part is the gradient of one backward pass on one rank. The loss of this pass may be a mean
    over any of the counts. An example for three parts is `{"samples": [8, 8, 4], "labels in tensor
    1": [60, 75, 40]}`. Counts of batches come first, the simplest first, and then divisors of
    losses.

    Args:
        case: the difference.
        num_parts: number of parts. If there is another number of batches (or losses), they cannot
            be assigned to parts and are ignored.
    """
    # Ranks whose losses do not count, such as the first stages of a pipeline, have no parts, so
    # their batches and losses are left out. `Update.batches` does so by itself.

    # Counts of each batch, such as {"samples": 8, "labels in tensor 1": 60}.
    counts_of_batches = [batch.weights for batch in case.actual.batches]

    # For each loss, numbers that it may have been divided by.
    divisors_of_losses: list[Mapping[str, float]] = []
    for record in case.actual:
        if record.contributes:
            divisors_of_losses += record.loss_divisors

    counts: dict[str, list[float]] = {}
    if len(counts_of_batches) == num_parts:
        counts |= _simplest_first(_numbers_by_key(counts_of_batches))

    if len(divisors_of_losses) == num_parts:
        counts |= _numbers_by_key(divisors_of_losses)

    return counts


def _simplest_first(counts_by_key: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Returns counts in the order of `KINDS_OF_COUNTS`: "samples" before "labels in tensor 1"."""
    ordered_counts = {}
    for kind in KINDS_OF_COUNTS:
        for key, counts in counts_by_key.items():
            if key.startswith(kind):
                ordered_counts[key] = counts
    return ordered_counts


def _numbers_by_key(dictionaries: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Turns a list of dictionaries into a dictionary of lists, with 0 for a missing number.

    For example, [{"a": 1, "b": 2}, {"a": 3}] becomes {"a": [1, 3], "b": [2, 0]}.
    """
    keys: dict[str, None] = {}  # an ordered set
    for dictionary in dictionaries:
        keys.update(dict.fromkeys(dictionary))

    numbers = {}
    for key in keys:
        numbers[key] = [dictionary.get(key, 0.0) for dictionary in dictionaries]
    return numbers


# Gradients in which samples depend on each other or on chance


def gradient_hook(case: Divergence) -> Cause | None:
    """LS406: a hook of the script changed gradients of a rank before they were averaged.

    Needs: `gradient_hook_line`.
    Applies: if there is such a hook.
    False positives: something else may be wrong as well.
    Evidence: the line of the hook.
    """
    sentences_on_hook = _describe_gradient_hook(case)
    if not sentences_on_hook:
        return None
    return Cause("LS406", (*sentences_on_hook, *gradient_patterns(case)))


def _describe_gradient_hook(case: Divergence) -> list[str]:
    """Says that a hook of the script changed gradients, and where it was registered.

    The list is empty if there is no such hook.
    """
    line = case.actual.first_on_any_rank("gradient_hook_line")
    if not line:
        return []
    return ["a hook changed gradients of the ranks while they still differed", line]


def cause_if_no_rule_applies(case: Divergence) -> Cause:
    """LS210, the cause is not known; or a code for inputs that are known to differ.

    Needs: `local_gradients` and `loss_terms` for the evidence.
    Applies: always.
    False positives: everything that no other rule explains.
    Evidence: that no weighting of the local gradients is right, and how the terms of the loss
        scale.
    """
    evidence = []
    if case.num_ranks > 1 and any(record.local_gradients for record in case.actual):
        evidence.append("no weighting of the ranks' own gradients gives that of one process")
    terms = describe_terms(case).sentences
    return cause_by_inputs_or_unknown(case, *evidence, *terms)


def cause_by_inputs_or_unknown(case: Divergence, *evidence: str) -> Cause:
    """Names what is known if no rule explains the gradients.

    If the models were called with different inputs than on one process, these are the cause: LS101,
    LS102, LS110 or LS111. Otherwise, the cause is not known: LS210.

    Needs: `model_inputs` and `forwards`.
    Applies: always.
    False positives: everything that no other rule explains.
    Evidence: the given evidence, whether inputs and outputs are equal, statistics, and the
        gradients.

    Args:
        case: the difference.
        *evidence: sentences that come first.
    """
    # How often the models of each rank got each input. Empty if some input is not known.
    input_counts_of_one_process = inputs_of_ranks(case.expected)
    input_counts_of_ranks = inputs_of_ranks(case.actual)
    inputs_are_known = bool(input_counts_of_one_process) and bool(input_counts_of_ranks)

    # Inputs of other shapes, such as padded texts, may still hold the same samples.
    same_shapes = _shapes_of_inputs(case.expected) == _shapes_of_inputs(case.actual)

    has_other_inputs = inputs_are_known and same_shapes and inputs_differ(case)
    if has_other_inputs:
        code = code_of_differing_inputs(
            input_counts_of_one_process, input_counts_of_ranks, case.num_ranks
        )
    else:
        code = "LS210"

    return Cause(
        code,
        (
            *evidence,
            *_describe_inputs(case),
            *_compare_outputs(case),
            *_describe_what_is_carried_over(case),
            *describe_local_statistics(case),
            *loss_line(case),
            *gradient_patterns(case),
        ),
    )


def _shapes_of_inputs(update: Update) -> set[str]:
    """Returns the shapes of the samples that models were called with."""
    return {batch.shape for record in update for batch in record.model_inputs}


def _describe_inputs(case: Divergence) -> list[str]:
    """Says how many inputs the models were called with, and how many both runs have in common.

    An input is what a model is given for one sample: a call with a batch of 8 samples has 8 inputs.

    The result is one sentence, or an empty list if some input is not known.
    """
    expected_of_ranks = inputs_of_ranks(case.expected)
    actual_of_ranks = inputs_of_ranks(case.actual)
    if not expected_of_ranks or not actual_of_ranks:
        return []

    # Counters that say how often each input occurs in a run.
    expected_counts = sum_counts(expected_of_ranks)
    actual_counts = sum_counts(actual_of_ranks)
    expected_text = str(expected_counts.total())
    actual_text = str(actual_counts.total())

    # Shapes are only mentioned if they differ.
    expected_shapes = _shapes_of_inputs(case.expected)
    actual_shapes = _shapes_of_inputs(case.actual)
    if expected_shapes != actual_shapes:
        expected_text += f" of {' or '.join(sorted(expected_shapes))}"
        actual_text += f" of {' or '.join(sorted(actual_shapes))}"

    # The intersection of two counters has the smaller count of each input.
    num_same = (expected_counts & actual_counts).total()
    return [
        f"the models were called with {expected_text} inputs, on {case.num_ranks} processes "
        f"with {actual_text}; {num_same} are the same"
    ]


def _compare_outputs(case: Divergence) -> list[str]:
    """Says whether the models returned the same outputs for the same inputs.

    The result is one sentence, or an empty list if the outputs cannot be compared.
    """
    forwards = match_forwards(case.expected, case.actual)
    if not forwards:
        return []

    wrong_models = []
    for forward in forwards:
        differs = forward.differing_rows("outputs")  # a bool for each sample
        if len(differs) == 0:  # the output has no row for each sample, so it cannot be compared
            return []
        if differs.any():
            wrong_models.append(forward.model)

    if wrong_models:
        return [f"for the same inputs something else was returned by {format_items(wrong_models)}"]

    # The models are not the cause, so the difference arises in the loss or after it.
    return ["for each sample the models returned the same; it is the loss, or later"]


def _describe_what_is_carried_over(case: Divergence) -> list[str]:
    """Says that all earlier steps are equal, and what the modules carry over from step to step.

    The result is one sentence, or an empty list in the first step.
    """
    if case.update_index == 0:
        return []

    # The cause may be a tensor that a module keeps from one step to the next.
    text = "until here all steps are equal, so it may be what is carried from step to step"

    # Tensors that modules have before the step, besides parameters and buffers: "layer.state" for
    # "Net/layer.state".
    kept_names = set()
    for record in case.actual:
        for name in record.module_tensors_before:
            kept_names.add(path_of(name))

    if kept_names:
        text += f": {format_items(sorted(kept_names))}"

    return [text]


ValueRule = Callable[[Divergence, Gradients, Gradients], Cause | None]

# These rules are tried in order. Those for a gradient that is a multiple of the right one come
# first, since the factor reveals the cause by itself.
VALUE_RULES: tuple[ValueRule, ...] = (
    equal_within_rounding,
    multiple_by_a_count,
    multiplied_after_passes,
    other_multiple,
    clipped_between_passes,
    changed_after_right_passes,
    unused_parameters,
    other_weights,
)

RULES_WITHOUT_VALUES: tuple[Callable[[Divergence], Cause | None], ...] = (
    local_batchnorm,
    batchnorm_in_other_passes,
    gradient_hook,
    terms_that_scale_differently,
    later_inputs_of_model,
    other_outputs,
    local_comparison,
    other_targets,
    outputs_of_earlier_steps,
    other_loss_arguments,
    local_statistic_in_loss,
    other_sample_weights,
    random_numbers_in_loss,
    other_padding,
)
