"""torch's key-value stores, under names that type checkers see, and how we wait on them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

# torch does not list them in `__all__`, though its documentation does.
from torch.distributed import FileStore as FileStore  # type: ignore[attr-defined]
from torch.distributed import PrefixStore as PrefixStore  # type: ignore[attr-defined]
from torch.distributed import Store as Store  # type: ignore[attr-defined]
from torch.distributed import TCPStore as TCPStore  # type: ignore[attr-defined]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05
T = TypeVar("T")


def wait_until(attempt: Callable[[], T], deadline: float) -> T:
    """Calls `attempt` until it returns something true, or `time.monotonic()` passes the deadline.

    `Store.wait` would do for keys, but it cannot be interrupted, logs its timeouts, and on files
    looks once a second.

    Returns:
        The last result.
    """
    pause = _FIRST_PAUSE_S
    while not (result := attempt()):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return result
