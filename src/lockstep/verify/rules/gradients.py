"""Rules for wrong gradients that are the same on all ranks.

A *rule* returns the `Cause` of a difference, or None. `case` is a difference between a run on one
process, `case.reference_run`, and one on several, `case.parallel_run`: lists with an update for
each optimizer step. The update that differs is `case.expected` in the first run and `case.actual`
in the second: a tuple of `RankUpdate`s, one for each rank, whose fields "Needs" names.
`merged(field)` joins the arrays of all ranks by name.

They are about what was trained, gathers, and clipping. Rules that compare the gradients' values
themselves are in `gradient_values`. A gradient before
clipping is called *unclipped*.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from lockstep.verify.algebra import constant_ratio, mean_of, near
from lockstep.verify.cause import Cause, format_items, script_names
from lockstep.verify.compare import Divergence
from lockstep.verify.rules.evidence import format_ratio, gradient_patterns
from lockstep.verify.rules.gradient_values import explain_gradients
from lockstep.verify.tolerance import Array
from lockstep.verify.training_record import Update
from lockstep.wording import format_ranks, join_first


def frozen_on_some_processes(case: Divergence) -> Cause | None:
    """LS312: parameters require gradients on some processes only.

    Needs: `frozen`.
    Applies, Looks the same, Says: see `_trained_differently`.
    """
    return _trained_differently(case, "frozen", "requires_grad")


def other_mode_on_some_processes(case: Divergence) -> Cause | None:
    """LS312: modules are trained in evaluation mode on some processes only.

    Needs: `in_eval_mode`.
    Applies, Looks the same, Says: see `_trained_differently`.
    """
    return _trained_differently(case, "in_eval_mode", "train() or eval()")


def _trained_differently(case: Divergence, field_name: str, setting: str) -> Cause | None:
    """LS312: a setting of parameters is not that of one process.

    Applies: to parameters that the rank has; a pipeline stage has only its own.
    Looks the same: nothing known.
    Says: which ranks, and which parameters.

    Args:
        case: the difference.
        field_name: the field with the names of the parameters that have the setting, such as
            `frozen`.
        setting: the setting, for the text.
    """
    expected = set(getattr(case.expected[0], field_name))
    known_from_start = case.reference_run[0][0].initial.keys()
    ranks = []
    all_names: set[str] = set()
    for number, rank in enumerate(case.actual):
        actual = set(getattr(rank, field_name))
        # A model and its copy are named "Net" and "Net#2" in the order in which they are called.
        # If both appear after the first step, a rank may call the copy first. Then only the names
        # inside of the models can be compared: "layer.weight" for "Net#2/layer.weight".
        short_names = Counter(script_names(getattr(rank, field_name)))
        same_short_names = short_names == Counter(script_names(expected))
        all_known_from_start = known_from_start >= expected | actual
        if same_short_names and not all_known_from_start:
            continue
        # Those with the setting on only one of the two, of the parameters that the rank has.
        names = (expected ^ actual) & rank.parameter_sums.keys()
        if names:
            ranks.append(number)
            all_names |= names
    if not all_names:
        return None
    names_in_order = tuple(sorted(all_names))
    text = (
        f"{setting} is not that of one process on {format_ranks(ranks)}: "
        f"{format_items(script_names(names_in_order))}"
    )
    return Cause("LS312", (text,), names_in_order)


def parameters_without_optimizer(case: Divergence) -> Cause | None:
    """LS312: no optimizer of the ranks updates parameters that one process updates.

    Needs: `gradients`, which are recorded of an optimizer's parameters.
    Applies: if gradients are missing, and not only because models are named in another order.
    Looks the same: parameters without a gradient on all ranks.
    Says: which parameters.
    """
    if case.kind != "gradients":  # the other kind is "unclipped": gradients before clipping
        return None
    expected = case.expected.merged("gradients")
    actual = case.actual.merged("gradients")
    missing = tuple(sorted(expected.keys() - actual.keys()))
    if not missing:
        return None
    # "Net/fc.weight" may be missing only because this model is called "Net#2" on the ranks.
    has_same_short_names = Counter(script_names(expected)) == Counter(script_names(actual))
    if has_same_short_names:
        return None
    names = join_first(script_names(missing))
    text = f"no optimizer of {case.num_ranks} processes updates {names}"
    return Cause("LS312", (text, "on one process an optimizer does"), missing)


def wrong_after_exchange_in_step(case: Divergence) -> Cause | None:
    """Explains gradients that an optimizer averages itself, by how it changed the parameters.

    Needs: `calls` inside of `optimizer.step()`, `initial` and `parameters`.
    Applies: to the first step, if on one process it is the gradient times one number, as with SGD.
        Then the step of several processes, divided by this number, is the gradient that they used.
    Looks the same: optimizers whose first step is no multiple of the gradient are not explained.
    Says: the line of the collective, then what `explain_gradients` says of these gradients.
    """
    is_first_step = case.update_index == 0  # only before it are all parameters recorded
    calls_in_step = case.actual.in_step
    if case.kind != "gradients" or not is_first_step or not calls_in_step:
        return None
    # If the ranks have the same gradients before the step, those are compared as they are.
    if not case.actual.ranks_that_differ("gradients", case.tolerance):
        return None
    expected_gradients = case.expected.merged("gradients")
    expected_steps = _first_steps(case.expected, case)
    actual_steps = _first_steps(case.actual, case)
    if expected_steps.keys() != expected_gradients.keys():
        return None
    # step = learning_rate * gradient, for all parameters of one process
    learning_rate = constant_ratio(expected_gradients, expected_steps, case.max_error)
    if learning_rate is None or actual_steps.keys() != expected_steps.keys():
        return None
    used = {name: step / learning_rate for name, step in actual_steps.items()}
    # The same update, as if the ranks had stepped with the gradients that they really used.
    update = Update(replace(rank, gradients=used, unclipped=used) for rank in case.actual)
    case_with_used = replace(case, parallel_run=[update, *case.parallel_run[1:]])
    cause = explain_gradients(case_with_used, expected_gradients, used)
    evidence = (
        f"the optimizer exchanges gradients in its step: {calls_in_step[0].line}",
        "the gradients that it used are computed from how it changed the parameters",
        *cause.evidence,
    )
    return replace(cause, evidence=evidence)


def _first_steps(update: Update, case: Divergence) -> dict[str, Array]:
    """Returns by how much the first update decreased each parameter that has a gradient.

    Args:
        update: of one process, or of the ranks.
        case: the difference; a parameter has a gradient if it has one on one process.
    """
    before = update.merged("initial")
    after = update.merged("parameters")
    steps = {}
    for name in case.expected.merged("gradients"):
        if name in before and name in after:
            steps[name] = before[name] - after[name]
    return steps


def gather_without_gradient(case: Divergence) -> Cause | None:
    """LS207: the loss was computed from an all-gather, which carries no gradient.

    Needs: `gather_line`, or `detached_gather_line` and `loss_compares_samples`.
    Applies: if there is such a gather. Of tensors that were detached before it, only if on one
        process nothing is detached and the loss compares samples, so that it should follow them.
    Looks the same: a loss that is scaled up by a wrong number to make good for the lost gradient.
    Says: the line of the gather.
    """
    line = case.actual.first("gather_line") or _detached_gather_line(case)
    if not line:
        return None
    text = "the loss is computed from the result of an all-gather, which carries no gradient"
    return Cause("LS207", (text, line, *gradient_patterns(case)))


def _detached_gather_line(case: Divergence) -> str:
    """Returns the line of a gather of detached tensors, if the loss should have followed them.

    Empty if there is no such gather, or if detaching may be intended.
    """
    if case.expected.first("detached_gather_line"):  # one process detaches them as well
        return ""
    if not any(rank.loss_compares_samples for rank in case.expected):
        return ""
    return case.actual.first("detached_gather_line")


def wrong_after_clipping(case: Divergence) -> Cause | None:
    """LS404: gradients were clipped before they were averaged. LS403: they were clipped otherwise.

    Needs: `unclipped`, and `calls` that clip.
    Applies: if gradients were clipped in one of the runs and differ after that. LS403 if they were
        equal before. LS404 if they differed between the ranks when clipping changed them, were the
        same when they were used, and their mean would have been right, or right times a number.
        In other cases the mean before clipping is explained by `explain_gradients`.
    Looks the same: whether clipping is all that was done in between is not recorded.
    Says: the line that clips.
    """
    clips = case.actual.clips or case.expected.clips
    if case.kind != "gradients" or not clips:
        return None
    line = clips[0].line
    # Other gradients before clipping are a difference of another kind, which comes before this one.
    # So if the ranks agree before clipping, they also agree with one process.
    if not case.actual.ranks_that_differ("unclipped", case.tolerance):
        text = "they were equal before they were clipped, and are not after"
        return Cause("LS403", (text, line, *gradient_patterns(case)))
    expected = case.expected.merged("unclipped")
    # What the ranks would have used if they had averaged first.
    mean = mean_of([rank.unclipped for rank in case.actual])
    ratio = constant_ratio(expected, mean, case.max_error)
    clipping_changed_something = any(call.has_clipped for call in (*clips, *case.expected.clips))
    if ratio is None or not clipping_changed_something:
        # Even the mean is wrong, or clipping did nothing: something else is the cause.
        cause = explain_gradients(case, expected, mean)
        early = "gradients were clipped while those of the ranks still differed"
        return cause.with_evidence(early, line)
    early = "clipping changed gradients while those of the ranks still differed"
    compared = "equal to"
    if not near(ratio, 1):
        compared = format_ratio(ratio, case.num_ranks)
    right = f"their mean was {compared} that of one process before"
    return Cause("LS404", (early, right, line))
