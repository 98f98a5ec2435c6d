"""DTensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def is_sharded(value: object) -> bool:
    """Returns True for a DTensor."""
    # Not by `isinstance`, which would import DTensor for programs that have none.
    return hasattr(value, "full_tensor")


def to_local(tensor: Any) -> Tensor:
    """Returns this rank's shard of a DTensor, or any other tensor whole; memory is shared."""
    local: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return local.detach()


def local_box(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the offsets and the sizes of this rank's shard of a DTensor."""
    from torch.distributed.tensor import _utils

    sizes, offsets = _utils.compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(offsets), tuple(sizes)
