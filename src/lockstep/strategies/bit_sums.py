"""Sums over the bits of tensors, which show whether tensors are equal on several ranks.

The bits of each element are read as an integer, and the integers are added up. If two tensors of
the same shape differ, their sums almost surely differ too. A sum takes 8 bytes, so comparing sums
sends much less than comparing tensors.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype with elements of a given number of bytes."""
CHUNK_SIZE = 2**17
"""How many numbers are added up at a time on the CPU, where torch first converts them to 64 bits.
"""


def gradient_bit_sums(gradients: Iterable[Tensor]) -> Tensor:
    """Returns a 64-bit sum over the bits of each gradient, in which -0.0 counts as 0.0.

    A virtual rank without samples computes one placeholder sample, whose gradient is zero. Which
    sample that is depends on the process, and the signs of the zeros depend on the sample.
    """
    return bit_sums(gradient + 0.0 for gradient in gradients)


def bit_sums(tensors: Iterable[Tensor]) -> Tensor:
    """Returns a 64-bit sum over the bits of each tensor, shape `(number of tensors,)`."""
    sums: list[Tensor] = []
    for tensor in tensors:
        values = tensor.detach()
        if values.is_complex():  # read each element as two real numbers
            values = torch.view_as_real(values)

        # Read the bits of each element as an integer.
        integers = values.contiguous().view(INTEGER_DTYPES[values.element_size()])
        if integers.is_cuda or integers.numel() <= CHUNK_SIZE:
            sums.append(integers.sum(dtype=torch.int64))
        else:
            # On the CPU, torch first converts its whole input to 64-bit numbers. Sum in chunks, so
            # that these take little memory. (A GPU converts each number as it adds it.)
            chunks = torch.split(integers.view(-1), CHUNK_SIZE)
            sums_of_chunks = [chunk.sum(dtype=torch.int64) for chunk in chunks]
            sums.append(torch.stack(sums_of_chunks).sum())

    if not sums:
        return torch.empty(0, dtype=torch.int64)

    return torch.stack(_on_first_device(sums))  # the tensors may be on several devices


def _on_first_device(numbers: list[Tensor]) -> list[Tensor]:
    """Moves tensors without dimensions to the device of the first one.

    The numbers of each device are moved together, because every copy waits for the device.
    """
    indices_by_device: dict[torch.device, list[int]] = {}
    for index, number in enumerate(numbers):
        indices_by_device.setdefault(number.device, []).append(index)

    if len(indices_by_device) == 1:
        return numbers

    first_device = numbers[0].device
    on_first_device = list(numbers)
    for indices in indices_by_device.values():
        moved = torch.stack([numbers[index] for index in indices]).to(first_device)
        for index, number in zip(indices, moved.unbind(), strict=True):
            on_first_device[index] = number

    return on_first_device
