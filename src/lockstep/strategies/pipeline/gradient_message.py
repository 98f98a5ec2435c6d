"""The message with the gradients of the tensors that were sent to the next stage of a pipeline.

It contains one tensor and one *mark*, a boolean, for each of the tensors that were sent. The mark
is True if the tensor has a gradient, which may differ from one micro-batch to the next. A missing
gradient is not the same as a gradient of zeros, because optimizers skip parameters without one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.strategies.pipeline.wire import Message, MessageSpec, TensorSpec


def gradient_message_spec(tensors: Sequence[Tensor]) -> MessageSpec:
    """Returns the shapes and dtypes of the message with the gradients of the given tensors."""
    specs = tuple(TensorSpec.of(tensor) for tensor in tensors)
    return MessageSpec(specs, num_marks=len(specs))


def gradient_message(tensors: Sequence[Tensor]) -> Message:
    """Returns the message with the gradients of the given tensors, zeros where one is missing."""
    marks = [tensor.grad is not None for tensor in tensors]
    gradients: list[Tensor] = []
    for tensor in tensors:
        gradients.append(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
    return Message(marks, gradients)
