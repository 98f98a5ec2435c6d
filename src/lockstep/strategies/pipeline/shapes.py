"""Shapes: what tensors of other stages are on a rank of a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.distributed.torch_compat import NormBase, TorchDispatchMode, pytree

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Of a call, by place and by name."""


class Shape(Tensor):
    """A tensor of another stage, which is only a shape but says that it is on the device.

    `torch.arange(length, device=x.device)` makes real numbers then, whatever `x` is. What is
    computed with such a tensor is one, too.
    """

    on: ClassVar[torch.device | None] = None
    """In a subclass, while `Shapes` is on; None while torch itself looks."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where it would be."""
        return self.on or super().device


class Shapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, whatever is computed with a tensor that is only a shape is one, too."""

    def __init__(self, shape: type[Shape], device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shape = shape
        self._device = device

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._shape.on = self._device
        return self

    def __exit__(self, *error: object) -> None:
        self._shape.on = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
            args, kwargs = pytree.tree_map_only(Tensor, shape_of, (args, kwargs))
            if kwargs.get("device") is not None:
                kwargs["device"] = torch.device("meta")
        self._shape.on = None
        try:
            return func(*args, **kwargs)
        finally:
            self._shape.on = self._device


def signature(value: Arguments) -> Any:
    """What decides about forms: equal for arguments that a model treats alike; None: unknown."""
    if all_tensors(value):
        return tuple((arg.shape, arg.dtype, arg.requires_grad) for arg in value[0])
    leaves, spec = pytree.tree_flatten(value)
    parts = [
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]
    plain = all(isinstance(p, tuple | int | float | str | bool | None) for p in parts)
    return (str(spec), *parts) if plain else None


def all_tensors(value: Arguments) -> bool:
    """Whether they are nothing but tensors by place, as nearly always: no nest to walk through."""
    args, kwargs = value
    return not kwargs and all(isinstance(arg, Tensor) for arg in args)


def shape_of(tensor: Tensor) -> Tensor:
    """Of this dtype and shape, on the meta device."""
    return tensor if tensor.is_meta else like(tensor)


def map_shapes(change: Callable[[Tensor], Tensor], nest: Any) -> Any:
    """A nest with its tensors changed."""
    if isinstance(nest, Tensor):  # without the detour that a nest takes
        return change(nest)
    return pytree.tree_map_only(Tensor, change, nest)


def like(tensor: Tensor) -> Tensor:
    """Another shape like it; `empty_like` on the meta device is Python, and 20 times slower."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def on_meta(piece: nn.Module) -> nn.Module:
    """A copy that has the shapes alone."""
    tensors = [*piece.parameters(), *piece.buffers()]
    memo: dict[int, Any] = {
        id(t): nn.Parameter(t.detach().to("meta"), requires_grad=t.requires_grad)
        if isinstance(t, nn.Parameter)
        else t.detach().to("meta")
        for t in tensors
    }
    own = (thing for part in piece.modules() for thing in vars(part).values())
    # It meets nobody, and what keeps a group would keep its threads after the end of the run.
    memo |= {id(thing): None for thing in own if isinstance(thing, dist.ProcessGroup)}
    return copy.deepcopy(piece, memo)


def leave_statistics(piece: nn.Module) -> None:
    """Its BatchNorms give the shape they get: some ask statistics for a number, or meet ranks."""
    for part in piece.modules():
        if isinstance(part, NormBase):
            part.forward = like
