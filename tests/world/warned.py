"""The warnings of a run, each with the user's line."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable
from typing import Any

import lockstep

Use = Callable[[lockstep.World], Any]


def warnings_of(use: Use, **settings: Any) -> list[tuple[str, str]]:
    """The text of each warning, and the user's line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with lockstep.init(seed=0, **settings) as world:
            use(world)

    found = []
    for warning in caught:
        line = linecache.getline(warning.filename, warning.lineno)
        found.append((str(warning.message), line.strip()))
    return found
