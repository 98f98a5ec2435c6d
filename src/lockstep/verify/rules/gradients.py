"""Rules for wrong gradients that are the same on all ranks: training modes, gathers, clipping.

A *rule* returns the `Cause` of a difference (`case`) between a run on one process and a run on
several ranks, or None if it does not apply. `case.expected` is the optimizer step on one process,
and `case.actual` the same step on the ranks: a `RankUpdate` (record) for each rank, with the fields
listed under "Needs". Gradients before clipping are *unclipped*. `merged(field)` merges the arrays
of all ranks.

Rules that compare the values of gradients are in `gradient_values`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from lockstep.verify.algebra import constant_ratio, mean_of, near
from lockstep.verify.cause import Cause, format_items, script_names
from lockstep.verify.divergence import Divergence
from lockstep.verify.rules.evidence import format_ratio, gradient_patterns
from lockstep.verify.rules.gradient_values import explain_gradients
from lockstep.verify.tolerance import Array
from lockstep.verify.training_record import ScriptCall, Update
from lockstep.wording import format_ranks, join_first


def frozen_on_some_processes(case: Divergence) -> Cause | None:
    """LS312: parameters require gradients on some processes only.

    Needs: `frozen`.
    Applies: if a rank freezes different parameters than one process, of those that it has.
    False positives: none known.
    Evidence: which ranks, and which parameters.
    """
    return _cause_if_setting_differs(case, "frozen", "requires_grad")


def other_mode_on_some_processes(case: Divergence) -> Cause | None:
    """LS312: modules are trained in evaluation mode on some processes only.

    Needs: `in_eval_mode`.
    Applies: if other parameters of a rank than on one process belong to modules in this mode.
    False positives: none known.
    Evidence: which ranks, and which parameters.
    """
    return _cause_if_setting_differs(case, "in_eval_mode", "train() or eval()")


def _cause_if_setting_differs(case: Divergence, field_name: str, setting: str) -> Cause | None:
    """LS312: a setting of some parameters, such as being frozen, differs from one process.

    Only parameters that a rank has are compared: a pipeline stage has only its own.

    False positives: none known.
    Evidence: which ranks, and which parameters.

    Args:
        case: the difference.
        field_name: field with the names of the parameters that have the setting, such as "frozen".
        setting: description of the setting, for the text.
    """
    names_on_one_process = set(getattr(case.expected[0], field_name))
    ranks = []
    all_names: set[str] = set()

    for rank, record in enumerate(case.actual):
        names_on_rank = set(getattr(record, field_name))

        # Two models of one class are named "Net" and "Net#2" in the order in which they are called.
        # If the rank calls them in another order than one process, its "Net" is the "Net#2" of one
        # process, and settings cannot be compared by name.
        if _may_be_of_swapped_models(case, names_on_one_process, names_on_rank):
            continue

        names_set_in_one_run_only = names_on_one_process ^ names_on_rank
        parameters_of_rank = record.parameter_sums.keys()
        names_that_differ = names_set_in_one_run_only & parameters_of_rank
        if names_that_differ:
            ranks.append(rank)
            all_names |= names_that_differ

    if not all_names:
        return None

    names_in_order = tuple(sorted(all_names))
    text = (
        f"{setting} is not that of one process on {format_ranks(ranks)}: "
        f"{format_items(script_names(names_in_order))}"
    )
    return Cause("LS312", (text,), names_in_order)


def _may_be_of_swapped_models(case: Divergence, expected: set[str], actual: set[str]) -> bool:
    """True if two sets of parameters may be the same, but with the names of their models swapped.

    A model and its copy are named "Net" and "Net#2" in the order in which they are called. If they
    are first called after the first step, a rank may call the copy first. Then only names without
    the model can be compared: "layer.weight" for "Net#2/layer.weight".

    Args:
        case: the difference.
        expected: names of parameters on one process.
        actual: names of parameters on a rank.
    """
    names_at_first_step = case.reference_run[0][0].initial.keys()
    names_of_later_parameters = (expected | actual) - names_at_first_step
    some_came_later = bool(names_of_later_parameters)
    return some_came_later and _have_same_names_without_models(expected, actual)


def _have_same_names_without_models(expected: Collection[str], actual: Collection[str]) -> bool:
    """True if two runs name the same parameters, apart from the names of their models.

    For example, "Net/fc.weight" may be "Net#2/fc.weight" in the other run. Without their models,
    both are "fc.weight". Each of these short names must occur as often in both runs.
    """
    return Counter(script_names(expected)) == Counter(script_names(actual))


def parameters_without_optimizer(case: Divergence) -> Cause | None:
    """LS312: no optimizer of the ranks updates parameters that one process updates.

    Needs: `gradients`, which are recorded for an optimizer's parameters.
    Applies: if gradients are missing, and not just because models are named in another order.
    False positives: parameters that have no gradient on any rank.
    Evidence: which parameters.
    """
    # The difference may also be in the gradients before clipping (kind "unclipped"), for which this
    # cause is not looked for.
    if case.kind != "gradients":
        return None

    expected = case.expected.merged("gradients")
    actual = case.actual.merged("gradients")
    missing = tuple(sorted(expected.keys() - actual.keys()))
    if not missing:
        return None

    # "Net/fc.weight" may be missing just because this model is named "Net#2" on the ranks.
    if _have_same_names_without_models(expected, actual):
        return None

    names = join_first(script_names(missing))
    text_on_ranks = f"no optimizer of {case.num_ranks} processes updates {names}"
    text_on_one_process = "on one process an optimizer does"
    return Cause("LS312", (text_on_ranks, text_on_one_process), missing)


def wrong_after_exchange_in_step(case: Divergence) -> Cause | None:
    """Explains gradients that an optimizer averages by itself, from the change of the parameters.

    Needs: `calls` inside `optimizer.step()`, `initial` and `parameters`.
    Applies: to the first step, if one process changed its parameters by the gradient times a
        number, as SGD does. The change on the ranks, divided by this number, is the gradient that
        they used.
    False positives: none known. An optimizer whose first step is no multiple of the gradient is not
        explained.
    Evidence: the line of the collective, and what `explain_gradients` says about these gradients.
    """
    calls_in_step = case.actual.in_step
    if case.kind != "gradients" or not calls_in_step:
        return None

    # All parameters are recorded only before the first step.
    is_first_step = case.update_index == 0
    if not is_first_step:
        return None

    # If the ranks have the same gradients before the step, they do not average them in it.
    if not case.actual.ranks_that_differ("gradients", case.tolerance):
        return None

    expected_gradients = case.expected.merged("gradients")
    expected_decreases = _decreases_in_first_step(case.expected, case)
    actual_decreases = _decreases_in_first_step(case.actual, case)
    if expected_decreases.keys() != expected_gradients.keys():
        return None

    # On one process, decrease = learning_rate * gradient for all parameters.
    learning_rate = constant_ratio(expected_gradients, expected_decreases, case.max_error)
    if learning_rate is None or actual_decreases.keys() != expected_decreases.keys():
        return None

    # So on the ranks, gradient = decrease / learning_rate.
    used_gradients = {}
    for name, decrease in actual_decreases.items():
        used_gradients[name] = decrease / learning_rate

    # Explain the update as if the ranks had stepped with the gradients that they really used.
    update = Update(
        replace(record, gradients=used_gradients, unclipped=used_gradients)
        for record in case.actual
    )
    case_with_used = replace(case, parallel_run=[update, *case.parallel_run[1:]])
    cause = explain_gradients(case_with_used, expected_gradients, used_gradients)
    evidence = (
        f"the optimizer exchanges gradients in its step: {calls_in_step[0].line}",
        "the gradients that it used are computed from how it changed the parameters",
        *cause.evidence,
    )

    return replace(cause, evidence=evidence)


def _decreases_in_first_step(update: Update, case: Divergence) -> dict[str, Array]:
    """Returns by how much the first update decreased each parameter: its old minus its new value.

    Args:
        update: first update of one process or of the ranks.
        case: the difference. Parameters without a gradient on one process are left out, since an
            optimizer does not change them there.
    """
    before = update.merged("initial")
    after = update.merged("parameters")
    decreases = {}
    for name in case.expected.merged("gradients"):
        if name in before and name in after:
            decreases[name] = before[name] - after[name]
    return decreases


def gather_without_gradient(case: Divergence) -> Cause | None:
    """LS207: the loss was computed from an all-gather, which passes no gradient on.

    Needs: `gather_line`, or `detached_gather_line` and `loss_compares_samples`.
    Applies: if there is such a gather. If its inputs were detached before, the rule also requires
        that one process detaches nothing and that the loss compares samples, so that gradients are
        needed.
    False positives: a loss that is scaled up, by a wrong number, to compensate for the lost
        gradient.
    Evidence: the line of the gather.
    """
    line = case.actual.first_on_any_rank("gather_line") or _detached_gather_line(case)
    if not line:
        return None
    text = "the loss is computed from the result of an all-gather, which carries no gradient"
    return Cause("LS207", (text, line, *gradient_patterns(case)))


def _detached_gather_line(case: Divergence) -> str:
    """Returns the line of a gather of detached tensors, if they should not have been detached.

    Empty if there is no such gather, or if detaching may be intended.
    """
    if case.expected.first_on_any_rank("detached_gather_line"):  # one process detaches them too
        return ""
    if not any(record.loss_compares_samples for record in case.expected):
        return ""
    return case.actual.first_on_any_rank("detached_gather_line")


def wrong_after_clipping(case: Divergence) -> Cause | None:
    """Names the cause of gradients that differ after they were clipped.

    LS403: the ranks had equal gradients before clipping, so they clipped differently. If they had
    not averaged their gradients yet, see `_cause_of_clipping_before_averaging` for the codes.

    Needs: `unclipped`, and `calls` that clip.
    Applies: if gradients were clipped in one of the runs and differ afterwards.
    False positives: something else that was done to gradients at the same time as clipping.
    Evidence: the line that clips.
    """
    # All calls that clip gradients. The first one is named, and calls of the ranks come first.
    clips = [*case.actual.clips, *case.expected.clips]
    if case.kind != "gradients" or not clips:
        return None

    # The ranks had averaged their gradients before they clipped them. A wrong average would have
    # been reported as a difference before clipping (kind "unclipped"), so the average was right,
    # and clipping made the difference.
    ranks_agreed_before = not case.actual.ranks_that_differ("unclipped", case.tolerance)
    if ranks_agreed_before:
        text = "they were equal before they were clipped, and are not after"
        return Cause("LS403", (text, clips[0].line, *gradient_patterns(case)))

    return _cause_of_clipping_before_averaging(case, clips)


def _cause_of_clipping_before_averaging(case: Divergence, clips: Sequence[ScriptCall]) -> Cause:
    """Names the cause if the ranks clipped gradients that they had not averaged.

    LS404: clipping changed them, and their mean was right before, perhaps times a number. Any code
    of `explain_gradients`: the mean was wrong before, or clipping changed nothing.

    Args:
        case: the difference.
        clips: all calls that clip gradients. The first one is named.
    """
    line = clips[0].line
    expected = case.expected.merged("unclipped")
    mean = mean_of([record.unclipped for record in case.actual])

    # The mean was right if mean = ratio * expected for some number; otherwise, the ratio is None.
    ratio = constant_ratio(expected, mean, case.max_error)
    clipping_changed_nothing = not any(call.has_clipped for call in clips)
    if ratio is None or clipping_changed_nothing:
        cause = explain_gradients(case, expected, mean)
        clipped_text = "gradients were clipped while those of the ranks still differed"
        return cause.with_evidence(clipped_text, line)

    clipped_text = "clipping changed gradients while those of the ranks still differed"
    ratio_text = "equal to"
    if not near(ratio, 1):
        ratio_text = format_ratio(ratio, case.num_ranks)

    mean_text = f"before, their mean was {ratio_text} that of one process"
    return Cause("LS404", (clipped_text, mean_text, line))
