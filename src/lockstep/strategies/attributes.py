"""Attributes that a forward pass of the user's may set on its modules."""

from __future__ import annotations

from torch import nn

PLAIN = frozenset(vars(nn.Module()))
"""Those that every module has; what is in them is known, or of no matter."""


def may_set(part: nn.Module) -> bool:
    """Whether a module's forward is the user's: torch's own layers keep nothing between calls."""
    return not type(part).__module__.startswith("torch.nn.")
