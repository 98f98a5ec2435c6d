"""Activation checkpointing: memory for time, with the same gradients bit for bit.

A wrapped submodule keeps its inputs alone; in backward its forward runs a second time (Chen et al.,
"Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174). That is
`torch.utils.checkpoint` without reentrant autograd. Two things are added here. The submodule stays
the same object under the same name, so `state_dict` keys do not change. And the second run
sees the buffers as they were before the first and leaves them as it found them: torch alone
would update BatchNorm's running statistics twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.errors import SettingError

Choice = type[nn.Module] | tuple[type[nn.Module], ...] | str | Callable[[nn.Module], bool]

MAX_CANDIDATES = 10


def checkpoint_activations(module: nn.Module, submodules: Choice) -> int:
    """Makes the chosen submodules recompute their activations in backward instead of keeping them.

    Choose the blocks that the model repeats: `checkpoint_activations(model, Block)`. Of nested
    matches the outermost is taken. Call it before or after `world.prepare`; a second call wraps
    nothing twice. Random numbers of torch (dropout) are the same in both runs. A SyncBatchNorm
    inside communicates in both, at the same points on all ranks.

    Args:
        module: the model, changed in place; the model as a whole is never wrapped.
        submodules: a class or tuple of classes, a pattern of names as in `named_modules()`
            (`"encoder.layers.*"`), or a function that says yes or no to each module.

    Returns:
        How many submodules match and now recompute.

    Raises:
        SettingError: nothing matches, or `submodules` is none of the above.
    """
    matches = _matcher(submodules)
    chosen = dict(_outermost(module, "", matches))
    if not chosen:
        raise SettingError(
            f"checkpoint_activations(..., {_in_words(submodules)})",
            "no submodule matches",
            f"choose among: {_candidates(module)}",
        )
    for submodule in chosen:
        if not isinstance(vars(submodule).get("forward"), _Recomputed):
            submodule.forward = _Recomputed(submodule)
    return len(chosen)


class _Recomputed:
    """Stands in for a module's `forward`; an object, so that copies of the module copy it too."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.__wrapped__ = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        return checkpoint(
            partial(self.__wrapped__, **kwargs),
            *args,
            use_reentrant=False,
            context_fn=self._contexts,
        )

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _BuffersAsBefore(self.module)


class _BuffersAsBefore:
    """While entered, the buffers of `module` are copies of what they were when this was made.

    May be entered again: each backward through a kept graph runs the forward once more.
    """

    def __init__(self, module: nn.Module) -> None:
        self._before = [(m, name, buffer.clone()) for m, name, buffer in _changing_buffers(module)]
        self._now: list[tuple[nn.Module, str, Tensor]] = []

    def __enter__(self) -> None:
        self._now = [(m, name, m.get_buffer(name)) for m, name, _ in self._before]
        for m, name, buffer in self._before:
            setattr(m, name, buffer.clone())

    def __exit__(self, *_: object) -> None:
        for m, name, buffer in self._now:
            setattr(m, name, buffer)


def _changing_buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for m in module.modules():
        if m.training:
            for name, buffer in m.named_buffers(recurse=False):
                yield m, name, buffer


def _matcher(submodules: Choice) -> Callable[[str, nn.Module], bool]:
    if isinstance(submodules, str):
        return lambda name, _: fnmatchcase(name, submodules)
    kinds: tuple[Any, ...] = submodules if isinstance(submodules, tuple) else (submodules,)
    if kinds and all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds):
        return lambda _, module: isinstance(module, kinds)
    if isinstance(submodules, type | tuple | nn.Module) or not callable(submodules):
        raise SettingError(
            f"checkpoint_activations(..., {submodules!r})",
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


def _candidates(module: nn.Module) -> str:
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
