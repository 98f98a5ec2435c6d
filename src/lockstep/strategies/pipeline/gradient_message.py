"""The message with the gradients of the tensors that were sent to the next stage.

It has a tensor and a mark for each of them. The mark says whether there is a gradient, which may
differ from one micro-batch to the next. No gradient is not the same as a gradient of zeros: an
optimizer leaves parameters without one alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.strategies.pipeline.wire import Message, MessageSpec, TensorSpec


def gradient_message_spec(tensors: Sequence[Tensor]) -> MessageSpec:
    """Returns the form of the message with the gradients of tensors."""
    specs = tuple(TensorSpec.of(tensor) for tensor in tensors)
    return MessageSpec(specs, num_marks=len(specs))


def gradient_message(tensors: Sequence[Tensor]) -> Message:
    """Returns the message with the gradients of tensors; zeros stand for one that is missing."""
    marks = [tensor.grad is not None for tensor in tensors]
    gradients: list[Tensor] = []
    for tensor in tensors:
        gradients.append(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
    return Message(marks, gradients)
