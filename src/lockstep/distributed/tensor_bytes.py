"""Converts tensors to bytes and back, exactly, for every dtype.

Gloo and NCCL support only some of torch's dtypes. So a tensor that is only moved (gathered,
broadcast or written to a file) is sent as a flat uint8 tensor, which both support.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_bytes(tensor: Tensor) -> Tensor:
    """Returns the data of a tensor as a 1-dimensional uint8 tensor, which may share its memory.

    Example: a float32 tensor of shape (2, 3) becomes a uint8 tensor of shape (24,).
    """
    contiguous = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if contiguous.numel() == 0:
        # `reshape(-1)` may leave an empty tensor with strides that `view(torch.uint8)` refuses.
        flat = contiguous.new_empty(0)
    else:
        flat = contiguous.reshape(-1)
    return flat.view(torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Restores a tensor from the bytes that `to_bytes` returned; it shares the memory of `data`."""
    return data.view(dtype).reshape(tuple(shape))
