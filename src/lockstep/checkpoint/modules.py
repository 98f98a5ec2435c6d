"""The state of a module under the names of the bare module, whatever it is wrapped in.

DDP, DataParallel and `torch.compile` put a module into a *wrapper*: a module whose one child is the
wrapped one, so that the names of all parameters get a prefix (`module.`, `_orig_mod.`). A *plain*
name is one without the prefixes of wrappers, wherever in the module they are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lockstep.checkpoint.sharding import reshard
from lockstep.distributed.torch_compat import (
    COMPILED_CHILD_NAME,
    set_state_dict_metadata,
    state_dict_metadata,
)
from lockstep.optim.deferred_init import shapes_are_enough


def unwrap(module: nn.Module) -> nn.Module:
    """Returns the module inside of DDP, DataParallel and `torch.compile`, however many of them."""
    child_name = _wrapped_child(module)
    while child_name is not None:
        module = module.get_submodule(child_name)
        child_name = _wrapped_child(module)
    return module


def plain_state_dict(module: nn.Module) -> OrderedDict[str, Any]:
    """Returns `module.state_dict()` under plain names."""
    return _with_plain_names(module, module.state_dict())


def plain_shapes(module: nn.Module) -> OrderedDict[str, Any]:
    """Returns what `plain_state_dict` returns, whose tensors may not have their values yet.

    A model that was built in `lockstep.deferred_init` gets values when they are needed.
    """
    with shapes_are_enough():
        return plain_state_dict(module)


def _with_plain_names(module: nn.Module, state: Any) -> OrderedDict[str, Any]:
    """Returns the state of a module under plain names."""
    to_plain_name = plain_names(module)
    plain_state: OrderedDict[str, Any] = OrderedDict()
    for name, value in state.items():
        plain_state[to_plain_name(name)] = value
    # torch keeps the versions of the modules in an attribute of the state, by their paths. These
    # get plain names too.
    plain_versions: OrderedDict[str, Any] = OrderedDict()
    for path, version in (state_dict_metadata(state) or {}).items():
        plain_versions[to_plain_name(path)] = version
    set_state_dict_metadata(plain_state, plain_versions)
    return plain_state


class PlainState:
    """The state of one module under plain names, asked for in every step.

    To find the plain names takes longer than all the rest, so they are kept until the module has
    others.

    Args:
        module: whose state it is.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._names: list[str] = []
        self._plain: OrderedDict[str, Any] = OrderedDict()
        """The state when the names were last found."""

    def take(self) -> OrderedDict[str, Any]:
        """Returns the state; its tensors are those of the module, parameters included."""
        state = self._module.state_dict(keep_vars=True)
        names = list(state)
        if names != self._names:
            self._plain = plain_state_dict(self._module)
            self._names = names
        taken = OrderedDict(zip(self._plain, state.values(), strict=True))
        set_state_dict_metadata(taken, state_dict_metadata(self._plain))
        return taken


def plain_names(module: nn.Module) -> Callable[[str], str]:
    """Returns a function that turns names of a module's parameters and buffers into plain names."""
    child_of_wrapper = _find_wrappers(module)
    return lambda name: _remove_wrappers(name, child_of_wrapper)


def load_plain(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Loads a state with plain names, such as `plain_state_dict` returns, into a module.

    Args:
        module: keeps its tensors; the values are copied. A sharded module takes its own shards of
            the values, which may be stored in shards themselves.
        state: values by plain names.
        strict: as in `nn.Module.load_state_dict`.
    """
    # The module's own names, with the parts that its wrappers add, are what torch asks for.
    to_plain_name = plain_names(module)
    named_state: OrderedDict[str, Any] = OrderedDict()
    with shapes_are_enough():
        own_state = module.state_dict()
    for name, tensor in own_state.items():
        plain_name = to_plain_name(name)
        if plain_name in state:
            named_state[name] = reshard(state[plain_name], tensor)
    # The versions of the modules, by which torch converts states of older versions.
    versions = state_dict_metadata(state)
    if versions is not None:
        named_versions: OrderedDict[str, Any] = OrderedDict()
        for path, _ in module.named_modules(remove_duplicate=False):
            plain_path = to_plain_name(path)
            if plain_path in versions:
                named_versions[path] = versions[plain_path]
        set_state_dict_metadata(named_state, named_versions)
    module.load_state_dict(named_state, strict=strict)


def _wrapped_child(module: nn.Module) -> str | None:
    """Returns the name of a wrapper's child; None if the module is no wrapper."""
    # getattr would not do: a compiled module passes it on to the module inside.
    children = dict(module.named_children())
    if COMPILED_CHILD_NAME in children:
        return COMPILED_CHILD_NAME
    if isinstance(module, DistributedDataParallel | DataParallel):
        return "module"
    if getattr(type(module), "wraps_module", False):  # a wrapper of Lockstep says so itself
        return "module"
    return None


def _find_wrappers(module: nn.Module) -> dict[str, str]:
    """Returns the paths of all wrappers in a module, each with the name of its child."""
    child_of_wrapper = {}
    for path, submodule in module.named_modules(remove_duplicate=False):
        child_name = _wrapped_child(submodule)
        if child_name is not None:
            child_of_wrapper[path] = child_name
    return child_of_wrapper


def _remove_wrappers(name: str, child_of_wrapper: Mapping[str, str]) -> str:
    """Returns a name, or the path of a submodule, without the parts that wrappers have added.

    If the module itself is a wrapper (path "") with the child "_orig_mod", the name
    "_orig_mod.block.0.weight" becomes "block.0.weight".

    Args:
        name: such as "_orig_mod.block.0.weight"; "" for the module itself.
        child_of_wrapper: the name of each wrapper's child, by the wrapper's path.
    """
    if not name:
        return ""
    plain_parts = []
    path = ""  # of the submodule that has the next part as a child
    for part in name.split("."):
        is_child_of_wrapper = child_of_wrapper.get(path) == part
        if not is_child_of_wrapper:
            plain_parts.append(part)
        path = f"{path}.{part}" if path else part
    return ".".join(plain_parts)
