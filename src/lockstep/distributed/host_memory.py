"""The memory of this process."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def return_free_memory() -> None:
    """Gives memory that is free inside the allocator of the C library back to the system.

    Glibc keeps what lies between blocks that are in use. After large tensors have been made and
    freed many times, that can be more than the model.
    """
    trim = _trim_function()
    if trim is not None:
        trim(0)


@cache
def _trim_function() -> Any | None:
    """Returns glibc's `malloc_trim`; None where the C library is another one."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
