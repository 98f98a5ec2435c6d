"""Finds faults of a run that are known without comparing it with a reference.

A run is a list of `Update`s. Each is one optimizer step, with the record of every rank
(`RankUpdate`). A `Finding` is a cause, with a code such as LS103, and the evidence for it. Here,
the ranks of one run are compared with each other: they must have the same parameters and gradients,
and different samples.
"""

from __future__ import annotations

import traceback
from collections import Counter, defaultdict
from collections.abc import Sequence

from lockstep.verify.cause import Cause
from lockstep.verify.causes import cause_of
from lockstep.verify.divergence import Divergence
from lockstep.verify.finding import Finding
from lockstep.verify.rules.model_inputs import all_ranks_had_the_same, ranks_train_other_rows
from lockstep.verify.tolerance import Tolerance
from lockstep.verify.training_record import RankUpdate, Update

# Fewer samples may have the same order twice by chance.
MIN_SAMPLES_OF_REPEATED_ORDER = 6


def find_cause(case: Divergence) -> Cause:
    """Returns the cause of a difference, from the first rule that applies.

    If a rule raises an error, this is reported as the code LS210 (not known), because the
    difference is real nevertheless.
    """
    try:
        return cause_of(case)
    except Exception as error:
        function = traceback.extract_tb(error.__traceback__)[-1].name
        text = (
            f"a rule of `lockstep verify` itself has failed, in {function}: "
            f"{type(error).__name__}: {error}"
        )
        return Cause("LS210", (text, "please report it"))


def findings_without_reference(
    updates: Sequence[Update], tolerance: Tolerance, *, was_stopped: bool = True
) -> list[Finding]:
    """Returns the faults of a run that are known without a reference.

    These are ranks with different gradients or parameters, the same inputs on all ranks, optimizers
    that Lockstep has not prepared (LS407), and a repeated order of samples (LS103).

    Args:
        updates: updates of the run.
        tolerance: tolerance within which values are equal.
        was_stopped: whether the script was stopped after enough steps, and so may have had more
            passes over the samples. False if it has reached its end.
    """
    findings: list[Finding] = []
    for update_index, update in enumerate(updates):
        if not findings:  # otherwise, the difference may follow from an earlier finding
            findings += _compare_ranks(updates, update_index, tolerance)

        findings += _find_same_inputs_on_all_ranks(update)

        if any(record.optimizer_unprepared for record in update):
            step = update[0].step + 1
            text = f"optimizer {update[0].optimizer + 1} of the script, in step {step}"
            findings.append(Finding(Cause("LS407", (text,))))

    return findings + _find_repeated_order(updates, was_stopped=was_stopped)


def _find_repeated_order(updates: Sequence[Update], *, was_stopped: bool) -> list[Finding]:
    """Returns the finding LS103 in a list, if the samples have the same order in every epoch.

    Either a second pass over the samples was seen to repeat the order of the first one, or the
    script was stopped before a second pass, which would repeat the order.
    """
    repeated_order = _describe_repeated_order(updates)
    if repeated_order:
        return [Finding(Cause("LS103", (repeated_order,)))]

    if was_stopped and _latest_pass_has_fixed_order(updates):
        text = (
            "set_epoch was not called before the DistributedSampler's first pass, and no second "
            "was begun"
        )
        # The script may still set the epoch before a second pass, so this title is more careful
        # than the title in the catalogue.
        title = "without set_epoch a second pass would have the same order"
        return [Finding(Cause("LS103", (text,), title=title))]

    return []


def _compare_ranks(
    updates: Sequence[Update], update_index: int, tolerance: Tolerance
) -> list[Finding]:
    """Compares the ranks: their parameters before an update, and their gradients in it.

    Args:
        updates: updates of the run.
        update_index: index of the update.
        tolerance: tolerance within which values are equal.

    Returns:
        A list with one finding; empty if all ranks have the same values.
    """
    update = updates[update_index]

    # Parameters come first: if they differ before the update, so do the gradients in it.
    differing_parameters = list(update.replicas_that_differ())
    differing_gradients = list(update.ranks_that_differ("gradients", tolerance))
    if differing_parameters:
        kind, names = "replicas", differing_parameters
    elif differing_gradients:
        kind, names = "gradients", differing_gradients
    else:
        return []

    # The ranks are compared with each other, so the same run stands on both sides.
    num_parameters = len(update.merged("gradients"))  # each parameter has one gradient
    case = Divergence(
        reference_run=updates,
        parallel_run=updates,
        tolerance=tolerance,
        update_index=update_index,
        kind=kind,
        names=tuple(names),
        num_compared=num_parameters,
    )
    return [Finding(find_cause(case), case)]


def _find_same_inputs_on_all_ranks(update: Update) -> list[Finding]:
    """Checks whether all ranks computed the same inputs, although they should not.

    Returns:
        A list with the finding LS101, or LS108 if the inputs come from an IterableDataset. Empty if
        the ranks had different inputs, or may rightly have had the same.
    """
    # Ranks that hold parts of a model rightly get the same inputs.
    if any(_has_parts_of_parameters(record) for record in update):
        return []

    # Samples with known indices are compared with those of one process instead.
    indices_are_known = any(batch.ids for batch in update.batches)
    if indices_are_known:
        return []

    # For each rank, how often each sample occurs, by the digest of its contents.
    counts_of_ranks = []
    for record in update:
        if record.contributes:
            counts: Counter[str] = Counter()
            for batch in record.batches:
                counts.update(batch.contents)
            counts_of_ranks.append(counts)

    if not all_ranks_had_the_same(counts_of_ranks) or ranks_train_other_rows(update):
        return []

    is_stream = all(batch.iterable for batch in update.batches)
    code = "LS108" if is_stream else "LS101"
    text = f"in step {update[0].step + 1} every rank computed the same inputs"

    return [Finding(Cause(code, (text,)))]


def _has_parts_of_parameters(record: RankUpdate) -> bool:
    """True if a rank holds only a part of some parameter, such as a shard.

    A gradient is recorded of each parameter that the rank trains, but a sum only of each parameter
    that it holds as a whole.
    """
    names_of_trained_parameters = record.gradients.keys()
    names_of_whole_parameters = record.parameter_sums.keys()
    return bool(names_of_trained_parameters - names_of_whole_parameters)


def _describe_repeated_order(updates: Sequence[Update]) -> str:
    """Describes an epoch that repeats the sample order of the epoch before; empty if there is none.

    Unshuffled samples are ignored, since every epoch then has the order of the dataset.
    """
    # The sample indices of rank 0, by loader and epoch.
    order_of_epoch: dict[tuple[int, int], list[int]] = defaultdict(list)
    for update in updates:
        record_of_rank_0 = update[0]
        for batch in record_of_rank_0.batches:
            if batch.ids is not None:
                order_of_epoch[batch.loader, batch.epoch] += batch.ids

    for (loader, epoch), order in order_of_epoch.items():
        order_before = order_of_epoch.get((loader, epoch - 1), [])

        # The run may have been stopped within an epoch, so only the beginning is compared.
        num_compared = min(len(order), len(order_before))
        beginning = order[:num_compared]
        repeats_beginning = beginning == order_before[:num_compared]
        has_enough_samples = num_compared >= MIN_SAMPLES_OF_REPEATED_ORDER
        # Without shuffling, the indices are in ascending order.
        is_shuffled = beginning != sorted(beginning)
        if repeats_beginning and has_enough_samples and is_shuffled:
            # Epochs 0 and 1 of the record are shown to the user as epochs 1 and 2.
            return f"epoch {epoch + 1} begins with the samples of epoch {epoch}, in their order"

    return ""


def _latest_pass_has_fixed_order(updates: Sequence[Update]) -> bool:
    """True if the last batch of rank 0 comes from a sampler that repeats its order in every epoch.

    Such a DistributedSampler shuffles, but its `set_epoch` was never called.
    """
    indexed_batches = [batch for update in updates for batch in update[0].batches if batch.ids]
    return bool(indexed_batches) and indexed_batches[-1].order_fixed
