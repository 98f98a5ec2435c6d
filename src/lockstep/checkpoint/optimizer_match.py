"""Matches the saved state of an optimizer with the parameters of this run, by their names.

In the state of an optimizer, torch numbers the parameters in the order in which the optimizer was
given them, and loads the state in that order. If a model defines the same layers in another order,
each layer would get the state of another one. So a checkpoint also stores the name of each
parameter, and the class of the optimizer (its *facts*).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoint.differences import shape_of
from lockstep.checkpoint.layout import CLASS_OF_OPTIMIZER, NAMES_OF_PARAMETERS, OPTIMIZERS
from lockstep.checkpoint.modules import plain_parameter_names, plain_shapes, unwrap
from lockstep.errors import CheckpointError
from lockstep.optim.origin import is_of_torch_or_lockstep
from lockstep.wording import join_first

Names = list[list[str | None]]
"""The name of each parameter, for each group; None if its module is not saved."""

KEYS_OF_PARAMETER_SHAPE = (
    "acc_delta",
    "ax",
    "exp_avg",
    "exp_avg_sq",
    "exp_inf",
    "max_exp_avg_sq",
    "momentum_buffer",
    "prev",
    "square_avg",
    "step_size",
    "sum",
)
"""In the optimizers of torch and Lockstep, these tensors have the shape of their parameter."""


def optimizer_facts(optimizer: Optimizer, names: SavedNames) -> dict[str, Any]:
    """Returns what a manifest says about an optimizer: its class, and the names of its parameters.

    Args:
        optimizer: the optimizer, prepared or not.
        names: the names of all parameters that are saved.
    """
    return {
        CLASS_OF_OPTIMIZER: _class_name(optimizer),
        NAMES_OF_PARAMETERS: names.of_optimizer(optimizer),
    }


class SavedNames:
    """The names of all parameters that a checkpoint saves: "model.fc.weight".

    Args:
        modules: the modules by the names under which they are saved.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._names: dict[Tensor, str] = {}
        for module_name, module in modules.items():
            for parameter, plain_name in plain_parameter_names(module).items():
                name = f"{module_name}.{plain_name}"
                former_name = self._names.get(parameter, name)
                self._names[parameter] = min(name, former_name)  # the first in the alphabet

    def of_optimizer(self, optimizer: Optimizer) -> Names:
        """Returns the names of an optimizer's parameters, also of those on other ranks.

        The name is None for a parameter of a module that is not saved.
        """
        if _is_under_pipeline(optimizer):
            return self._of_optimizer_under_pipeline(optimizer)

        names_of_groups: Names = []
        for group in optimizer.param_groups:
            names = [self._names.get(parameter) for parameter in group["params"]]
            names_of_groups.append(names)
        return names_of_groups

    def _of_optimizer_under_pipeline(self, optimizer: Optimizer) -> Names:
        """Returns the names of an optimizer's parameters, most of which are on other ranks.

        So the optimizer says which parameters its groups would have on one device: `[[(model,
        "0.weight"), (model, "0.bias")]]` becomes `[["model.0.weight", "model.0.bias"]]`.
        """
        names_of_groups: Names = []
        for group in optimizer.groups_on_one_device.origins:  # type: ignore[attr-defined]
            names = [self._name_in(module, plain_name) for module, plain_name in group]
            names_of_groups.append(names)
        return names_of_groups

    def _name_in(self, module: nn.Module, plain_name: str) -> str | None:
        """Returns the name of a parameter of a prepared module; None if its module is not saved."""
        for module_name, saved_module in self._modules.items():
            if unwrap(saved_module) is unwrap(module):
                return f"{module_name}.{plain_name}"
        return None


def match_optimizers(
    path: Path | str, objects: Mapping[str, Any], saved: Mapping[str, Any], *, has_replicas: bool
) -> dict[str, Any]:
    """Puts the saved states of optimizers in the order of the present parameters.

    Nothing is loaded.

    Args:
        path: the folder of the checkpoint, or a description such as "step 12 in memory".
        objects: the objects of this run by name.
        saved: the saved states by name, with the `manifest`. They have been checked with
            `check_fits`.
        has_replicas: True if this run loads the states of DiLoCo's replicas, which are stored in
            the order of the parameters.

    Returns:
        The saved states, with those of the optimizers in the present order.

    Raises:
        CheckpointError: an optimizer is of another class or has other parameters.
    """
    modules = {name: value for name, value in objects.items() if isinstance(value, nn.Module)}
    loads_replicas = has_replicas and "replicas" in saved
    if loads_replicas:
        _check_order_of_modules(path, modules, saved)

    names = SavedNames(modules)
    facts_of_optimizers = saved["manifest"][OPTIMIZERS]
    matched = dict(saved)
    for name, optimizer in objects.items():
        state = saved[name]
        if not isinstance(optimizer, Optimizer) or not _is_in_format_of_torch(state):
            continue

        action = f"resuming {name} from {path}"
        facts = facts_of_optimizers.get(name)
        # There are no facts if another object was saved under this name, such as a wrapper around
        # an optimizer. Then the parameters keep the saved order.
        if facts is not None:
            state = _in_present_order(
                action, optimizer, state, facts, names, loads_replicas=loads_replicas
            )
        _check_shapes(action, optimizer, state)
        matched[name] = state
    return matched


def _in_present_order(
    action: str,
    optimizer: Optimizer,
    state: dict[str, Any],
    facts: Mapping[str, Any],
    names: SavedNames,
    *,
    loads_replicas: bool,
) -> dict[str, Any]:
    """Returns a saved state of an optimizer in the order of the present parameters.

    Args:
        action: what is being done, for errors.
        optimizer: the present optimizer.
        state: the saved state.
        facts: what the manifest says about the saved optimizer, see `optimizer_facts`. If the names
            of parameters in it belong to another state, the saved order is kept.
        names: the present names of parameters.
        loads_replicas: True if this run loads the states of DiLoCo's replicas.

    Raises:
        CheckpointError: the optimizer is of another class or had other parameters; or the
            parameters had another order, and the state cannot be put into the present order.
    """
    _check_class(action, optimizer, facts[CLASS_OF_OPTIMIZER])
    saved_names = facts[NAMES_OF_PARAMETERS]
    if not _are_names_of(saved_names, state):
        return state

    # The state of LBFGS has tensors over all parameters, in their order, and so has the state of
    # DiLoCo's replicas.
    is_lbfgs = isinstance(_inner(optimizer), torch.optim.LBFGS)
    must_have_saved_order = loads_replicas or is_lbfgs
    saved_positions = _match_names(
        action, saved_names, names.of_optimizer(optimizer), order_matters=must_have_saved_order
    )
    return _reorder(state, saved_positions)


def _inner(optimizer: Optimizer) -> Optimizer:
    """Returns the user's optimizer, also if it is prepared."""
    # A prepared optimizer is recognised by a method that torch's optimizers do not have.
    if hasattr(optimizer, "load_saved_state"):
        inner: Optimizer = optimizer.inner  # type: ignore[attr-defined]
        return inner
    return optimizer


def _is_under_pipeline(optimizer: Optimizer) -> bool:
    """Returns True if this rank has only some of the optimizer's parameters."""
    # Only prepared optimizers have the attribute. This module must not import their class.
    return bool(getattr(optimizer, "partial", False))


def _class_name(optimizer: Optimizer) -> str:
    return type(_inner(optimizer)).__name__


def _is_in_format_of_torch(state: Any) -> bool:
    """Returns True if the state of an optimizer has the form that torch's optimizers return."""
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        return False
    groups = state.get("param_groups")
    if not isinstance(groups, list):
        return False
    return all(isinstance(group, dict) and "params" in group for group in groups)


def _are_names_of(names: Names, state: Mapping[str, Any]) -> bool:
    """Returns True if a manifest has a name, or None, for each parameter of a saved state."""
    counts = [len(group["params"]) for group in state["param_groups"]]
    return counts == [len(group) for group in names]


def _check_class(action: str, optimizer: Optimizer, saved_class: str) -> None:
    """Raises CheckpointError if the state was saved by an optimizer of another class."""
    own_class = _class_name(optimizer)
    if saved_class == own_class:
        return
    raise CheckpointError(
        action,
        f"it was saved from the optimizer {saved_class}, and this run has {own_class}",
        f"build it as {saved_class}; to train on with another optimizer, load the weights alone "
        "with lockstep.load_weights",
    )


def _match_names(action: str, saved: Names, own: Names, *, order_matters: bool) -> list[list[int]]:
    """Returns for each parameter of each group its position in the same group when it was saved.

    Parameters without a name are taken in their order.

    Args:
        action: what is being done, for errors.
        saved: the names of the parameters when they were saved.
        own: the present names.
        order_matters: True if the state cannot be put into another order.

    Raises:
        CheckpointError: a group has other parameters, or the order differs and matters.
    """
    advice_on_groups = "give the optimizer the parameters that it had, in the same groups"
    if len(saved) != len(own):
        raise CheckpointError(
            action,
            f"the number of its parameter groups was {len(saved)} in the checkpoint, and is "
            f"{len(own)} now",
            advice_on_groups,
        )

    saved_positions = []
    for index, (saved_names, own_names) in enumerate(zip(saved, own, strict=True)):
        # Parameters without a name (None) cannot be compared.
        only_saved = sorted({name for name in saved_names if name} - set(own_names))
        only_own = sorted({name for name in own_names if name} - set(saved_names))
        if only_saved or only_own:
            raise CheckpointError(
                action,
                f"group {index} of its parameters has other names: in the checkpoint alone "
                f"{join_first(only_saved, 3) or 'none'}; in this run alone "
                f"{join_first(only_own, 3) or 'none'}",
                advice_on_groups,
            )
        if len(saved_names) != len(own_names):
            raise CheckpointError(
                action,
                f"the number of parameters in its group {index} was {len(saved_names)} in the "
                f"checkpoint, and is {len(own_names)} now",
                advice_on_groups,
            )
        saved_positions.append(_saved_positions(saved_names, own_names))

    is_same_order = all(positions == sorted(positions) for positions in saved_positions)
    if order_matters and not is_same_order:
        raise CheckpointError(
            action,
            "the optimizer was given its parameters in another order, and this state cannot be "
            "put into another order",
            "define the layers of the model, and pass its parameters, in the order in which they "
            "were saved",
        )
    return saved_positions


def _saved_positions(
    saved_names: Sequence[str | None], own_names: Sequence[str | None]
) -> list[int]:
    """Returns for each present parameter of a group its position in the group when it was saved.

    Parameters without a name (None) are matched in their order, and all others by name: `["a",
    None, "b"]` when it was saved and `["b", "a", None]` now give `[2, 0, 1]`.
    """
    position_of_name: dict[str, int] = {}
    positions_without_name: list[int] = []
    for position, name in enumerate(saved_names):
        if name is None:
            positions_without_name.append(position)
        else:
            position_of_name[name] = position

    positions = []
    remaining_without_name = iter(positions_without_name)
    for name in own_names:
        if name is None:
            positions.append(next(remaining_without_name))
        else:
            positions.append(position_of_name[name])
    return positions


def _reorder(state: dict[str, Any], saved_positions: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Returns an optimizer's state with the entries of its parameters in another order.

    Example: the entries `{0: a, 1: b, 2: c}` of a group with the parameters `[0, 1, 2]`. If the
    parameter that is the first one now was at position 2, and the others follow it, the positions
    are `[2, 0, 1]`. The group still lists `[0, 1, 2]`, and the entries become `{0: c, 1: a, 2: b}`.

    Args:
        state: the saved state; it is not changed.
        saved_positions: for each group and each present parameter in it, the position in the group
            that the parameter had when it was saved.
    """
    groups = []
    new_number_of: dict[Any, Any] = {}  # {number when saved: present number}
    for group, positions in zip(state["param_groups"], saved_positions, strict=True):
        new_number_of.update(_new_numbers(group["params"], positions))

        # Torch adds the names of parameters that were given to the optimizer with their names.
        reordered = dict(group)
        if isinstance(group.get("param_names"), list):
            reordered["param_names"] = [group["param_names"][position] for position in positions]
        groups.append(reordered)

    entries = {}
    for saved_number, entry in state["state"].items():
        # An optimizer may have an entry that belongs to no parameter, which keeps its key.
        new_number = new_number_of.get(saved_number, saved_number)
        entries[new_number] = entry
    return {**state, "state": entries, "param_groups": groups}


def _new_numbers(numbers: Sequence[Any], saved_positions: Sequence[int]) -> dict[Any, Any]:
    """Returns `{number when saved: present number}` for the parameters of a group.

    Example: the numbers `[5, 6, 7]` and the positions `[2, 0, 1]` give `{7: 5, 5: 6, 6: 7}`: the
    parameter that is the first one now was at position 2 when it was saved.

    Args:
        numbers: the numbers of the group's parameters in their order. The positions have the same
            numbers now as when the state was saved; the parameters at them may be others.
        saved_positions: for each present parameter, the position at which it was saved.
    """
    new_numbers = {}
    for present_number, saved_position in zip(numbers, saved_positions, strict=True):
        saved_number = numbers[saved_position]
        new_numbers[saved_number] = present_number
    return new_numbers


def _check_shapes(action: str, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Raises CheckpointError if the shape of a saved tensor, such as `exp_avg`, is not that of its
    parameter.

    Only the optimizers of torch and Lockstep are checked. Another optimizer may use the same key
    for a tensor of another shape.
    """
    if not is_of_torch_or_lockstep(_inner(optimizer)):
        return

    for number, parameter in _numbered_parameters(optimizer, state):
        entry = state["state"].get(number)
        if not isinstance(entry, dict):
            continue
        for key in KEYS_OF_PARAMETER_SHAPE:
            saved_shape = shape_of(entry.get(key))
            own_shape = shape_of(parameter)
            if saved_shape is None or own_shape is None:  # one of them is not known
                continue
            if saved_shape != own_shape:
                raise CheckpointError(
                    action,
                    f"{key} of its parameter {number} has the shape {list(saved_shape)}, and the "
                    f"parameter has {list(own_shape)}",
                    "give the optimizer the parameters that it had, in the same order",
                )


def _numbered_parameters(
    optimizer: Optimizer, state: Mapping[str, Any]
) -> list[tuple[Any, Tensor]]:
    """Pairs the numbers that a state uses for parameters with the parameters on this rank."""
    if _is_under_pipeline(optimizer):
        # The optimizer knows the numbers that this rank's parameters would have on one device.
        numbers_of_groups = optimizer.groups_on_one_device.numbers_here  # type: ignore[attr-defined]
    else:
        numbers_of_groups = [group["params"] for group in state["param_groups"]]
    parameters_of_groups = [group["params"] for group in optimizer.param_groups]

    # If there are more numbers than parameters, or fewer, torch will say so.
    numbers = chain.from_iterable(numbers_of_groups)
    parameters = chain.from_iterable(parameters_of_groups)
    return list(zip(numbers, parameters, strict=False))


def _check_order_of_modules(
    path: Path | str, modules: Mapping[str, nn.Module], saved: Mapping[str, Any]
) -> None:
    """Checks that the models define their tensors in the order in which they were saved.

    The weights of DiLoCo's replicas are stored without names, in the order of the model's tensors.

    Raises:
        CheckpointError: the order of a model differs.
    """
    for name, module in modules.items():
        saved_tensor_names = list(saved[name])
        own_tensor_names = list(plain_shapes(module))
        if saved_tensor_names != own_tensor_names:
            raise CheckpointError(
                f"resuming the replicas from {path}",
                f"{name} defines its layers in another order than when it was saved, and the "
                "weights of the replicas are stored in this order",
                "define the layers in the order in which they were saved",
            )
