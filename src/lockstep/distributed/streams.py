"""CUDA streams beside the one that the training computes on: one for each device and purpose.

They are kept for the life of the process, and used again by every pass and every run. Torch's
allocator keeps freed memory for the stream that it was allocated on. With a new stream in each pass
the memory of the passes before would stay reserved, and each pass would ask the driver for its own.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch

Purpose = Literal["copies of batches", "sums of logged values", "kept steps"]
"""What a stream is used for. Streams of two purposes do not wait for each other: a batch must not
wait for the other ranks, as a sum over the ranks does."""


@cache
def side_stream(device: torch.device, purpose: Purpose) -> torch.cuda.Stream:
    """Returns the stream of a GPU for a purpose; the first call creates it.

    Args:
        device: the GPU, with its index.
        purpose: what the caller does there.
    """
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
