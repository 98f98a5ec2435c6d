"""Tensors: writes to them, their storages, and one call for many of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def write_count(tensor: Tensor) -> int:
    """Returns how often a tensor was written to in place, as autograd counts it."""
    return tensor._version


def write_counts(tensors: Iterable[Tensor]) -> list[int]:
    """Returns the `write_count` of each tensor."""
    return [tensor._version for tensor in tensors]


def is_view(tensor: Tensor) -> bool:
    """Returns True if autograd treats a tensor as a view of another one."""
    return tensor._is_view()


def storage_key(tensor: Tensor) -> int:
    """Returns a number that is equal for tensors in the same memory, also on the meta device.

    It may be given again after the memory is freed.
    """
    key: int = tensor.untyped_storage()._cdata
    return key


def storage_reference(tensor: Tensor) -> Any:
    """Returns a weak reference to the storage of a dense tensor, which can be a key of a dict.

    References to one storage are equal, whichever of its views they were made from. As long as
    there is a reference, the address of a freed storage is not used again.
    """
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def add_to_each(tensors: list[Tensor], summands: list[Tensor]) -> None:
    """Adds one summand to each tensor, in place: one call for all of them."""
    import torch

    torch._foreach_add_(tensors, summands)


def copy_to_each(tensors: list[Tensor], sources: list[Tensor]) -> None:
    """Copies one source to each tensor: one call for all of them."""
    import torch

    if tensors:  # torch refuses empty lists
        torch._foreach_copy_(tensors, sources)


def multiply_each(tensors: list[Tensor], factor: float) -> None:
    """Multiplies all tensors by a number, in place: one call for all of them."""
    import torch

    torch._foreach_mul_(tensors, factor)
