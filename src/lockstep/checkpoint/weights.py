"""The weights of a model alone: out as safetensors, in from every form that is about."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoint.encoding import unstorable
from lockstep.checkpoint.formats.reading import Found, read
from lockstep.checkpoint.formats.safetensors import shard_bytes, write_weights
from lockstep.checkpoint.modules import (
    Differences,
    Match,
    conflict,
    key_mismatch,
    load_plain,
    match_names,
    plain_state_dict,
    shape_of,
    unwrap,
)
from lockstep.checkpoint.sharding import (
    HeldTensor,
    LazyTensor,
    ShardedEntry,
    run_on_all_ranks,
    view_of,
)
from lockstep.distributed.process_group import run_of
from lockstep.errors import CheckpointError, SettingError

_BATCH = 2**26
"""Bytes of values that are in memory at a time, beside the model and the mapped file."""

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
        model: bare or wrapped; its values on any device, and not sharded.
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
    tensors: dict[str, LazyTensor] = {}
    for name, value in plain_state_dict(model).items():
        held = unstorable(value) if isinstance(value, Tensor) else f"is a {type(value).__name__}"
        if held:
            raise CheckpointError(
                f"saving weights to {path}",
                f"{name} {held}, and the file can hold plain tensors alone",
                "save the whole state with world.checkpoint",
            )
        tensors[name] = HeldTensor(value)
    size = None if shard_size is None else shard_bytes(shard_size)
    write_weights(path, tensors, size, dtype)


def load_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    trust: bool = False,
) -> WeightsReport:
    """Copies weights from a file into a model, on whatever device the model is.

    Reads safetensors files (also several, by their index), what `torch.save` wrote (a state dict,
    also under one of the usual names such as `state_dict` or `model`, and several by their index; a
    whole model if trusted), a folder of `torch.distributed.checkpoint`, a checkpoint of Lockstep
    and the folder that holds checkpoints. Prefixes that wrappers leave (`module.`, `_orig_mod.`,
    `model.`, `net.`) are removed or added as the model's own names ask for. Nothing is copied
    unless all checks have passed, on all ranks where the model is a prepared one.

    Files are mapped, so what many ranks of a machine read is in its memory once; folders of
    `torch.distributed.checkpoint` are read some tensors at a time. The format of `torch.save`
    before torch 1.6 alone has to be read in full by each rank.

    Communication: none for a bare model, so any rank may load for itself; one exchange of text
    for a prepared model, which all ranks load together.

    Args:
        model: bare, wrapped or prepared.
        path: the file or folder.
        strict: every name must be on both sides, in one shape. Otherwise what fits is loaded, as
            long as that is at least half of the model's names.
        trust: the file may run code of its author's while it is read, as pickled models do.

    Raises:
        CheckpointError: the file cannot be read, is not trusted, or does not fit; with counts and
            examples.
    """
    path = Path(path)
    run = run_of(model)

    work = partial(_plan, model, path, strict=strict, trust=trust, alone=run is None)
    # Nothing is copied on any rank unless all can.
    plan = work() if run is None else run_on_all_ranks(run.collectives, f"loading {path}", work)
    for names in _batches(plan):
        # Of what is in shards, a sharded model reads the regions that it needs.
        values = {
            target: value if isinstance(value, ShardedEntry) else plan.found.value(name)
            for name, target in names
            for value in [plan.found.state[name]]
        }
        load_plain(model, values, strict=False)
        del values  # before the next are read
    return plan.report


@dataclass(frozen=True)
class _Plan:
    """What is to be copied, after all checks."""

    found: Found
    names: Mapping[str, str]
    """In the file and in the model."""
    copied: Collection[str]
    """Those (in the file) that are copied into memory on their way into the model."""
    report: WeightsReport


def _plan(model: nn.Module, path: Path, *, strict: bool, trust: bool, alone: bool) -> _Plan:
    own = plain_state_dict(model)
    if alone:  # else what is on the meta device is on another rank
        _check_model(own, path)
    found, match = _best(read(path, trust=trust).states, own)
    groups = _tied(own)
    _check_tied(groups, found, match, path)
    differ = _differences(found, match, own, groups)
    fitting = {
        name: target
        for name, target in match.names.items()
        if not conflict(found.state[name], own[target])
    }
    covered = len(_with_ties(fitting.values(), groups))
    enough = covered * 2 >= len(own)
    if (strict and differ) or not enough:
        raise CheckpointError(
            f"loading {path} into {type(unwrap(model)).__name__} with strict={strict}",
            f"of the model's {len(own)} names {covered} fit; {differ.counts}\n"
            + key_mismatch(differ, found.state, own),
            "build the model as it was when the file was saved"
            + (", or pass strict=False to load what fits" if enough else ""),
        )
    place = (f"read {found.place}",) if found.place else ()
    report = WeightsReport(
        matched=tuple(name for name in own if name in set(fitting.values())),
        missing=differ.missing,
        unexpected=differ.unexpected,
        mismatched=differ.mismatched,
        changes=(*place, *match.changes, *_casts(found, fitting, own)),
    )
    here = {n: t for n, t in fitting.items() if not getattr(own[t], "is_meta", False)}
    unread = {name for name in here if isinstance(found.state[name], ShardedEntry)}
    for name in unread:
        found.state[name].check()
    cut = {name for name, target in here.items() if hasattr(own[target], "full_tensor")}
    return _Plan(found, here, unread | cut, report)


def _batches(plan: _Plan) -> Iterator[list[tuple[str, str]]]:
    """The names in parts whose values are to be in memory at a time; those of a module together.

    What goes from a mapped file into a plain tensor takes no memory of its own.
    """
    modules: dict[str, list[tuple[str, str]]] = {}
    for name, target in plan.names.items():
        modules.setdefault(target.rpartition(".")[0], []).append((name, target))
    batch: list[tuple[str, str]] = []
    size = 0
    for names in modules.values():
        more = sum(plan.found.state[name].nbytes for name, _ in names if name in plan.copied)
        if batch and size + more > _BATCH:
            yield batch
            batch, size = [], 0
        batch = batch + names
        size += more
    yield batch


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
        if shape_of(value) is not None and (view := view_of(value)):
            groups.setdefault(view, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _with_ties(names: Iterable[str], groups: list[list[str]]) -> set[str]:
    """The names, and those that are one tensor with any of them."""
    known = set(names)
    return known.union(*(group for group in groups if known & set(group)))


def _check_tied(groups: list[list[str]], found: Found, match: Match, path: Path) -> None:
    names = {target: name for name, target in match.names.items()}
    for group in groups:
        first, *rest = [names[target] for target in group if target in names] or [""]
        for name in rest:
            if not _equal(found, first, name):
                raise CheckpointError(
                    f"loading {path}",
                    f"{match.names[first]} and {match.names[name]} are one tensor in the model, "
                    "and differ in the file",
                    "untie them in the model before loading",
                )


def _equal(found: Found, first: str, name: str) -> bool:
    if shape_of(found.state[first]) != shape_of(found.state[name]):
        return False
    one, other = found.value(first), found.value(name)
    return torch.equal(one, other.to(one.dtype))


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


def _casts(found: Found, names: Mapping[str, str], own: Mapping[str, Any]) -> list[str]:
    counts: dict[tuple[str, str], int] = {}
    for name, target in names.items():
        value = found.state[name]
        if isinstance(value, Tensor | ShardedEntry) and value.dtype != own[target].dtype:
            pair = (str(value.dtype), str(own[target].dtype))
            counts[pair] = counts.get(pair, 0) + 1
    return [f"converted {n} tensors from {old} to {new}" for (old, new), n in counts.items()]
