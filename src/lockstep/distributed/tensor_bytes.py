"""Converts tensors to bytes and back, exactly, for every dtype.

Gloo and NCCL each carry some of torch's dtypes only. What is moved without being computed with
(gathered, broadcast, written to a file) therefore travels as a flat uint8 tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_bytes(tensor: Tensor) -> Tensor:
    """Returns the tensor's data as a uint8 tensor of shape `(bytes,)`; it may share memory."""
    contiguous = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if contiguous.numel() == 0:
        # An empty tensor may have any strides, with which `view` would fail.
        flat = contiguous.new_empty(0)
    else:
        flat = contiguous.reshape(-1)
    return flat.view(torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Returns the tensor of which `to_bytes` made `data`; it shares the memory of `data`."""
    return data.view(dtype).reshape(tuple(shape))
