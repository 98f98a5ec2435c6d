"""Gets and loads the state of a module under the names of the bare module.

DDP, DataParallel and `torch.compile` put a module into a *wrapper*: a module whose only child is
the original one, so that the names of all parameters get a prefix (`module.`, `_orig_mod.`). A
*plain* name is a name without the prefixes of wrappers, wherever in the module these are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lockstep.checkpoint.sharding import reshard
from lockstep.optim.deferred_init import shapes_are_enough
from lockstep.torch_compat import (
    COMPILED_CHILD_NAME,
    set_state_dict_metadata,
    state_dict_metadata,
)


def unwrap(module: nn.Module) -> nn.Module:
    """Returns the module inside DDP, DataParallel and `torch.compile`, even if they are nested."""
    child_name = _wrapped_child(module)
    while child_name is not None:
        module = module.get_submodule(child_name)
        child_name = _wrapped_child(module)
    return module


def plain_state_dict(module: nn.Module) -> OrderedDict[str, Any]:
    """Returns `module.state_dict()` under plain names."""
    return _with_plain_names(module, module.state_dict())


def plain_shapes(module: nn.Module) -> OrderedDict[str, Any]:
    """Returns the same as `plain_state_dict`, but the tensors may not have their values yet.

    A model that was built in `lockstep.deferred_init` is initialised only when values are needed.
    This function does not need them.
    """
    with shapes_are_enough():
        return plain_state_dict(module)


def _with_plain_names(module: nn.Module, state: Any) -> OrderedDict[str, Any]:
    """Returns the state of a module under plain names.

    Args:
        module: the module.
        state: the result of its `state_dict()`.
    """
    to_plain_name = plain_name_function(module)
    plain_state: OrderedDict[str, Any] = OrderedDict()
    for name, value in state.items():
        plain_state[to_plain_name(name)] = value

    # torch has attached to the state the versions of the submodules by their paths: {"module":
    # {"version": 1}, "module.bn": {"version": 2}}. The paths are changed in the same way.
    plain_versions: OrderedDict[str, Any] = OrderedDict()
    for path, version in (state_dict_metadata(state) or {}).items():
        plain_versions[to_plain_name(path)] = version
    set_state_dict_metadata(plain_state, plain_versions)
    return plain_state


class PlainState:
    """Returns the state of a module under plain names, fast enough to be called in every step.

    Finding the plain names takes longer than everything else. So they are kept as long as the names
    of the module do not change.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._names: list[str] = []
        """The names in the state, in the module as it is wrapped."""
        self._plain_names: list[str] = []
        """The names in the bare module, in the same order."""
        self._plain_metadata: Any = None
        """The metadata of the state with the plain names."""

    def take(self) -> OrderedDict[str, Any]:
        """Returns the present state. Its tensors are those of the module, including parameters."""
        state = self._module.state_dict(keep_vars=True)
        names = list(state)
        if names != self._names:
            self._update_plain_names(names)

        # The plain names are in the same order as the values.
        plain_state = OrderedDict(zip(self._plain_names, state.values(), strict=True))
        set_state_dict_metadata(plain_state, self._plain_metadata)
        return plain_state

    def _update_plain_names(self, names: list[str]) -> None:
        """Finds the plain names again, and the metadata of the state with these names.

        Args:
            names: the names in the state of the module as it is wrapped.
        """
        plain_state = plain_state_dict(self._module)
        self._plain_names = list(plain_state)
        self._plain_metadata = state_dict_metadata(plain_state)
        self._names = names


def plain_name_function(module: nn.Module) -> Callable[[str], str]:
    """Returns a function that converts names in a module's state to plain names."""
    child_of_wrapper = _find_wrappers(module)
    return lambda name: _remove_wrappers(name, child_of_wrapper)


def plain_parameter_names(module: nn.Module) -> dict[Tensor, str]:
    """Returns the plain name of each parameter of a module.

    A tied parameter has several names, of which the first in the alphabet is taken: it does not
    depend on the order in which the module defines its layers.
    """
    to_plain_name = plain_name_function(module)
    names_of_parameter: dict[Tensor, list[str]] = {}
    with shapes_are_enough():  # a model of `deferred_init` is not initialised for this
        for own_name, parameter in module.named_parameters(remove_duplicate=False):
            names_of_parameter.setdefault(parameter, []).append(to_plain_name(own_name))
    return {parameter: min(names) for parameter, names in names_of_parameter.items()}


def load_plain(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Loads a state with plain names, for example from `plain_state_dict`, into a module.

    Values whose names the module does not have are ignored.

    Args:
        module: the module. Its tensors are overwritten. A sharded module takes its own shards of
            the values, which may be stored in shards themselves.
        state: the values by plain names.
        strict: whether a name of the module that `state` lacks is an error.
    """
    to_plain_name = plain_name_function(module)

    # Only the names and shapes are needed, so a model of `deferred_init` computes no values here.
    with shapes_are_enough():
        own_state = module.state_dict()

    # torch expects the module's own names, with the prefixes of its wrappers.
    own_state_to_load: OrderedDict[str, Any] = OrderedDict()
    for name, tensor in own_state.items():
        plain_name = to_plain_name(name)
        if plain_name in state:
            own_state_to_load[name] = reshard(state[plain_name], tensor)

    # With the versions of the submodules, torch converts states of older versions.
    versions = state_dict_metadata(state)
    if versions is not None:
        own_versions = _versions_under_own_names(module, versions)
        set_state_dict_metadata(own_state_to_load, own_versions)

    module.load_state_dict(own_state_to_load, strict=strict)


def _versions_under_own_names(
    module: nn.Module, versions: Mapping[str, Any]
) -> OrderedDict[str, Any]:
    """Returns the versions of a module's submodules by their paths, with the wrappers' prefixes.

    A version says in which form a submodule's state is; `state_dict()` attaches it to the result.
    Example for a DDP module: `{"bn": {"version": 2}}` becomes `{"module.bn": {"version": 2}}`.

    Args:
        module: the module.
        versions: the versions by the plain paths of the submodules.
    """
    to_plain_name = plain_name_function(module)
    own_versions: OrderedDict[str, Any] = OrderedDict()
    for path, _ in module.named_modules(remove_duplicate=False):
        plain_path = to_plain_name(path)
        if plain_path in versions:
            own_versions[path] = versions[plain_path]
    return own_versions


def _wrapped_child(module: nn.Module) -> str | None:
    """Returns the name of the child of a wrapper, or None if the module is no wrapper."""
    # `hasattr(module, "_orig_mod")` would not do: a wrapper may pass it on to the module inside.
    children = dict(module.named_children())
    if COMPILED_CHILD_NAME in children:
        return COMPILED_CHILD_NAME
    if isinstance(module, DistributedDataParallel | DataParallel):
        return "module"
    if getattr(type(module), "wraps_module", False):  # a wrapper of Lockstep
        return "module"
    return None


def _find_wrappers(module: nn.Module) -> dict[str, str]:
    """Finds all wrappers in a module. Returns the name of the wrapped child by the wrapper's path.

    For a compiled DDP model: `{"": "_orig_mod", "_orig_mod": "module"}`.
    """
    child_of_wrapper = {}
    for path, submodule in module.named_modules(remove_duplicate=False):
        child_name = _wrapped_child(submodule)
        if child_name is not None:
            child_of_wrapper[path] = child_name
    return child_of_wrapper


def _remove_wrappers(name: str, child_of_wrapper: Mapping[str, str]) -> str:
    """Removes from a name, or from the path of a submodule, the parts that wrappers have added.

    If the module itself is a wrapper (path "") with the child "_orig_mod", the name
    "_orig_mod.block.0.weight" becomes "block.0.weight".

    Args:
        name: the name or path; "" is the module itself.
        child_of_wrapper: the name of each wrapper's child, by the wrapper's path.
    """
    if not name:
        return ""

    plain_parts = []
    parent_path = ""
    for part in name.split("."):
        is_child_of_wrapper = child_of_wrapper.get(parent_path) == part
        if not is_child_of_wrapper:
            plain_parts.append(part)
        parent_path = f"{parent_path}.{part}" if parent_path else part
    return ".".join(plain_parts)
