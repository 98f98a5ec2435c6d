"""Computes shapes instead of values, for the stages of a model that are on other ranks.

Every rank of a pipeline runs the forward of the whole model. Outside its own stages it computes on
tensors without values, which takes no memory and hardly any time. Such a tensor is a `Shape`: it is
on the meta device, but claims to be on the rank's device, because a model may ask for the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.torch_compat import NormBase, TorchDispatchMode, pytree


class Shape(Tensor):
    """A tensor on the meta device that claims to be on the device of the rank.

    So `torch.arange(length, device=x.device)` makes real numbers, whether `x` is a Shape or not.
    Anything that is computed from a Shape is a Shape, too.
    """

    device_to_show: ClassVar[torch.device | None] = None
    """The device to claim inside `only_shapes`. None elsewhere, and while torch asks for it."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device on which the tensor would be if it had values."""
        return self.device_to_show or super().device


class _ShapeMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which operations on a tensor on the meta device compute shapes."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operation, on shapes if one of its arguments is a shape; called by torch."""
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
            args, kwargs = pytree.tree_map_only(Tensor, shape_of, (args, kwargs))
            if kwargs.get("device") is not None:  # as in `x.to(device)`, which returns a shape, too
                kwargs["device"] = torch.device("meta")

        # While torch runs the operation, it must see that a `Shape` is on the meta device.
        device_to_show = Shape.device_to_show
        Shape.device_to_show = None
        try:
            return func(*args, **kwargs)
        finally:
            Shape.device_to_show = device_to_show


@contextmanager
def only_shapes(device: torch.device) -> Iterator[None]:
    """A context in which shapes are computed, without gradients.

    Args:
        device: the device on which shapes claim to be.
    """
    Shape.device_to_show = device
    try:
        with torch.no_grad(), _ShapeMode():  # type: ignore[no-untyped-call]
            yield
    finally:
        Shape.device_to_show = None


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns a pytree, or a single tensor, with `change` applied to each tensor."""
    if isinstance(tree, Tensor):  # much faster than `tree_map_only`
        return change(tree)
    return pytree.tree_map_only(Tensor, change, tree)


def shape_of(tensor: Tensor) -> Tensor:
    """Returns a tensor on the meta device with the dtype, shape and strides of the given one."""
    if tensor.is_meta:
        return tensor
    # `empty_like` is written in Python for the meta device, and is 20 times slower.
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def copy_to_meta(module: nn.Module) -> nn.Module:
    """Returns a copy of a module on the meta device, which only computes shapes."""
    # `deepcopy` replaces an object by what is found here under its `id`, even if that is None.
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        on_meta = parameter.detach().to("meta")
        memo[id(parameter)] = nn.Parameter(on_meta, parameter.requires_grad)

    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")

    for part in module.modules():
        for value in vars(part).values():
            # The threads of a process group only end when nothing refers to the group any more. So
            # the copy, which does not communicate, gets None instead.
            if isinstance(value, dist.ProcessGroup):
                memo[id(value)] = None

    return copy.deepcopy(module, memo)


def skip_normalisation(module: nn.Module) -> None:
    """Makes normalisation layers with statistics return the shape of their input.

    Otherwise some of them would read values of their statistics, or wait for other ranks.
    """
    for part in module.modules():
        if isinstance(part, NormBase):
            part.forward = shape_of
