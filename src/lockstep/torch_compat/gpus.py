"""What is known of GPUs without using them."""

from __future__ import annotations

from typing import Any


def count_gpus_without_cuda() -> int | None:
    """Returns the number of visible GPUs without initialising CUDA.

    It is asked from the vendor's management library, as `torch.cuda.device_count` does at first.

    Returns:
        None if the library is not there, or cannot tell, as with MIG slices.
    """
    import torch

    cuda: Any = torch.cuda
    is_rocm = torch.version.hip is not None
    count: int = cuda._device_count_amdsmi() if is_rocm else cuda._device_count_nvml()
    return count if count >= 0 else None


def cuda_is_refused_in_this_copy() -> bool:
    """Returns True if torch will not use CUDA here, in a process that was forked.

    So it is if the process that was copied had asked CUDA for anything, be it the number of GPUs.
    """
    import torch

    return bool(torch.cuda._is_in_bad_fork())
