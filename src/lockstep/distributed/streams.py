"""Provides the CUDA streams for work beside the training, one for each device and purpose.

The streams are created once and used until the process ends. Torch's allocator reserves freed
memory for the stream on which it was allocated. If each pass over the data used a new stream, the
memory of earlier passes would stay reserved, and each pass would allocate new memory.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor

Purpose = Literal["copies of batches", "sums of logged values", "kept steps"]
"""What a stream is used for. Streams of two purposes do not wait for each other: a sum of logged
values waits for the other ranks, and a copy of a batch must not."""


def take_gpu_in_this_thread(device: torch.device) -> None:
    """Makes a GPU the current one of this thread; on the CPU it does nothing.

    Each thread that uses a GPU calls this first. A new thread starts with GPU 0 as its current one,
    and `torch.cuda.stream` returns to the stream of the current GPU at its end. So without this
    call, every rank of a machine would open GPU 0, which takes some hundred MiB of its memory.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


@cache
def side_stream(device: torch.device, purpose: Purpose) -> torch.cuda.Stream:
    """Returns the stream of a GPU for a purpose; the first call creates it.

    Args:
        device: the GPU, with its index.
        purpose: what the stream is used for.
    """
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def start_copy_to_host(tensor: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Starts to copy a tensor from a GPU to page-locked memory, on the current stream of the GPU.

    Returns:
        The copy, and an event that tells when its values have arrived.
    """
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    on_host.copy_(tensor, non_blocking=True)
    arrived: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    # A model may be spread over several GPUs, so the tensor need not be on the current device.
    arrived.record(torch.cuda.current_stream(tensor.device))
    return on_host, arrived
