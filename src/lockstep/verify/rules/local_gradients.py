"""Rules for gradients that differ between the ranks, which should have averaged them.

A *rule* returns the `Cause`, or None. `gradients.names` are the gradients that differ, and
`gradients.case` is the step: `case.expected` is what one process recorded of it, `case.actual` what
the ranks recorded (a `RankUpdate` each, with the fields under "Needs"). *Local* gradients are what
the backward passes of one rank left, before any average.

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
from lockstep.verify.compare import Divergence
from lockstep.verify.rules.evidence import other_draws
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
    def difference_text(self) -> str:
        """The first sentence of evidence of all rules: how many gradients differ."""
        total = len(self.case.actual.merged("gradients"))
        return f"the gradients of {len(self.names)} of {total} parameters differ between the ranks"

    @cached_property
    def num_local_passes(self) -> int:
        """How many of the last backward passes explain the differences by local gradients.

        With 1, each rank used what its last backward pass left, and an average of the passes
        before it. 0 if something else differs as well, or if local gradients are not known.
        """
        # `local_gradients` has one dictionary for each backward pass.
        num_recorded = min(len(rank.local_gradients) for rank in self.case.actual)
        for num_passes in range(1, num_recorded + 1):
            if self._differ_by_last_passes(num_passes):
                return num_passes
        return 0

    def _differ_by_last_passes(self, num_passes: int) -> bool:
        """Returns whether the last passes explain all that differs between the ranks.

        Say that the last passes were not averaged, and the passes before them were. Then each rank
        used the same average plus the local sum of its last passes:
        `used = average + local_sum`. So `used - local_sum` must be the same on all ranks. Gradients
        are taken as they were before clipping.
        """
        local_sums = []  # for each rank, one vector with all values
        remainders = []  # for each rank, `used - local_sum`
        for rank in self.case.actual:
            used = {name: rank.unclipped[name] for name in self.names if name in rank.unclipped}
            used_vector = flat(used)
            local_sum = np.zeros_like(used_vector)
            for gradients in rank.local_gradients[-num_passes:]:
                gradients_of_pass = {}
                for name, array in used.items():
                    # A pass that does not reach a parameter leaves no gradient of it.
                    gradients_of_pass[name] = gradients.get(name, np.zeros_like(array))
                local_sum = local_sum + flat(gradients_of_pass)

            local_sums.append(local_sum)
            remainders.append(used_vector - local_sum)

        sizes = {len(remainder) for remainder in remainders}
        if len(sizes) != 1:  # some ranks lack gradients
            return False

        rounding = self.case.max_error * norm(local_sums[0])
        return all(norm(remainder - remainders[0]) <= rounding for remainder in remainders)

    @property
    def local_text(self) -> str:
        """A sentence of evidence: each rank used the local gradients of its last passes.

        These are the last `num_local_passes` backward passes of the step.
        """
        total = self.case.actual.backward_passes
        if self.num_local_passes < total:
            return (
                f"what the last {self.num_local_passes} of {total} backward passes left is "
                "each rank's own"
            )
        return "each rank used what its own backward pass left"

    @property
    def past_wrapper_texts(self) -> list[str]:
        """Evidence that the script called a model without its DDP wrapper: one sentence or none."""
        line = self.case.actual.first("past_wrapper_line")
        if not line:
            return []
        return [f"a forward pass bypassed the DDP wrapper: {line}"]

    @property
    def are_unwrapped(self) -> bool:
        """True if all parameters with these gradients are of models that nothing wraps.

        That is, neither DDP nor `World.prepare`.
        """
        unwrapped: set[str] = set()
        for rank in self.case.actual:
            unwrapped |= set(rank.unwrapped)
        return set(self.names) <= unwrapped

    @property
    def reducing_calls(self) -> list[ScriptCall]:
        """Collectives whose input was a gradient, in this update and the next one.

        A call after the optimizer's step is recorded with the next update.
        """
        case = self.case
        calls = []
        this_and_next = case.parallel_run[case.update_index : case.update_index + 2]
        for update in this_and_next:
            # `gradient_of` is the name of the parameter, or empty.
            calls += [call for call in update.calls if call.gradient_of]
        return calls


def gradients_that_differ_between_ranks(case: Divergence) -> Cause | None:
    """Tries `LOCAL_GRADIENT_RULES` if ranks step with different gradients.

    Needs: `gradients`.
    Applies: if a gradient is not the same on all ranks that have it.
    False positives, Evidence: see each rule. The cause is about the gradients that differ.
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
    """LS303: the parameters were made trainable after DDP had been built.

    Needs: `unknown_to_ddp`.
    Applies: if DDP knows none of the parameters whose gradients differ.
    False positives: none known.
    Evidence: that DDP was built too early.
    """
    unknown: set[str] = set()
    for rank in gradients.case.actual:
        unknown |= set(rank.unknown_to_ddp)
    if not unknown or not set(gradients.names) <= unknown:
        return None
    text = "DDP was built before they were to be trained"
    return Cause("LS303", (gradients.difference_text, text))


def communication_hook(gradients: LocalGradients) -> Cause | None:
    """LS213: the script gave DDP a communication hook, which decides how gradients are averaged.

    Needs: `comm_hook_line`.
    Applies: if there is such a hook.
    False positives: something else may be wrong as well.
    Evidence: the line that registered the hook.
    """
    line = gradients.case.actual.first("comm_hook_line")
    if not line:
        return None
    return Cause(
        "LS213", (gradients.difference_text, f"DDP was given a communication hook: {line}")
    )


def averages_within_groups(gradients: LocalGradients) -> Cause | None:
    """LS315: DDP averages gradients over groups of ranks instead of over all ranks.

    Needs: `ddp_ranks`.
    Applies: if there are several groups and gradients agree within each.
    False positives: none known.
    Evidence: the ranks of each group.
    """
    ranks = gradients.case.actual
    # For example [(0, 1), (2, 3)]: each group once, in the order of ranks.
    groups = list(dict.fromkeys(tuple(rank.ddp_ranks) for rank in ranks))
    some_use_all_ranks = () in groups  # as DDP does without a group of the script's
    if len(groups) < 2 or some_use_all_ranks:
        return None

    for group in groups:
        group_update = Update(ranks[number] for number in group)
        if group_update.ranks_that_differ("gradients", gradients.case.tolerance):
            return None

    names = "; ".join(format_ranks(group) for group in groups)
    text = f"DDP averages them over a part of the ranks, and they agree within each: {names}"
    return Cause("LS315", (gradients.difference_text, text))


def clipping_on_some_ranks(gradients: LocalGradients) -> Cause | None:
    """LS304: gradients were the same on all ranks until some ranks clipped them.

    Needs: `unclipped`, and `calls` that clip.
    Applies: if some rank clips, and the gradients before clipping are equal.
    False positives: clipping by different norms on different ranks.
    Evidence: which ranks clip, and the line.
    """
    case = gradients.case
    clipping_ranks = []
    for number, rank in enumerate(case.actual):
        if Update([rank]).clips:  # the calls of this rank alone
            clipping_ranks.append(number)

    if not clipping_ranks or case.actual.ranks_that_differ("unclipped", case.tolerance):
        return None

    text = f"they were the same until {format_ranks(clipping_ranks)} clipped them"
    return Cause("LS304", (gradients.difference_text, text, case.actual.clips[0].line))


def exchanged_inside_step(gradients: LocalGradients) -> Cause | None:
    """The optimizer exchanges gradients itself. LS201: it adds them up instead of averaging.

    LS209: it multiplies them by another number. LS210: what it used is not known.

    Needs: `calls` inside of `optimizer.step()`, `reduced_in_step`, `optimizer_state`.
    Applies: if there is such a call. LS201 and LS209 follow from what the collective left, or from
        the optimizer's state.
    False positives: an optimizer that itself divides the sum after the collective.
    Evidence: the line of the collective, and how many times too large they are.
    """
    case = gradients.case
    calls_in_step = case.actual.in_step
    if not calls_in_step:
        return None

    line = calls_in_step[0].line
    exchange = f"they differ as the step begins; the optimizer exchanges them in it: {line}"
    ratio = _ratio_after_exchange(case)
    if ratio is not None and not near(ratio, 1):
        code = "LS201" if near(ratio, case.num_ranks) else "LS209"
        text = f"after that they are {ratio:.6g} times those of one process"
        return Cause(code, (gradients.difference_text, exchange, text), ratio=ratio)

    large_state = _optimizer_state_too_large(case)
    if large_state:
        return Cause("LS201", (gradients.difference_text, exchange, *large_state))

    text = "what it computes from them is not known; the parameters before the next step differ"
    return Cause("LS210", (gradients.difference_text, exchange, text))


def _ratio_after_exchange(case: Divergence) -> float | None:
    """Returns the factor between the gradients of one process and those that the optimizer made.

    Its own collective, inside of `optimizer.step()`, has left them in the gradients. Returns None
    if they are no multiple of those of one process, or if no rank recorded them.
    """
    expected = case.expected.merged("gradients")
    reduced = case.actual.merged("reduced_in_step")

    # The gradients that are known of both, by name.
    expected_of_reduced = {}
    actual = {}
    for name in case.names:
        if name in expected and name in reduced:
            expected_of_reduced[name] = expected[name]
            actual[name] = reduced[name]

    if not actual:
        return None

    return constant_ratio(expected_of_reduced, actual, case.max_error)


def _optimizer_state_too_large(case: Divergence) -> list[str]:
    """Says that state of the optimizer is N times, or N squared times, that of one process.

    The result is one sentence about the first such state in any step, or an empty list.
    """
    # Adam keeps a mean of gradients ("exp_avg"), and one of their squares ("exp_avg_sq").
    factors = {
        case.num_ranks: "the number of processes",
        case.num_ranks**2: "the number of processes, squared",
    }
    for expected, actual in zip(case.reference_run, case.parallel_run, strict=False):
        ratios_by_key = _ratios_of_state(expected[0], actual)
        for key, ratios in ratios_by_key.items():
            for factor, text in factors.items():
                # The same factor for all parameters.
                if all(near(ratio, factor) for ratio in ratios):
                    return [
                        f"what the optimizer keeps as {key!r} is {factor} times as large as "
                        f"on one process: {text}"
                    ]

    return []


def _ratios_of_state(expected: RankUpdate, actual: Update) -> dict[str, set[float]]:
    """Returns how many times as large state tensors of the ranks are as those of one process.

    Tensors are compared by their largest absolute value.

    Args:
        expected: one process.
        actual: the ranks in the same update. If each keeps a part of a tensor, the largest counts.

    Returns:
        The ratios of all parameters, for each key such as "exp_avg".
    """
    ratios_by_key: dict[str, set[float]] = defaultdict(set)
    # Tensors are named "Net/layer.weight/exp_avg". Three numbers stand for each.
    for name, numbers in expected.optimizer_state.items():
        largest_of_ranks = []
        for rank in actual:
            if name in rank.optimizer_state:
                largest_of_ranks.append(rank.optimizer_state[name][LARGEST])
        if largest_of_ranks and numbers[LARGEST]:
            key = name.rpartition("/")[2]
            ratios_by_key[key].add(max(largest_of_ranks) / numbers[LARGEST])

    return ratios_by_key


def gradients_that_are_not_local(gradients: LocalGradients) -> Cause | None:
    """LS308: the gradients were computed from random numbers. LS304, LS210: something else.

    Needs: `local_gradients`; `gradient_draw_line`.
    Applies: if the ranks did not use their local gradients. LS304 if each rank has the gradients
        of rank 0 times a number, else LS210.
    False positives: noise, or weights of the ranks after the average, which have no code.
    Evidence: what is known of them.
    """
    ranks_used_local_gradients = gradients.num_local_passes > 0
    if ranks_used_local_gradients:  # the rules after this one say why
        return None

    case = gradients.case
    evidence = [gradients.difference_text, *gradients.past_wrapper_texts]
    line = case.actual.first("gradient_draw_line")
    if line:
        evidence.append(f"they are computed from random numbers that each rank drew: {line}")
        return Cause("LS308", tuple(evidence))

    evidence.append("they are not what each rank's own backward passes left")
    gradients_of_first = case.actual[0].gradients

    # For each rank but rank 0, its gradients divided by those of rank 0; None if that is not one
    # number.
    ratios = []
    for rank in case.actual[1:]:
        ratios.append(constant_ratio(gradients_of_first, rank.gradients, case.max_error))

    are_multiples = None not in ratios
    if are_multiples:
        texts = [f"{ratio:.6g} times on rank {rank}" for rank, ratio in enumerate(ratios, 1)]
        evidence.append(f"they are those of rank 0, {', '.join(texts)}")

    reducing_calls = [call for call in case.actual.calls if call.gradient_of]
    if reducing_calls:
        evidence.append(f"gradients were reduced: {reducing_calls[0].line}")

    code = "LS304" if are_multiples else "LS210"
    return Cause(code, (*evidence, *other_draws(case)))


def parameters_averaged_later(gradients: LocalGradients) -> Cause | None:
    """LS313: the script averages parameters over the ranks instead of gradients.

    Needs: `rewritten_parameters` before a later step, and `parameters` after the step before it.
    Applies: if parameters differed after a step, and before the next one each rank has their mean.
    False positives: none known.
    Evidence: before which step.
    """
    case = gradients.case
    # A script may average parameters only every few steps. So all steps from this one on are looked
    # at, in pairs of a step and the next one.
    for before, after in pairwise(case.parallel_run[case.update_index :]):
        if not before.ranks_that_differ("parameters", case.tolerance):
            continue

        mean = mean_of([_arrays(rank.parameters, gradients.names) for rank in before])
        # What the script wrote to the parameters after the step of `before`.
        rewritten = [_arrays(rank.rewritten_parameters, gradients.names) for rank in after]
        if all(_is_equal(arrays, mean, case.max_error) for arrays in rewritten):
            step = after[0].step + 1
            text = f"before step {step} parameters, not gradients, are averaged over the ranks"
            return Cause("LS313", (gradients.difference_text, gradients.local_text, text))

    return None


def _arrays(arrays: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
    """Returns those of the arrays that have one of these names."""
    return {name: arrays[name] for name in names if name in arrays}


def _is_equal(actual: Mapping[str, Array], expected: Mapping[str, Array], max_error: float) -> bool:
    """Returns whether all arrays are equal within rounding; False if there are none."""
    ratio = constant_ratio(expected, actual, max_error)
    return ratio is not None and near(ratio, 1)


def forward_past_wrapper(gradients: LocalGradients) -> Cause | None:
    """LS302: forward passes went past the DDP wrapper, which then averages nothing.

    Needs: `past_wrapper_line` and `wrapped_passes`.
    Applies: if no forward pass went through the wrapper.
    False positives: none known.
    Evidence: the line of a forward pass.
    """
    if not gradients.past_wrapper_texts or gradients.are_unwrapped:
        return None
    some_passes_were_wrapped = any(rank.wrapped_passes for rank in gradients.case.actual)
    if some_passes_were_wrapped:
        return None
    return Cause("LS302", (gradients.difference_text, *gradients.past_wrapper_texts))


def averaged_too_late(gradients: LocalGradients) -> Cause | None:
    """LS406: the script averages these gradients, but after the optimizer has used them.

    Needs: `calls` on gradients, in this update and the next one.
    Applies: if a collective got one of these gradients, though each rank used its local ones.
    False positives: a collective whose result is not written back.
    Evidence: the line of the first collective.
    """
    calls = gradients.reducing_calls
    if not any(call.gradient_of in gradients.names for call in calls):
        return None
    text = f"these gradients were averaged too late, or only others were: {calls[0].line}"
    return Cause("LS406", (gradients.difference_text, gradients.local_text, text))


def other_gradients_are_averaged(gradients: LocalGradients) -> Cause | None:
    """LS301: the script averages other gradients, but not these.

    Needs: `calls` on gradients, or `local_gradients` of models that are not wrapped.
    Applies: if a collective was called with other gradients, or if other gradients of the same
        models are not the local ones, so that something has averaged them.
    False positives: none known.
    Evidence: the line of the collective, or the gradients that are averaged.
    """
    calls = gradients.reducing_calls
    if calls:
        text = f"the script reduces other gradients: {calls[0].line}"
        return Cause("LS301", (gradients.difference_text, gradients.local_text, text))

    names = _averaged_names(gradients)
    if not names:
        return None

    text = f"gradients of other parameters are averaged: {format_items(script_names(names))}"
    return Cause("LS301", (gradients.difference_text, gradients.local_text, text))


def _averaged_names(gradients: LocalGradients) -> list[str]:
    """Returns gradients that the script itself averages, though not those that differ.

    Only models that nothing wraps are looked at, since DDP averages for itself. A gradient is
    averaged if rank 0 used another one than its backward passes left. It must belong to the models
    or to the optimizer of the gradients that differ.
    """
    case = gradients.case
    all_are_unwrapped = set(gradients.names) <= set(case.actual[0].unwrapped)
    if not all_are_unwrapped:
        return []

    optimizer = case.actual[0].optimizer
    models = {_model_of(name) for name in gradients.names}
    averaged: dict[str, None] = {}  # a set that keeps the order
    for update in _neighbouring_updates(case):
        rank = update[0]
        # What all backward passes of the step left, by name; empty if that is not known.
        local = sum_of_passes(rank.local_gradients, rank.unwrapped)
        for name, local_gradient in local.items():
            is_related = rank.optimizer == optimizer or _model_of(name) in models
            if not is_related or name in gradients.names:
                continue
            if name not in rank.unclipped:  # this optimizer does not have the parameter
                continue

            used = rank.unclipped[name]
            difference = norm(flat({name: used - local_gradient}))
            if difference > case.max_error * norm(used):
                averaged[name] = None

    return list(averaged)


def _neighbouring_updates(case: Divergence) -> Sequence[Update]:
    """Returns the updates around this one in which each optimizer of the script steps.

    For example, with three optimizers that step in turn, these are two updates before this one, it
    itself, and two after it.
    """
    num_optimizers = len({update[0].optimizer for update in case.parallel_run})
    first = max(0, case.update_index - num_optimizers + 1)
    return case.parallel_run[first : case.update_index + num_optimizers]


def _model_of(name: str) -> str:
    """Returns the model in the name of a parameter: "Net" of "Net/layer.weight"."""
    return name.partition("/")[0]


def model_that_nothing_wraps(gradients: LocalGradients) -> Cause | None:
    """LS311: the model is neither wrapped by DDP nor prepared by Lockstep.

    Needs: `unwrapped` and `unwrapped_line`.
    Applies: if all these parameters are of such models.
    False positives: none known.
    Evidence: the line of a forward pass of the model.
    """
    if not gradients.are_unwrapped:
        return None

    case = gradients.case
    text = "neither DDP nor Lockstep wraps the model"

    # A model may have been called before another one's step, so earlier updates count too.
    for update in reversed(case.parallel_run[: case.update_index + 1]):
        line = update.first("unwrapped_line")
        if line:
            text += f": {line}"
            break

    return Cause("LS311", (gradients.difference_text, gradients.local_text, text))


def ddp_did_not_average(gradients: LocalGradients) -> Cause:
    """LS301: DDP knows these parameters, and did not average their gradients.

    Needs: `local_gradients`.
    Applies: always.
    False positives: parameters that the loss does not use, and `no_sync` around the last backward
        pass.
    Evidence: whether no gradient at all was averaged.
    """
    total = len(gradients.case.actual.merged("gradients"))
    all_differ = len(gradients.names) == total and total > 1
    evidence = [gradients.difference_text, gradients.local_text, *gradients.past_wrapper_texts]
    if all_differ:
        evidence.append("no gradient at all was averaged, as under no_sync")
    return Cause("LS301", tuple(evidence))


# In the order in which they are tried. From `parameters_averaged_later` on, each rank used its
# local gradients.
LOCAL_GRADIENT_RULES: tuple[Callable[[LocalGradients], Cause | None], ...] = (
    parameters_unknown_to_ddp,
    communication_hook,
    averages_within_groups,
    clipping_on_some_ranks,
    exchanged_inside_step,
    gradients_that_are_not_local,
    parameters_averaged_later,
    forward_past_wrapper,
    averaged_too_late,
    other_gradients_are_averaged,
    model_that_nothing_wraps,
    ddp_did_not_average,
)
