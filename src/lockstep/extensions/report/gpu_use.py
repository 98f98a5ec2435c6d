"""How busy a GPU is and how much of its memory is in use, as NVML says (package nvidia-ml-py)."""

from __future__ import annotations

import platform
from contextlib import suppress
from typing import NamedTuple

import torch


class GpuUse(NamedTuple):
    """The use of a GPU, by all processes on it."""

    percent: int
    """The part of the last moments in which a kernel ran, as `nvidia-smi` shows it."""
    memory_bytes: int


def measure_gpu(device: torch.device) -> GpuUse | None:
    """Asks the driver how much a GPU is used, or returns None if it does not say.

    It takes a fraction of a millisecond and does not wait for the GPU.
    """
    # Without NVML torch raises an error; NVML has its own for a GPU that does not support this, as
    # one that is divided (MIG). A record without these values is still one.
    with suppress(Exception):
        return GpuUse(torch.cuda.utilization(device), torch.cuda.device_memory_used(device))
    return None


def device_name(device: torch.device) -> str:
    """Returns the name of a GPU, such as "NVIDIA H100 80GB HBM3", or the model of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    # Linux has the model in a file; elsewhere there is only the name of the architecture.
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()
