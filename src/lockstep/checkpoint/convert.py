"""Weights from one form into another: safetensors in one or several files, or a torch file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint import layout
from lockstep.checkpoint.contents import Contents, Stored
from lockstep.checkpoint.encoding import separate
from lockstep.checkpoint.formats.safetensors import (
    SHARD_SIZE,
    TORCH_ENDINGS,
    cast,
    cast_to,
    in_place,
    index_of,
    write_weights,
)
from lockstep.checkpoint.storage import sync_folder
from lockstep.errors import CheckpointError, SettingError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What `--dtype` may be."""


@dataclass(frozen=True)
class Converted:
    """What `convert` wrote."""

    files: tuple[Path, ...]
    """The index, if there is one, first."""
    tensors: int
    cast: int
    """How many of the tensors have another dtype now."""
    renamed: int
    """How many have another name."""


def convert(
    contents: Contents,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    remove: Sequence[str] = (),
    add: str = "",
    shard_size: int = SHARD_SIZE,
) -> Converted:
    """Writes stored weights to a file whose ending says its form; in full or not at all.

    Tied tensors are written under each of their names in safetensors, so that any reader finds
    them; in a torch file they are one tensor again where the source says so.

    Args:
        contents: of one model, from `open_contents`.
        out: ends in `.safetensors`, or in one of `TORCH_ENDINGS`.
        dtype: of all tensors of 16 bits and more with fractions; None: as they are.
        remove: prefixes to take away, in this order; `_orig_mod.` also from within a name.
        add: a prefix for every name.
        shard_size: bytes; with more, safetensors are written to several files with an index.

    Raises:
        CheckpointError: the file cannot be written, a value does not fit into `dtype`, or the form
            cannot hold what is there.
        SettingError: a prefix that no name has, or names that would become one; an ending that
            is not known; the output is among what is read.
    """
    names = _new_names([*contents.tensors, *contents.extra], remove, add)
    _check_out(contents, out)
    tensors = {names[name]: stored for name, stored in contents.tensors.items()}
    extra = {names[name]: value for name, value in contents.extra.items()}
    if out.suffix == ".safetensors":
        if extra:
            raise CheckpointError(
                f"writing {out}",
                f"{next(iter(extra))} is no tensor, and the file can hold plain tensors alone",
                f"convert to a torch file ({', '.join(TORCH_ENDINGS)})",
            )
        files = write_weights(out, tensors, shard_size, dtype)
    else:
        files = [out]
        _write_torch(out, tensors, extra, dtype)
    return Converted(
        tuple(files),
        len(tensors),
        sum(cast_to(s.dtype, dtype) is not s.dtype for s in tensors.values()),
        sum(old != new for old, new in names.items()),
    )


def _write_torch(
    out: Path, tensors: Mapping[str, Stored], extra: Mapping[str, Any], dtype: torch.dtype | None
) -> None:
    state: dict[str, Any] = {}
    by_old_name: dict[str, Tensor] = {}
    memory: set[int] = set()
    for name, stored in tensors.items():
        if stored.tied_to is not None:
            state[name] = by_old_name[stored.tied_to]
        else:
            # torch.save writes a view's whole storage.
            state[name] = separate(cast(stored.full(), dtype, name).contiguous(), memory)
            by_old_name[stored.name] = state[name]
    with layout.plain_errors("saving weights to", out):
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.is_dir():
            raise IsADirectoryError(f"{out} is a folder")
        with in_place(out) as temporary:
            with temporary.open("wb") as file:
                torch.save(state | dict(extra), file)
            sync_folder(temporary)


def _new_names(names: Sequence[str], remove: Sequence[str], add: str) -> dict[str, str]:
    result = {name: name for name in names}
    for prefix in remove:
        changed = {old: _without(name, prefix) for old, name in result.items()}
        if changed == result:
            raise SettingError(
                f"the prefix {prefix!r} to be removed",
                f"no name begins with it; the first is {names[0] if names else 'not there'}",
                "see the names with lockstep checkpoint inspect",
            )
        result = changed
    result = {old: add + name for old, name in result.items()}
    if len(set(result.values())) < len(result) or "" in result.values():
        raise SettingError(
            f"the prefixes {', '.join(map(repr, remove))} to be removed",
            "two names would become one, or a name empty",
            "remove fewer of them",
        )
    return result


def _without(name: str, prefix: str) -> str:
    if prefix == "_orig_mod.":  # torch.compile puts it around parts of a model too
        return re.sub(r"(^|(?<=\.))_orig_mod\.", "", name)
    return name.removeprefix(prefix)


def _check_out(contents: Contents, out: Path) -> None:
    if out.suffix not in (".safetensors", *TORCH_ENDINGS):
        raise SettingError(
            f"the output {out}",
            "its ending says nothing of the form to write",
            f"use .safetensors, or {', '.join(TORCH_ENDINGS)} for a torch file",
        )
    folder = contents.path if contents.path.is_dir() else contents.path.parent
    taken = {(folder / name).resolve() for name in contents.files} | {contents.path.resolve()}
    if out.resolve() in taken or index_of(out).resolve() in taken:
        raise SettingError(
            f"the output {out}", "it is among the files that are read", "choose another name"
        )
    if (out.parent / layout.MANIFEST).exists():
        raise SettingError(
            f"the output {out}",
            "its folder is a checkpoint, whose files belong together",
            "choose another folder",
        )
