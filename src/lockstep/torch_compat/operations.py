"""Operations of torch, as a `TorchDispatchMode` is given them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def device_constructors() -> set[Callable[..., Any]]:
    """Returns the functions of torch whose tensors `with torch.device(...)` puts on a device."""
    from torch.utils import _device

    constructors: set[Callable[..., Any]] = _device._device_constructors()
    return constructors


def copy_operation() -> Any:
    """Returns the operation that `tensor.to(...)` calls if something changes."""
    import torch

    return torch.ops.aten._to_copy.default


def reads_number(operation: Any) -> bool:
    """Returns True for operations that return a Python value, which depends on the elements.

    These are `tensor.item()`, `torch.equal(...)` and `torch.allclose(...)`.

    Args:
        operation: an operation as a dispatch mode gets it, such as `torch.ops.aten.equal.default`.
    """
    import torch

    aten = torch.ops.aten
    return operation in (
        aten._local_scalar_dense.default,  # `tensor.item()`
        aten.allclose.default,
        aten.equal.default,
    )


def written_arguments(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Returns the arguments that an operation writes to, such as `x` in `x.uniform_()`.

    Args:
        operation: the `OpOverload` that a `TorchDispatchMode` is given.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
    """
    written: list[Any] = []
    for number, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue

        value = args[number] if number < len(args) else kwargs.get(argument.name)
        written.append(value)
    return written
