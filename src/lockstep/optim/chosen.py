"""Which submodules a user has chosen: by class, by a pattern of names, or by a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from lockstep.errors import SettingError

Choice = type[nn.Module] | tuple[type[nn.Module], ...] | str | Callable[[nn.Module], bool]

MAX_CANDIDATES = 10


def choose(module: nn.Module, choice: Choice, setting: str) -> list[tuple[str, nn.Module]]:
    """The submodules that match, with their names; of nested matches the outermost.

    Args:
        module: the model; it is never chosen itself.
        choice: a class or tuple of classes, a pattern of names as in `named_modules()`
            (`"encoder.layers.*"`), or a function that says yes or no to each module.
        setting: what the user has written, with `{}` for the choice.

    Raises:
        SettingError: nothing matches, or the choice is none of the above.
    """
    # A module that stands in two places is one.
    found = {id(m): (name, m) for m, name in _outermost(module, "", _matcher(choice, setting))}
    if not found:
        raise SettingError(
            setting.format(_in_words(choice)),
            "no submodule matches",
            f"choose among: {candidates(module)}",
        )
    return list(found.values())


def candidates(module: nn.Module) -> str:
    """Classes of submodules that hold others, the most frequent first, with one name of each."""
    names: dict[str, list[str]] = {}
    for name, m in module.named_modules():
        if name and next(m.children(), None) and type(m).forward is not nn.Module.forward:
            names.setdefault(type(m).__name__, []).append(name)
    ranked = sorted(names.items(), key=lambda item: -len(item[1]))[:MAX_CANDIDATES]
    listed = [f"{kind} ({len(of_kind)}, such as {of_kind[0]!r})" for kind, of_kind in ranked]
    if listed:
        return ", ".join(listed)
    return ", ".join(dict.fromkeys(type(m).__name__ for m in module.children())) or "none"


def _matcher(submodules: Choice, setting: str) -> Callable[[str, nn.Module], bool]:
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


def _outermost(
    module: nn.Module, prefix: str, matches: Callable[[str, nn.Module], bool]
) -> Iterator[tuple[nn.Module, str]]:
    for name, child in module.named_children():
        # A ModuleList has no forward: its parts run, it does not.
        if type(child).forward is not nn.Module.forward and matches(prefix + name, child):
            yield child, prefix + name
        else:
            yield from _outermost(child, f"{prefix}{name}.", matches)


def _in_words(submodules: Choice) -> str:
    if isinstance(submodules, tuple):
        return f"({', '.join(kind.__name__ for kind in submodules)})"
    return str(getattr(submodules, "__name__", repr(submodules)))
