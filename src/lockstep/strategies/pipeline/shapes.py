"""Shapes in the place of the tensors of other stages: tensors on the meta device.

Every rank of a pipeline runs the forward of the whole model. Outside of its own stages it computes
shapes instead of values, which takes no memory and next to no time. Such a tensor is a `Shape`: it
is on the meta device, but says that it is on the rank's device, because a model may ask.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.distributed.torch_compat import NormBase, TorchDispatchMode, pytree


class Shape(Tensor):
    """A tensor on the meta device that says it is on the device of the rank.

    So `torch.arange(length, device=x.device)` makes real numbers, whether `x` is a Shape or not.
    Whatever is computed from a Shape is a Shape, too.
    """

    device_to_show: ClassVar[torch.device | None] = None
    """The device inside `only_shapes`; None while torch itself asks, and outside."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device on which the tensor would be."""
        return self.device_to_show or super().device


class _ShapeMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, operations with a tensor on the meta device compute shapes."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Is called by torch for every operation, and runs it: on shapes if one is among them."""
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
            args, kwargs = pytree.tree_map_only(Tensor, shape_of, (args, kwargs))
            if kwargs.get("device") is not None:  # as in `x.to(device)`: the result is a shape, too
                kwargs["device"] = torch.device("meta")

        # torch itself must see that a `Shape` is on the meta device.
        device_to_show = Shape.device_to_show
        Shape.device_to_show = None
        try:
            return func(*args, **kwargs)
        finally:
            Shape.device_to_show = device_to_show


@contextmanager
def only_shapes(device: torch.device) -> Iterator[None]:
    """Inside this context shapes are computed, without gradients; they say they are on `device`."""
    Shape.device_to_show = device
    try:
        with torch.no_grad(), _ShapeMode():  # type: ignore[no-untyped-call]
            yield
    finally:
        Shape.device_to_show = None


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Returns a tensor, or a pytree, with its tensors changed."""
    if isinstance(tree, Tensor):  # much faster than `tree_map_only`
        return change(tree)
    return pytree.tree_map_only(Tensor, change, tree)


def shape_of(tensor: Tensor) -> Tensor:
    """Returns a tensor of the same dtype and shape on the meta device."""
    if tensor.is_meta:
        return tensor
    # `empty_like` on the meta device is written in Python, and 20 times slower.
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def copy_to_meta(module: nn.Module) -> nn.Module:
    """Returns a copy of a module that computes shapes only."""
    memo: dict[int, Any] = {}  # what `deepcopy` puts in the place of an object, by its `id`
    for parameter in module.parameters():
        on_meta = parameter.detach().to("meta")
        memo[id(parameter)] = nn.Parameter(on_meta, parameter.requires_grad)

    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")

    for part in module.modules():
        for value in vars(part).values():
            # The copy communicates with nobody, and the threads of a group end with its last
            # reference.
            if isinstance(value, dist.ProcessGroup):
                memo[id(value)] = None

    return copy.deepcopy(module, memo)


def skip_normalisation(module: nn.Module) -> None:
    """Lets the BatchNorm layers of a module return the shape that they are called with.

    Otherwise some of them would read numbers from their statistics, or wait for other ranks.
    """
    for part in module.modules():
        if isinstance(part, NormBase):
            part.forward = shape_of
