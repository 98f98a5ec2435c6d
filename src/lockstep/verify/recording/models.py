"""The models of a script, with a name for each tensor that is the same on every rank.

A *root* is a module that the script wrapped or called and that is no part of another root. A tensor
is named by the class of its root and its name inside, as `Net/layer.weight`; a second root of the
same class is `Net#2`. Nothing here knows of updates or of other ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer

from lockstep.checkpoint.modules import plain_names, unwrap
from lockstep.distributed.torch_compat import is_sharded, pytree
from lockstep.strategies.base import parameters_of
from lockstep.verify.recording.tensor_values import storage_of, summarize
from lockstep.verify.tolerance import Array

LIBRARY_PREFIXES = ("torch.", "lockstep.")
"""Plain attributes of modules from these packages are not recorded."""


class Models:
    """The root modules in the order in which they were met, and how each is wrapped."""

    def __init__(self) -> None:
        self._roots: list[tuple[str, nn.Module]] = []
        self._module_ids: set[int] = set()  # of all modules inside of the roots
        self.ddp_parameter_ids: dict[int, set[int]] = {}
        """Ids of the parameters that DDP averages, by the id of the module that it wraps."""
        self.prepared_ids: set[int] = set()
        """Ids of the modules that `World.prepare` has wrapped."""
        self.built_optimizers: list[Optimizer] = []
        self.stepped_optimizers: list[Optimizer] = []
        """Their parameters are recorded even if no module has them."""
        self.after_last_step: dict[str, Array] = {}
        """The parameters as the last steps left them."""
        self.ddp_group_ranks: Sequence[int] = ()
        """The ranks of DDP's process group; empty if these are all ranks."""
        self.comm_hook_line = ""
        """The line of the communication hook that the script gave DDP; empty without one."""

    def add(self, module: nn.Module) -> None:
        """Adds a module that was wrapped or called, unless it is part of a known root."""
        inner = unwrap(module)
        if id(inner) in self._module_ids or not has_tensors(inner):
            return
        name = _class_name(inner)
        # Roots of this class that are known already: `Net`, `Net#2`, ...
        roots_of_class = [root for root, _ in self._roots if root.split("#")[0] == name]
        if roots_of_class:
            name = f"{name}#{len(roots_of_class) + 1}"
        self._roots.append((name, module))
        self._module_ids |= {id(part) for part in module.modules()}

    def add_ddp(self, wrapper: DistributedDataParallel) -> None:
        """Adds a module that DDP has been put around."""
        self.add(wrapper)
        averaged = {id(p) for p in wrapper.module.parameters() if p.requires_grad}
        self.ddp_parameter_ids[id(wrapper.module)] = averaged
        ranks = dist.get_process_group_ranks(wrapper.process_group)
        if len(ranks) < dist.get_world_size():
            self.ddp_group_ranks = ranks

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields each parameter with its name; a tied one once, under its first name.

        Parameters that only an optimizer has follow, named by their place in it.
        """
        yielded_ids = set()
        for name, parameter in self._named("named_parameters"):
            yielded_ids.add(id(parameter))
            yield name, parameter
        for optimizer_number, optimizer in enumerate(self.stepped_optimizers, 1):
            for number, parameter in enumerate(parameters_of(optimizer), 1):
                if id(parameter) not in yielded_ids and not is_sharded(parameter):
                    yielded_ids.add(id(parameter))
                    yield f"/parameter {number} of optimizer {optimizer_number}", parameter

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yields each buffer with its name."""
        return self._named("named_buffers")

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields each module with its name."""
        return self._named("named_modules")

    def _named(self, method: str) -> Iterator[tuple[str, Any]]:
        """Yields what a method such as `named_parameters` yields for each root, each object once.

        Parameters and buffers without values yet (lazy ones, or on the meta device) are left out.
        """
        yielded_ids: set[int] = set()
        for root_name, root in self._roots:
            plain_name = plain_names(root)
            for name, value in getattr(root, method)():
                is_lazy = isinstance(value, UninitializedParameter | UninitializedBuffer)
                is_meta = getattr(value, "is_meta", False)
                if is_lazy or is_meta or id(value) in yielded_ids:
                    continue
                yielded_ids.add(id(value))
                yield f"{root_name}/{plain_name(name)}", value

    def parameters_of_unstepped_optimizers(
        self,
    ) -> Iterator[tuple[tuple[int, int], nn.Parameter]]:
        """Yields parameters that no root has, of optimizers that were built and have not stepped.

        Each comes with a pair: the number of its optimizer, in the order in which they were built,
        and the place of the parameter in this optimizer.
        """
        unstepped_numbers = []
        for number, optimizer in enumerate(self.built_optimizers):
            if optimizer not in self.stepped_optimizers:
                unstepped_numbers.append(number)
        if not unstepped_numbers:
            return
        known_ids = {id(parameter) for _, parameter in self.parameters()}
        for number in unstepped_numbers:
            for place, parameter in enumerate(parameters_of(self.built_optimizers[number])):
                has_values = not (
                    isinstance(parameter, UninitializedParameter) or parameter.is_meta
                )
                if has_values and id(parameter) not in known_ids and not is_sharded(parameter):
                    yield (number, place), parameter

    def plain_attributes(self) -> dict[str, Array]:
        """Returns a summary and the size of each tensor in a plain attribute of a user's module.

        These are neither parameters nor buffers, so nothing keeps them equal between ranks.
        """
        arrays: dict[str, Array] = {}
        for module_name, module in self.modules():
            if type(module).__module__.startswith(LIBRARY_PREFIXES):
                continue
            for attribute, value in vars(module).items():
                if not isinstance(value, Tensor | list | tuple):
                    continue
                leaves = [t for t in pytree.tree_leaves(value) if type(t) is Tensor]
                for place, tensor in enumerate(leaves):
                    # "Net/layer.scale"; of the root itself, "Net/scale" instead of "Net/.scale"
                    name = f"{module_name}.{attribute}".replace("/.", "/")
                    if len(leaves) > 1:
                        name = f"{name}[{place}]"
                    arrays[name] = np.array([*summarize(tensor), tensor.numel()])
        return arrays

    def whole_parameters(self) -> dict[str, Array]:
        """Returns a summary of each parameter that is not sharded."""
        return {name: summarize(p) for name, p in self.parameters() if not is_sharded(p)}

    def parameters_with_gradient_at(self, storage: int) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters whose gradient lies at this address; none if it is 0."""
        if not storage:
            return
        for name, parameter in self.parameters():
            if parameter.grad is not None and storage_of(parameter.grad) == storage:
                yield name, parameter

    # How models are wrapped

    def is_wrapped(self, module: nn.Module) -> bool:
        """True if the module, or what it wraps, is inside DDP or was prepared by Lockstep."""
        return id(unwrap(module)) in self._wrapped_ids()

    def has_prepared(self, parameter_ids: Collection[int]) -> bool:
        """True if any of these parameters is part of a model that Lockstep has prepared."""
        return not self._parameter_ids_within(self.prepared_ids).isdisjoint(parameter_ids)

    def parameters_unknown_to_ddp(self) -> list[str]:
        """Returns the trainable parameters inside of DDP modules that DDP does not average."""
        inside = self._parameter_ids_within(self.ddp_parameter_ids.keys())
        averaged = set().union(*self.ddp_parameter_ids.values())
        unknown = inside - averaged
        return [name for name, p in self.parameters() if p.requires_grad and id(p) in unknown]

    def unwrapped_parameters(self) -> list[str]:
        """Returns the trainable parameters of models that are neither in DDP nor prepared."""
        wrapped = self._parameter_ids_within(self._wrapped_ids())
        names = []
        for name, parameter in self.parameters():
            is_wrapped = id(parameter) in wrapped or is_sharded(parameter)
            if parameter.requires_grad and not is_wrapped:
                names.append(name)
        return names

    def _wrapped_ids(self) -> set[int]:
        """Returns the ids of the modules inside of DDP or prepared by Lockstep."""
        return self.ddp_parameter_ids.keys() | self.prepared_ids

    def _parameter_ids_within(self, module_ids: Collection[int]) -> set[int]:
        """Returns the ids of the parameters of roots that are, or wrap, one of these modules."""
        parameter_ids = set()
        for _, root in self._roots:
            if id(unwrap(root)) in module_ids:
                parameter_ids |= {id(parameter) for parameter in root.parameters()}
        return parameter_ids


def _class_name(module: nn.Module) -> str:
    """Returns the name of the module's class.

    FSDP changes the class of a `Net` to a subclass named `FSDPNet`: the name is still `Net`.
    """
    names = [module_class.__name__ for module_class in type(module).__mro__]
    names_without_fsdp = [name for name in names if "FSDP" not in name]
    return names_without_fsdp[0]


def has_tensors(module: nn.Module) -> bool:
    """True if the module has parameters or buffers."""
    return next(chain(module.parameters(), module.buffers()), None) is not None


def has_parameters(module: nn.Module) -> bool:
    """True if the module has parameters."""
    return next(module.parameters(), None) is not None
