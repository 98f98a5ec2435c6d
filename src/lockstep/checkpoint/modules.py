"""A module's state under the names of the bare module, whatever it is wrapped in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lockstep.checkpoint.header import Described
from lockstep.checkpoint.matching import Shape
from lockstep.checkpoint.whole import spread
from lockstep.errors import some


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside of DDP, DataParallel and `torch.compile`, in any order and number."""
    while (child := _wrapped_child(module)) is not None:
        module = module.get_submodule(child)
    return module


def plain_state_dict(module: nn.Module) -> OrderedDict[str, Any]:
    """`state_dict()` without the names of wrappers, also of those around parts of the module."""
    state = module.state_dict()
    wrappers = _wrappers(module)
    plain = OrderedDict((_plain(name, wrappers), value) for name, value in state.items())
    versions = getattr(state, "_metadata", {})
    plain._metadata = OrderedDict(  # type: ignore[attr-defined]
        (_plain(path, wrappers), value) for path, value in versions.items()
    )
    return plain


def plain_names(module: nn.Module) -> Callable[[str], str]:
    """Turns the names of a module's parameters and buffers into those without wrappers."""
    wrappers = _wrappers(module)
    return lambda name: _plain(name, wrappers)


def load_plain(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """The inverse of `plain_state_dict`: copies values in, where the module has its tensors.

    The values are whole; a sharded module takes its part of them.
    """
    wrappers = _wrappers(module)
    own = module.state_dict()
    named: OrderedDict[str, Any] = OrderedDict(
        (name, state[plain]) for name in own if (plain := _plain(name, wrappers)) in state
    )
    named.update(spread(named, own))
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        named._metadata = OrderedDict(  # type: ignore[attr-defined]
            (path, versions[plain])
            for path, _ in module.named_modules(remove_duplicate=False)
            if (plain := _plain(path, wrappers)) in versions
        )
    module.load_state_dict(named, strict=strict)


def shape_of(value: object) -> Shape:
    """A tensor's shape; None for what has none yet, or is not a tensor."""
    if isinstance(value, Described):
        return value.shape
    if not isinstance(value, Tensor) or nn.parameter.is_lazy(value):
        return None
    return tuple(value.shape)


def conflict(saved: object, own: object) -> str | None:
    """Both shapes in words where they differ, else None."""
    there, here = shape_of(saved), shape_of(own)
    if there is None or here is None or there == here:
        return None
    return f"{list(there)} in the file, {list(here)} in the model"


@dataclass(frozen=True)
class Differences:
    """Between the names and shapes of a state and of a module."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]
    """In words: the name and both shapes."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        parts = [f"{len(names)} {word} ({some(names, 3)})" for names, word in self._kinds]
        return "; ".join(parts) or "no differences"

    @property
    def counts(self) -> str:
        """How many of each, in words."""
        return ", ".join(f"{len(names)} {word}" for names, word in self._kinds)

    @property
    def _kinds(self) -> list[tuple[tuple[str, ...], str]]:
        kinds = (
            (self.missing, "missing"),
            (self.unexpected, "unexpected"),
            (self.mismatched, "of another shape"),
        )
        return [(names, word) for names, word in kinds if names]


def differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> Differences:
    """Compares a saved state with a module's own, both under plain names."""
    return Differences(
        missing=tuple(name for name in own if name not in saved),
        unexpected=tuple(name for name in saved if name not in own),
        mismatched=tuple(
            f"{name}: {text}"
            for name in own
            if name in saved and (text := conflict(saved[name], own[name]))
        ),
    )


def _wrapped_child(module: nn.Module) -> str | None:
    # By the children, not getattr: a compiled module answers for what is inside of it.
    children = dict(module.named_children())
    if "_orig_mod" in children:
        return "_orig_mod"
    torch_wraps = isinstance(module, DistributedDataParallel | DataParallel)
    return "module" if torch_wraps or getattr(type(module), "wraps_module", False) else None


def _wrappers(module: nn.Module) -> dict[str, str]:
    """The paths of the wrappers in a module, each with the name of its one child."""
    return {
        path: child
        for path, part in module.named_modules(remove_duplicate=False)
        if (child := _wrapped_child(part)) is not None
    }


def _plain(name: str, wrappers: Mapping[str, str]) -> str:
    kept: list[str] = []
    path = ""
    for part in name.split(".") if name else ():
        if wrappers.get(path) != part:
            kept.append(part)
        path = f"{path}.{part}" if path else part
    return ".".join(kept)
