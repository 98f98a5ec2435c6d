"""The same code on a GPU and, as a check of the tests themselves, on the CPU.

On a GPU it runs in processes of its own, never in that of pytest: a process that has used CUDA
cannot be forked any more, and keeps what CUDA has started.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from ranks import run_ranks

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ["cpu", GPU]
ON_RANKS = [("cpu", 2), *(pytest.param("cuda", size, marks=pytest.mark.gpu) for size in (1, 2))]
"""Devices and numbers of ranks."""


def settings(device: str) -> dict[str, Any]:
    """For `lockstep.init`: with Gloo several ranks may share a GPU, which NCCL refuses."""
    return {"device": device, "backend": "gloo"}


def run_on(fn: Callable[..., Any], size: int, *args: Any, timeout: float = 100.0) -> list[Any]:
    """The results of `fn(*args)` on so many ranks."""
    return run_ranks(_run, size, fn, args, timeout=timeout)


def _run(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return fn(*args)
    finally:
        # Autograd works for a GPU in a thread of its own, which lives as long as the process and
        # which Python knows from the time when one of its functions has run there.
        for thread in threading.enumerate():
            if isinstance(thread, threading._DummyThread):
                threading._active.pop(thread.ident, None)  # type: ignore[attr-defined]
