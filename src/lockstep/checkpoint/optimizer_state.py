"""Loads the saved state of an optimizer so that its tensors keep their dtypes.

Torch's `Optimizer.load_state_dict` converts every tensor of the state except `step` to the dtype of
its parameter. That is right if the state was kept in the dtype of the parameter. But momentum and
master weights in float32 of bfloat16 parameters would be rounded, and 8-bit states and counters
would become floating-point numbers. Torch also converts strings and arrays to lists. So torch loads
the state first, and then whatever it has changed is replaced by the saved values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoint.modules import plain_name_function
from lockstep.checkpoint.sharding import map_leaves

TAKEN_FOR_LISTS_BY_TORCH = (str, bytes, np.ndarray)


def load_into_torch_optimizer(
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    saved_dtypes: Mapping[Tensor, torch.dtype],
) -> None:
    """Loads a saved state into an optimizer, without converting its tensors to other dtypes.

    Exception: if the dtype of a parameter has changed since, tensors that were saved in the
    parameter's former dtype are converted to its present dtype.

    1. Torch's `load_state_dict` loads everything except strings and arrays.
    2. These are put in their places, and dtypes that torch has changed are restored.
    3. Options that are tensors are moved to the device on which they were.

    Args:
        optimizer: an optimizer of torch, or one with torch's `param_groups`, `state` and
            `load_state_dict`.
        saved: the result of its `state_dict`. All tensors are in memory.
        saved_dtypes: the dtypes of parameters when the state was saved. A parameter that is not
            listed is assumed to have had its present dtype.
    """
    tensor_options_before = _tensor_options(optimizer)

    # 1. Torch would convert strings and arrays to lists, so it gets None in their place.
    entries = saved["state"]  # the state of each parameter, by the parameter's number
    safe_entries = {}
    for number, entry in entries.items():
        safe_entries[number] = map_leaves(_none_for_string_or_array, entry)
    optimizer.load_state_dict({**saved, "state": safe_entries})

    # 2.
    _restore_entries(optimizer, saved, saved_dtypes)

    # 3. Options of a parameter group, such as the learning rate, may be tensors. If the step is
    # compiled, they are on a GPU. Torch has loaded them to the CPU.
    for group, options_before in zip(optimizer.param_groups, tensor_options_before, strict=True):
        for name, option_before in options_before.items():
            if isinstance(group.get(name), Tensor):
                group[name] = group[name].to(option_before.device)


def _restore_entries(
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    saved_dtypes: Mapping[Tensor, torch.dtype],
) -> None:
    """Puts saved values back into the state of an optimizer where torch has changed them.

    Torch has converted all tensors to the present dtype of their parameter. That is right for a
    tensor that had its parameter's dtype when it was saved: it follows the parameter. Every other
    tensor is put back as it was saved. Examples:

        parameter when saved   parameter now   momentum when saved   momentum now
        bfloat16               bfloat16        float32               float32 (put back)
        float32                bfloat16        float32               bfloat16 (as torch made it)
        float32                bfloat16        int8                  int8 (put back)

    Args:
        optimizer: the optimizer, into which torch has loaded the state.
        saved: the saved state.
        saved_dtypes: as in `load_into_torch_optimizer`.
    """
    entries = saved["state"]
    for number, parameter in _numbered_parameters(optimizer, saved):
        if number not in entries or parameter not in optimizer.state:
            continue

        former_dtype = saved_dtypes.get(parameter, parameter.dtype)
        parameter_has_other_dtype = former_dtype != parameter.dtype
        dtype_to_convert = former_dtype if parameter_has_other_dtype else None
        optimizer.state[parameter] = _restore_saved(
            optimizer.state[parameter], entries[number], dtype_to_convert
        )


def saved_parameter_dtypes(
    modules: Mapping[str, nn.Module], saved: Mapping[str, Any]
) -> dict[Tensor, torch.dtype]:
    """Returns the dtype that each parameter had when the state of its module was saved.

    Parameters that were not saved are left out.

    Args:
        modules: the modules by name.
        saved: their saved states, by the same names.
    """
    dtypes: dict[Tensor, torch.dtype] = {}
    for module_name, module in modules.items():
        to_plain_name = plain_name_function(module)
        for name, parameter in module.named_parameters():
            value = saved[module_name].get(to_plain_name(name))
            was_saved_as_tensor = hasattr(value, "dtype")  # False for None, and for other values
            if was_saved_as_tensor:
                dtypes[parameter] = value.dtype
    return dtypes


def _numbered_parameters(
    optimizer: Optimizer, saved: Mapping[str, Any]
) -> list[tuple[Any, Tensor]]:
    """Pairs the numbers that a saved state uses for parameters with the parameters themselves.

    As in torch, the order of the parameters in the groups decides.

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
    """Returns, for each parameter group, its options that are tensors, by name."""
    options_of_groups = []
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if isinstance(value, Tensor)}
        options_of_groups.append(options)
    return options_of_groups


def _none_for_string_or_array(leaf: Any) -> Any:
    """Returns None for strings and arrays, which torch would convert to lists; others unchanged."""
    if isinstance(leaf, TAKEN_FOR_LISTS_BY_TORCH):
        return None
    return leaf


def _restore_saved(loaded: Any, saved: Any, dtype_to_convert: torch.dtype | None) -> Any:
    """Returns a value that an optimizer has loaded, or the saved value if torch has changed it.

    Dictionaries are changed in place. Values without a saved counterpart stay as they were loaded.

    Args:
        loaded: the value in the optimizer's state, on the right device.
        saved: the saved value, of any type, from which torch has made it.
        dtype_to_convert: tensors that were saved in this dtype stay as torch has converted them.
            All other tensors that it has converted are put back; with None, all.
    """
    if isinstance(saved, TAKEN_FOR_LISTS_BY_TORCH):
        return saved

    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        was_converted = saved.dtype != loaded.dtype
        if was_converted and saved.dtype != dtype_to_convert:
            return saved.to(loaded.device)
        return loaded

    if isinstance(saved, dict) and isinstance(loaded, dict):
        for key, value in saved.items():
            if key in loaded:
                loaded[key] = _restore_saved(loaded[key], value, dtype_to_convert)
        return loaded

    is_sequence = type(saved) in (list, tuple) and type(loaded) is type(saved)
    if is_sequence and len(saved) == len(loaded):
        items = []
        for loaded_item, saved_item in zip(loaded, saved, strict=True):
            items.append(_restore_saved(loaded_item, saved_item, dtype_to_convert))
        return type(saved)(items)

    return loaded
