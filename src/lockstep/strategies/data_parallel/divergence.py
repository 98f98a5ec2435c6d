"""Warns of modules that give different results on several replicas than on one device (LS310).

Two cases are found, in the first forward pass on several replicas. They are not errors, because the
user may want it so:

- A list in a batch, with one entry per sample, is not split: every replica gets all of it.
- A forward pass leaves *state* in the module: buffers, or *terms* of a loss (single numbers with a
  gradient) in attributes, lists and dictionaries. Each replica computes its own state from its
  samples, and only that of the first one is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.errors import warn
from lockstep.strategies.base import MODULE_ATTRIBUTES
from lockstep.torch_compat import BatchNorm
from lockstep.wording import describe_type, join_first

ForwardState = dict[tuple[str, int], Tensor]
"""State of a module, by the name of a buffer or attribute and an index in its container."""


def warn_of_lists(num_replicas: int, batch: Any, num_samples: int) -> None:
    """Warns of a list or array in a batch that has one entry per sample and is not split.

    Only tensors are split over the replicas, so every replica gets the whole list. This is no error
    because a list may have as many entries as there are samples by chance, for example one weight
    for each of 8 classes beside 8 samples.
    """
    descriptions = describe_sample_lists(batch, num_samples)
    if not descriptions:
        return

    warn(
        f"inputs of a module on {num_replicas} replicas",
        found=f"{descriptions[0]}, beside tensors of {num_samples} samples: it is not split, so "
        "every replica gets all of it",
        do="give what belongs to the samples as tensors; if this does not, nothing has to be done",
        code="LS310",
    )


def describe_sample_lists(batch: Any, num_samples: int) -> list[str]:
    """Describes the lists and arrays in a batch with one entry per sample: "a list of 8 values".

    Only lists of strings or numbers count.
    """
    if isinstance(batch, np.ndarray):
        if batch.shape[:1] == (num_samples,):
            return [f"an array of shape {tuple(batch.shape)}"]
        return []

    has_entry_per_sample = isinstance(batch, list | tuple) and len(batch) == num_samples
    if has_entry_per_sample:
        if all(isinstance(value, str | bytes | int | float) for value in batch):
            return [f"{describe_type(batch)} of {num_samples} values"]

    descriptions: list[str] = []
    for value in _values_in(batch):
        descriptions += describe_sample_lists(value, num_samples)

    return descriptions


def _values_in(container: Any) -> Sequence[Any]:
    """Returns the values of a mapping, or of a list such as one of tensors; else nothing."""
    if isinstance(container, Mapping):
        return list(container.values())
    if isinstance(container, list | tuple):
        return container
    return ()


def is_loss_term(value: Any) -> bool:
    """Returns True for a tensor with a single number and a gradient, like a loss."""
    return isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad


def forward_state(module: nn.Module) -> ForwardState:
    """Returns the buffers of a module, and the terms of a loss in its attributes.

    A term of a loss is a tensor with a single number and with a gradient; see `is_loss_term`.

    A key consists of the name of the buffer or attribute, and the index in a container. Examples:
    `("layer.count", 0)` for a buffer, and `("layer.losses", 2)` for the third tensor of a list.
    BatchNorm layers are left out, because the option `sync_batchnorm` applies to them.
    """
    state: ForwardState = {}
    for path, part in module.named_modules():
        if isinstance(part, BatchNorm):
            continue

        prefix = f"{path}." if path else ""
        for name, buffer in part.named_buffers(recurse=False):
            key = (f"{prefix}{name}", 0)
            state[key] = buffer

        for name, value in vars(part).items():
            if name in MODULE_ATTRIBUTES:  # every module has it, such as `training`
                continue
            for index, term in enumerate(_loss_terms(value)):
                key = (f"{prefix}{name}", index)
                state[key] = term

    return state


def _loss_terms(value: Any) -> list[Tensor]:
    """Returns the terms of a loss in an attribute, which may be a list or dictionary of them."""
    if isinstance(value, dict):
        candidates = list(value.values())
    elif isinstance(value, list):
        candidates = value
    else:
        candidates = [value]
    return [candidate for candidate in candidates if is_loss_term(candidate)]


def warn_of_state(modules: Sequence[nn.Module], state_before: ForwardState) -> None:
    """Warns if a forward pass has left state in the replicas that differs between them.

    Args:
        modules: the replicas that ran, at least two.
        state_before: the `forward_state` of the first one before the forward pass.
    """
    states = [forward_state(module) for module in modules]

    # A key is a pair such as ("layer.losses", 0): the name of a buffer or attribute, and the index
    # in its container. (`dict.fromkeys` removes duplicates and keeps the order.)
    keys = list(dict.fromkeys(chain.from_iterable(states)))
    names: list[str] = []  # the state to warn of
    for key in keys:
        name, _ = key
        if name in names:  # because of another index in the same container
            continue
        tensors = [state.get(key) for state in states]  # None where a replica does not have it
        if _needs_warning(tensors, state_before.get(key)):
            names.append(name)

    if not names:
        return

    warn(
        f"a module on {len(modules)} replicas that keeps {join_first(names, 4)}",
        found="each replica computes its own value from its samples, and only that of the first "
        "replica stays; a list gets an entry from each replica, and a dictionary keeps that of the "
        "last one",
        do="return what the loss needs from forward, so that it is joined",
        code="LS310",
    )


def _needs_warning(tensors: Sequence[Tensor | None], before: Tensor | None) -> bool:
    """Returns True if a forward pass has left a tensor that is not the same in all replicas.

    Args:
        tensors: the buffer or attribute of each replica; None where a replica does not have it.
        before: that of the first replica before the forward pass.
    """
    return _differ_between_replicas(tensors) or _was_added_to_shared_list(tensors, before)


def _differ_between_replicas(tensors: Sequence[Tensor | None]) -> bool:
    """Returns True if each replica has a buffer or attribute of its own, with its own value."""
    first = tensors[0]
    return not all(_may_be_equal(first, tensor) for tensor in tensors[1:])


def _was_added_to_shared_list(tensors: Sequence[Tensor | None], before: Tensor | None) -> bool:
    """Returns True for a new tensor in a list that all replicas share.

    For example, `self.losses` is `[]` before the forward pass. 3 replicas, which share this one
    list, append t0, t1 and t2 to it. For index 0, `tensors` is then `[t0, t0, t0]`, and `before` is
    None.
    """
    first = tensors[0]
    is_shared = first is tensors[1]
    is_new = first is not before
    return is_shared and is_new


def _may_be_equal(value: Tensor | None, other: Tensor | None) -> bool:
    """Returns False if two tensors are known to differ by more than rounding.

    None stands for a tensor that a replica does not have, which is a difference as well. Sparse,
    quantized and 8-bit floating-point tensors cannot be compared, and pass as equal. They hold
    graphs or packed weights, not statistics.
    """
    if value is None or other is None:
        return False

    if value.shape != other.shape or value.dtype != other.dtype:
        return False
    is_8_bit_float = value.is_floating_point() and value.itemsize == 1
    if value.layout is not torch.strided or value.is_quantized or is_8_bit_float:
        return True
    return torch.allclose(value.detach(), other.detach().to(value.device), equal_nan=True)
