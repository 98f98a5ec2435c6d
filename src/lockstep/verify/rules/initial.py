"""Rules for parameters that differ from those of one process before the first step.

A *rule* returns the `Cause` of a difference (`case`) between a run on one process and a run on
several ranks, or None if it does not apply. `case.expected` is the optimizer step on one process,
and `case.actual` the same step on the ranks: a `RankUpdate` (record) for each rank, with the fields
listed under "Needs". `merged(field)` merges the arrays of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.verify.cause import Cause, format_by_process, name_ranks, name_reference
from lockstep.verify.divergence import Divergence
from lockstep.verify.joined_parts import belongs_only_to_optimizer
from lockstep.verify.line_findings import describe_writes
from lockstep.verify.rules.evidence import format_ranks_that_differ
from lockstep.verify.training_record import Update


def optimizer_has_parameters_of_no_model(case: Divergence) -> Cause | None:
    """LS314: the optimizer updates parameters that belong to no model, so no model is trained.

    For example, the script has constructed the optimizer, and then wrapped the model in a way that
    gives it new parameters.

    Needs: `initial`, in which parameters that belong to no model have names that begin with "/".
    Applies: if all parameters of the optimizer belong to a model on one process, and on several
        ranks the models' own parameters never change.
    False positives: a sharded model that is trained correctly. Its parameters are not recorded
        between steps, so their changes are not seen.
    Evidence: how many such parameters the optimizer has.
    """
    # Such a parameter has a name like "/parameter 3 of optimizer 1", and not "Net/layer.weight".
    names_of_no_model = [
        name for name in case.actual.merged("initial") if belongs_only_to_optimizer(name)
    ]
    if not names_of_no_model:
        return None

    # If one process has some too, the optimizer is meant to have parameters outside of models.
    one_process_has_some_too = any(
        belongs_only_to_optimizer(name) for name in case.expected.merged("initial")
    )
    if one_process_has_some_too:
        return None

    # If the models change, they are trained nevertheless.
    if _models_change(case.parallel_run):
        return None

    optimizer_class = case.actual[0].optimizer_class
    return Cause(
        "LS314",
        (
            f"{len(names_of_no_model)} parameters that {optimizer_class} updates belong to no "
            "model that was called",
            "on one process all of its parameters belong to models; on the ranks the models have "
            "got other parameters since the optimizer was constructed",
        ),
        tuple(names_of_no_model),
    )


def _models_change(run: Sequence[Update]) -> bool:
    """True if a parameter of a model differs between the first and a later step."""
    # `parameter_sums` has two numbers for each parameter, which change when any of its values does.
    first_sums = run[0].merged("parameter_sums")
    for update in run[1:]:
        sums = update.merged("parameter_sums")
        for name in first_sums:
            is_outside_of_models = belongs_only_to_optimizer(name)
            if is_outside_of_models or name not in sums:
                continue
            if not np.array_equal(sums[name], first_sums[name]):
                return True

    return False


def other_initial_parameters(case: Divergence) -> Cause:
    """LS305: the ranks start with different parameters than one process.

    Needs: `initial`, and `seeds` for the evidence.
    Applies: always.
    False positives: parameters that some ranks loaded from a file or wrote to. The lines that wrote
        to them are named.
    Evidence: which ranks differ from rank 0, and the first line that seeded torch differently.
    """
    # By parameter, the ranks with other values than rank 0: {"fc.weight": [1, 3]}.
    ranks_by_name = case.actual.ranks_that_differ("initial", case.tolerance)
    if ranks_by_name:
        ranks = format_ranks_that_differ(ranks_by_name)
        sentence = f"before the first step {ranks} had different values than rank 0"
    else:
        sentence = "all ranks began with the same values, which are not those of one process"

    names_of_parameters = tuple(ranks_by_name)
    writes = describe_writes(case, names_of_parameters)
    return Cause("LS305", (sentence, *_other_seeds(case), *writes))


def _other_seeds(case: Divergence) -> list[str]:
    """Names the first line that seeded torch differently on different processes.

    For example, one process and rank 0 have recorded the seeds `{"train.py:3: ...": 0}`, and rank 1
    has recorded `{"train.py:3: ...": 1}`. Then the result has two sentences, on these seeds and on
    this line. It is empty if there is no such line.
    """
    # The names of all records, such as "one process", "rank 0" and "rank 1". One process has a
    # record for each replica of the model that it trains, usually a single one.
    names_of_reference = name_reference(num_replicas=len(case.expected))
    names_of_records = [*names_of_reference, *name_ranks(range(len(case.actual)))]

    # For each record, the seeds that torch was given, by line, such as
    # {"train.py:3: torch.manual_seed(0)": 0}.
    seeds_of_records = [record.seeds for record in (*case.expected, *case.actual)]

    # Only lines that one process ran are compared. Its replicas have run the same ones.
    lines_of_one_process = list(case.expected[0].seeds)
    for line in lines_of_one_process:
        values = [seeds.get(line, "no seed") for seeds in seeds_of_records]
        if len(set(values)) > 1:
            return [
                f"torch was seeded with {format_by_process(values, names_of_records)}",
                f"the seed was set by {line}",
            ]

    return []
