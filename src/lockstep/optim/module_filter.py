"""Which submodules a user has chosen: by class, by a pattern of names, or by a function.

And the repeated blocks of a model: transformer blocks, residual blocks, found by structure alone.

They are what is worth treating as one: to recompute, to shard, to put on a stage of a pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from lockstep.distributed.torch_compat import without_compile
from lockstep.errors import SettingError
from lockstep.wording import group_by_key

ModuleFilter = type[nn.Module] | tuple[type[nn.Module], ...] | str | Callable[[nn.Module], bool]

MAX_CANDIDATES = 10


def select_modules(
    module: nn.Module, choice: ModuleFilter, setting: str
) -> list[tuple[str, nn.Module]]:
    """The submodules that match, with their names; of nested matches the outermost.

    Args:
        module: the model; it is never chosen itself.
        choice: a class or tuple of classes, a pattern of names as in `named_modules()`
            (`"encoder.layers.*"`), or a function that says yes or no to each module.
        setting: what the user has written, with `{}` for the choice.

    Raises:
        SettingError: nothing matches, or the choice is none of the above.
    """
    matches = _matcher(choice, setting)
    named = module.named_modules(remove_duplicate=False)
    chosen = {name: m for name, m in named if name and _runs(m) and matches(name, m)}
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, m in _outermost(chosen):
        found.setdefault(id(m), (name, m))  # a module that stands in two places is one
    if not found:
        raise SettingError(
            setting.format(_in_words(choice)),
            "no submodule matches",
            f"choose among: {candidates(module)}",
        )
    return list(found.values())


def candidates(module: nn.Module) -> str:
    """Classes of submodules that hold others, the most frequent first, with one name of each."""
    parts = module.named_modules()
    holding = ((name, m) for name, m in parts if name and next(m.children(), None) and _runs(m))
    names = group_by_key((type(m).__name__, name) for name, m in holding)
    ranked = sorted(names.items(), key=lambda item: -len(item[1]))[:MAX_CANDIDATES]
    listed = [f"{kind} ({len(of_kind)}, such as {of_kind[0]!r})" for kind, of_kind in ranked]
    if listed:
        return ", ".join(listed)
    return ", ".join(dict.fromkeys(type(m).__name__ for m in module.children())) or "none"


def _matcher(submodules: ModuleFilter, setting: str) -> Callable[[str, nn.Module], bool]:
    if isinstance(submodules, str):
        return lambda name, _: fnmatchcase(name, submodules)
    kinds: tuple[Any, ...] = submodules if isinstance(submodules, tuple) else (submodules,)
    if kinds and all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds):
        return lambda _, module: isinstance(module, kinds)
    if isinstance(submodules, type | tuple | nn.Module) or not callable(submodules):
        raise SettingError(
            setting.format(repr(submodules)),
            f"a {type(submodules).__name__} does not choose submodules",
            "pass a class of modules, a tuple of such, a name pattern, or a function of a module",
        )
    return lambda _, module: submodules(module)


def _runs(module: nn.Module) -> bool:
    """A ModuleList has no forward: its parts run, it does not."""
    return type(module).forward is not nn.Module.forward


def _in_words(submodules: ModuleFilter) -> str:
    if isinstance(submodules, tuple):
        return f"({', '.join(kind.__name__ for kind in submodules)})"
    return str(getattr(submodules, "__name__", repr(submodules)))


_HOLDS = (nn.Module.forward, nn.Sequential.forward)
"""The forwards of modules that only hold others; ModuleList and ModuleDict have none."""


def repeated_blocks(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks that a model repeats, under their names, in the order of `named_modules()`.

    A block has parameters, stands in an `nn.Sequential`, `nn.ModuleList` or `nn.ModuleDict`, is
    more than one of torch's single layers, and is not the only one of its kind. The kind is the
    class; of an `nn.Sequential` also what is in it. Of blocks inside blocks the outermost counts,
    but an `nn.Sequential` that holds several blocks of a kind (a stage) is none itself. Where
    containers hold no blocks, modules that stand in attributes (`self.down1`, `self.down2`) are
    looked at in the same way. Of what `torch.compile(block)` gave, the block inside is found.

    Returns:
        `(name, block)` for each, none inside another; nothing where nothing repeats.
    """
    modules = dict(module.named_modules())
    possible = {name: m for name, m in modules.items() if name and _may_be_block(m)}
    held = {n: m for n, m in possible.items() if _only_holds(modules[n.rpartition(".")[0]])}
    for candidates in (held, possible):
        count = Counter(_kind(m) for m in candidates.values())
        repeated = {name: m for name, m in candidates.items() if count[_kind(m)] > 1}
        if repeated:
            return list(_outermost(repeated))
    return []


def _may_be_block(module: nn.Module) -> bool:
    """It runs, has parameters, and is not one of torch's single layers, or a weight of one."""
    if not _runs(module) or next(module.parameters(), None) is None:
        return False
    if isinstance(module, ParametrizationList):
        return False
    if next(module.children(), None) is None:
        return not type(module).__module__.startswith("torch.")
    return not _is_stage(module)


def _is_stage(module: nn.Module) -> bool:
    """It only holds others, and several blocks of a kind are among them."""
    if not _only_holds(module):
        return False
    children = map(without_compile, module.children())
    count = Counter(_kind(child) for child in children if _may_be_block(child))
    return max(count.values(), default=0) > 1


def _only_holds(module: nn.Module) -> bool:
    return type(module).forward in _HOLDS


def _kind(module: nn.Module) -> Any:
    """Equal for modules that are built alike, compiled or not; to be counted by."""
    module = without_compile(module)
    if not _only_holds(module):
        return type(module)
    return (type(module), *(_kind(child) for child in module.children()))


def _outermost(blocks: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Those that are in no other; what is in a module follows it in the order."""
    inside: str | None = None
    for name, block in blocks.items():
        if inside is None or not name.startswith(inside):
            inside = f"{name}."
            yield name, block
