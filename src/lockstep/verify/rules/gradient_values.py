"""Rules that compare the values of gradients, which are wrong but the same on all ranks.

A *rule* returns the `Cause` of a difference (`case`) between one process and many ranks, or None.
Of the step that differs, `case.expected` is what one process recorded, `case.actual` what the ranks
recorded (a `RankUpdate` each, with the fields under "Needs"). The arguments `expected` and `actual`
are its gradients. A *part* is the gradient that one backward pass of one rank left.

The gradient of several ranks is a sum of parts, each times a weight. If the gradient of one process
is such a sum too, with other weights, then only the weighting is wrong, and the weights say what it
should have been.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lockstep.verify.algebra import (
    all_near,
    constant_ratio,
    flat,
    mean_of,
    near,
    norm,
    proportional,
    sum_of_passes,
    weights,
)
from lockstep.verify.cause import Cause, format_items
from lockstep.verify.compare import Divergence, same_samples
from lockstep.verify.rules.evidence import (
    draws_that_may_differ,
    first_clip_line,
    format_backward_passes,
    format_ratio,
    format_weights,
    gradient_patterns,
    local_statistics,
    loss_compares_local_samples,
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
    inputs_differ,
    inputs_of_ranks,
    other_padding,
    sum_counts,
    unknown_inputs_code,
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

# Weights with a share of the largest one below this are what rounding leaves of a zero.
ZERO_WEIGHT_SHARE = 1e-6


def explain_gradients(case: Divergence, expected: Gradients, actual: Gradients) -> Cause:
    """Returns the cause of gradients whose values are wrong: that of the first rule that has one.

    Args:
        case: the difference.
        expected: gradients of one process.
        actual: gradients that the ranks used, or would have used without clipping.
    """
    for value_rule in VALUE_RULES:
        cause = value_rule(case, expected, actual)
        if cause is not None:
            return cause

    # The gradients themselves do not say it. What they were computed from may: samples, outputs,
    # losses, draws of random numbers.
    for rule in RULES_WITHOUT_VALUES:
        cause = rule(case)
        if cause is not None:
            return cause

    return unknown_coupling(case)


# Gradients that are a multiple of the right ones


def equal_within_rounding(case: Divergence, expected: Gradients, actual: Gradients) -> Cause | None:
    """LS210: the gradients are right apart from rounding.

    Needs: `gradients`.
    Applies: if all are one multiple of the right ones, and the number is 1.
    False positives: none.
    Evidence: that it is rounding.
    """
    ratio = constant_ratio(expected, actual, case.max_error)
    if ratio is None or not near(ratio, 1):
        return None
    return Cause("LS210", ("they are those of one process but for rounding, as in float32",))


def multiple_by_a_count(case: Divergence, expected: Gradients, actual: Gradients) -> Cause | None:
    """All gradients are off by a number that says by itself what is wrong.

    LS201: N times as large for N ranks (added up instead of averaged). LS202: 1/N. LS203: times the
    number of micro-batches. LS204: divided by it.

    Needs: `gradients`, and `losses`, one for each backward pass.
    Applies: if the ratio is such a number. Micro-batches count if one process has another number
        of backward passes.
    False positives: several of these numbers may be equal; then all codes that fit are said.
    Evidence: the ratio, and an all-gather that could be the reason.
    """
    ratio = constant_ratio(expected, actual, case.max_error)
    if ratio is None:
        return None

    passes_of_one = case.expected.backward_passes
    passes_of_rank = case.actual.backward_passes

    # The ratio that each cause would lead to. The first one that fits is returned.
    ratio_of_code: dict[str, float] = {}
    passes_are_known = passes_of_one > 0 and passes_of_rank > 0
    if passes_are_known and passes_of_one != passes_of_rank:
        ratio_of_code["LS203"] = passes_of_rank / passes_of_one
        ratio_of_code["LS204"] = passes_of_one / passes_of_rank

    ratio_of_code["LS201"] = case.num_ranks
    ratio_of_code["LS202"] = 1 / case.num_ranks
    fitting_codes = []
    for code, ratio_of_cause in ratio_of_code.items():
        if near(ratio, ratio_of_cause, case.max_error):
            fitting_codes.append(code)

    if not fitting_codes:
        return None

    code, *other_codes = fitting_codes
    if code in ("LS203", "LS204"):
        reasons = [format_backward_passes(case)]
    else:
        reasons = _gather_without_graph(case)

    also = [f"it may be {other} as well; another --nproc tells" for other in other_codes]
    evidence = (_multiple(case, ratio), *loss_line(case), *reasons, *also)
    return Cause(code, evidence, ratio=ratio)


def _multiple(case: Divergence, ratio: float) -> str:
    """Says by which factor all gradients are wrong: "all gradients are 2 times those of ..."."""
    return f"all gradients are {format_ratio(ratio, case.num_ranks)} those of one process"


def _gather_without_graph(case: Divergence) -> list[str]:
    """Names the first all-gather whose input autograd does not track.

    A loss over gathered outputs then has a gradient by this rank's own outputs only, which has to
    be added up over the ranks instead of averaged.
    """
    for call in case.actual.calls:
        if call.name.startswith("all_gather") and not call.carries_gradient:
            text = "if the loss is computed from this all-gather, sum its gradient over ranks"
            return [f"{text}: {call.line}"]
    return []


def multiplied_after_passes(
    case: Divergence, expected: Gradients, actual: Gradients
) -> Cause | None:
    """LS403: gradients were right after the last backward pass and then multiplied by a number.

    Needs: `gradient_factor` of both runs.
    Applies: if the two factors have the ratio of the gradients.
    False positives: clipping by another norm, which is such a factor.
    Evidence: the factors, and the line that clips.
    """
    ratio = constant_ratio(expected, actual, case.max_error)
    # The number that a run multiplied all its gradients by, 1 if it did nothing to them.
    factor_of_one = case.expected[0].gradient_factor
    factor_of_ranks = case.actual[0].gradient_factor

    if ratio is None or factor_of_one == 0:
        return None
    # A factor that is not known is NaN, which is near to nothing.
    if not near(factor_of_ranks / factor_of_one, ratio):
        return None

    text = (
        "they were right after the last backward pass, and then multiplied "
        f"by {factor_of_ranks:.6g}, on one process by {factor_of_one:.6g}"
    )
    return Cause("LS403", (text, *first_clip_line(case)))


def other_multiple(case: Divergence, expected: Gradients, actual: Gradients) -> Cause | None:
    """LS209: all gradients are off by one number that nothing explains.

    Needs: `gradients`.
    Applies: if they are one multiple of the right ones.
    False positives: a loss with another weight, or a wrong factor anywhere after it.
    Evidence: the number, and the line of the loss.
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

    Needs: `calls` that clip, with `passes_before`, and `losses`, one for each backward pass.
    Applies: if such a call changed a gradient, in either run.
    False positives: something else may be wrong as well.
    Evidence: after which backward pass, the line, and the factors by which gradients are wrong.
    """
    for rank in (*case.actual, *case.expected):
        num_passes = len(rank.losses)
        for call in rank.calls:
            # The backward passes after it add to gradients that are clipped already.
            is_early = call.passes_before < num_passes
            if call.name == "clip" and call.has_clipped and is_early:
                text = (
                    f"clipped after backward pass {call.passes_before} of {num_passes}: {call.line}"
                )
                return Cause("LS404", (text, *gradient_patterns(case)))

    return None


def changed_after_right_passes(
    case: Divergence, expected: Gradients, actual: Gradients
) -> Cause | None:
    """Names what was done to gradients after backward passes that were right.

    LS213: a communication hook of DDP. LS404: each rank multiplied its gradients by another number
    before they were added. LS406: gradients were changed before they were averaged. LS210: unknown.

    Needs: `local_gradients`; `comm_hook_line` and `calls`.
    Applies: if the mean of what the ranks' backward passes left is right, or right times a number,
        and the gradients that were used are no multiple of this mean.
    False positives: none known.
    Evidence: that the mean is right, and what was done.
    """
    # What all backward passes of each rank added up to, by name; empty if that is not known.
    local_sums = []
    for rank in case.actual:
        if rank.contributes:  # not so the first stages of a pipeline
            local_sums.append(sum_of_passes(rank.local_gradients, actual))

    sum_of_one = sum_of_passes(case.expected[0].local_gradients, actual)
    if case.num_ranks == 1 or not sum_of_one or not all(local_sums):
        return None

    mean = mean_of(local_sums)
    ratio = constant_ratio(sum_of_one, mean, case.max_error)
    if ratio is None:  # the backward passes themselves were wrong
        return None

    used_is_multiple_of_mean = constant_ratio(mean, actual, case.max_error) is not None
    if used_is_multiple_of_mean:  # the ranks did average
        return None

    right = "what the backward passes left is, on average over the ranks, that of one process"
    if not near(ratio, 1):
        right = (
            f"what the backward passes left is, on average over the ranks, {ratio:.6g} times that "
            "of one process"
        )

    patterns = gradient_patterns(case)

    hook_line = case.actual.first("comm_hook_line")
    if hook_line:
        text = "what DDP's communication hook made of it is not its mean"
        return Cause("LS213", (right, text, hook_line, *patterns))

    # actual = used_weights[0] * local_sums[0] + used_weights[1] * local_sums[1] + ..., or None
    used_weights = weights(actual, local_sums, case.max_error)
    if used_weights is not None and not all_near(used_weights, case.max_error):
        text = (
            f"each rank multiplied its own before they were added: {format_weights(used_weights)}"
        )
        norms = []
        for local_sum, weight in zip(local_sums, used_weights, strict=True):
            norms.append(norm(flat(local_sum)) * abs(weight))

        same_norm = []
        if all_near(norms, 1e-5):
            same_norm.append("that gave the gradients of all ranks the same norm, as clipping does")

        return Cause("LS404", (right, text, *same_norm))

    for call in case.actual.calls:
        if call.gradient_changed:
            text = f"each rank changed its own before they were averaged: {call.line}"
            return Cause("LS406", (right, text, *patterns))

    return Cause("LS210", (f"{right}; what was made of it afterwards is not", *patterns))


# Gradients that are a sum of the same parts with other weights


def unused_parameters(case: Divergence, expected: Gradients, actual: Gradients) -> Cause | None:
    """LS312: a rank's backward passes do not reach parameters that those of one process reach.

    Needs: `local_gradients`.
    Applies: if all gradients that differ are of such parameters.
    False positives: none known.
    Evidence: which ranks.
    """
    names_of_one = _names_with_gradients(case.expected[0].local_gradients)
    missing: set[str] = set()  # parameters that some rank has no gradient of
    ranks = []
    for number, rank in enumerate(case.actual):
        gradients_are_known = rank.contributes and bool(rank.local_gradients)
        if not gradients_are_known:
            continue
        missing_on_rank = names_of_one - _names_with_gradients(rank.local_gradients)
        if missing_on_rank:
            missing |= missing_on_rank
            ranks.append(number)

    explains_all = set(case.names) <= missing
    if not missing or not explains_all:
        return None

    text = f"the backward passes of {format_ranks(ranks)} left no gradient of these parameters"
    return Cause("LS312", (text, "on one process they do, and all others are right"), case.names)


def _names_with_gradients(passes: Sequence[Gradients]) -> set[str]:
    """Returns the parameters of which some backward pass left a gradient."""
    names: set[str] = set()
    for gradients in passes:
        names |= gradients.keys()
    return names


def other_weights(case: Divergence, expected: Gradients, actual: Gradients) -> Cause | None:
    """The gradient of one process is a sum of the same parts with other weights.

    LS206: the weights should be the numbers of samples. LS205: they should be another count, such
    as tokens, or a mean of means was taken. LS208: the loss compares samples, or was computed from
    a statistic. LS110: one process has only some of the parts. LS210: unknown.

    Needs: `local_gradients`; counts in `batches` and `loss_divisors`.
    Applies: if the gradient of one process is a sum of the parts. LS205 without a count needs means
        that are added up equally though other weights would add up to as much.
    False positives: with few parts and small counts another count may fit by chance.
    Evidence: the weights, and those that would be right.
    """
    # A part is the gradient that one backward pass of one rank left.
    parts = []
    for rank in case.actual:
        if rank.contributes:  # not so the first stages of a pipeline
            parts += rank.local_gradients

    # expected = right_weights[0] * parts[0] + right_weights[1] * parts[1] + ...
    right_weights = weights(expected, parts, case.max_error)
    if right_weights is None:
        return None

    # actual = used_weights[0] * parts[0] + used_weights[1] * parts[1] + ...
    used_weights = weights(actual, parts, case.max_error)
    if used_weights is None:
        # The ranks used no sum of the parts at all. If the parts are right, that is worth saying.
        if not all_near(right_weights, case.max_error):
            return None
        text = "the sum of what the ranks' backward passes left is right up to a factor"
        return unknown_cause(case, f"{text}; what was made of it afterwards is not")

    # A part that one process does not have gets a tiny weight, by rounding: it becomes 0.
    largest_weight = max(abs(weight) for weight in right_weights)
    zero_weight = max(ZERO_WEIGHT_SHARE, case.max_error) * largest_weight
    nonzero_weights = []
    for weight in right_weights:
        nonzero_weights.append(weight if abs(weight) > zero_weight else 0.0)

    if min(nonzero_weights) <= 0.0:
        return _parts_left_out(case, nonzero_weights, used_weights)

    evidence = (
        "the gradient of one process is a sum of the same parts with other weights",
        f"the backward passes of the ranks weigh {format_weights(used_weights)}; "
        f"they should weigh {format_weights(right_weights)}",
        *loss_line(case),
    )
    # Are the parts to be weighted by something that was counted, such as samples? Where the ranks
    # weigh the parts unequally, the right weights are relative to theirs.
    relative_weights = []

    for right, used in zip(right_weights, used_weights, strict=True):
        relative_weights.append(right / used if used else 0.0)

    for key, counts in _counts_of_parts(case, len(parts)).items():
        if proportional(relative_weights, counts):
            code = "LS206" if key == "samples" else "LS205"
            numbers = ", ".join(f"{count:g}" for count in counts)
            return Cause(code, (*evidence, f"that is by their {key}: {numbers}"))

    comparison = loss_compares_local_samples(case)
    if comparison:
        return Cause("LS208", (*evidence, *comparison))

    statistics = local_statistics(case)
    # A mean of means: equal weights instead of others with the same sum.
    same_sum = near(sum(right_weights), sum(used_weights), 1e-5)
    if all_near(used_weights, case.max_error) and same_sum:
        no_count = ["nothing that was counted in the batches is proportional to these weights"]
        return Cause("LS205", (*evidence, *(statistics or no_count)))

    if statistics and not draws_that_may_differ(case):
        return Cause("LS208", (*evidence, *statistics))

    return Cause("LS210", evidence)


def _parts_left_out(
    case: Divergence, right_weights: Sequence[float], used_weights: Sequence[float]
) -> Cause:
    """LS110: one process trains some of the parts only, so the ranks have too many samples.

    This is so if one process has the mean of some parts, and the ranks have the mean of all parts.
    Otherwise the cause is LS210.

    Args:
        case: the difference.
        right_weights: the weights with which the parts add up to the gradient of one process; 0
            for a part that one process does not have.
        used_weights: the weights with which they add up to the gradient of the ranks.
    """
    parts_of_one = [place for place, weight in enumerate(right_weights) if weight > 0]
    weights_of_one = [right_weights[place] for place in parts_of_one]

    # Equal weights make a mean. A negative one takes a part away, which no mean does.
    no_weight_is_negative = min(right_weights) >= 0
    weights_are_equal = bool(parts_of_one) and all_near(weights_of_one, 1e-5)
    one_process_has_mean_of_some = no_weight_is_negative and weights_are_equal
    ranks_have_mean_of_all = all_near(used_weights, 1e-5)

    # Each is True, False, or None if it is not known. With the same samples, no part is left out.
    same_indices, same_contents = same_samples(case.expected, case.actual)
    have_same_samples = same_indices is True or same_contents is True
    if have_same_samples or not one_process_has_mean_of_some or not ranks_have_mean_of_all:
        text = "the gradient of one process is a sum of the same parts, but not a mean of them"
        return Cause("LS210", (text, *loss_line(case), *gradient_patterns(case)))

    numbers = format_items([place + 1 for place in parts_of_one])
    plural = "s" if len(parts_of_one) > 1 else ""
    text = (
        f"the gradient of one process is that of part{plural} {numbers} of {len(right_weights)} "
        "alone"
    )
    what_is_a_part = "a part is what one backward pass of one rank left, in the order of ranks"

    return Cause("LS110", (text, what_is_a_part, *loss_line(case)))


def _counts_of_parts(case: Divergence, num_parts: int) -> dict[str, list[float]]:
    """Returns what was counted in the batch and in the loss of each part, by what was counted.

    A part is what one backward pass of one rank left. For example, `samples` are [8, 8, 4] and
    `labels in tensor 1` are [60, 75, 40] for three parts. The plainest counts come first.

    Args:
        case: the difference.
        num_parts: number of parts. Batches, or losses, that are more or fewer cannot be assigned to
            parts, and are not counted.
    """
    counts: dict[str, list[float]] = {}
    # What was counted in the batches; 0 in a batch without this tensor.
    batches = case.actual.batches
    if len(batches) == num_parts:
        keys: dict[str, None] = {}  # a set that keeps the order
        for batch in batches:
            keys.update(dict.fromkeys(batch.weights))

        # Samples first, then labels, values that are not zero, ones of masks, and other values than
        # padding.
        for kind in ("samples", "labels", "non-zero", "ones", "values"):
            for key in keys:
                if key.startswith(kind):
                    counts[key] = [batch.weights.get(key, 0.0) for batch in batches]

    # What the losses may have been divided by.
    divisors_of_losses = []
    for rank in case.actual:
        if rank.contributes:
            divisors_of_losses += rank.loss_divisors

    if len(divisors_of_losses) == num_parts:
        divisor_keys: dict[str, None] = {}
        for divisors in divisors_of_losses:
            divisor_keys.update(dict.fromkeys(divisors))
        for key in divisor_keys:
            counts[key] = [divisors.get(key, 0.0) for divisors in divisors_of_losses]

    return counts


# Gradients in which samples depend on each other or on chance


def gradient_hook(case: Divergence) -> Cause | None:
    """LS406: a hook of the script changed gradients of a rank before they were averaged.

    Needs: `gradient_hook_line`.
    Applies: if there is such a hook.
    False positives: something else may be wrong as well.
    Evidence: the line of the hook.
    """
    line = case.actual.first("gradient_hook_line")
    if not line:
        return None
    text = "a hook changed gradients of the ranks while they still differed"
    return Cause("LS406", (text, line, *gradient_patterns(case)))


def unknown_coupling(case: Divergence) -> Cause:
    """The cause is not known; see `unknown_cause` for the codes.

    Needs: `local_gradients` and `loss_terms` for the evidence.
    Applies: always.
    False positives: everything that no other rule explains.
    Evidence: that no weighting of the local gradients is right, and how terms of the loss scale.
    """
    evidence = []
    if case.num_ranks > 1 and any(rank.local_gradients for rank in case.actual):
        evidence.append("no weighting of the ranks' own gradients gives that of one process")
    terms, _ = describe_terms(case)
    return unknown_cause(case, *evidence, *terms)


def unknown_cause(case: Divergence, *evidence: str) -> Cause:
    """LS210: nothing explains the gradients; or LS101, LS102, LS110, LS111 if inputs differ.

    Needs: `model_inputs` and `forwards`.
    Applies: always. Models that were given other inputs are a cause even if no rule names it.
    False positives: everything that no other rule explains.
    Evidence: what was found, what is equal for each sample, statistics, and the gradients.

    Args:
        case: the difference.
        *evidence: sentences about what was found, which come first.
    """
    code = "LS210"
    # For each rank, how often its models were given each input. Empty if an input is not known.
    expected = inputs_of_ranks(case.expected)
    actual = inputs_of_ranks(case.actual)
    inputs_are_known = bool(expected) and bool(actual)

    # Inputs of other shapes, such as padded texts, may still hold the same samples.
    same_shapes = _shapes_of_inputs(case.expected) == _shapes_of_inputs(case.actual)
    if inputs_are_known and same_shapes and inputs_differ(case):
        code = unknown_inputs_code(expected, actual, case.num_ranks)

    return Cause(
        code,
        (
            *evidence,
            *_numbers_of_inputs(case),
            *_compare_outputs(case),
            *_describe_earlier_steps(case),
            *local_statistics(case),
            *loss_line(case),
            *gradient_patterns(case),
        ),
    )


def _shapes_of_inputs(update: Update) -> set[str]:
    """Returns the shapes of samples with which models were called."""
    return {batch.shape for rank in update for batch in rank.model_inputs}


def _numbers_of_inputs(case: Divergence) -> list[str]:
    """Says with how many inputs the models were called, and how many both runs have in common.

    The result is one sentence, or an empty list if some input is not known.
    """
    expected_of_ranks = inputs_of_ranks(case.expected)
    actual_of_ranks = inputs_of_ranks(case.actual)
    if not expected_of_ranks or not actual_of_ranks:
        return []

    expected = sum_counts(expected_of_ranks)
    actual = sum_counts(actual_of_ranks)
    expected_text = str(expected.total())
    actual_text = str(actual.total())
    expected_shapes = _shapes_of_inputs(case.expected)
    actual_shapes = _shapes_of_inputs(case.actual)

    if expected_shapes != actual_shapes:
        expected_text += f" of {' or '.join(sorted(expected_shapes))}"
        actual_text += f" of {' or '.join(sorted(actual_shapes))}"

    num_same = (expected & actual).total()
    return [
        f"the models were called with {expected_text} inputs, on {case.num_ranks} processes "
        f"with {actual_text}; {num_same} are the same"
    ]


def _compare_outputs(case: Divergence) -> list[str]:
    """Says whether the models returned the same for the same inputs.

    The result is one sentence, or an empty list if the outputs cannot be compared.
    """
    forwards = match_forwards(case.expected, case.actual)
    wrong_models = []
    for forward in forwards:
        # For each sample, whether its output differs. Empty if there is no row for each sample.
        differs = forward.differing_rows("outputs")
        if len(differs) == 0:
            return []
        if differs.any():
            wrong_models.append(forward.model)

    if not forwards:
        return []
    if wrong_models:
        return [f"for the same inputs something else was returned by {format_items(wrong_models)}"]

    return ["for each sample the models returned the same; it is the loss, or later"]


def _describe_earlier_steps(case: Divergence) -> list[str]:
    """Says that all earlier steps are equal, and what modules carry from step to step.

    The result is one sentence, or an empty list in the first step.
    """
    if case.update_index == 0:
        return []

    text = "until here all steps are equal, so it may be what is carried from step to step"
    # Tensors that modules keep besides parameters and buffers, named "Net/layer.state".
    kept_names = set()
    for rank in case.actual:
        kept_names |= {name.partition("/")[2] for name in rank.module_tensors_before}

    if kept_names:
        text += f": {format_items(sorted(kept_names))}"

    return [text]


ValueRule = Callable[[Divergence, Gradients, Gradients], Cause | None]

# In the order in which they are tried. A gradient that is a whole multiple says by itself what it
# is, so these rules come first.
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
