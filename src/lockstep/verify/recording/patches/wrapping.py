"""How a function of torch or Lockstep is patched: replaced by one that also calls others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from lockstep.verify.recording.library_code import is_of_lockstep

UNKNOWN_LINE = "somewhere"
"""Shown instead of a line of the script if no file of the user is on the call stack."""


def _do_nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


def wrap(
    owner: Any,
    name: str,
    before: Callable[..., Any] = _do_nothing,
    after: Callable[..., Any] = _do_nothing,
) -> None:
    """Patches a function so that others are called before and after it, with the same arguments.

    Args:
        owner: module or class that the function belongs to.
        name: name of the function.
        before: function that is called before it.
        after: function that is called after it, unless it raises an error.
    """
    function = getattr(owner, name)

    @wraps(function)  # `FunctionMode` recognizes functions by their names
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        result = function(*args, **kwargs)
        after(*args, **kwargs)
        return result

    setattr(owner, name, wrapped)


def lockstep_called_patched_function() -> bool:
    """True if a module of Lockstep, and not the script, has called a patched function.

    It must be called directly by a `before` or `after` function of `wrap`.
    """
    # Frame 0 is this function, 1 is `before` or `after`, 2 is `wrapped`, and 3 is its caller.
    caller = sys._getframe(3)
    return is_of_lockstep(caller.f_globals["__name__"])
