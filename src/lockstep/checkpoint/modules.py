"""A module's state under the names of the bare module, whatever it is wrapped in.

Which tensor of a file belongs to which of a model, when wrappers have changed the names.

DDP and DataParallel put `module.` before every name below them, `torch.compile` puts `_orig_mod.`,
and people's own classes `model.` or `net.`. Nothing is stripped blindly: every combination of
taking such parts away and putting them on is tried against the model's own names, and the one that
makes most of them equal is used.

What of a file does not fit a model, as a table that can be read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import product
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lockstep.checkpoint.formats.safetensors import short
from lockstep.checkpoint.sharding import LazyTensor, resharded
from lockstep.distributed.torch_compat import set_state_dict_metadata, state_dict_metadata
from lockstep.wording import join_first


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
    versions = state_dict_metadata(state) or {}
    set_state_dict_metadata(
        plain, OrderedDict((_plain(path, wrappers), value) for path, value in versions.items())
    )
    return plain


def plain_names(module: nn.Module) -> Callable[[str], str]:
    """Turns the names of a module's parameters and buffers into those without wrappers."""
    wrappers = _wrappers(module)
    return lambda name: _plain(name, wrappers)


def load_plain(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """The inverse of `plain_state_dict`: copies values in, where the module has its tensors.

    A sharded module takes its shards of the values, which may be stored in shards themselves.
    """
    wrappers = _wrappers(module)
    own = module.state_dict()
    named: OrderedDict[str, Any] = OrderedDict(
        (name, resharded(state[plain], value))
        for name, value in own.items()
        if (plain := _plain(name, wrappers)) in state
    )
    versions = state_dict_metadata(state)
    if versions is not None:
        of_paths = OrderedDict(
            (path, versions[plain])
            for path, _ in module.named_modules(remove_duplicate=False)
            if (plain := _plain(path, wrappers)) in versions
        )
        set_state_dict_metadata(named, of_paths)
    module.load_state_dict(named, strict=strict)


def shape_of(value: object) -> Shape:
    """A tensor's shape; None for what has none yet, or is not a tensor."""
    if isinstance(value, LazyTensor):
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
        return "; ".join(f"{count} ({join_first(names, 3)})" for count, names in self.counted())

    def counted(self) -> list[tuple[str, tuple[str, ...]]]:
        """The names of each kind, and in words how many there are."""
        kinds = (
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("of another shape", self.mismatched),
        )
        return [(f"{len(names)} {word}", names) for word, names in kinds if names]


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


Shape = tuple[int, ...] | None
"""None where there is none (extra state, lazy parameters)."""

_WRAPPERS = ("_orig_mod", "module")  # may stand anywhere in a name
_PREFIXES = frozenset({*_WRAPPERS, "model", "net"})  # may stand in front


@dataclass(frozen=True)
class Match:
    """The best correspondence found."""

    names: Mapping[str, str]
    """Name in the file -> name in the model, for those that have one."""
    fitting: int
    """How many of them have the same shape on both sides."""
    changes: tuple[str, ...]
    """What was done to the file's names, in words."""


def match_names(file: Mapping[str, Shape], model: Mapping[str, Shape]) -> Match:
    """Finds the renaming under which most names of the file are names of the model.

    Equal shapes count first, equal names second, few changes third. A name is either changed like
    all others or left out; two names never become one.
    """
    best, best_score = Match({}, 0, ()), (-1, -1, 0)
    added_choices = _leading(model)
    for dropped in ((), ("_orig_mod",), ("module",), _WRAPPERS):
        inner = {name: without_parts(name, dropped) for name in file}
        if len(set(inner.values())) < len(inner) or (dropped and list(inner) == [*inner.values()]):
            continue
        for removed, added in product(_leading(inner.values()), added_choices):
            names = {
                name: target
                for name, short in inner.items()
                if short.startswith(removed) and (target := added + short[len(removed) :]) in model
            }
            fitting = sum(file[name] == model[target] for name, target in names.items())
            cost = len(dropped) + removed.count(".") + added.count(".")
            if (score := (fitting, len(names), -cost)) > best_score:
                best = Match(names, fitting, _in_words(dropped, removed, added))
                best_score = score
    return best


def _leading(names: Collection[str]) -> list[str]:
    """Every run of known prefixes that some name begins with; the empty one first."""
    found = {""}
    for name in names:
        lead = ""
        for part in name.split(".")[:-1]:
            if part not in _PREFIXES:
                break
            lead += f"{part}."
            found.add(lead)
    return sorted(found, key=lambda lead: (len(lead), lead))


def without_parts(name: str, dropped: Collection[str]) -> str:
    """A name of a tensor without these parts, wherever they stand in front of its last."""
    *parts, last = name.split(".")
    return ".".join([*(part for part in parts if part not in dropped), last])


def _in_words(dropped: Collection[str], removed: str, added: str) -> tuple[str, ...]:
    changes = [f"removed every {part + '.'!r}" for part in dropped]
    if removed:
        changes.append(f"removed the prefix {removed!r}")
    if added:
        changes.append(f"added the prefix {added!r}")
    return tuple(changes)


_ROWS = 8
"""Of each kind."""
_COMPARED = 2000
"""Names that one is compared with, at most."""


def key_mismatch(differ: Differences, file: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """One line for each name that does not fit, with the nearest name of the other side.

    Args:
        differ: what does not fit.
        file: values by the names of the file.
        own: by those of the model.
    """
    rows: list[tuple[str, str, str]] = []
    for kind, names, of, others, where in (
        ("missing", differ.missing, own, differ.unexpected, "in the file"),
        ("unexpected", differ.unexpected, file, differ.missing, "in the model"),
    ):
        for name in names[:_ROWS]:
            shape = shape_of(of[name])
            near = get_close_matches(name, others[:_COMPARED], n=1, cutoff=0.75)
            nearest = f"  nearest {where}: {short(near[0])}" if near else ""
            rows.append((kind, short(name), f"{'' if shape is None else list(shape)}{nearest}"))
        rows += _more(kind, names)
    mismatched = (text.partition(": ") for text in differ.mismatched[:_ROWS])
    rows += [("other shape", name, shapes) for name, _, shapes in mismatched]
    rows += _more("other shape", differ.mismatched)
    width = max((len(name) for _, name, _ in rows), default=0)
    return "\n".join(f"    {kind:<13}{name:<{width}}  {text}".rstrip() for kind, name, text in rows)


def _more(kind: str, names: tuple[str, ...]) -> list[tuple[str, str, str]]:
    more = len(names) - _ROWS
    return [(kind, f"... and {more} more", "")] if more > 0 else []
