"""Decides where a model is cut into stages: pure functions of the model's structure and of costs.

A *cut* is the name of the submodule with which a stage begins. Everything that is registered before
it belongs to earlier stages, so submodules must be registered in the order in which they are
called. A *unit* is a submodule before which the model can be cut. *State* is what training changes:
parameters, or the statistics of a BatchNorm. Every stage begins with a submodule that has state.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from torch import nn

from lockstep.errors import SettingError, UsageError
from lockstep.optim.module_filter import repeated_blocks
from lockstep.torch_compat import BatchNorm
from lockstep.wording import did_you_mean

_CONTAINERS = nn.Sequential | nn.ModuleList


@dataclass(frozen=True)
class Split:
    """The result of cutting a module into stages: which stage each submodule belongs to."""

    cuts: tuple[str, ...]
    """The names of the submodules with which the stages begin, except for the first stage."""
    pieces: dict[str, int]
    """The stage of each *piece*, by name. A piece is a submodule with state that belongs to a
    single stage; pieces are as large as possible."""
    loose_parameters: dict[str, int]
    """The stage of each parameter that belongs to no piece, by name. The module of such a parameter
    is divided over several stages."""

    def stage_of(self, name: str) -> int | None:
        """Returns the stage of a module or parameter; None for a module that is divided."""
        for piece, stage in self.pieces.items():
            is_whole_model = piece == ""
            is_in_piece = name == piece or name.startswith(f"{piece}.")
            if is_whole_model or is_in_piece:
                return stage
        return self.loose_parameters.get(name)


def units(module: nn.Module) -> list[str]:
    """Returns the names of the submodules before which the model can be cut, in order.

    Containers such as `nn.Sequential` are divided into their submodules, and so is any module that
    contains the repeated blocks of the model. The blocks themselves stay whole, because their
    submodules need not be a chain (for example, a residual connection bypasses them).

    Returns:
        Names as in `named_modules()`, of submodules that have parameters or statistics of a
        BatchNorm.
    """
    blocks = [name for name, _ in repeated_blocks(module)]
    names: list[str] = []
    for name, unit in _find_units("", module, blocks):
        if _has_state(unit):
            names.append(name)
    return names


def _find_units(name: str, module: nn.Module, blocks: list[str]) -> list[tuple[str, nn.Module]]:
    """Divides a module into units; returns their names and modules.

    Args:
        name: the name of the module in the model.
        module: the module.
        blocks: the names of the repeated blocks of the model, each of which is one unit.
    """
    children = list(module.named_children())
    if name in blocks or not children:
        return [(name, module)]

    # Divide the model itself, containers, and modules that contain blocks. Any other module may
    # call its submodules in an order of its own, so it stays whole.
    is_whole_model = name == ""
    is_container = isinstance(module, _CONTAINERS)
    contains_blocks = any(block.startswith(f"{name}.") for block in blocks)
    if not (is_whole_model or is_container or contains_blocks):
        return [(name, module)]

    prefix = "" if is_whole_model else f"{name}."
    units: list[tuple[str, nn.Module]] = []
    for child_name, child in children:
        units += _find_units(f"{prefix}{child_name}", child, blocks)

    return units


def split(module: nn.Module, cuts: Sequence[str]) -> Split:
    """Cuts a module into stages.

    Args:
        module: the model.
        cuts: the names of the submodules with which the stages begin, except for the first stage.

    Raises:
        SettingError: a submodule does not exist, has no parameters, or is out of order.
        UsageError: a parameter would belong to two stages.
    """
    names = [name for name, _ in module.named_modules()]
    for name in cuts:
        if name == "" or name not in names:
            known_names = [known for known in names if known]
            advice = did_you_mean(
                name, known_names, "use the names of model.named_modules()", cutoff=0.3
            )
            raise SettingError(
                f"Pipeline(split=[..., {name!r}])",
                "the model has no submodule of that name",
                advice,
            )

        if not _has_state(module.get_submodule(name)):
            raise SettingError(
                f"Pipeline(split=[..., {name!r}])",
                "this submodule has no parameters, and every stage runs it",
                "name the next one that has some: submodules before it run in the earlier stage",
            )

    positions = [names.index(name) for name in cuts]
    is_in_order = sorted(set(positions)) == positions  # ascending, and no name twice

    # A stage cannot begin inside of the submodule with which the previous stage begins, for example
    # at "block.linear" after "block".
    has_nested_cuts = any(later.startswith(f"{name}.") for name, later in itertools.pairwise(cuts))
    if not is_in_order or has_nested_cuts:
        raise SettingError(
            f"Pipeline(split={list(cuts)})",
            "the stages are not in the order of the model",
            f"in the model's order: {sorted(set(cuts), key=names.index)}",
        )

    # Go through the model, and write down the stage of each submodule (in `pieces`), and of the
    # parameters of modules that are divided over several stages (in `loose_parameters`).
    pieces: dict[str, int] = {}
    loose_parameters: dict[str, int] = {}
    result = Split(tuple(cuts), pieces, loose_parameters)
    _assign_stages("", module, stage=0, result=result)
    _check_shared_parameters(module, result)
    return result


def _assign_stages(name: str, module: nn.Module, stage: int, result: Split) -> int:
    """Adds a module and everything in it to `result`, in the order of registration.

    A module without cuts inside becomes a *piece*. A module with cuts inside is divided over
    several stages. Its own parameters, which are in no submodule, become *loose parameters*.

    For example, a model with the submodules `embed`, `blocks.0`, `blocks.1` and `head` and the cut
    "blocks.1" gets `pieces == {"embed": 0, "blocks.0": 0, "blocks.1": 1, "head": 1}`. The call for
    `blocks` begins in stage 0 and returns 1, so `head` is in stage 1, too.

    Args:
        name: the name of the module in the model.
        module: the module.
        stage: the stage in which the module begins.
        result: the split whose pieces and loose parameters are filled. Its cuts are set already.

    Returns:
        The stage in which the module ends.
    """
    if not _has_cuts_inside(name, result.cuts):
        if _has_state(module):
            result.pieces[name] = stage
        return stage

    prefix = f"{name}." if name else ""
    for parameter_name, _ in module.named_parameters(recurse=False):
        result.loose_parameters[f"{prefix}{parameter_name}"] = stage

    for child_name, child in _direct_children(module):
        child_path = f"{prefix}{child_name}"
        child_begins_next_stage = child_path in result.cuts
        if child_begins_next_stage:
            stage += 1
        # The child may have cuts inside. Then it ends, and the next child begins, in a later stage.
        stage = _assign_stages(child_path, child, stage, result)

    return stage


def _has_cuts_inside(name: str, cuts: Sequence[str]) -> bool:
    """Returns True if a stage begins at a submodule of the module with this name."""
    is_whole_model = name == ""
    if is_whole_model:
        return len(cuts) > 0
    return any(cut.startswith(f"{name}.") for cut in cuts)


def _direct_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the names and modules of a module's direct children.

    `module.named_children()` would omit a child that was registered before under another name.
    """
    children: list[tuple[str, nn.Module]] = []
    for name, submodule in module.named_modules(remove_duplicate=False):
        is_direct_child = name != "" and "." not in name  # "" is the module itself
        if is_direct_child:
            children.append((name, submodule))
    return children


def _check_shared_parameters(module: nn.Module, result: Split) -> None:
    """Raises UsageError if a parameter belongs to two stages."""
    # The name and stage under which each parameter was seen first, by its `id`.
    first_use: dict[int, tuple[str, int]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        stage = result.stage_of(name)
        assert stage is not None  # every parameter has one
        if id(parameter) not in first_use:
            first_use[id(parameter)] = (name, stage)
            continue

        other_name, other_stage = first_use[id(parameter)]  # it has two names
        if other_stage != stage:
            raise UsageError(
                "a pipeline over a model with shared parameters",
                f"{other_name} (stage {other_stage}) and {name} (stage {stage}) are one parameter",
                "give them parameters of their own, or cut the model so that both are in one stage",
            )


def _has_state(module: nn.Module) -> bool:
    """Returns True if a module has parameters or the statistics of a BatchNorm."""
    if next(module.parameters(), None) is not None:
        return True

    # A BatchNorm counts even if it keeps no running statistics. Other layers with statistics, such
    # as InstanceNorm, are recognised by their `running_mean`.
    for part in module.modules():
        if isinstance(part, BatchNorm) or getattr(part, "running_mean", None) is not None:
            return True
    return False


def balanced_cuts(costs: Sequence[float], parts: int) -> list[int]:
    """Divides a list into contiguous parts so that the most expensive part is as cheap as possible.

    For example, `balanced_cuts([1, 1, 1, 3], 2)` is `[3]`: the parts are `[1, 1, 1]` and `[3]`.

    Args:
        costs: the costs of the items, in order.
        parts: the number of parts, at most the number of items. No part is empty.

    Returns:
        The index of the first item of every part except the first part.
    """
    cost_before = [0.0, *itertools.accumulate(costs)]

    @cache
    def best(end: int, num_parts: int) -> tuple[float, list[int]]:
        """Divides the items before `end` in the best way, by recursion over the last part.

        `cost_before[i]` is the cost of all items before item i. So the items from i to j - 1 cost
        `cost_before[j] - cost_before[i]`.

        Returns:
            The cost of the most expensive part, and the first index of every part except the first.
        """
        if num_parts == 1:
            return cost_before[end], []

        candidates: list[tuple[float, list[int]]] = []
        earliest = num_parts - 1  # each of the other parts needs at least one item
        for begin_of_last in range(earliest, end):
            most_before, cuts_before = best(begin_of_last, num_parts - 1)
            cost_of_last = cost_before[end] - cost_before[begin_of_last]
            cuts = [*cuts_before, begin_of_last]
            candidates.append((max(most_before, cost_of_last), cuts))

        # Tuples are compared by their first elements, the costs, and then by the cuts. So this is
        # the cheapest candidate, and of several cheapest ones that with the earliest cuts.
        return min(candidates)

    _, cuts = best(len(costs), parts)
    return cuts
