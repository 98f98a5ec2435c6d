"""Makes two runs comparable if one of them meets a model later than the other.

The recorder has *met* a model once the script has called or wrapped it. A script that wraps its
models only on several processes may call one of them after some steps, or never: then the ranks
meet it before the first step, and one process meets it later. A run is a list of `Update`s
(optimizer steps), which hold a `RankUpdate` of every rank with its tensors by name. Before its
model is met, a parameter is named by its *place*, such as "/parameter 3 of optimizer 1".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lockstep.verify.joined_parts import belongs_only_to_optimizer
from lockstep.verify.names import AlignedRun, model_of, num_ranks_of, split_replica
from lockstep.verify.training_record import RankUpdate, Update

FIELDS_OF_MET_MODELS = ("initial", "buffers")
"""Fields of `RankUpdate` that hold tensors of all models that were met, trained or not."""

PlaceInOptimizer = tuple[int, int]
"""The number of an optimizer, in the order of first steps, and the index of a parameter in it."""


def with_names_of_models(run: AlignedRun, other_run: Sequence[Update] = ()) -> AlignedRun:
    """Returns a run in which every parameter has the name that it has once its model is met.

    For example, the script calls `Net` only after the third update. Then the first three updates
    have a parameter "/parameter 1 of optimizer 1", which the later ones call "Net/weight". The
    result has this name everywhere.

    Args:
        run: the run.
        other_run: updates of another run. It gives the names of parameters whose models some rank
            of this run never meets.
    """
    if not run.updates:
        return run

    names_in_other_run: dict[PlaceInOptimizer, str] = {}
    for rank in reversed(range(num_ranks_of(other_run))):  # names of lower ranks win
        names_in_other_run |= _names_by_place(other_run, rank)

    new_names_of_rank = []
    for rank in range(num_ranks_of(run.updates)):
        # If the rank has a parameter of that name too, then its optimizer has another one. For
        # example, the model was replaced after the optimizer had been constructed.
        names_on_rank = _names_of_parameters(run.updates, rank)
        names_by_place: dict[PlaceInOptimizer, str] = {}
        for place, name in names_in_other_run.items():
            if name not in names_on_rank:
                names_by_place[place] = name

        names_by_place |= _names_by_place(run.updates, rank)  # those of this run win
        new_names_of_rank.append(_new_names(run.updates, rank, names_by_place))

    if not any(new_names_of_rank):
        return run
    return run.renamed([partial(_with_name_of_model, names) for names in new_names_of_rank])


def _records_of(run: Sequence[Update], rank: int) -> Iterator[RankUpdate]:
    """Yields the records of a rank: in each update one, or one for each of its replicas."""
    for update in run:
        for record in update:
            if record.rank == rank:
                yield record


def _names_of_parameters(run: Sequence[Update], rank: int) -> set[str]:
    """Returns the names of all parameters that a rank has in some update, without replicas."""
    names: set[str] = set()
    for record in _records_of(run, rank):
        # The names of sharded parameters are only in `initial`.
        for name in (*record.initial, *record.parameter_sums):
            names.add(split_replica(name)[0])
    return names


def _names_by_place(run: Sequence[Update], rank: int) -> dict[PlaceInOptimizer, str]:
    """Returns the name of each parameter of a rank's optimizers, if its model was met.

    It is the last name that the parameter had, without its replica, such as "Net/weight" for
    (0, 1): parameter 1 of optimizer 0.
    """
    names = {}
    for record in _records_of(run, rank):
        for index, name in enumerate(record.optimizer_parameters):
            if name and not belongs_only_to_optimizer(name):
                names[record.optimizer, index] = split_replica(name)[0]
    return names


def _new_names(
    run: Sequence[Update], rank: int, names_by_place: Mapping[PlaceInOptimizer, str]
) -> dict[str, str]:
    """Returns the parameters of a rank to rename: `{"/parameter 1 of optimizer 1": "Net/weight"}`.

    Args:
        run: updates of the run.
        rank: number of the rank.
        names_by_place: for a parameter of an optimizer, its name in its model.
    """
    new_names: dict[str, str] = {}
    for record in _records_of(run, rank):
        for index, name in enumerate(record.optimizer_parameters):
            new_name = names_by_place.get((record.optimizer, index))
            if belongs_only_to_optimizer(name) and new_name is not None:
                new_names[split_replica(name)[0]] = new_name
    return new_names


def _with_name_of_model(new_names: Mapping[str, str], name: str) -> str:
    """Returns the new name of a tensor; the same name if it has none. Its replica stays."""
    name_without_replica, replica = split_replica(name)
    return new_names.get(name_without_replica, name_without_replica) + replica


def without_models_met_by_one_run(
    one_run: Sequence[Update], other_run: Sequence[Update]
) -> tuple[list[Update], list[Update]]:
    """Returns both runs without values of models that only one of them has met so far.

    The values of a model that is trained in the update are kept: then it is a difference that only
    one run has met it. Values of parameters that belong to no model are kept as well.
    """
    updates_of_one = list(one_run)
    updates_of_other = list(other_run)
    num_common_updates = min(len(one_run), len(other_run))
    for index in range(num_common_updates):
        for field_name in FIELDS_OF_MET_MODELS:
            models_of_one = models_of(updates_of_one[index].merged(field_name))
            models_of_other = models_of(updates_of_other[index].merged(field_name))
            updates_of_one[index] = _without_untrained_models(
                updates_of_one[index], field_name, models=models_of_one - models_of_other
            )
            updates_of_other[index] = _without_untrained_models(
                updates_of_other[index], field_name, models=models_of_other - models_of_one
            )

    return updates_of_one, updates_of_other


def models_of(names: Iterable[str]) -> set[str]:
    """Returns the models that some tensors belong to."""
    return {model_of(name) for name in names if not belongs_only_to_optimizer(name)}


def _without_untrained_models(update: Update, field_name: str, models: set[str]) -> Update:
    """Returns an update in which a field has no tensors of some models.

    Args:
        update: the update.
        field_name: name of a field of `RankUpdate` with arrays by name.
        models: the models. Those with gradients in the update are trained, and keep their tensors.
    """
    trained_models = models_of(update.merged("gradients"))
    removed_models = models - trained_models
    if not removed_models:
        return update

    records = []
    for record in update:
        arrays = {}
        for name, array in getattr(record, field_name).items():
            if model_of(name) not in removed_models:
                arrays[name] = array
        changed_field: dict[str, Any] = {field_name: arrays}
        records.append(replace(record, **changed_field))

    return Update(records)
