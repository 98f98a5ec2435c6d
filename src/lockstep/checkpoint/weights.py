"""The weights of a model alone: out as safetensors, in from every form that is about."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoint.conversion import cast, cast_to
from lockstep.checkpoint.encoding import on_cpu, unstorable
from lockstep.checkpoint.matching import Match, match_names
from lockstep.checkpoint.modules import (
    Differences,
    conflict,
    load_plain,
    plain_state_dict,
    shape_of,
    unwrap,
)
from lockstep.checkpoint.reading import Found, read_states
from lockstep.checkpoint.shards import Piece, in_bytes, write_weights
from lockstep.checkpoint.whole import address
from lockstep.errors import CheckpointError, SettingError

__all__ = ["WeightsReport", "load_weights", "save_weights", "unwrap"]


@dataclass(frozen=True)
class WeightsReport:
    """What `load_weights` did, under the bare model's names (`unexpected`: the file's)."""

    matched: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]
    """Of another shape, left as they were: the name and both shapes."""
    changes: tuple[str, ...]
    """What was done to names and types to make them fit, in words."""


def save_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    shard_size: int | str | None = None,
) -> None:
    """Writes a model's parameters and buffers as safetensors.

    The names are those of the bare model, whatever it is wrapped in. Tied weights are written
    under each of their names, so that any reader finds them. The file is there in full or not at
    all; missing folders are made. It takes part in no collective: call it on one rank
    (`if world.is_main:`).

    Args:
        model: bare or wrapped; its values on any device, but whole.
        path: of the file. What is there already is replaced once the new is complete.
        dtype: of what is written, for tensors with fractions and at least 16 bits, such as
            `torch.bfloat16`; None: as they are.
        shard_size: bytes, or a text such as "5GB"; a larger model is written to several files
            beside `path`, and `path` + ".index.json" names them. None: one file.

    Raises:
        CheckpointError: the state holds what safetensors cannot (such as an extra state that is
            not a tensor), a value does not fit into `dtype`, or the file cannot be written.
        SettingError: `dtype` has no fractions, or `shard_size` is no size.
    """
    path = Path(path)
    if dtype is not None and not dtype.is_floating_point:
        raise SettingError(
            f"saving weights to {path} with dtype={dtype}",
            "it holds no fractions",
            "give torch.float32, torch.bfloat16 or torch.float16",
        )
    pieces = []
    for name, value in plain_state_dict(model).items():
        held = unstorable(value) if isinstance(value, Tensor) else f"is a {type(value).__name__}"
        if held:
            raise CheckpointError(
                f"saving weights to {path}",
                f"{name} {held}, and the file can hold plain tensors alone",
                "save the whole state with world.checkpoint",
            )
        size = value.numel() * cast_to(value.dtype, dtype).itemsize
        pieces.append(Piece(name, size, _getter(name, value, dtype)))
    write_weights(path, pieces, None if shard_size is None else in_bytes(shard_size))


def _getter(name: str, value: Tensor, dtype: torch.dtype | None) -> Callable[[], Tensor]:
    return lambda: cast(on_cpu(value), dtype, name)


def load_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    trust: bool = False,
) -> WeightsReport:
    """Copies weights from a file into a model, on whatever device the model is.

    Reads safetensors files (also several, by their index), what `torch.save` wrote (a state dict,
    also under one of the usual names such as `state_dict` or `model`; a whole model if trusted), a
    checkpoint of Lockstep and the folder that holds checkpoints. Prefixes that wrappers leave
    (`module.`, `_orig_mod.`, `model.`, `net.`) are removed or added as the model's own names ask
    for. Nothing is copied unless all checks have passed.

    Args:
        model: bare or wrapped; every rank of a run loads for itself.
        path: the file or folder.
        strict: every name must be on both sides, in one shape. Otherwise what fits is loaded, as
            long as that is at least half of the model's names.
        trust: the file may run code of its author's while it is read, as whole-model pickles do.

    Raises:
        CheckpointError: the file cannot be read, is not trusted, or does not fit; with counts and
            examples.
    """
    path = Path(path)
    own = plain_state_dict(model)
    _check_model(own, path)
    found, match = _best(read_states(path, trust=trust), own)
    state = {match.names[name]: value for name, value in found.state.items() if name in match.names}
    groups = _tied(own)
    _check_tied(groups, state, path)
    differ = _differences(found, match, own, groups)
    fitting = {name: value for name, value in state.items() if not conflict(value, own[name])}
    covered = len(_with_ties(fitting, groups))
    enough = covered * 2 >= len(own)
    if (strict and differ) or not enough:
        raise CheckpointError(
            f"loading {path} into {type(unwrap(model)).__name__} with strict={strict}",
            f"of the model's {len(own)} names {covered} fit; {differ}",
            "build the model as it was when the file was saved"
            + (", or pass strict=False to load what fits" if enough else ""),
        )
    load_plain(model, fitting, strict=False)
    place = (f"read {found.place}",) if found.place else ()
    return WeightsReport(
        matched=tuple(name for name in own if name in fitting),
        missing=differ.missing,
        unexpected=differ.unexpected,
        mismatched=differ.mismatched,
        changes=(*place, *match.changes, *_casts(fitting, own)),
    )


def _check_model(own: Mapping[str, Any], path: Path) -> None:
    meta = [name for name, value in own.items() if isinstance(value, Tensor) and value.is_meta]
    if meta:
        raise CheckpointError(
            f"loading {path}",
            f"{len(meta)} tensors of the model are on the meta device ({meta[0]}, ...), which "
            "holds no values",
            'give them memory first: model.to_empty(device="cpu")',
        )


def _best(states: Iterable[Found], own: Mapping[str, Any]) -> tuple[Found, Match]:
    shapes = {name: shape_of(value) for name, value in own.items()}
    matches = [
        (found, match_names({n: shape_of(v) for n, v in found.state.items()}, shapes))
        for found in states
    ]
    return max(matches, key=lambda pair: (pair[1].fitting, len(pair[1].names)))


def _tied(own: Mapping[str, Any]) -> list[list[str]]:
    """Groups of names that are one tensor."""
    groups: dict[object, list[str]] = {}
    for name, value in own.items():
        if isinstance(value, Tensor) and shape_of(value) is not None and value.numel():
            view = (value.device, address(value), value.shape, value.stride(), value.dtype)
            groups.setdefault(view, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _with_ties(names: Iterable[str], groups: list[list[str]]) -> set[str]:
    """The names, and those that are one tensor with any of them."""
    known = set(names)
    return known.union(*(group for group in groups if known & set(group)))


def _check_tied(groups: list[list[str]], state: Mapping[str, Any], path: Path) -> None:
    for names in groups:
        first, *rest = [name for name in names if name in state] or [""]
        for name in rest:
            if not torch.equal(state[first], state[name].to(state[first].dtype)):
                raise CheckpointError(
                    f"loading {path}",
                    f"{first} and {name} are one tensor in the model, and differ in the file",
                    "untie them in the model before loading",
                )


def _differences(
    found: Found, match: Match, own: Mapping[str, Any], groups: list[list[str]]
) -> Differences:
    taken = _with_ties(match.names.values(), groups)
    return Differences(
        # BatchNorm counts batches since torch 0.4.1 only; torch starts the count by itself.
        missing=tuple(
            name for name in own if name not in taken and not name.endswith("num_batches_tracked")
        ),
        unexpected=tuple(name for name in found.state if name not in match.names),
        mismatched=tuple(
            f"{target}: {text}"
            for name, target in match.names.items()
            if (text := conflict(found.state[name], own[target]))
        ),
    )


def _casts(state: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    counts: dict[tuple[str, str], int] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dtype != own[name].dtype:
            pair = (str(value.dtype), str(own[name].dtype))
            counts[pair] = counts.get(pair, 0) + 1
    return [f"converted {n} tensors from {old} to {new}" for (old, new), n in counts.items()]
