"""Returns free memory of this process to the operating system."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def return_free_memory() -> None:
    """Returns memory to the operating system that the C library has kept after it was freed.

    Glibc keeps freed blocks that lie between blocks in use. After many large tensors have been
    allocated and freed, this can be more memory than the model takes.
    """
    trim = _trim_function()
    if trim is not None:
        trim(0)


@cache
def _trim_function() -> Any | None:
    """Returns glibc's function `malloc_trim`, or None if another C library is used."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
