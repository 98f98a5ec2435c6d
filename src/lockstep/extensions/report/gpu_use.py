"""Measures how busy a GPU is and how much of its memory is in use, with the package nvidia-ml-py.

The package gives access to NVML, the library behind `nvidia-smi`.
"""

from __future__ import annotations

import platform
from contextlib import suppress
from typing import NamedTuple

import torch


class GpuUse(NamedTuple):
    """How much a GPU is used by all processes together."""

    percent: int
    """The share of the last moments in which a kernel ran, as shown by `nvidia-smi`."""
    memory_bytes: int


def measure_gpu(device: torch.device) -> GpuUse | None:
    """Asks the driver how much a GPU is used, or returns None if the driver does not tell.

    This takes a fraction of a millisecond and does not wait for the GPU.
    """
    # Torch raises an error if NVML is missing, and NVML raises its own if the GPU does not support
    # the query, for example because it is divided (MIG). The run is recorded without these values.
    with suppress(Exception):
        return GpuUse(torch.cuda.utilization(device), torch.cuda.device_memory_used(device))
    return None


def device_name(device: torch.device) -> str:
    """Returns the name of a GPU, such as "NVIDIA H100 80GB HBM3", or the model of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)

    # On Linux, a file names the model: "model name : AMD EPYC 9654 96-Core Processor".
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()

    # Elsewhere only the architecture is known, such as "arm64".
    return platform.machine()
