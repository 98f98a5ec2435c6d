"""Sums of the bits of tensors, which show whether tensors are equal on several ranks.

Two tensors of the same shape whose bits differ have, almost surely, different sums. A sum takes
8 bytes, so that comparing sums sends much less than comparing tensors.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The dtype as which the bits of a tensor are read, by the size of its elements in bytes."""
CHUNK_SIZE = 2**17
"""How many numbers are summed at a time on the CPU, where torch first converts all of them to 64
bits."""


def gradient_bit_sums(gradients: Iterable[Tensor]) -> Tensor:
    """Returns a 64-bit sum of the bits of each gradient, in which -0.0 counts as 0.0.

    A virtual rank without rows computes a placeholder row with gradient zero. Which row that is
    depends on the process, and the row decides the signs of the zeros.
    """
    return bit_sums(gradient + 0.0 for gradient in gradients)


def bit_sums(tensors: Iterable[Tensor]) -> Tensor:
    """Returns a 64-bit sum of the bits of each tensor, shape `(number of tensors,)`."""
    sums: list[Tensor] = []
    for tensor in tensors:
        real = tensor.detach()
        if real.is_complex():  # its elements may have 16 bytes, and no integer has as many
            real = torch.view_as_real(real)

        # The same bits, read as integers of the same size.
        integers = real.contiguous().view(INTEGER_DTYPES[real.element_size()])
        if integers.is_cuda or integers.numel() <= CHUNK_SIZE:
            sums.append(integers.sum(dtype=torch.int64))
        else:  # in chunks, so that the converted numbers take little memory
            chunks = torch.split(integers.view(-1), CHUNK_SIZE)
            sums_of_chunks = [chunk.sum(dtype=torch.int64) for chunk in chunks]
            sums.append(torch.stack(sums_of_chunks).sum())

    if not sums:
        return torch.empty(0)

    return torch.stack(_on_first_device(sums))


def _on_first_device(numbers: list[Tensor]) -> list[Tensor]:
    """Returns tensors without dimensions on the device of the first one.

    Each other device is copied from once, since every copy to the host waits for the device.
    """
    places_of_device: dict[torch.device, list[int]] = {}
    for place, number in enumerate(numbers):
        places_of_device.setdefault(number.device, []).append(place)

    if len(places_of_device) == 1:
        return numbers

    on_first_device = list(numbers)
    for places in places_of_device.values():
        moved = torch.stack([numbers[place] for place in places]).to(numbers[0].device)
        for place, number in zip(places, moved.unbind(), strict=True):
            on_first_device[place] = number

    return on_first_device
