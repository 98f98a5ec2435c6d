"""The models of a script that knows nothing of being watched, and the names of their tensors."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.checkpoint.modules import plain_names, unwrap


class Models:
    """Modules that are no part of another, in the order in which they were met."""

    def __init__(self) -> None:
        self._roots: list[tuple[str, nn.Module]] = []
        self._known: set[int] = set()
        """Ids of all modules inside of the roots."""
        self._names: dict[int, str] = {}
        """Of modules that were asked for, and of those beside them, by id."""
        self.averaged: dict[int, set[int]] = {}
        """The parameters that DDP averages, by the id of the module that it wraps."""

    def add(self, module: nn.Module) -> None:
        """A module that was wrapped or called; what is inside of a known one is known."""
        inner = unwrap(module)
        if id(inner) in self._known:
            return
        if not any(True for _ in inner.parameters()) and not any(True for _ in inner.buffers()):
            return
        # FSDP gives a module a class of its own, made of its own one.
        kind = next(c.__name__ for c in type(inner).__mro__ if "FSDP" not in c.__name__)
        same = sum(name.split("#")[0] == kind for name, _ in self._roots)
        self._roots.append((f"{kind}#{same + 1}" if same else kind, module))
        self._known |= {id(part) for part in module.modules()}

    def wrapped(self, wrapper: DistributedDataParallel) -> None:
        """DDP has been put around a module."""
        self.add(wrapper)
        own = {id(p) for p in wrapper.module.parameters() if p.requires_grad}
        self.averaged[id(wrapper.module)] = own

    def name_of(self, module: nn.Module) -> str:
        """Of what is inside of one of them; else that of its class."""
        if id(module) not in self._names:
            for _, root in self._roots:
                plain = plain_names(root)
                self._names |= {id(part): plain(name) for name, part in root.named_modules()}
            self._names.setdefault(id(module), "")
        return self._names[id(module)] or type(module).__name__

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each with a name that is the same on every rank; a tied one under its first name."""
        for root, name, tensor in self._named("named_parameters"):
            if isinstance(tensor, nn.Parameter):
                yield f"{root}/{name}", tensor

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Each with a name that is the same on every rank."""
        for root, name, tensor in self._named("named_buffers"):
            yield f"{root}/{name}", tensor

    def not_averaged(self) -> list[str]:
        """Parameters to train, inside of DDP, that it does not know."""
        if not self.averaged:
            return []
        known = set().union(*self.averaged.values())
        found = []
        for root, module in self._roots:
            inner = unwrap(module)
            if id(inner) in self.averaged:
                found += [
                    f"{root}/{name}"
                    for name, parameter in inner.named_parameters()
                    if parameter.requires_grad and id(parameter) not in known
                ]
        return found

    def _named(self, what: str) -> Iterator[tuple[str, str, Tensor]]:
        seen: set[int] = set()
        for root, module in self._roots:
            plain = plain_names(module)
            for name, tensor in getattr(module, what)():
                if tensor is not None and tensor.device.type != "meta" and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield root, plain(name), tensor
