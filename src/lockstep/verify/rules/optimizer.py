"""Rules for learning rates, optimizers, and parameters that differ before or after a step.

A *rule* returns the `Cause` of a difference (`case`) between a run on one process and a run on
several ranks, or None if it does not apply. `case.expected` is the optimizer step on one process,
and `case.actual` the same step on the ranks: a `RankUpdate` (record) for each rank, with the fields
listed under "Needs". All steps are in `case.reference_run` and `case.parallel_run`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.verify.algebra import near
from lockstep.verify.cause import (
    Cause,
    format_by_process,
    format_items,
    name_ranks,
    name_reference,
    script_names,
)
from lockstep.verify.divergence import Divergence
from lockstep.verify.line_findings import describe_writes
from lockstep.verify.rules.evidence import format_ranks_that_differ
from lockstep.verify.tolerance import largest_of_all
from lockstep.verify.training_record import RankUpdate, ScriptCall

MAX_LINES_THAT_SET_RATES = 2


def other_parameter_groups(case: Divergence) -> Cause | None:
    """LS403: the optimizers have different numbers of parameter groups.

    Needs: `learning_rates`, one for each group.
    Applies: if processes have different numbers of learning rates.
    False positives: none known.
    Evidence: what is different in the parameter groups and in the optimizer's state.
    """
    ranks = (*case.expected, *case.actual)
    if len({len(rank.learning_rates) for rank in ranks}) == 1:
        return None
    evidence = tuple(_optimizer_differences(case))
    return Cause("LS403", evidence or ("other parameter groups",))


def other_learning_rates(case: Divergence) -> Cause:
    """LS401: the scheduler made more or fewer steps than on one process. LS402: another reason.

    Needs: `learning_rates`, `learning_rate_lines`, and `calls` of schedulers.
    Applies: always. LS401 if all ranks stepped the scheduler equally often, but not as often as one
        process.
    False positives: LS402 covers rates that the script sets, schedulers of another length, and
        schedulers that follow a metric.
    Evidence: the rates, the numbers of scheduler steps, and the lines that set the rates.
    """
    # The lists have an item for one process, and then one for each rank.
    rates = _format_rates(case)
    scheduler_steps = _count_scheduler_steps(case)
    rates_of_ranks = rates[1:]
    steps_of_one, *steps_of_ranks = scheduler_steps

    ranks_have_equal_steps = len(set(steps_of_ranks)) == 1
    code = "LS402"
    if ranks_have_equal_steps and steps_of_ranks[0] != steps_of_one:
        code = "LS401"

    # If the ranks have the same rates and scheduler steps, they are not listed rank by rank.
    ranks_agree = ranks_have_equal_steps and len(set(rates_of_ranks)) == 1
    evidence = (
        _format_once_if_ranks_agree(rates, ranks_agree=ranks_agree),
        _describe_how_rates_were_set(case, scheduler_steps, ranks_agree=ranks_agree),
        *_lines_that_set_rates(case),
        *_describe_differing_metrics(case),
    )
    return Cause(code, evidence, ratio=_ratio_of_first_rates(case))


def _describe_how_rates_were_set(
    case: Divergence, scheduler_steps: Sequence[int], *, ranks_agree: bool
) -> str:
    """Says how often schedulers stepped, or how the script has scaled the rates at the start.

    Args:
        case: the difference.
        scheduler_steps: the number of scheduler steps on one process, and then on each rank.
        ranks_agree: whether all ranks have the same rates and scheduler steps.
    """
    some_scheduler_stepped = any(scheduler_steps)
    if some_scheduler_stepped:
        steps_by_process = _format_once_if_ranks_agree(scheduler_steps, ranks_agree=ranks_agree)
        return f"steps of the scheduler until then: {steps_by_process}"

    differs_from_start = case.update_index == 0
    if differs_from_start and ranks_agree:
        # The script has scaled the rates with the number of ranks: "2 times as high".
        return _format_rate_ratio(_ratio_of_first_rates(case), case.num_ranks)

    return "no scheduler stepped"


def _format_rates(case: Divergence) -> list[str]:
    """Returns a text with all learning rates, such as "0.1, 0.2", of each process.

    The text of one process comes first. It may train several replicas, which all have the same
    learning rates.
    """
    texts = []
    for process in (case.expected[0], *case.actual):
        texts.append(", ".join(f"{rate:.6g}" for rate in process.learning_rates))
    return texts


def _format_once_if_ranks_agree(numbers: Sequence[object], *, ranks_agree: bool) -> str:
    """Formats numbers with the processes that have them.

    This is "0.1 on one process, 0.2 on 4" if the 4 ranks agree; otherwise each rank is named.

    Args:
        numbers: the number of one process, or a text such as "0.1, 0.2", and then that of each
            rank.
        ranks_agree: whether all ranks have the same.
    """
    numbers_of_one, *numbers_by_rank = numbers
    num_ranks = len(numbers_by_rank)
    if ranks_agree:
        numbers_of_ranks = numbers_by_rank[0]
        return f"{numbers_of_one} on one process, {numbers_of_ranks} on {num_ranks}"

    processes = ["one process", *name_ranks(range(num_ranks))]
    pairs = zip(numbers, processes, strict=True)
    return ", ".join(f"{value} on {process}" for value, process in pairs)


def _updates_of_processes(case: Divergence) -> list[list[RankUpdate]]:
    """Returns the updates of one process and then of each rank, up to the current one."""
    end = case.update_index + 1
    processes = [[update[0] for update in case.reference_run[:end]]]
    for rank in range(case.num_ranks):
        processes.append([update[rank] for update in case.parallel_run[:end]])
    return processes


def _count_scheduler_steps(case: Divergence) -> list[int]:
    """Returns the number of scheduler steps so far, on one process and then on each rank."""
    counts = []
    for updates in _updates_of_processes(case):
        scheduler_calls: list[ScriptCall] = []
        for update in updates:
            # Calls of `scheduler.step()` are recorded under this name.
            scheduler_calls += [call for call in update.calls if call.name == "schedule"]
        counts.append(len(scheduler_calls))

    return counts


def _ratio_of_first_rates(case: Divergence) -> float:
    """Returns the ratio of the first learning rate to that of one process, or NaN."""
    expected = case.expected[0].learning_rates
    actual = case.actual[0].learning_rates
    if not expected or not actual or not expected[0]:
        return math.nan
    return actual[0] / expected[0]


def _format_rate_ratio(ratio: float, num_ranks: int) -> str:
    """Describes how a learning rate was scaled with the number of ranks: "4 times as high"."""
    if near(ratio, num_ranks):
        text = f"{num_ranks} times"
    elif near(ratio, math.sqrt(num_ranks)):
        text = f"the square root of {num_ranks} times"
    else:
        text = f"{ratio:.6g} times"
    return f"{text} as high"


def _lines_that_set_rates(case: Divergence) -> list[str]:
    """Names the first lines that set learning rates which are not the same on all processes."""
    # Only the first lines are named. The ranks come first: they are more likely to have set a wrong
    # rate than one process is. And their rates are compared with one process before other ranks.
    lines = []
    for record in (*case.actual, *case.expected):
        for other_record in (*case.expected, *case.actual):
            lines += _lines_of_differing_rates(record, other_record)

    distinct_lines = list(dict.fromkeys(lines))
    first_lines = distinct_lines[:MAX_LINES_THAT_SET_RATES]
    return [f"it was set by {line}" for line in first_lines]


def _lines_of_differing_rates(process: RankUpdate, other_process: RankUpdate) -> list[str]:
    """Returns the script's lines that set a rate on one process which another one does not have.

    A line is such as "train.py:31: ...". Rates whose line is not known are left out.
    """
    # One tuple for each parameter group that both have.
    rates_and_lines = zip(
        process.learning_rates,
        other_process.learning_rates,
        process.learning_rate_lines,
        strict=False,
    )
    lines = []
    for rate, other_rate, line in rates_and_lines:
        if line and rate != other_rate:
            lines.append(line)
    return lines


def _describe_differing_metrics(case: Divergence) -> list[str]:
    """Says that ReduceLROnPlateau got different metrics on different processes.

    The last call on each process is used. The result is one sentence in a list; the list is empty
    if the metrics are equal, or if some process has not called the scheduler.
    """
    last_calls: list[ScriptCall] = []
    for updates in _updates_of_processes(case):
        calls: list[ScriptCall] = []
        for update in updates:
            # Only calls of ReduceLROnPlateau.step(metric) have a value.
            calls += [call for call in update.calls if call.value is not None]

        if not calls:
            return []
        last_calls.append(calls[-1])

    values = [f"{call.value:.6g}" for call in last_calls]
    if len(set(values)) == 1:
        return []

    # ["one process", "rank 0", "rank 1", ...]
    processes = [*name_reference(num_replicas=1), *name_ranks(range(case.num_ranks))]
    by_process = format_by_process(values, processes)
    return [f"ReduceLROnPlateau was given {by_process}: {last_calls[-1].line}"]


def other_optimizer(case: Divergence) -> Cause | None:
    """LS403: the parameters differ after a step because of other options or state of the optimizer.

    Needs: `group_options` and `optimizer_state`.
    Applies: if options or state differ from one process.
    False positives: none known.
    Evidence: which options and which state.
    """
    differences = _optimizer_differences(case)
    if not differences:
        return None
    return Cause("LS403", (_only_parameters_differ(), *differences))


def _only_parameters_differ() -> str:
    """Returns the first sentence of evidence for parameters that differ after a step."""
    return "gradients and learning rates are equal, and the parameters after the step are not"


def _optimizer_differences(case: Divergence) -> list[str]:
    """Names options of parameter groups that differ; if there are none, optimizer state that does.

    Each sentence is about one option: "momentum of parameter group 1: 0.9 on one process, 0 on rank
    0 and rank 1".
    """
    record_by_name = _records_with_options(case)
    records = list(record_by_name.values())
    names_of_records = list(record_by_name)
    sentences = []
    num_groups = [len(record.group_options) for record in records]
    if len(set(num_groups)) > 1:
        by_process = format_by_process(num_groups, names_of_records)
        sentences.append(f"parameter groups of the optimizer: {by_process}")

    for group in range(min(num_groups)):
        options_of_records = [record.group_options[group] for record in records]
        sentences += _group_differences(group, options_of_records, names_of_records)

    if sentences:
        return sentences

    return _state_difference(case)


def _records_with_options(case: Divergence) -> dict[str, RankUpdate]:
    """Returns the records in which the options of an optimizer are known, by their names in texts.

    The names are such as "one process" and "rank 0". Options are not known for ranks that have not
    stepped, as under `Join`.
    """
    names_of_reference = name_reference(num_replicas=len(case.expected))
    record_by_name = dict(zip(names_of_reference, case.expected, strict=True))
    for name, record in zip(name_ranks(range(case.num_ranks)), case.actual, strict=True):
        if record.stepped:
            record_by_name[name] = record
    return record_by_name


def _group_differences(
    group: int, options_of_records: Sequence[Mapping[str, Any]], names_of_records: Sequence[str]
) -> list[str]:
    """Names options of one parameter group that differ, in a sentence each.

    Args:
        group: number of the group, from 0.
        options_of_records: options of the group in each record.
        names_of_records: names of the records, such as "rank 0".
    """
    keys: dict[str, None] = {}  # an ordered set
    for options in options_of_records:
        keys.update(dict.fromkeys(options))

    sentences = []
    for key in keys:
        values = [options.get(key) for options in options_of_records]
        if any(value != values[0] for value in values):
            # The entry "parameters" is the size of the group, and not an option of torch's.
            option = "number of parameters" if key == "parameters" else key
            by_process = format_by_process(values, names_of_records)
            sentences.append(f"{option} of parameter group {group + 1}: {by_process}")

    return sentences


def _state_difference(case: Divergence) -> list[str]:
    """Names tensors of the optimizer's state that differ, on the first rank where some do.

    The state, such as the momentum of each parameter, is recorded before the step. The result is
    one sentence in a list, or an empty list if no state differs.
    """
    expected = case.expected.merged("optimizer_state")
    scale = largest_of_all(expected)  # the tolerance depends on it

    for rank, record in enumerate(case.actual):
        actual = record.optimizer_state
        names = []
        for name in sorted(expected.keys() | actual.keys()):
            is_in_both = name in expected and name in actual
            if not is_in_both or case.tolerance.differ(expected[name], actual[name], scale):
                names.append(name)

        if names:
            listed = format_items(sorted(script_names(names)))
            return [
                f"on rank {rank}, the optimizer's state before the step differs from that of one "
                f"process: {listed}"
            ]

    return []


def parameters_of_ranks_differ(case: Divergence) -> Cause | None:
    """LS304: the ranks have different parameters after the step.

    Needs: `parameters`.
    Applies: if the ranks differ from each other, and `other_optimizer` explains nothing.
    False positives: none known.
    Evidence: which ranks differ from rank 0.
    """
    ranks_by_name = case.actual.ranks_that_differ("parameters", case.tolerance)
    if not ranks_by_name:
        return None
    text = f"rank 0 has different parameters than {format_ranks_that_differ(ranks_by_name)}"
    return Cause("LS304", (_only_parameters_differ(), text), tuple(ranks_by_name))


def other_parameters_after_step(case: Divergence) -> Cause:
    """LS403: all ranks have the same wrong parameters after the step.

    Needs: `parameters`.
    Applies: always.
    False positives: anything that the script does inside `optimizer.step()`.
    Evidence: that gradients and learning rates are right.
    """
    return Cause("LS403", (_only_parameters_differ(),))


def frozen_parameters_differ(case: Divergence) -> Cause | None:
    """LS309: parameters that nothing trains, such as those of a teacher, differ before the step.

    Needs: `frozen` and `parameter_sums`; `write_stacks` for the evidence.
    Applies: if all parameters that differ are frozen.
    False positives: none known.
    Evidence: the lines that wrote to them.
    """
    all_are_frozen = set(case.names) <= set(case.expected[0].frozen)
    if not all_are_frozen:
        return None

    step = case.actual[0].step + 1  # `step` counts from 0
    text = f"before step {step} parameters that nothing trains differ from those of one process"
    examples = "such as those of a teacher, an average or a target network"
    return Cause("LS309", (text, examples, *describe_writes(case, case.names)))


def parameters_changed_between_steps(case: Divergence) -> Cause:
    """LS210: something other than the optimizer changed parameters, but it is not known what.

    Needs: `parameter_sums`; `write_stacks` for the evidence.
    Applies: always.
    False positives: a change in a forward pass.
    Evidence: the lines that wrote to the parameters, and whether the step before had left the
        parameters of one process.
    """
    step = case.actual[0].step + 1  # records count steps from 0, texts from 1
    text = f"before step {step} parameters differ from those of one process"
    writes = describe_writes(case, case.names)

    # It is not known when the parameters were changed.
    if not _last_step_is_recorded(case):
        return Cause("LS210", (text, *writes))

    # No earlier difference was found: after the last step the parameters were equal to those of one
    # process.
    if not writes:
        writes = ["something changes them between the steps, or in a forward pass"]

    return Cause("LS210", (f"{text}; the last step left those of one process", *writes))


def _last_step_is_recorded(case: Divergence) -> bool:
    """True if there was a step before this one, and the parameters after it were recorded."""
    is_first_step = case.update_index == 0
    if is_first_step:
        return False
    last_update = case.parallel_run[case.update_index - 1]
    return bool(last_update.merged("parameters"))


def other_number_of_steps(case: Divergence) -> Cause:
    """LS405: the ranks made another number of optimizer steps.

    Needs: all updates.
    Applies: always.
    False positives: a script that stops after a certain time.
    Evidence: the numbers of steps.
    """
    num_expected = len(case.reference_run)
    num_actual = len(case.parallel_run)  # it only has the steps that all ranks took

    if num_actual == 0:
        text = f"one process took {num_expected} steps, and some rank took none"
    else:
        text = (
            f"one process took {num_expected} steps, {case.num_ranks} processes took {num_actual}"
        )

    return Cause("LS405", (text,))
