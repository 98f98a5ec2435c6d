"""Rules for gradients that differ between the ranks, although the ranks should have averaged them.

A *rule* returns the `Cause`, or None if it does not apply. `gradients.names` are the gradients that
differ, and `gradients.case` is the difference: `case.expected` is the optimizer step on one
process, and `case.actual` the same step on the ranks (a `RankUpdate` each, with the fields listed
under "Needs"). *Local* gradients are those of one rank's backward passes, before any averaging.

`gradients_that_differ_between_ranks` tries the rules in the order of `LOCAL_GRADIENT_RULES`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from lockstep.verify.algebra import constant_ratio, flat, mean_of, near, norm, sum_of_passes
from lockstep.verify.cause import Cause, format_items, script_names
from lockstep.verify.divergence import Divergence
from lockstep.verify.names import model_of
from lockstep.verify.rules.evidence import describe_random_numbers_of_one_run
from lockstep.verify.tolerance import Array
from lockstep.verify.training_record import LARGEST, RankUpdate, ScriptCall, Update
from lockstep.wording import format_ranks


@dataclass(frozen=True)
class LocalGradients:
    """A difference, and the gradients in it that are not the same on all ranks."""

    case: Divergence
    # Names of these gradients.
    names: tuple[str, ...]

    @property
    def sentence_on_difference(self) -> str:
        """The first sentence of evidence of all rules, on how many gradients differ."""
        total = len(self.case.actual.merged("gradients"))
        return f"the gradients of {len(self.names)} of {total} parameters differ between the ranks"

    @cached_property
    def num_local_passes(self) -> int:
        """How many backward passes, counted from the last one, were not averaged over the ranks.

        With 1, each rank used the gradient of its own last backward pass, plus an average over the
        ranks of the passes before. The result is 0 if this does not explain the differences, or if
        local gradients are not known.
        """
        num_recorded = min(len(record.local_gradients) for record in self.case.actual)
        for num_passes in range(1, num_recorded + 1):
            if self._differ_by_last_passes(num_passes):
                return num_passes
        return 0

    @property
    def ranks_used_local_gradients(self) -> bool:
        """True if the ranks stepped with their local gradients of the last backward passes."""
        return self.num_local_passes > 0

    def _differ_by_last_passes(self, num_passes: int) -> bool:
        """True if the ranks differ exactly by the local gradients of their last passes.

        If the last passes were not averaged, but those before them were, then each rank has used
        the same average plus its own local sum. For example, the first of two passes was averaged
        to 10. The last one adds 1 on rank 0 and 3 on rank 1, which then use 11 and 13. Without
        their own 1 and 3, the *remainder* is 10 on both ranks.

        Args:
            num_passes: number of backward passes, counted from the last one.
        """
        local_sums = []  # one vector with all values for each rank
        remainders = []
        for record in self.case.actual:
            before_clipping = record.unclipped
            used = {name: before_clipping[name] for name in self.names if name in before_clipping}
            local_sum = _sum_of_last_passes(record, num_passes, like_gradients=used)
            local_sums.append(local_sum)
            remainders.append(flat(used) - local_sum)

        # If the vectors have different lengths, some ranks lack gradients that others have.
        lengths = {len(remainder) for remainder in remainders}
        if len(lengths) != 1:
            return False

        # The rounding error of a remainder is proportional to the values that were subtracted. They
        # are about as large on all ranks, so those of rank 0 are used.
        size_of_local_sums = norm(local_sums[0])
        rounding = self.case.max_error * size_of_local_sums
        return all(norm(remainder - remainders[0]) <= rounding for remainder in remainders)

    @property
    def sentence_on_local_passes(self) -> str:
        """A sentence of evidence: the gradients of the last backward passes are local.

        If the gradients of earlier passes were averaged, it says how many passes are local.
        """
        total = self.case.actual.num_backward_passes
        earlier_passes_were_averaged = self.num_local_passes < total
        if earlier_passes_were_averaged:
            return (
                f"the gradients of the last {self.num_local_passes} of {total} backward passes "
                "were not averaged"
            )

        return "they were not averaged: each rank used the gradients of its own backward passes"

    @property
    def sentences_on_bypassed_wrapper(self) -> list[str]:
        """Evidence that the script called a model without its DDP wrapper: one sentence or none."""
        line = self.case.actual.first_on_any_rank("line_that_bypassed_wrapper")
        if not line:
            return []
        return [f"a forward pass bypassed the DDP wrapper: {line}"]

    @property
    def are_unwrapped(self) -> bool:
        """True if these gradients belong to models that neither DDP nor Lockstep has wrapped."""
        unwrapped: set[str] = set()
        for record in self.case.actual:
            unwrapped |= set(record.unwrapped_parameters)
        return set(self.names) <= unwrapped

    @property
    def collectives_on_gradients(self) -> list[ScriptCall]:
        """Collectives whose input was any gradient, in this update and the next one.

        A call after the optimizer's step is recorded with the next update.
        """
        case = self.case
        calls = []
        this_and_next = case.parallel_run[case.update_index : case.update_index + 2]
        for update in this_and_next:
            calls += [call for call in update.calls if call.gradient_of]
        return calls


def _sum_of_last_passes(
    record: RankUpdate, num_passes: int, like_gradients: Mapping[str, Array]
) -> Array:
    """Returns the sum of a rank's local gradients over its last backward passes, as one vector.

    Args:
        record: record of the rank.
        num_passes: number of backward passes to add up, counted from the last one; at least 1.
        like_gradients: gradients with the names, the order and the shapes of those in the vector.
    """
    total = np.zeros_like(flat(like_gradients))
    for local_gradients in record.local_gradients[-num_passes:]:
        # A pass that does not reach a parameter leaves no gradient for it.
        in_order = {}
        for name, array in like_gradients.items():
            in_order[name] = local_gradients.get(name, np.zeros_like(array))
        total = total + flat(in_order)
    return total


def gradients_that_differ_between_ranks(case: Divergence) -> Cause | None:
    """Tries `LOCAL_GRADIENT_RULES` if ranks step with different gradients.

    The cause is about the gradients that differ.

    Needs: `gradients`.
    Applies: if a gradient is not the same on all ranks that have it.
    False positives: see each rule.
    Evidence: see each rule.
    """
    names = tuple(case.actual.ranks_that_differ("gradients", case.tolerance))
    if not names:
        return None

    gradients = LocalGradients(case, names)
    for rule in LOCAL_GRADIENT_RULES:
        cause = rule(gradients)
        if cause is not None:
            return replace(cause, names=names)

    return None


def parameters_unknown_to_ddp(gradients: LocalGradients) -> Cause | None:
    """LS303: the parameters were made trainable after DDP had been constructed.

    Needs: `unknown_to_ddp`.
    Applies: if DDP knows none of the parameters whose gradients differ.
    False positives: none known.
    Evidence: that DDP was constructed too early.
    """
    unknown: set[str] = set()
    for record in gradients.case.actual:
        unknown |= set(record.unknown_to_ddp)

    all_are_unknown = set(gradients.names) <= unknown  # `names` is never empty
    if not all_are_unknown:
        return None

    text = "DDP was built before they were to be trained"
    return Cause("LS303", (gradients.sentence_on_difference, text))


def communication_hook(gradients: LocalGradients) -> Cause | None:
    """LS213: DDP has a communication hook of the script, which decides how gradients are averaged.

    Needs: `comm_hook_line`.
    Applies: if there is such a hook.
    False positives: something else may be wrong as well.
    Evidence: the line that registered the hook.
    """
    line = gradients.case.actual.first_on_any_rank("comm_hook_line")
    if not line:
        return None
    return Cause(
        "LS213", (gradients.sentence_on_difference, f"DDP was given a communication hook: {line}")
    )


def averages_within_groups(gradients: LocalGradients) -> Cause | None:
    """LS315: DDP averages gradients within groups of ranks instead of over all ranks.

    Needs: `ranks_of_incomplete_ddp_group`.
    Applies: if there are several groups and gradients agree within each.
    False positives: none known.
    Evidence: the ranks of each group.
    """
    records = gradients.case.actual
    # All groups without duplicates, such as [(0, 1), (2, 3)].
    groups = list(dict.fromkeys(tuple(record.ranks_of_incomplete_ddp_group) for record in records))

    # The process group of all ranks is recorded as an empty tuple.
    some_use_all_ranks = () in groups
    if len(groups) < 2 or some_use_all_ranks:
        return None

    for group in groups:
        # Compare the ranks of the group with each other, as if only they had made the update.
        records_of_group = Update([records[rank] for rank in group])
        if records_of_group.ranks_that_differ("gradients", gradients.case.tolerance):
            return None

    names = "; ".join(format_ranks(group) for group in groups)
    text = f"DDP averages them over a part of the ranks, and they agree within each: {names}"
    return Cause("LS315", (gradients.sentence_on_difference, text))


def clipping_on_some_ranks(gradients: LocalGradients) -> Cause | None:
    """LS304: gradients were the same on all ranks until some ranks clipped them.

    Needs: `unclipped`, and `calls` that clip.
    Applies: if some rank clips, and the gradients before clipping are equal.
    False positives: all ranks clip, but to different norms. The evidence then names all ranks.
    Evidence: which ranks clip, and the line.
    """
    case = gradients.case
    clips = []
    clipping_ranks = []
    for rank, record in enumerate(case.actual):
        clips_of_rank = [call for call in record.calls if call.name == "clip"]
        if clips_of_rank:
            clips += clips_of_rank
            clipping_ranks.append(rank)

    if not clips:
        return None

    differed_before_clipping = bool(case.actual.ranks_that_differ("unclipped", case.tolerance))
    if differed_before_clipping:
        return None

    text = f"they were the same until {format_ranks(clipping_ranks)} clipped them"
    return Cause("LS304", (gradients.sentence_on_difference, text, clips[0].line))


def exchanged_inside_step(gradients: LocalGradients) -> Cause | None:
    """Names the cause if the optimizer exchanges gradients in its step.

    1. LS201 or LS209: the result of the exchange is known, and it is too large by the number of
       ranks, as if summed (LS201), or by another number (LS209).
    2. LS201: the optimizer's state is too large, as if gradients were summed.
    3. LS210: nothing tells what the optimizer has used.

    Needs: `calls` inside `optimizer.step()`, `reduced_in_step`, `optimizer_state`.
    Applies: if the optimizer calls a collective in its step.
    False positives: an optimizer that divides the sum after the collective.
    Evidence: the line of the collective, and by which factor gradients are too large.
    """
    case = gradients.case
    calls_in_step = case.actual.in_step
    if not calls_in_step:
        return None

    line = calls_in_step[0].line
    sentence_on_exchange = (
        f"they differ as the step begins; the optimizer exchanges them in it: {line}"
    )
    evidence = (gradients.sentence_on_difference, sentence_on_exchange)

    # A ratio of 1 means that the gradients were right after the exchange. Then the optimizer's
    # state is looked at, as if the ratio were not known.
    ratio = _ratio_after_exchange(case)
    if ratio is not None and not near(ratio, 1):
        code = "LS201" if near(ratio, case.num_ranks) else "LS209"
        text = f"after that they are {ratio:.6g} times those of one process"
        return Cause(code, (*evidence, text), ratio=ratio)

    sentences_on_large_state = _describe_large_optimizer_state(case)
    if sentences_on_large_state:
        return Cause("LS201", (*evidence, *sentences_on_large_state))

    text = "what it computes from them is not known; the parameters before the next step differ"
    return Cause("LS210", (*evidence, text))


def _ratio_after_exchange(case: Divergence) -> float | None:
    """Returns by which factor gradients are too large after a collective in the optimizer's step.

    The result is None if there is no such factor, or if no rank has recorded the gradients that the
    collective returned.
    """
    gradients_of_one_process = case.expected.merged("gradients")
    gradients_after_exchange = case.actual.merged("reduced_in_step")

    # Only gradients that both runs have are compared.
    expected = {}
    actual = {}
    for name in case.names:
        if name in gradients_of_one_process and name in gradients_after_exchange:
            expected[name] = gradients_of_one_process[name]
            actual[name] = gradients_after_exchange[name]

    if not actual:
        return None

    return constant_ratio(expected, actual, case.max_error)


def _describe_large_optimizer_state(case: Divergence) -> list[str]:
    """Says that the optimizer's state is N times, or N squared times, as large as on one process.

    Steps before and after the present one are looked at, too. The result is one sentence about the
    first such state, or an empty list.
    """
    # Adam keeps a mean of gradients ("exp_avg") and a mean of their squares ("exp_avg_sq"). If N
    # ranks summed their gradients instead of averaging them, the gradients are N times as large,
    # and their squares N * N times.
    factors = {
        case.num_ranks: "the number of processes",
        case.num_ranks**2: "the number of processes, squared",
    }
    for expected, actual in zip(case.reference_run, case.parallel_run, strict=False):
        # For each key of the optimizer's state, such as "exp_avg", the ratios of all parameters, of
        # which there is at least one.
        record_of_one_process = expected[0]
        ratios_by_key = _ratios_of_state(record_of_one_process, actual)
        for key, ratios in ratios_by_key.items():
            for factor, text in factors.items():
                factor_holds_for_all_parameters = all(near(ratio, factor) for ratio in ratios)
                if factor_holds_for_all_parameters:
                    return [
                        f"what the optimizer keeps as {key!r} is {factor} times as large as "
                        f"on one process: {text}"
                    ]

    return []


def _ratios_of_state(expected: RankUpdate, actual: Update) -> dict[str, set[float]]:
    """Returns by which factors state tensors of the ranks are larger than those of one process.

    Tensors are compared by their largest absolute value.

    Args:
        expected: record of one process.
        actual: the same update on the ranks. If each rank has a part of a tensor, the largest value
            in all parts is used.

    Returns:
        For each key of the state, such as "exp_avg", the different factors of all parameters. With
        `{"exp_avg": {4.0}}`, this state is 4 times as large for every parameter.
    """
    ratios_by_key: dict[str, set[float]] = defaultdict(set)

    # Names are such as "Net/layer.weight/exp_avg". Three numbers are recorded for each tensor; the
    # one at index LARGEST is its largest absolute value.
    for name, numbers in expected.optimizer_state.items():
        largest_on_one_process = numbers[LARGEST]
        largest_on_each_rank = []
        for record in actual:
            if name in record.optimizer_state:
                largest_on_each_rank.append(record.optimizer_state[name][LARGEST])

        is_zero = largest_on_one_process == 0
        if is_zero or not largest_on_each_rank:
            continue

        key = name.rpartition("/")[2]
        ratios_by_key[key].add(max(largest_on_each_rank) / largest_on_one_process)

    return ratios_by_key


def stepped_inside_backward_pass(gradients: LocalGradients) -> Cause | None:
    """LS406: the optimizer stepped inside the backward pass, probably with a rank's own gradients.

    Needs: `step_line_in_backward`.
    Applies: if there is such a step, as in a hook on a parameter.
    False positives: something else may be wrong as well.
    Evidence: the line of the step.
    """
    line = gradients.case.actual.first_on_any_rank("step_line_in_backward")
    if not line:
        return None
    text = (
        "the optimizer stepped inside the backward pass, where gradients may not be averaged yet: "
        f"{line}"
    )
    return Cause("LS406", (gradients.sentence_on_difference, text))


def gradients_from_random_numbers(gradients: LocalGradients) -> Cause | None:
    """LS308: the gradients were computed from random numbers that each rank drew.

    Needs: `local_gradients`; `gradient_draw_line`.
    Applies: if there is such a line, and the ranks did not step with the gradients of their own
        last backward passes.
    False positives: something else may be wrong as well.
    Evidence: the line that drew the numbers.
    """
    line_of_draw = gradients.case.actual.first_on_any_rank("gradient_draw_line")
    if not line_of_draw or gradients.ranks_used_local_gradients:
        return None

    text = f"they are computed from random numbers that each rank drew: {line_of_draw}"
    return Cause(
        "LS308",
        (gradients.sentence_on_difference, *gradients.sentences_on_bypassed_wrapper, text),
    )


def gradients_that_are_not_local(gradients: LocalGradients) -> Cause | None:
    """Explains gradients that differ although the ranks did not step with their local gradients.

    LS304: the gradients of each rank are those of rank 0 times a number. LS210: the cause is not
    known.

    Needs: `local_gradients`.
    Applies: if the ranks did not step with the gradients of their own last backward passes.
    False positives: a script may add noise to its gradients after averaging them (reported as
        LS210), or multiply them by another number on each rank (as LS304). These mistakes have no
        code of their own.
    Evidence: what is known about the gradients.
    """
    # If the ranks used their local gradients, the rules that are tried after this one explain why.
    if gradients.ranks_used_local_gradients:
        return None

    case = gradients.case
    evidence = [
        gradients.sentence_on_difference,
        *gradients.sentences_on_bypassed_wrapper,
        "they are not what each rank's own backward passes left",
    ]

    sentences_on_multiples = _describe_multiples_of_rank_0(case)
    evidence += sentences_on_multiples

    collectives_on_gradients = [call for call in case.actual.calls if call.gradient_of]
    if collectives_on_gradients:
        evidence.append(f"gradients were reduced: {collectives_on_gradients[0].line}")

    # The loss may have been computed from random numbers that one process did not draw.
    evidence += describe_random_numbers_of_one_run(case)

    code = "LS304" if sentences_on_multiples else "LS210"
    return Cause(code, tuple(evidence))


def _describe_multiples_of_rank_0(case: Divergence) -> list[str]:
    """Says that the gradients of each rank are those of rank 0 times a number.

    The result is one sentence with these numbers, or an empty list if some rank has no multiple.
    """
    gradients_of_rank_0 = case.actual[0].gradients
    texts = []
    for rank, record in enumerate(case.actual[1:], start=1):
        ratio = constant_ratio(gradients_of_rank_0, record.gradients, case.max_error)
        if ratio is None:
            return []
        texts.append(f"{ratio:.6g} times on rank {rank}")

    return [f"they are those of rank 0, {', '.join(texts)}"]


def parameters_averaged_later(gradients: LocalGradients) -> Cause | None:
    """LS313: the script averages parameters over the ranks instead of gradients.

    Needs: `rewritten_parameters` before a later step, and `parameters` after the step before it.
    Applies: if parameters differed between the ranks after a step, and each rank has their mean
        before the next step.
    False positives: none known.
    Evidence: that gradients differ, that they are local, and before which step parameters are
        averaged.
    """
    case = gradients.case
    # A script may average parameters only every few steps, so all later steps are examined.
    for update, next_update in pairwise(case.parallel_run[case.update_index :]):
        if not update.ranks_that_differ("parameters", case.tolerance):
            continue

        # The mean over the ranks of the parameters that the first of the two updates left.
        mean = mean_of([_arrays(record.parameters, gradients.names) for record in update])

        # The values that the script itself wrote to the parameters between the two updates.
        written_values = [
            _arrays(record.rewritten_parameters, gradients.names) for record in next_update
        ]
        if all(_is_equal(values, mean, case.max_error) for values in written_values):
            step = next_update[0].step + 1  # records count steps from 0, texts from 1
            text = f"before step {step} parameters, not gradients, are averaged over the ranks"
            return Cause(
                "LS313",
                (gradients.sentence_on_difference, gradients.sentence_on_local_passes, text),
            )

    return None


def _arrays(arrays: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
    """Returns the arrays with the given names."""
    return {name: arrays[name] for name in names if name in arrays}


def _is_equal(actual: Mapping[str, Array], expected: Mapping[str, Array], max_error: float) -> bool:
    """True if all arrays are equal within rounding; False if there are none."""
    ratio = constant_ratio(expected, actual, max_error)
    return ratio is not None and near(ratio, 1)


def forward_past_wrapper(gradients: LocalGradients) -> Cause | None:
    """LS302: forward passes bypassed the DDP wrapper, so DDP averages nothing.

    Needs: `line_that_bypassed_wrapper` and `wrapped_passes`.
    Applies: if no forward pass went through the wrapper.
    False positives: none known.
    Evidence: the line of a forward pass.
    """
    has_bypassed_a_wrapper = bool(gradients.sentences_on_bypassed_wrapper)
    if not has_bypassed_a_wrapper:
        return None

    # The models of these gradients have no wrapper, so it was the wrapper of another model.
    if gradients.are_unwrapped:
        return None

    some_passes_were_wrapped = any(record.wrapped_passes for record in gradients.case.actual)
    if some_passes_were_wrapped:
        return None
    return Cause(
        "LS302", (gradients.sentence_on_difference, *gradients.sentences_on_bypassed_wrapper)
    )


def averaged_too_late(gradients: LocalGradients) -> Cause | None:
    """LS406: the script averages these gradients, but after the optimizer has used them.

    Needs: `calls` with `gradient_of`, in this update and the next one.
    Applies: if a collective got one of these gradients, although each rank used its local ones.
    False positives: a collective whose result is not written back.
    Evidence: the line of the first collective on one of these gradients.
    """
    # It is known that each rank stepped with its local gradients, or this rule would not be tried.
    # So any collective on these gradients came too late.
    calls_on_these = [
        call for call in gradients.collectives_on_gradients if call.gradient_of in gradients.names
    ]
    if not calls_on_these:
        return None

    text = f"these gradients were averaged too late: {calls_on_these[0].line}"
    return Cause(
        "LS406", (gradients.sentence_on_difference, gradients.sentence_on_local_passes, text)
    )


def other_gradients_are_averaged(gradients: LocalGradients) -> Cause | None:
    """LS301: the script averages other gradients, but not these.

    Needs: `calls` on gradients, or `local_gradients` of models that are not wrapped.
    Applies: if a collective was called with other gradients, or if other gradients of the same
        models are not local, so something has averaged them.
    False positives: none known.
    Evidence: the line of the collective, or the gradients that are averaged.
    """
    collectives_on_others = [
        call
        for call in gradients.collectives_on_gradients
        if call.gradient_of not in gradients.names
    ]
    if collectives_on_others:
        text = f"the script reduces other gradients: {collectives_on_others[0].line}"
        return Cause(
            "LS301", (gradients.sentence_on_difference, gradients.sentence_on_local_passes, text)
        )

    # Gradients that are no longer what the backward passes computed, so something averages them.
    names = _other_averaged_names(gradients)
    if not names:
        return None

    text = f"gradients of other parameters are averaged: {format_items(script_names(names))}"
    return Cause(
        "LS301", (gradients.sentence_on_difference, gradients.sentence_on_local_passes, text)
    )


def _other_averaged_names(gradients: LocalGradients) -> list[str]:
    """Returns the names of other gradients that the script itself averages.

    If there are some, the script averages by hand, and has left out the gradients that differ. Only
    gradients of the same models or of the same optimizer are examined. The result is empty if one
    of the gradients that differ is in a DDP wrapper, since DDP averages by itself.
    """
    case = gradients.case
    # `unwrapped_parameters` lists the parameters of models without a DDP wrapper.
    all_are_unwrapped = set(gradients.names) <= set(case.actual[0].unwrapped_parameters)
    if not all_are_unwrapped:
        return []

    optimizer = case.actual[0].optimizer
    models = {model_of(name) for name in gradients.names}
    averaged: dict[str, None] = {}  # an ordered set

    # Other gradients may belong to another optimizer of the script, which steps in an update before
    # or after this one. All ranks average the same ones, so it is enough to look at rank 0.
    for update in _neighbouring_updates(case):
        record_of_rank_0 = update[0]
        is_same_optimizer = record_of_rank_0.optimizer == optimizer
        for name in _names_averaged_by_script(record_of_rank_0, case.max_error):
            is_same_model = model_of(name) in models
            is_other_gradient = name not in gradients.names
            if is_other_gradient and (is_same_optimizer or is_same_model):
                averaged[name] = None

    return list(averaged)


def _names_averaged_by_script(record: RankUpdate, max_error: float) -> list[str]:
    """Returns the names of gradients that a rank has averaged without a DDP wrapper.

    A gradient was averaged if it is no longer what the rank's backward passes computed.

    Args:
        record: record of the rank.
        max_error: largest relative difference that counts as rounding.
    """
    # What the backward passes computed, for all parameters without a wrapper.
    local_gradients = sum_of_passes(record.local_gradients, record.unwrapped_parameters)
    # What the rank gave to its optimizer, for the parameters of this optimizer.
    used_gradients = record.unclipped  # before clipping

    names = []
    for name, local_gradient in local_gradients.items():
        if name in used_gradients:
            used_gradient = used_gradients[name]
            difference = (used_gradient - local_gradient).astype(np.float64)
            if norm(difference) > max_error * norm(used_gradient):
                names.append(name)
    return names


def _neighbouring_updates(case: Divergence) -> Sequence[Update]:
    """Returns this update and those around it, in which each optimizer of the script steps.

    For example, if three optimizers step in turn, the result is this update, two before it, and two
    after it.
    """
    num_optimizers = len({update[0].optimizer for update in case.parallel_run})
    first = max(0, case.update_index - num_optimizers + 1)
    return case.parallel_run[first : case.update_index + num_optimizers]


def model_that_nothing_wraps(gradients: LocalGradients) -> Cause | None:
    """LS311: the model is neither wrapped with DDP nor prepared by Lockstep.

    Needs: `unwrapped_parameters` and `unwrapped_line`.
    Applies: if all these gradients belong to such models.
    False positives: none known.
    Evidence: the line of a forward pass of the model.
    """
    if not gradients.are_unwrapped:
        return None

    case = gradients.case
    text = "neither DDP nor Lockstep wraps the model"

    # Name the latest call of the model. It may be in an earlier update: if two optimizers step
    # after one forward pass, the call is recorded with the first of their two updates.
    for update in reversed(case.parallel_run[: case.update_index + 1]):
        line = update.first_on_any_rank("unwrapped_line")
        if line:
            text += f": {line}"
            break

    return Cause(
        "LS311", (gradients.sentence_on_difference, gradients.sentence_on_local_passes, text)
    )


def ddp_did_not_average(gradients: LocalGradients) -> Cause:
    """LS301: DDP knows these parameters, but did not average their gradients.

    Needs: `local_gradients`.
    Applies: always.
    False positives: parameters that the loss does not use, and `no_sync` around the last backward
        pass.
    Evidence: whether no gradient at all was averaged.
    """
    total = len(gradients.case.actual.merged("gradients"))
    all_differ = len(gradients.names) == total and total > 1
    evidence = [
        gradients.sentence_on_difference,
        gradients.sentence_on_local_passes,
        *gradients.sentences_on_bypassed_wrapper,
    ]
    if all_differ:
        evidence.append("no gradient at all was averaged, as under no_sync")
    return Cause("LS301", tuple(evidence))


# These rules are tried in order. When `parameters_averaged_later` and the rules after it are tried,
# it is known that each rank used its local gradients.
LOCAL_GRADIENT_RULES: tuple[Callable[[LocalGradients], Cause | None], ...] = (
    parameters_unknown_to_ddp,
    communication_hook,
    averages_within_groups,
    clipping_on_some_ranks,
    exchanged_inside_step,
    stepped_inside_backward_pass,
    gradients_from_random_numbers,
    gradients_that_are_not_local,
    parameters_averaged_later,
    forward_past_wrapper,
    averaged_too_late,
    other_gradients_are_averaged,
    model_that_nothing_wraps,
    ddp_did_not_average,
)
