"""Returns free memory of this process to the operating system."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

FREED_BYTES_TO_RETURN = 2**24
_bytes_freed = 0
"""How much memory was freed since free memory was last returned; counted by `note_freed`."""


def note_freed(num_bytes: int) -> None:
    """Counts memory that was just freed, and returns free memory after some megabytes.

    Code that allocates and frees one large tensor after the other calls this after each. Otherwise
    the freed blocks together may take more memory than the tensors of a unit of the model.
    """
    global _bytes_freed
    _bytes_freed += num_bytes
    if _bytes_freed >= FREED_BYTES_TO_RETURN:
        _bytes_freed = 0
        return_free_memory()


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
