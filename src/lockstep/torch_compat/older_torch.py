"""What an older torch lacks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def accepted(function: Callable[..., object], **options: Any) -> dict[str, Any]:
    """Returns those of the options that a function or class has in this version of torch.

    Args:
        function: a function or class of torch.
        options: arguments that some versions do not have, and without which the call does the same.
    """
    known = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in known}


def dtypes_named(*names: str) -> list[torch.dtype]:
    """Returns the dtypes of these names that this version of torch has.

    Torch 2.6 has neither `float8_e8m0fnu` nor `float4_e2m1fn_x2`.
    """
    import torch

    return [getattr(torch, name) for name in names if hasattr(torch, name)]
