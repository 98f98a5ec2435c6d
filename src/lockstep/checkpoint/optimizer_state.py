"""The saved state of an optimizer, taken up again as it was saved.

Torch's `Optimizer.load_state_dict` converts every tensor of the state but `step` to the dtype of
its parameter. That is right for a state that is kept in the dtype of the parameter, and wrong for
every other: momentum and master weights in float32 beside parameters in bfloat16 would be rounded,
states in 8 bits and counters would become fractions. Text and arrays would be taken for lists. So
what torch has changed is put back.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoint.modules import plain_names
from lockstep.checkpoint.sharding import map_leaves

_TAKEN_FOR_LISTS = (str, bytes, np.ndarray)


def load_saved_state(
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    saved_dtypes: Mapping[Tensor, torch.dtype],
) -> None:
    """Loads a state into an optimizer; its tensors have the dtypes that they were saved in.

    One that was saved in the dtype of its parameter follows the parameter, if that has another
    dtype now.

    Args:
        optimizer: of torch, or with torch's `param_groups`, `state` and `load_state_dict`.
        saved: what its `state_dict` gave, in memory.
        saved_dtypes: the dtypes that parameters had then, as far as they are known.
    """
    devices = _devices_of_options(optimizer)
    entries = saved["state"]
    given = {number: map_leaves(_hidden_from_torch, entry) for number, entry in entries.items()}
    optimizer.load_state_dict({**saved, "state": given})
    numbers = chain.from_iterable(group["params"] for group in saved["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in entries and parameter in optimizer.state:
            before = saved_dtypes.get(parameter, parameter.dtype)
            follows = before if before != parameter.dtype else None
            loaded = optimizer.state[parameter]
            optimizer.state[parameter] = _as_saved(loaded, entries[number], follows)
    for group, of_group in zip(optimizer.param_groups, devices, strict=True):
        for option, device in of_group.items():
            if isinstance(group.get(option), Tensor):
                group[option] = group[option].to(device)


def saved_parameter_dtypes(
    modules: Mapping[str, nn.Module], saved: Mapping[str, Any]
) -> dict[Tensor, torch.dtype]:
    """The dtypes that the parameters of modules had when their states were saved.

    Args:
        modules: by name.
        saved: their states, by the same names.
    """
    dtypes: dict[Tensor, torch.dtype] = {}
    for name, module in modules.items():
        plain = plain_names(module)
        for own_name, parameter in module.named_parameters():
            value = saved[name].get(plain(own_name))
            if hasattr(value, "dtype"):
                dtypes[parameter] = value.dtype
    return dtypes


def _devices_of_options(optimizer: Optimizer) -> list[dict[str, torch.device]]:
    """Where the options of each group that are tensors are; a checkpoint does not say."""
    return [
        {option: value.device for option, value in group.items() if isinstance(value, Tensor)}
        for group in optimizer.param_groups
    ]


def _hidden_from_torch(leaf: Any) -> Any:
    return None if isinstance(leaf, _TAKEN_FOR_LISTS) else leaf


def _as_saved(loaded: Any, saved: Any, follows: torch.dtype | None) -> Any:
    """What an optimizer has loaded, with the saved value wherever torch has changed it.

    Args:
        loaded: as torch has put it into the optimizer; on the right device.
        saved: what it was made from.
        follows: tensors that were saved in this dtype are left in the one that torch chose.
    """
    if isinstance(saved, _TAKEN_FOR_LISTS):
        return saved
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        if saved.dtype in (loaded.dtype, follows):
            return loaded
        return saved.to(loaded.device)
    if isinstance(saved, dict) and isinstance(loaded, dict):
        for key, value in saved.items():
            if key in loaded:
                loaded[key] = _as_saved(loaded[key], value, follows)
        return loaded
    both = type(saved) in (list, tuple) and type(loaded) is type(saved)
    if both and len(saved) == len(loaded):
        pairs = zip(loaded, saved, strict=True)
        return type(saved)(_as_saved(item, value, follows) for item, value in pairs)
    return loaded
