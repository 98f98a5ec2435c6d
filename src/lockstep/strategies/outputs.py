"""What leaves a sharded unit in a forward pass, and how torch comes to know of it.

Torch hangs what a unit needs for its backward pass, its parameters gathered and its gradients
averaged, on the tensors that it returns in lists, tuples and dicts. Those that leave it otherwise,
in an object (a distribution) or in an attribute of one of its modules (`self.aux_loss`), it is
shown here. A gradient that comes to the unit around them would be computed from memory that is
free already.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lockstep.strategies.attributes import PLAIN, may_set

_SHOWN = "_lockstep_shown"
_DEPTH = 4
"""How far objects in objects are followed."""


class Outputs:
    """Two hooks of one unit: before torch's own of the forward pass, and after it.

    Args:
        unit: a module, before `fully_shard`.
        others: units inside of it, which have outputs of their own.
        passed: called after each forward pass.
        second: called in a backward pass that is differentiated itself.
    """

    def __init__(
        self,
        unit: nn.Module,
        others: Sequence[nn.Module],
        passed: Callable[[], None],
        second: Callable[[], None],
    ) -> None:
        theirs = {id(part) for other in others for part in other.modules()}
        self._attributes = [
            vars(part) for part in unit.modules() if id(part) not in theirs and may_set(part)
        ]
        self._passed = passed
        self._second = second

    def before(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """The output beside all other tensors that backward passes may begin with.

        Outputs that are views become tensors of their own over the same memory: an operation in
        place on a view would drop what torch hangs on it, and torch warns of each.
        """
        self._passed()
        if not torch.is_grad_enabled():
            return output
        leaves, structure = pytree.tree_flatten(output)
        leaves = [_no_view(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        seen = {id(leaf) for leaf in leaves}
        loose = [tensor for tensor in self._loose(leaves) if id(tensor) not in seen]
        for tensor in [*leaves, *loose]:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._look)  # type: ignore[no-untyped-call]
        return pytree.tree_unflatten(leaves, structure), loose

    def after(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """The output alone."""
        return output[0] if torch.is_grad_enabled() else output

    def _loose(self, leaves: Sequence[Any]) -> Iterator[Tensor]:
        for leaf in leaves:
            yield from _tensors(leaf, objects=True)
        for attributes in self._attributes:
            for name, value in attributes.items():
                if name in PLAIN:
                    continue
                for tensor in _tensors(value, objects=False):
                    # It may stay there for more passes than this one.
                    units = vars(tensor).setdefault(_SHOWN, set())
                    if id(self) not in units:
                        units.add(id(self))
                        yield tensor

    def _look(self, gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            self._second()


def _tensors(value: Any, *, objects: bool, depth: int = _DEPTH) -> Iterator[Tensor]:
    """Results of operations with gradients in containers and, if asked for, in other objects."""
    if isinstance(value, Tensor):
        if value.grad_fn is not None:
            yield value
        return
    inside: Any = ()
    if isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, list | tuple):
        inside = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif objects and not isinstance(value, nn.Module | type):
        inside = list(getattr(value, "__dict__", {}).values())
    if depth:
        for one in inside:
            yield from _tensors(one, objects=objects, depth=depth - 1)


def _no_view(tensor: Tensor) -> Tensor:
    viewed = tensor.requires_grad and tensor._is_view()
    return _Same.apply(tensor) if viewed else tensor  # type: ignore[no-untyped-call]


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]
