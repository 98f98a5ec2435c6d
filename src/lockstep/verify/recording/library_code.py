"""Tells code of torch and Lockstep from code of the script, by the name of its module."""

from __future__ import annotations


def is_of_lockstep(module_name: str) -> bool:
    """True for a module of Lockstep."""
    return _package_of(module_name) == "lockstep"


def is_of_torch_or_lockstep(module_name: str) -> bool:
    """True for a module of torch or Lockstep, such as "torch.nn.modules.linear"."""
    return _package_of(module_name) in ("torch", "lockstep")


def _package_of(module_name: str) -> str:
    """Returns the package that a module belongs to: "torch" for "torch.nn"."""
    return module_name.partition(".")[0]
