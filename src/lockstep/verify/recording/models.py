"""Keeps track of a script's models, and gives each tensor a name that is the same on every rank.

A *root* is a module that the script called or wrapped, and that is not part of another root.
Tensors are named by the class of their root and their name in it, such as `Net/layer.weight`; a
second root of the same class is `Net#2`. A module is *prepared* once it was passed to
`World.prepare`. A sharded parameter (of FSDP) has only a part of its values on this rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer

from lockstep.checkpoint.modules import plain_name_function, unwrap
from lockstep.strategies.base import parameters_of
from lockstep.torch_compat import is_sharded, pytree
from lockstep.verify.recording.library_code import is_of_torch_or_lockstep
from lockstep.verify.recording.tensor_values import storage_address, summarize
from lockstep.verify.tolerance import Array


class Models:
    """The root modules in the order in which they were first seen, and how each is wrapped."""

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
        """Values of the parameters after the last optimizer steps, by name."""
        self.ranks_of_incomplete_ddp_group: Sequence[int] = ()
        """Ranks in the last process group of a DDP wrapper that lacks some ranks; empty if every
        wrapper uses all ranks."""
        self.comm_hook_line = ""
        """Line that registered a communication hook with DDP; empty without one."""

    def add(self, module: nn.Module) -> None:
        """Adds a module that was called or wrapped as a root, if no root contains it.

        A wrapper, such as DDP, becomes the root itself, so that it is recognized when it is called.
        Its name is that of the module inside.
        """
        inner_module = unwrap(module)  # such as the module inside of DDP
        if id(inner_module) in self._module_ids or not has_tensors(inner_module):
            return

        # If there are roots of this class already, such as `Net` and `Net#2`, this one is `Net#3`.
        class_name = _class_name(inner_module)
        num_roots_of_class = 0
        for root_name, _ in self._roots:
            if root_name.split("#")[0] == class_name:
                num_roots_of_class += 1

        name = class_name
        if num_roots_of_class:
            name = f"{class_name}#{num_roots_of_class + 1}"

        self._roots.append((name, module))
        self._module_ids |= {id(submodule) for submodule in module.modules()}

    def add_ddp(self, wrapper: DistributedDataParallel) -> None:
        """Adds a module that was wrapped with DDP, and records the parameters that DDP averages."""
        self.add(wrapper)

        # DDP ignores parameters that are frozen when it is constructed.
        inner_module = wrapper.module
        averaged_ids = {id(p) for p in inner_module.parameters() if p.requires_grad}
        self.ddp_parameter_ids[id(inner_module)] = averaged_ids

        # A process group without some ranks may be a mistake.
        ranks = dist.get_process_group_ranks(wrapper.process_group)
        is_incomplete = len(ranks) < dist.get_world_size()
        if is_incomplete:
            self.ranks_of_incomplete_ddp_group = ranks

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields pairs of a name and a parameter. Shared parameters come only once.

        Parameters of the roots come first. Then come parameters that only an optimizer has, with
        names such as "/parameter 3 of optimizer 1".
        """
        yielded_ids = set()
        for name, parameter in self._named("named_parameters"):
            yielded_ids.add(id(parameter))
            yield name, parameter

        # A sharded parameter that no root has is left out, since this rank has only a part of its
        # values.
        for optimizer_number, optimizer in enumerate(self.stepped_optimizers, 1):
            for number, parameter in enumerate(parameters_of(optimizer), 1):
                if id(parameter) not in yielded_ids and not is_sharded(parameter):
                    yielded_ids.add(id(parameter))
                    yield f"/parameter {number} of optimizer {optimizer_number}", parameter

    def names_of(self, parameters: Iterable[Tensor]) -> list[str]:
        """Returns the names of parameters; an empty name for those that `parameters` leaves out."""
        name_of_id = {id(parameter): name for name, parameter in self.parameters()}
        return [name_of_id.get(id(parameter), "") for parameter in parameters]

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yields pairs of a name and a buffer."""
        return self._named("named_buffers")

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields pairs of a name and a module."""
        return self._named("named_modules")

    def _named(self, method: str) -> Iterator[tuple[str, Any]]:
        """Yields what a method such as `named_parameters` yields for all roots, each object once.

        The name of the root is put in front. Parameters and buffers that have no values yet (lazy
        ones, or those on the meta device) are left out.

        Args:
            method: name of a method of `nn.Module`.
        """
        yielded_ids: set[int] = set()
        for root_name, root in self._roots:
            # Removes the prefixes of wrappers: "module.layer.weight" becomes "layer.weight".
            remove_prefixes = plain_name_function(root)
            for name, value in getattr(root, method)():
                is_lazy = isinstance(value, UninitializedParameter | UninitializedBuffer)
                is_meta = getattr(value, "is_meta", False)
                if is_lazy or is_meta or id(value) in yielded_ids:
                    continue
                yielded_ids.add(id(value))
                yield f"{root_name}/{remove_prefixes(name)}", value

    def parameters_of_unstepped_optimizers(
        self,
    ) -> Iterator[tuple[tuple[int, int], nn.Parameter]]:
        """Yields parameters of optimizers that have not stepped yet, if no root contains them.

        Such parameters have no name. Each comes with a pair instead: the number of its optimizer,
        in the order of construction, and its index in that optimizer.
        """
        unstepped_numbers = []
        for number, optimizer in enumerate(self.built_optimizers):
            if optimizer not in self.stepped_optimizers:
                unstepped_numbers.append(number)

        if not unstepped_numbers:
            return

        named_ids = {id(parameter) for _, parameter in self.parameters()}
        for number in unstepped_numbers:
            for index, parameter in enumerate(parameters_of(self.built_optimizers[number])):
                has_name = id(parameter) in named_ids
                if not has_name and _has_all_values(parameter):
                    yield (number, index), parameter

    def plain_attributes(self) -> dict[str, Array]:
        """Returns three numbers for each tensor that a module has as a plain attribute, by name.

        Such tensors are neither parameters nor buffers, so nothing keeps them equal between ranks.
        The numbers are a weighted sum of the values, the largest absolute value, and the number of
        values. Modules of torch and Lockstep are skipped, and so are views of parameters, which
        keep nothing of their own.
        """
        storages_of_parameters = {storage_address(parameter) for _, parameter in self.parameters()}
        storages_of_parameters.discard(0)  # stands for no storage, such as that of an empty tensor
        arrays: dict[str, Array] = {}
        for module_name, module in self.modules():
            if is_of_torch_or_lockstep(type(module).__module__):
                continue

            for attribute, value in vars(module).items():
                if not isinstance(value, Tensor | list | tuple):
                    continue

                # The attribute itself, or the tensors in a list. Parameters in a list are left out:
                # their class is a subclass of Tensor.
                plain_tensors = [t for t in pytree.tree_leaves(value) if type(t) is Tensor]
                name = _attribute_name(module_name, attribute)
                for index, tensor in enumerate(plain_tensors):
                    if storage_address(tensor) in storages_of_parameters:
                        continue
                    name_of_tensor = f"{name}[{index}]" if len(plain_tensors) > 1 else name
                    weighted_sum, largest = summarize(tensor)
                    arrays[name_of_tensor] = np.array([weighted_sum, largest, tensor.numel()])

        return arrays

    def summaries_of_parameters(
        self, known_summaries: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """Returns the summary of each parameter, by name: two numbers that change with any value.

        Sharded parameters without a known summary are left out, since this rank has only a part of
        their values.

        Args:
            known_summaries: summaries by name, which are returned instead of new ones.
        """
        known = known_summaries or {}
        summaries = {}
        for name, parameter in self.parameters():
            if name in known:
                summaries[name] = known[name]
            elif not is_sharded(parameter):
                summaries[name] = summarize(parameter)

        return summaries

    def parameters_with_gradient_at(self, address: int) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters whose gradient has its values at an address, with their names.

        Args:
            address: the address; 0 if there is none, for which nothing is yielded.
        """
        if address == 0:
            return
        for name, parameter in self.parameters():
            if parameter.grad is not None and storage_address(parameter.grad) == address:
                yield name, parameter

    # How models are wrapped

    def is_inside_ddp(self, module: nn.Module) -> bool:
        """True if a module is the one that a DDP wrapper contains, without the wrapper."""
        return id(module) in self.ddp_parameter_ids  # the keys are the ids of such modules

    def is_wrapped(self, module: nn.Module) -> bool:
        """True if a module, or the module it wraps, is inside DDP or prepared by Lockstep."""
        return id(unwrap(module)) in self._wrapped_ids()

    def has_prepared(self, parameter_ids: Collection[int]) -> bool:
        """True if any of these parameters belongs to a model that Lockstep has prepared."""
        return not self._parameter_ids_within(self.prepared_ids).isdisjoint(parameter_ids)

    def parameters_unknown_to_ddp(self) -> list[str]:
        """Returns the names of trainable parameters inside DDP modules that DDP does not average.

        They were frozen or did not exist when DDP was constructed.
        """
        ids_inside_ddp = self._parameter_ids_within(self.ddp_parameter_ids.keys())
        averaged_ids = set().union(*self.ddp_parameter_ids.values())
        unknown_ids = ids_inside_ddp - averaged_ids
        return [name for name, p in self.parameters() if p.requires_grad and id(p) in unknown_ids]

    def unwrapped_parameters(self) -> list[str]:
        """Returns the trainable parameters that neither DDP nor Lockstep has wrapped, by name."""
        ids_of_wrapped_modules = self._wrapped_ids()
        ids_of_their_parameters = self._parameter_ids_within(ids_of_wrapped_modules)
        names = []
        for name, parameter in self.parameters():
            # FSDP, or whatever has sharded a parameter, also reduces its gradient.
            is_wrapped = id(parameter) in ids_of_their_parameters or is_sharded(parameter)
            if parameter.requires_grad and not is_wrapped:
                names.append(name)

        return names

    def _wrapped_ids(self) -> set[int]:
        """Returns the ids of the modules inside DDP and of those that Lockstep has prepared."""
        return self.ddp_parameter_ids.keys() | self.prepared_ids

    def _parameter_ids_within(self, module_ids: Collection[int]) -> set[int]:
        """Returns the ids of all parameters of roots that are, or wrap, one of these modules."""
        parameter_ids = set()
        for _, root in self._roots:
            if id(unwrap(root)) in module_ids:
                parameter_ids |= {id(parameter) for parameter in root.parameters()}
        return parameter_ids


def _class_name(module: nn.Module) -> str:
    """Returns the name of a module's class: `Net`, even if FSDP has changed it to `FSDPNet`."""
    # FSDP changes the class of a module to a subclass, so `Net` is among the base classes.
    names = [module_class.__name__ for module_class in type(module).__mro__]
    names_without_fsdp = [name for name in names if "FSDP" not in name]
    return names_without_fsdp[0]


def _attribute_name(module_name: str, attribute: str) -> str:
    """Returns "Net/layer.scale" for "Net/layer" and "scale"; "Net/scale" for the root "Net/"."""
    return f"{module_name}.{attribute}".replace("/.", "/")


def _has_all_values(parameter: nn.Parameter) -> bool:
    """True if this rank has all values of a parameter: it is not sharded, and has values at all."""
    is_lazy = isinstance(parameter, UninitializedParameter)
    return not is_lazy and not parameter.is_meta and not is_sharded(parameter)


def has_tensors(module: nn.Module) -> bool:
    """True if the module has parameters or buffers."""
    return next(chain(module.parameters(), module.buffers()), None) is not None


def has_parameters(module: nn.Module) -> bool:
    """True if the module has parameters."""
    return next(module.parameters(), None) is not None
