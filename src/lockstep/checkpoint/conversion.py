"""Writes stored weights in another format, for `lockstep checkpoint convert`.

The new format is safetensors, in one file or several, or a file of `torch.save`. Names are *tied*
if they stand for one tensor. *Extra* values are values of a module's state that are not tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint import layout, storage as disk
from lockstep.checkpoint.contents import Contents
from lockstep.checkpoint.encoding import with_own_storage
from lockstep.checkpoint.file_errors import make_parent_folders, plain_errors
from lockstep.checkpoint.formats.reading import Source
from lockstep.checkpoint.formats.safetensors_files import (
    DEFAULT_SHARD_BYTES,
    TORCH_ENDINGS,
    cast,
    index_of,
    result_dtype,
    write_weights,
)
from lockstep.checkpoint.lazy_tensor import LazyTensor
from lockstep.checkpoint.name_matching import remove_parts
from lockstep.errors import CheckpointError, SettingError
from lockstep.torch_compat import COMPILED_CHILD_NAME

DTYPE_OF_OPTION = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The values of `--dtype`."""


@dataclass(frozen=True)
class Converted:
    """What `convert` has written."""

    files: tuple[Path, ...]
    """The index comes first, if there is one."""
    num_tensors: int
    """How many names of tensors there are."""
    num_cast: int
    """How many of these tensors have another dtype now."""
    num_renamed: int
    """How many tensors and extra values have another name now."""


def convert(
    contents: Contents,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    remove_prefixes: Sequence[str] = (),
    add_prefix: str = "",
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Converted:
    """Writes stored weights to a file in the format that its extension stands for.

    If an error is raised, an existing file of that name is unchanged.

    In safetensors, a tied tensor is written under each of its names, so that any reader finds it.
    In a torch file, tied names stay one tensor if they are one in the source.

    Args:
        contents: the contents of one model, from `open_contents`.
        out: the path of the file, which ends in `.safetensors` or in one of `TORCH_ENDINGS`.
        dtype: the new dtype of all floating-point tensors of at least 16 bits; None to keep their
            dtypes.
        remove_prefixes: prefixes to remove from names, in this order. `_orig_mod.` is also removed
            inside names.
        add_prefix: a text to put before every name.
        shard_bytes: the size above which safetensors are written to several files with an index.

    Raises:
        CheckpointError: the file cannot be written, a value does not fit into `dtype`, or the
            format cannot hold the values.
        SettingError: a prefix that no name has, or names that would become equal; an unknown
            extension; or the output is one of the files that are read.
    """
    new_names = _new_names([*contents.tensors, *contents.extra], remove_prefixes, add_prefix)
    _check_output(contents.source, out)
    tensors = {new_names[name]: tensor for name, tensor in contents.tensors.items()}
    extra = {new_names[name]: value for name, value in contents.extra.items()}

    is_safetensors = out.suffix == ".safetensors"
    if is_safetensors and extra:
        first_name = next(iter(extra))
        raise CheckpointError(
            f"writing {out}",
            f"{first_name} is no tensor, and the file can hold plain tensors alone",
            f"convert to a torch file ({', '.join(TORCH_ENDINGS)})",
        )

    if is_safetensors:
        files = write_weights(out, tensors, shard_bytes, dtype)
    else:
        _write_torch(out, tensors, extra, dtype)
        files = [out]

    num_cast = sum(result_dtype(tensor.dtype, dtype) != tensor.dtype for tensor in tensors.values())
    num_renamed = sum(name != new_name for name, new_name in new_names.items())
    return Converted(tuple(files), len(tensors), num_cast, num_renamed)


def _write_torch(
    out: Path,
    tensors: Mapping[str, LazyTensor],
    extra: Mapping[str, Any],
    dtype: torch.dtype | None,
) -> None:
    """Writes a state with `torch.save`. Tied names are saved as one tensor, and so stay tied.

    Args:
        out: the file.
        tensors: the tensors by their new names; tied names have the same object.
        extra: the other values of the state by their new names.
        dtype: as for `convert`.
    """
    state: dict[str, Any] = {**_read_tensors(tensors, dtype), **extra}
    with plain_errors("saving weights to", out):
        make_parent_folders(out)
        with disk.replacing(out) as temporary:
            with temporary.open("wb") as file:
                torch.save(state, file)
            disk.sync_path(temporary)


def _read_tensors(
    tensors: Mapping[str, LazyTensor], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Reads tensors for `torch.save`. Tied names get the same tensor.

    Each tensor has a storage of its own, because torch.save writes the whole storage of a tensor.

    Args:
        tensors: the tensors by their names; tied names have the same object.
        dtype: as for `convert`.
    """
    tensor_of_name: dict[str, Tensor] = {}
    tensor_of_lazy_id: dict[int, Tensor] = {}  # by the id of the lazy tensor
    storages_in_use: set[int] = set()  # `with_own_storage` adds the storage of each result
    for name, lazy_tensor in tensors.items():
        tensor = tensor_of_lazy_id.get(id(lazy_tensor))
        if tensor is None:  # the first of the names that are tied
            contiguous = cast(lazy_tensor.read(), dtype, name).contiguous()
            tensor = with_own_storage(contiguous, storages_in_use)
            tensor_of_lazy_id[id(lazy_tensor)] = tensor
        tensor_of_name[name] = tensor
    return tensor_of_name


def _new_names(
    names: Sequence[str], remove_prefixes: Sequence[str], add_prefix: str
) -> dict[str, str]:
    """Returns the new names by the old ones.

    Without "module." and with "net." in front: `{"module.fc.weight": "net.fc.weight"}`.

    Raises:
        SettingError: no name begins with one of the prefixes, or two names would become equal.
    """
    new_names = {name: name for name in names}
    for prefix in remove_prefixes:
        changed = {name: _without_prefix(new, prefix) for name, new in new_names.items()}
        no_name_has_the_prefix = changed == new_names
        if no_name_has_the_prefix:
            found = "there are no names"
            if names:
                found = f"no name begins with it; the first is {names[0]}"
            raise SettingError(
                f"the prefix {prefix!r} to be removed",
                found,
                "see the names with lockstep checkpoint inspect",
            )
        new_names = changed

    new_names = {name: add_prefix + new for name, new in new_names.items()}
    distinct = set(new_names.values())
    two_became_equal = len(distinct) < len(new_names)
    if two_became_equal or "" in distinct:
        raise SettingError(
            f"the prefixes {', '.join(repr(prefix) for prefix in remove_prefixes)} to be removed",
            "two names would become one, or a name empty",
            "remove fewer of them",
        )
    return new_names


def _without_prefix(name: str, prefix: str) -> str:
    """Returns a name without a prefix, if the name has it."""
    if prefix == f"{COMPILED_CHILD_NAME}.":
        # `torch.compile` of a part of a model adds it inside names: "block._orig_mod.weight".
        return remove_parts(name, [COMPILED_CHILD_NAME])
    return name.removeprefix(prefix)


def _check_output(source: Source, out: Path) -> None:
    """Checks that the output has a known extension, and would damage neither source nor checkpoint.

    Raises:
        SettingError: the extension does not tell the format; a file that is read would be
            overwritten; or the output would be in the folder of a checkpoint.
    """
    if out.suffix not in (".safetensors", *TORCH_ENDINGS):
        raise SettingError(
            f"the output {out}",
            "its ending says nothing of the form to write",
            f"use .safetensors, or {', '.join(TORCH_ENDINGS)} for a torch file",
        )

    # Large weights are written to several files, with an index beside `out`.
    index = index_of(out)
    files_read = {path.resolve() for path in (source.path, *source.files)}
    if out.resolve() in files_read or index.resolve() in files_read:
        raise SettingError(
            f"the output {out}", "it is among the files that are read", "choose another name"
        )

    if (out.parent / layout.MANIFEST).exists():
        raise SettingError(
            f"the output {out}",
            "its folder is a checkpoint, whose files belong together",
            "choose another folder",
        )
