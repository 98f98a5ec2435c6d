"""Batches as nests of tensors: one walk for moving, pinning and emptying them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nest with every tensor changed; what is neither tensor nor container stays.

    Mappings, sequences and named tuples keep their types. An object that is none of these but has
    `.to`, such as a graph batch, is left to `move`.
    """
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, MutableMapping):  # keeps classes such as a tokenizer's BatchEncoding
        mapped = copy.copy(batch)
        mapped.update({key: map_tensors(value, change) for key, value in batch.items()})
        return mapped
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, change) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(value, change) for value in batch)
    return batch


def move(batch: Any, device: torch.device) -> Any:
    """The batch on the device; from pinned memory the copy does not block."""
    if not isinstance(batch, Tensor | Mapping | list | tuple | str | bytes) and hasattr(
        batch, "to"
    ):
        return batch.to(device)
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def pin(batch: Any) -> Any:
    """The batch in page-locked memory."""
    return map_tensors(batch, Tensor.pin_memory)


def emptied(batch: Any) -> Any:
    """The batch without samples: shapes `(n, *)` become `(0, *)`, lists of text become empty."""
    if isinstance(batch, list) and not any(
        isinstance(x, Tensor | Mapping | list | tuple) for x in batch
    ):
        return []
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        return type(batch)(emptied(value) for value in batch)
    if isinstance(batch, Mapping):
        return type(batch)({key: emptied(value) for key, value in batch.items()})  # type: ignore[call-arg]
    return map_tensors(batch, lambda tensor: tensor[:0] if tensor.dim() else tensor)
