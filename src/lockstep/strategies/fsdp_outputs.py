"""Shows torch's FSDP all tensors that leave a unit in a forward pass.

A *unit* is a submodule that `fully_shard` was applied to. Torch registers hooks on the tensors that
a unit returns in lists, tuples and dicts. In the backward pass these hooks gather the unit's
parameters and average its gradients. But tensors may also leave a unit inside an object (such as a
`torch.distributions` object) or as an attribute of a module (`self.aux_loss`). If a gradient came
back only through these *hidden* tensors, the backward pass would use memory that was freed already.

So each unit gets two more forward hooks. The first one runs before torch's hook and adds the hidden
tensors to the output, where torch finds them. The second one runs after it and removes them again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import torch_compat
from lockstep.strategies.base import MODULE_ATTRIBUTES, may_set_attributes

_SHOWN_BY = "_lockstep_shown_by"
"""The attribute of a tensor with the ids of the `UnitOutputs` objects that have shown it to torch.
"""
_MAX_DEPTH = 4
"""How many levels of nested containers and objects are searched for tensors."""


class UnitOutputs:
    """The two forward hooks of one unit, registered before and after `fully_shard` is applied.

    Args:
        unit: the module, before `fully_shard`.
        inner_units: units inside this one, which have hooks of their own.
    """

    def __init__(self, unit: nn.Module, inner_units: Sequence[nn.Module]) -> None:
        ids_in_inner_units: set[int] = set()
        for inner_unit in inner_units:
            ids_in_inner_units.update(id(module) for module in inner_unit.modules())

        self._attributes: list[dict[str, Any]] = []
        """The attributes of each module of the unit, without those of inner units."""
        for module in unit.modules():
            if id(module) not in ids_in_inner_units and may_set_attributes(module):
                self._attributes.append(vars(module))

        self.on_backward: Callable[[], None] | None = None
        """Called when a backward pass begins in the unit."""
        self.on_double_backward: Callable[[], None] | None = None
        """Called in a backward pass that will itself be differentiated (`create_graph=True`)."""

    @torch_compat.outside_compiled_code
    def before_torch(self, module: Any, inputs: Any, output: Any) -> Any:
        """Adds hidden tensors to the output, so that torch finds all that may bring gradients.

        The three hooks run in this order:

        1. this one adds the hidden tensors to the output;
        2. torch's hook finds all tensors in the output, and registers gradient hooks on them;
        3. `after_torch` removes the hidden tensors again.

        Each tensor also gets a gradient hook that notices a backward pass (`_notice_backward`).

        Returns:
            The pair `(output, hidden tensors)`, in which torch finds both; or only the output, if
            gradients are disabled or the output is None.
        """
        if not torch.is_grad_enabled():
            return output
        if output is None:
            self._show_hidden_tensors_of_none(module)
            return None

        # Torch's gradient hooks would be lost with a view that the user changes in place.
        leaves, structure = torch_compat.pytree.tree_flatten(output)
        leaves = [_without_view(leaf) for leaf in leaves]

        # Leave out the tensors that torch finds by itself.
        ids_in_output = {id(leaf) for leaf in leaves}
        hidden_tensors = [t for t in self._hidden_tensors(leaves) if id(t) not in ids_in_output]
        self._register_hooks([*leaves, *hidden_tensors])
        return torch_compat.pytree.tree_unflatten(leaves, structure), hidden_tensors

    def _show_hidden_tensors_of_none(self, module: Any) -> None:
        """Does what torch's hook would do with the hidden tensors of a module that returns None.

        They cannot be shown to torch's hook: a forward hook that returns None changes nothing, so
        `after_torch` could not remove them from the output again.
        """
        hidden_tensors = self._hidden_tensors(leaves=[])
        self._register_hooks(hidden_tensors)
        torch_compat.gather_in_backward_of(hidden_tensors, module)

    def _register_hooks(self, values: Sequence[Any]) -> None:
        """Registers a gradient hook on those of the values that are tensors with a gradient."""
        for value in values:
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(self._notice_backward)  # type: ignore[no-untyped-call]

    @torch_compat.outside_compiled_code
    def after_torch(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Removes the tensors that `before_torch` has added to the output."""
        if output is None or not torch.is_grad_enabled():  # nothing was added
            return output

        original_output, _ = output
        return original_output

    def _hidden_tensors(self, leaves: Sequence[Any]) -> list[Tensor]:
        """Returns the tensors inside objects of the output and those in attributes of modules.

        A tensor in an attribute of a module is returned only once, even if it stays there for
        several forward passes.

        Args:
            leaves: the values in the containers of the output.
        """
        tensors: list[Tensor] = []
        for leaf in leaves:
            _collect_tensors(leaf, tensors, search_objects=True)

        # Objects in the attributes of modules are not searched: they may lead anywhere.
        in_attributes: list[Tensor] = []
        for attributes in self._attributes:
            for name, value in attributes.items():
                if name not in MODULE_ATTRIBUTES:
                    _collect_tensors(value, in_attributes, search_objects=False)

        for tensor in in_attributes:
            if not self._was_shown_before(tensor):
                tensors.append(tensor)

        return tensors

    def _was_shown_before(self, tensor: Tensor) -> bool:
        """Returns False when this object asks for the first time about a tensor.

        The tensor remembers in an attribute who has asked: each unit has a `UnitOutputs`, and a
        tensor may be in attributes of modules of several units.
        """
        shown_by: set[int] = vars(tensor).setdefault(_SHOWN_BY, set())
        was_shown = id(self) in shown_by
        shown_by.add(id(self))
        return was_shown

    def _notice_backward(self, gradient: Tensor) -> None:
        """A gradient hook that only notices a backward pass, also one with `create_graph=True`."""
        if self.on_backward is not None:
            self.on_backward()

        # In a backward pass gradients are only enabled with `create_graph=True`.
        if torch.is_grad_enabled() and self.on_double_backward is not None:
            self.on_double_backward()


def _collect_tensors(
    value: Any, tensors: list[Tensor], *, search_objects: bool, depth: int = _MAX_DEPTH
) -> None:
    """Adds all tensors inside a value that were computed with gradients to the list `tensors`.

    Args:
        value: a tensor, a container, a dataclass, or anything else.
        tensors: the list to which tensors are added.
        search_objects: True to search the attributes of other objects, too.
        depth: how many levels of containers and objects are searched.
    """
    if isinstance(value, Tensor):
        if value.grad_fn is not None:
            tensors.append(value)
        return

    if depth == 0:
        return

    children: Sequence[Any] = ()
    if isinstance(value, Mapping):
        children = list(value.values())
    elif isinstance(value, list | tuple):
        children = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        children = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif search_objects and not isinstance(value, nn.Module | type):
        # (A module would lead to all of its tensors, and a class to what all its objects share.)
        # An object without a `__dict__`, such as a number, has nothing to search.
        children = list(getattr(value, "__dict__", {}).values())

    for child in children:
        _collect_tensors(child, tensors, search_objects=search_objects, depth=depth - 1)


def _without_view(leaf: Any) -> Any:
    """Replaces a view by a tensor that shares its memory but is no view; returns others unchanged.

    Torch registers gradient hooks on the tensors of an output. An in-place operation of the user on
    a view would drop them, of which torch warns.
    """
    if isinstance(leaf, Tensor) and leaf.requires_grad and torch_compat.is_view(leaf):
        return _Alias.apply(leaf)  # type: ignore[no-untyped-call]
    return leaf


class _Alias(torch.autograd.Function):
    """The identity function. Its result shares the argument's memory but is no view of it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]
