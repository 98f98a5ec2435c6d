"""Selects submodules of a model: the ones that a user chose, or the repeated blocks of the model.

A user chooses submodules by class, by a pattern of names, or by a function. *Blocks* are repeated
parts of a model, such as transformer blocks and residual blocks; they are found by the structure of
the model. A block is recomputed, sharded, or put on a stage of a pipeline as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from lockstep.errors import SettingError
from lockstep.torch_compat import without_compile
from lockstep.wording import describe_type

ModuleFilter = type[nn.Module] | tuple[type[nn.Module], ...] | str | Callable[[nn.Module], bool]

MAX_CANDIDATES = 10
"""The maximum number of classes that an error suggests."""


def select_modules(
    module: nn.Module, choice: ModuleFilter, setting: str
) -> list[tuple[str, nn.Module]]:
    """Returns the names and modules of the submodules that the user chose.

    If a chosen module is inside another one, only the outer one is returned.

    Args:
        module: the model, which is never chosen itself.
        choice: a class or tuple of classes, a pattern of names as in `named_modules()`
            (`"encoder.layers.*"`), or a function that returns True for the modules to select.
        setting: template for the setting in errors, in which `{}` stands for the choice:
            `"checkpoint_activations(..., {})"`.

    Raises:
        SettingError: nothing matches, or the choice is none of the above.
    """
    matches = _make_matcher(choice, setting)
    matching: dict[str, nn.Module] = {}
    for name, submodule in module.named_modules(remove_duplicate=False):
        if name and _has_forward(submodule) and matches(name, submodule):
            matching[name] = submodule

    selected: dict[int, tuple[str, nn.Module]] = {}
    for name, submodule in _outermost(matching):
        # A module that is registered several times is selected once, by its first name.
        if id(submodule) not in selected:
            selected[id(submodule)] = (name, submodule)

    if not selected:
        raise SettingError(
            setting.format(_describe(choice)),
            "no submodule matches",
            f"choose among: {candidates(module)}",
        )

    return list(selected.values())


def candidates(module: nn.Module) -> str:
    """Returns a text that lists the classes of submodules that a user may choose, by frequency.

    For example: "Block (12, such as 'layers.0'), Mlp (12, such as 'layers.0.mlp')". These are
    submodules that contain others. If there are none, the text lists the classes of the model's
    children: "Linear, ReLU".
    """
    names_of_class: dict[str, list[str]] = {}
    for name, submodule in module.named_modules():
        has_children = next(submodule.children(), None) is not None
        if name and has_children and _has_forward(submodule):
            class_name = type(submodule).__name__
            names_of_class.setdefault(class_name, []).append(name)

    by_frequency = sorted(
        names_of_class.items(), key=lambda class_and_names: len(class_and_names[1]), reverse=True
    )
    if by_frequency:
        descriptions: list[str] = []
        for class_name, names in by_frequency[:MAX_CANDIDATES]:
            descriptions.append(f"{class_name} ({len(names)}, such as {names[0]!r})")
        return ", ".join(descriptions)

    classes_of_children = dict.fromkeys(type(child).__name__ for child in module.children())
    return ", ".join(classes_of_children) or "none"


def _make_matcher(submodules: ModuleFilter, setting: str) -> Callable[[str, nn.Module], bool]:
    """Returns a function that decides, by name and module, whether a submodule is chosen.

    Args:
        submodules: the user's choice: a name pattern, a class, a tuple of classes, or a function.
        setting: template for the setting in errors, in which `{}` stands for the choice:
            `"checkpoint_activations(..., {})"`.

    Raises:
        SettingError: the choice is of no known kind.
    """
    # A name pattern.
    if isinstance(submodules, str):
        return lambda name, _: fnmatchcase(name, submodules)

    # A class, or a tuple of classes.
    classes: tuple[Any, ...] = submodules if isinstance(submodules, tuple) else (submodules,)
    are_module_classes = all(
        isinstance(item, type) and issubclass(item, nn.Module) for item in classes
    )
    if classes and are_module_classes:
        return lambda _, module: isinstance(module, classes)

    # A function. A module, or another class, can be called too, but does not choose anything.
    if callable(submodules) and not isinstance(submodules, type | tuple | nn.Module):
        return lambda _, module: submodules(module)

    raise SettingError(
        setting.format(repr(submodules)),
        f"{describe_type(submodules)} does not choose submodules",
        "pass a class of modules, a tuple of such, a name pattern, or a function of a module",
    )


def _has_forward(module: nn.Module) -> bool:
    """Returns False for containers such as `nn.ModuleList`, which cannot be called themselves."""
    return type(module).forward is not nn.Module.forward


def _describe(submodules: ModuleFilter) -> str:
    """Returns the user's choice as it is shown in errors."""
    if isinstance(submodules, tuple):
        return f"({', '.join(item.__name__ for item in submodules)})"
    return str(getattr(submodules, "__name__", repr(submodules)))


_FORWARDS_OF_CONTAINERS = (nn.Module.forward, nn.Sequential.forward)
"""The forwards of containers: of `nn.ModuleList` and `nn.ModuleDict`, which raises an error, and of
`nn.Sequential`."""


def repeated_blocks(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the repeated blocks of a model, e.g. the layers of a transformer.

    They are searched in two steps:

    1. Collect the possible blocks: submodules that have parameters, are more than a single layer of
       torch, and are no containers of several equal blocks.
    2. Of these, take the ones that repeat: there is another one of the same kind, e.g. of the same
       class. Of blocks within blocks, only the outermost are taken.

    Step 2 first looks at possible blocks in an `nn.Sequential`, `nn.ModuleList` or `nn.ModuleDict`.
    If none of these repeats, it looks at all, including attributes such as `self.down1` and
    `self.down2`. If `torch.compile` has wrapped a block, the inner module is found.

    Returns:
        `(name, block)` for each block, in the order of `named_modules()`. The list is empty if
        nothing repeats.
    """
    # Step 1.
    modules = dict(module.named_modules())
    possible_blocks: dict[str, nn.Module] = {}
    possible_blocks_in_containers: dict[str, nn.Module] = {}
    for name, submodule in modules.items():
        is_whole_model = name == ""
        if is_whole_model or not _may_be_block(submodule):
            continue
        possible_blocks[name] = submodule
        parent_name = name.rpartition(".")[0]  # "layers" for "layers.3"
        if _is_container(modules[parent_name]):
            possible_blocks_in_containers[name] = submodule

    # Step 2.
    return _repeated(possible_blocks_in_containers) or _repeated(possible_blocks)


def _repeated(possible_blocks: dict[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    """Returns the outermost of those modules that are not the only one of their kind.

    Args:
        possible_blocks: modules by name, in the order of `named_modules()`.
    """
    num_of_kind = Counter(_kind(block) for block in possible_blocks.values())
    repeated: dict[str, nn.Module] = {}
    for name, block in possible_blocks.items():
        if num_of_kind[_kind(block)] > 1:
            repeated[name] = block
    return list(_outermost(repeated))


def _may_be_block(module: nn.Module) -> bool:
    """Returns True for a possible block: a module that counts as a block if it repeats.

    It must have parameters and a forward, and be neither a single layer of torch, nor a container
    of several equal blocks.
    """
    if not _has_forward(module) or next(module.parameters(), None) is None:
        return False

    # torch puts a `ParametrizationList` into a layer whose weight is computed from other tensors,
    # e.g. by `spectral_norm`. The list is a part of the layer.
    if isinstance(module, ParametrizationList):
        return False

    is_single_layer = next(module.children(), None) is None
    if is_single_layer:
        return not type(module).__module__.startswith("torch.")
    return not _holds_equal_blocks(module)


def _holds_equal_blocks(module: nn.Module) -> bool:
    """Returns True for a container that has several blocks of the same kind.

    A residual network, for example, has a few `nn.Sequential` of several residual blocks each. The
    blocks are the repeated parts, not the containers.
    """
    if not _is_container(module):
        return False

    # How many of its children are possible blocks, by kind. If `torch.compile` has wrapped a child,
    # the inner module is looked at.
    num_blocks_of_kind: Counter[Any] = Counter()
    for child in module.children():
        inner_child = without_compile(child)
        if _may_be_block(inner_child):
            num_blocks_of_kind[_kind(inner_child)] += 1
    return max(num_blocks_of_kind.values(), default=0) > 1


def _is_container(module: nn.Module) -> bool:
    """Returns True if a module only contains other modules."""
    return type(module).forward in _FORWARDS_OF_CONTAINERS


def _kind(module: nn.Module) -> Any:
    """Returns a key that is equal for modules of the same kind, compiled or not.

    The key is the class; for a container it is the class and the kinds of its children.
    """
    module = without_compile(module)
    if not _is_container(module):
        return type(module)
    return (type(module), *(_kind(child) for child in module.children()))


def _outermost(modules: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yields the names and modules of those modules that are inside no other one.

    Args:
        modules: modules by name, in the order of `named_modules()`, in which a module is followed
            by the modules inside it.
    """
    prefix: str | None = None  # the names of modules inside the last yielded one begin with it
    for name, module in modules.items():
        is_inside = prefix is not None and name.startswith(prefix)
        if not is_inside:
            prefix = f"{name}."
            yield name, module
