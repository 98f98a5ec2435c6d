"""The models of a script, with a name for each tensor that is the same on every rank.

A *root* is a module that the script wrapped or called and that is no part of another root. A tensor
is named by the class of its root and its name inside, as `Net/layer.weight`; a second root of the
same class is `Net#2`. To *prepare* a module is to pass it to Lockstep's `World.prepare`. A sharded
parameter, as FSDP makes them, has only a part of its values on this rank.
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
        """Makes a module that was wrapped or called a root, unless it is part of one already."""
        inner_module = unwrap(module)  # such as the module inside of DDP
        if id(inner_module) in self._module_ids or not has_tensors(inner_module):
            return

        name = _class_name(inner_module)
        # Names of the roots of this class that are known already: `Net`, `Net#2`, ...
        names_of_class = []
        for root_name, _ in self._roots:
            if root_name.split("#")[0] == name:
                names_of_class.append(root_name)

        if names_of_class:
            name = f"{name}#{len(names_of_class) + 1}"

        self._roots.append((name, module))
        self._module_ids |= {id(submodule) for submodule in module.modules()}

    def add_ddp(self, wrapper: DistributedDataParallel) -> None:
        """Adds a module that DDP was put around, with the parameters that DDP averages."""
        self.add(wrapper)
        # DDP leaves out parameters that are frozen when it is built.
        averaged = {id(p) for p in wrapper.module.parameters() if p.requires_grad}
        self.ddp_parameter_ids[id(wrapper.module)] = averaged
        ranks = dist.get_process_group_ranks(wrapper.process_group)

        # A group of all ranks is the usual case, and is not recorded.
        if len(ranks) < dist.get_world_size():
            self.ddp_group_ranks = ranks

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields each parameter with its name; a tied one once, under its first name.

        After those of the roots come parameters that only an optimizer has. They are named by their
        place in it: "/parameter 3 of optimizer 1".
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

        Names begin with that of the root. Parameters and buffers without values yet (lazy ones, or
        on the meta device) are left out.
        """
        yielded_ids: set[int] = set()
        for root_name, root in self._roots:
            plain_name = plain_names(root)  # a function that removes "module." of wrappers
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

        Without a root they have no name. Each comes with a pair instead: the number of its
        optimizer, in the order in which they were built, and its place in this optimizer.
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
                is_lazy = isinstance(parameter, UninitializedParameter)
                has_values = not is_lazy and not parameter.is_meta
                if has_values and id(parameter) not in known_ids and not is_sharded(parameter):
                    yield (number, place), parameter

    def plain_attributes(self) -> dict[str, Array]:
        """Returns three numbers for each tensor in a plain attribute of a user's module, by name.

        They are a weighted sum of the values, the largest absolute value, and the number of values.
        The tensors are neither parameters nor buffers, so nothing keeps them equal between ranks.
        """
        arrays: dict[str, Array] = {}
        for module_name, module in self.modules():
            if type(module).__module__.startswith(LIBRARY_PREFIXES):
                continue

            for attribute, value in vars(module).items():
                if not isinstance(value, Tensor | list | tuple):
                    continue

                # The attribute itself, or the tensors in the list. A parameter in a list is of a
                # subclass of Tensor.
                plain_tensors = [t for t in pytree.tree_leaves(value) if type(t) is Tensor]
                for place, tensor in enumerate(plain_tensors):
                    # "Net/layer.scale"; of the root itself, "Net/scale" instead of "Net/.scale"
                    name = f"{module_name}.{attribute}".replace("/.", "/")
                    if len(plain_tensors) > 1:
                        name = f"{name}[{place}]"
                    arrays[name] = np.array([*summarize(tensor), tensor.numel()])

        return arrays

    def whole_parameters(self) -> dict[str, Array]:
        """Returns a summary of each parameter that is not sharded."""
        return {name: summarize(p) for name, p in self.parameters() if not is_sharded(p)}

    def parameters_with_gradient_at(self, storage: int) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters whose gradient lies at this address.

        Args:
            storage: the address; 0 of a tensor without one, for which nothing is yielded.
        """
        if storage == 0:
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
        """Returns the trainable parameters inside of DDP modules that DDP does not average.

        They were frozen, or not there, when DDP was built.
        """
        inside = self._parameter_ids_within(self.ddp_parameter_ids.keys())
        averaged = set().union(*self.ddp_parameter_ids.values())
        unknown = inside - averaged
        return [name for name, p in self.parameters() if p.requires_grad and id(p) in unknown]

    def unwrapped_parameters(self) -> list[str]:
        """Returns the trainable parameters of models that are neither in DDP nor prepared."""
        wrapped = self._parameter_ids_within(self._wrapped_ids())
        names = []
        for name, parameter in self.parameters():
            # A sharded parameter is wrapped by FSDP or the like, which reduces its gradient.
            is_wrapped = id(parameter) in wrapped or is_sharded(parameter)
            if parameter.requires_grad and not is_wrapped:
                names.append(name)

        return names

    def _wrapped_ids(self) -> set[int]:
        """Returns the ids of the modules inside of DDP, and of those that Lockstep has prepared."""
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
    # From the class itself to its bases.
    names = [module_class.__name__ for module_class in type(module).__mro__]
    names_without_fsdp = [name for name in names if "FSDP" not in name]
    return names_without_fsdp[0]


def has_tensors(module: nn.Module) -> bool:
    """True if the module has parameters or buffers."""
    return next(chain(module.parameters(), module.buffers()), None) is not None


def has_parameters(module: nn.Module) -> bool:
    """True if the module has parameters."""
    return next(module.parameters(), None) is not None
