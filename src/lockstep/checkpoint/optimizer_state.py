"""Loads the saved state of an optimizer so that its tensors keep their dtypes.

Torch's `Optimizer.load_state_dict` converts every tensor of the state except `step` to the dtype of
its parameter. That is right for a state that is kept in the dtype of the parameter, and wrong for
every other: momentum and master weights in float32 of parameters in bfloat16 would be rounded, and
states in 8 bits and counters would become fractions. It also takes text and arrays for lists. So
torch loads the state first, and then what it has changed is replaced by what was saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoint.modules import plain_names
from lockstep.checkpoint.sharding import map_leaves

TAKEN_FOR_LISTS_BY_TORCH = (str, bytes, np.ndarray)


def load_saved_state(
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    saved_dtypes: Mapping[Tensor, torch.dtype],
) -> None:
    """Loads a state into an optimizer, whose tensors keep the dtypes that they were saved in.

    One exception: a tensor that was saved in the dtype of its parameter gets the dtype that the
    parameter has now.

    Args:
        optimizer: an optimizer of torch, or one with torch's `param_groups`, `state` and
            `load_state_dict`.
        saved: what its `state_dict` returned. All tensors are in memory.
        saved_dtypes: the dtypes that parameters had when the state was saved. If the dtype of a
            parameter is not known, it is taken to be the present one.
    """
    options_as_built = _tensor_options(optimizer)
    entries = saved["state"]  # for each parameter that has one, by its number
    # Torch would take text and arrays for lists, so it gets None in their place.
    safe_entries = {
        number: map_leaves(_none_if_taken_for_list, entry) for number, entry in entries.items()
    }
    optimizer.load_state_dict({**saved, "state": safe_entries})
    _restore_entries(optimizer, saved, saved_dtypes)

    # Options such as a learning rate may be tensors, on a GPU if the step is compiled. Loading has
    # put the saved ones on the CPU; they go to the device where the optimizer was built with them.
    for group, options in zip(optimizer.param_groups, options_as_built, strict=True):
        for name, built in options.items():
            if isinstance(group.get(name), Tensor):
                group[name] = group[name].to(built.device)


def _restore_entries(
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    saved_dtypes: Mapping[Tensor, torch.dtype],
) -> None:
    """Puts back, in the state that torch has loaded, what torch has changed or did not get.

    Args:
        optimizer: the optimizer, which has loaded the state.
        saved: the saved state.
        saved_dtypes: as in `load_saved_state`.
    """
    entries = saved["state"]
    for number, parameter in _numbered_parameters(optimizer, saved):
        if number not in entries or parameter not in optimizer.state:
            continue
        # A parameter in bfloat16 may have been saved in float32. Then torch was right to convert
        # momentum that was saved in float32 too: it has the dtype of its parameter.
        saved_dtype = saved_dtypes.get(parameter, parameter.dtype)
        dtype_has_changed = saved_dtype != parameter.dtype
        optimizer.state[parameter] = _restore_saved(
            optimizer.state[parameter],
            entries[number],
            converted_dtype=saved_dtype if dtype_has_changed else None,
        )


def saved_parameter_dtypes(
    modules: Mapping[str, nn.Module], saved: Mapping[str, Any]
) -> dict[Tensor, torch.dtype]:
    """Returns the dtypes, by parameter, that modules had when their states were saved.

    Parameters that were not saved have none.

    Args:
        modules: the modules by name.
        saved: their states, by the same names.
    """
    dtypes: dict[Tensor, torch.dtype] = {}
    for module_name, module in modules.items():
        to_plain_name = plain_names(module)
        for name, parameter in module.named_parameters():
            value = saved[module_name].get(to_plain_name(name))
            if hasattr(value, "dtype"):
                dtypes[parameter] = value.dtype
    return dtypes


def _numbered_parameters(
    optimizer: Optimizer, saved: Mapping[str, Any]
) -> list[tuple[Any, Tensor]]:
    """Returns pairs: the number that a parameter has in the saved state, and the parameter.

    Parameters are identified by their order in the groups, as torch does it.

    Raises:
        ValueError: the saved state has more or fewer parameters than the optimizer.
    """
    numbers = []
    for saved_group in saved["param_groups"]:
        numbers += saved_group["params"]
    parameters = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return list(zip(numbers, parameters, strict=True))


def _tensor_options(optimizer: Optimizer) -> list[dict[str, Tensor]]:
    """Returns, for each parameter group, those options by name that are tensors."""
    options_of_groups = []
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if isinstance(value, Tensor)}
        options_of_groups.append(options)
    return options_of_groups


def _none_if_taken_for_list(leaf: Any) -> Any:
    """Returns None for text and arrays, which torch would take for lists; else the value itself."""
    if isinstance(leaf, TAKEN_FOR_LISTS_BY_TORCH):
        return None
    return leaf


def _restore_saved(loaded: Any, saved: Any, converted_dtype: torch.dtype | None) -> Any:
    """Returns what an optimizer has loaded, with saved values wherever torch has changed them.

    Dictionaries are changed in place. What has no saved counterpart stays as it was loaded.

    Args:
        loaded: what torch has put into the optimizer's state; on the right device.
        saved: the saved value that torch has made it from, of any kind.
        converted_dtype: tensors that were saved in this dtype stay in the one that torch chose;
            None: no tensor does.
    """
    if isinstance(saved, TAKEN_FOR_LISTS_BY_TORCH):
        return saved
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        keeps_dtype = saved.dtype == loaded.dtype
        was_rightly_converted = saved.dtype == converted_dtype
        if keeps_dtype or was_rightly_converted:
            return loaded
        return saved.to(loaded.device)
    if isinstance(saved, dict) and isinstance(loaded, dict):
        for key, value in saved.items():
            if key in loaded:
                loaded[key] = _restore_saved(loaded[key], value, converted_dtype)
        return loaded
    is_sequence = type(saved) in (list, tuple) and type(loaded) is type(saved)
    if is_sequence and len(saved) == len(loaded):
        items = []
        for loaded_item, saved_item in zip(loaded, saved, strict=True):
            items.append(_restore_saved(loaded_item, saved_item, converted_dtype))
        return type(saved)(items)
    return loaded
