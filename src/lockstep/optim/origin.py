"""Says whether an optimizer is one of torch or Lockstep, of which it is known how they work."""

from __future__ import annotations

from torch.optim import Optimizer

KNOWN_PACKAGES = ("torch.optim.", "lockstep.optim.")


def is_of_torch_or_lockstep(optimizer: Optimizer) -> bool:
    """Returns True if the class of an optimizer is defined in torch or Lockstep.

    A subclass that a script defines may work in another way, and is none of these.
    """
    return type(optimizer).__module__.startswith(KNOWN_PACKAGES)
