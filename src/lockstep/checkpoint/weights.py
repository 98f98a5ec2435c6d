"""The weights of a model alone: out as safetensors, in from every form that is about."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoint.encoding import unstorable
from lockstep.checkpoint.formats.reading import read, read_value
from lockstep.checkpoint.formats.safetensors import (
    CODES,
    in_groups,
    no_such_dtype,
    shard_bytes,
    write_weights,
)
from lockstep.checkpoint.modules import (
    Differences,
    conflict,
    differences,
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
    is_meta,
    view_of,
)
from lockstep.distributed.collectives import Collectives, run_on_all_ranks
from lockstep.distributed.process_group import run_of
from lockstep.distributed.torch_compat import is_sharded
from lockstep.errors import CheckpointError, SettingError
from lockstep.wording import group_by_key

_BATCH = 2**26
"""Bytes of values that are in memory at a time, beside the model and the mapped file."""


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
    all; missing folders are made. Of a prepared model rank 0 alone writes, so all ranks may call it
    under every strategy.

    Communication: none for a model that each rank has whole; the other ranks do not wait for the
    file. A model that is spread over the ranks (`fsdp`, `hsdp`, `pipeline`) is saved by all of them
    together: rank 0 gathers it on the CPU, a tensor at a time.

    Args:
        model: bare, wrapped or prepared.
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
    size = None if shard_size is None else shard_bytes(shard_size)
    run, state = run_of(model), plain_state_dict(model)
    spread = run is not None and any(is_sharded(v) or is_meta(v) for v in state.values())
    if run is not None and spread:
        gather_on_main(state, run.collectives)

    def write() -> None:
        if run is None or run.topology.is_main:
            write_weights(path, _storable(state, path), size, dtype)

    if run is None or not spread:
        write()
    else:
        run_on_all_ranks(run.collectives, f"saving weights to {path}", write)


def gather_on_main(state: dict[str, Any], collectives: Collectives) -> None:
    """Makes the state of a model that is spread over the ranks whole on rank 0; of the others none.

    A tensor comes from its shards, or from the first rank that does not have it on the meta device.
    Tied shards are gathered once, and remain one tensor.
    """
    mine = [name for name, value in state.items() if not is_meta(value)]
    held = [set(names) for names in collectives.exchange(mine)]
    gathered: dict[object, Any] = {}
    for name, value in state.items():
        tie = view_of(value) if is_sharded(value) else None
        if tie is not None and tie in gathered:
            state[name] = gathered[tie]
            continue
        if is_sharded(value):  # also one that is kept on the CPU beside GPUs
            value = value.to(collectives.device).full_tensor()
        source = next((rank for rank, names in enumerate(held) if name in names), 0)
        if source:
            value = collectives.broadcast(value, source)
        if not collectives.topology.is_main:
            value = None
        state[name] = value.cpu() if isinstance(value, Tensor) else value
        if tie is not None:
            gathered[tie] = state[name]


def _storable(state: Mapping[str, Any], path: Path) -> dict[str, LazyTensor]:
    """Its tensors; raises CheckpointError where it holds what the file cannot."""
    for name, value in state.items():
        held = unstorable(value) if isinstance(value, Tensor) else f"is a {type(value).__name__}"
        if held is None and value.dtype not in CODES:
            raise no_such_dtype(f"saving weights to {path}", name, value.dtype)
        if held:
            raise CheckpointError(
                f"saving weights to {path}",
                f"{name} {held}, and the file can hold plain tensors alone",
                "save the whole state with world.checkpoint",
            )
    return {name: HeldTensor(value) for name, value in state.items()}


def load_weights(
    model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True, trust: bool = False
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
    batches, report = (
        work() if run is None else run_on_all_ranks(run.collectives, f"loading {path}", work)
    )
    for batch in batches:
        # Of what is in shards, a sharded model reads the regions that it needs.
        load_plain(
            model,
            {n: v if isinstance(v, ShardedEntry) else read_value(v) for n, v in batch.items()},
            strict=False,
        )
    return report


def _plan(
    model: nn.Module, path: Path, *, strict: bool, trust: bool, alone: bool
) -> tuple[list[dict[str, Any]], WeightsReport]:
    """Makes all checks; what is to be copied, in parts, under the names of the model."""
    own = plain_state_dict(model)
    meta = {name for name, value in own.items() if is_meta(value)}
    if meta and alone:  # else it is on another rank
        raise CheckpointError(
            f"loading {path}",
            f"{len(meta)} tensors of the model are on the meta device ({min(meta)}, ...)",
            'give them memory first: model.to_empty(device="cpu")',
        )
    shapes = {name: shape_of(value) for name, value in own.items()}
    matches = [
        (match_names({n: shape_of(v) for n, v in found.state.items()}, shapes), found)
        for found in read(path, trust=trust).states
    ]
    match, found = max(matches, key=lambda pair: (pair[0].fitting, len(pair[0].names)))
    state = {name: found.state[old] for old, name in match.names.items()}
    groups = _tied(own)
    _check_tied(groups, state, path)
    taken = _with_ties(state, groups)
    differ = Differences(
        # BatchNorm counts batches since torch 0.4.1 only; torch starts the count by itself.
        missing=tuple(n for n in own if n not in taken and not n.endswith("num_batches_tracked")),
        unexpected=tuple(old for old in found.state if old not in match.names),
        mismatched=differences(state, own).mismatched,
    )
    fitting = {name: v for name, v in state.items() if not conflict(v, own[name])}
    covered = len(_with_ties(fitting, groups))
    enough = covered * 2 >= len(own)
    if (strict and differ) or not enough:
        counts = ", ".join(count for count, _ in differ.counted())
        raise CheckpointError(
            f"loading {path} into {type(unwrap(model)).__name__} with strict={strict}",
            f"of the model's {len(own)} names {covered} fit; {counts}\n"
            + key_mismatch(differ, found.state, own),
            "build the model as it was when the file was saved"
            + (", or pass strict=False to load what fits" if enough else ""),
        )
    place = (f"read {found.place}",) if found.place else ()
    report = WeightsReport(
        matched=tuple(name for name in own if name in fitting),
        **vars(differ),
        changes=(*place, *match.changes, *_casts(fitting, own)),
    )
    values = {name: value for name, value in fitting.items() if name not in meta}
    stored = {name: v for name, v in values.items() if isinstance(v, ShardedEntry)}
    for entry in stored.values():
        entry.check()
    copied = {name for name in values if name in stored or is_sharded(own[name])}
    return _batches(values, copied), report


def _batches(values: Mapping[str, Any], copied: Set[str]) -> list[dict[str, Any]]:
    """The values in parts that are to be in memory at a time; those of a module together.

    Only `copied` ones take memory: not what goes from a mapped file into a plain tensor.
    """
    modules = list(group_by_key((name.rpartition(".")[0], name) for name in values).values())
    sizes = [sum(values[name].nbytes for name in names if name in copied) for names in modules]
    batches = in_groups(zip(modules, sizes, strict=True), _BATCH)
    return [{name: values[name] for names in batch for name in names} for batch in batches]


def _tied(own: Mapping[str, Any]) -> list[list[str]]:
    """Groups of names that are one tensor."""
    views = ((view_of(value), name) for name, value in own.items() if shape_of(value) is not None)
    groups = group_by_key((view, name) for view, name in views if view)
    return [names for names in groups.values() if len(names) > 1]


def _with_ties(names: Iterable[str], groups: list[list[str]]) -> set[str]:
    """The names, and those that are one tensor with any of them."""
    known = set(names)
    return known.union(*(group for group in groups if known & set(group)))


def _check_tied(groups: list[list[str]], state: Mapping[str, Any], path: Path) -> None:
    for group in groups:
        first, *rest = [name for name in group if name in state] or [""]
        for name in rest:
            one, other = read_value(state[first]), read_value(state[name])
            if not torch.equal(one, other.to(one.dtype)):
                raise CheckpointError(
                    f"loading {path}",
                    f"{first} and {name} are one tensor in the model, and differ in the file",
                    "untie them in the model before loading",
                )


def _casts(values: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    counts = Counter(
        (str(value.dtype), str(own[name].dtype))
        for name, value in values.items()
        if isinstance(value, Tensor | ShardedEntry) and value.dtype != own[name].dtype
    )
    return [f"converted {n} tensors from {old} to {new}" for (old, new), n in counts.items()]
