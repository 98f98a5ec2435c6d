"""The message with the gradient of a tensor that was sent to the next stage.

It consists of the gradient's bytes and one more byte, which is 1 if there is a gradient. No
gradient is not the same as a gradient of zeros: an optimizer leaves parameters without one alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.distributed import tensor_bytes
from lockstep.strategies.pipeline.wire import TensorSpec


def gradient_message_spec(tensor: Tensor) -> TensorSpec:
    """Returns the form of the message with a tensor's gradient."""
    num_bytes = tensor.numel() * tensor.element_size()
    return TensorSpec("uint8", (num_bytes + 1,))


def encode_gradient(tensor: Tensor) -> Tensor:
    """Returns the message with a tensor's gradient, `(bytes + 1,)`."""
    if tensor.grad is None:
        shape = gradient_message_spec(tensor).shape
        return torch.zeros(shape, dtype=torch.uint8, device=tensor.device)
    data = tensor_bytes.to_bytes(tensor.grad)
    has_gradient = data.new_ones(1)
    return torch.cat([data, has_gradient])


def decode_gradient(message: Tensor, tensor: Tensor) -> Tensor | None:
    """Returns the gradient of a tensor from the message that `encode_gradient` made of it."""
    has_gradient = message[-1]
    if not has_gradient:
        return None
    return tensor_bytes.from_bytes(message[:-1], tensor.dtype, tensor.shape)
