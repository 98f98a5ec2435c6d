"""Checks the arguments `device_ids`, `output_device` and `replicas` of `DataParallel`.

A *replica* is one copy of the module. Each replica runs on its own GPU, or all of them share the
device that the module is on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lockstep.errors import SettingError
from lockstep.settings import check_whole_number

_NO_DEVICE_ERRORS = (TypeError, RuntimeError)
"""What `torch.device` raises for a value that is no device."""


def parse_device_ids(
    device_ids: Sequence[int | torch.device] | None, replicas: int | None
) -> tuple[list[torch.device], int]:
    """Checks the arguments `device_ids` and `replicas` of `DataParallel`.

    Returns:
        The GPU of each replica (an empty list if they run on the module's own device), and the
        number of replicas.

    Raises:
        SettingError: both arguments were given, or one of them is invalid.
    """
    if replicas is not None:
        if device_ids is not None:
            raise SettingError(
                f"device_ids={device_ids!r}, replicas={replicas}",
                "replicas are several on one device, device_ids are several devices",
                "give one of them",
            )
        check_whole_number(f"replicas={replicas!r}", replicas)
        return [], replicas

    # By default all visible GPUs are used, which may be none.
    if device_ids is None:
        device_ids = range(torch.cuda.device_count())
    devices = _parse_gpus(device_ids)
    num_replicas = max(1, len(devices))  # without GPUs, one replica on the module's own device
    return devices, num_replicas


def _parse_gpus(device_ids: Any) -> list[torch.device]:
    """Converts `device_ids` to GPUs.

    Args:
        device_ids: the argument, which may be anything.

    Raises:
        SettingError: it is no list of different visible GPUs.
    """
    if not _is_list(device_ids):  # the user has given 0 instead of [0], for example
        raise _device_ids_error(device_ids)

    numbers_or_devices = list(device_ids)  # an iterator can be read only once
    try:
        devices = [_to_device(number_or_device) for number_or_device in numbers_or_devices]
    except _NO_DEVICE_ERRORS:
        raise _device_ids_error(numbers_or_devices) from None

    # (torch stores an index in one byte: 900 becomes a negative number, which is not visible.)
    visible_indices = range(torch.cuda.device_count())
    all_are_visible_gpus = all(d.type == "cuda" and d.index in visible_indices for d in devices)
    has_duplicates = len(set(devices)) < len(devices)
    if not all_are_visible_gpus or has_duplicates:
        raise _device_ids_error(numbers_or_devices)
    return devices


def _is_list(device_ids: Any) -> bool:
    """Returns True for a list or another iterable, and False for a text, which names one GPU."""
    return isinstance(device_ids, Iterable) and not isinstance(device_ids, str)


def _device_ids_error(shown: Any) -> SettingError:
    """Returns the error for an invalid `device_ids`.

    Args:
        shown: what the user has given.
    """
    num_visible = torch.cuda.device_count()
    return SettingError(
        f"device_ids={shown!r}",
        f"they name GPUs, each once, and {num_visible} are visible here",
        "give a list of numbers below that; replicas=N computes on one device of any kind",
    )


def parse_output_device(output_device: int | torch.device | None) -> torch.device | None:
    """Checks the argument `output_device`, where -1 means the CPU, as in torch's `gather`.

    Returns:
        The device, or None if none was given.

    Raises:
        SettingError: the device is a GPU that is not visible.
    """
    if output_device is None:
        return None
    if output_device == -1:
        return torch.device("cpu")

    try:
        device = _to_device(output_device)
    except _NO_DEVICE_ERRORS:
        raise _output_device_error(output_device) from None

    index = 0 if device.index is None else device.index  # `torch.device("cuda")` has no index
    if device.type == "cuda" and index not in range(torch.cuda.device_count()):
        raise _output_device_error(output_device)

    return device


def _output_device_error(output_device: Any) -> SettingError:
    """Returns the error for an invalid `output_device`, which may be of any type."""
    num_visible = torch.cuda.device_count()
    return SettingError(
        f"output_device={output_device!r}",
        f"{num_visible} GPUs are visible here",
        "give a number below that, or leave it out, which means the first of device_ids",
    )


def _to_device(device: int | str | torch.device) -> torch.device:
    """Converts an argument to a device; a number is the index of a GPU."""
    if isinstance(device, int):
        return torch.device("cuda", device)
    return torch.device(device)
