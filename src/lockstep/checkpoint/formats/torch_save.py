"""Reads files of `torch.save`, without running code from the file unless it is trusted.

See https://docs.pytorch.org/docs/stable/notes/serialization.html. An *archive* is the zip file that
`torch.save` writes since torch 1.6; older files are a plain pickle. A file that holds more than
tensors, numbers and text is only unpickled if the user trusts it. Even then DistributedDataParallel
is replaced by a plain module, because unpickling it would join a process group.
"""

from __future__ import annotations

import errno
import mmap
import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, ClassVar

import torch
from torch import Tensor, nn

from lockstep.checkpoint.file_errors import opened, unreadable
from lockstep.checkpoint.formats.safetensors_files import misplaced_error
from lockstep.checkpoint.formats.text import short
from lockstep.errors import CheckpointError
from lockstep.wording import group_by_key

ARCHIVE_BEGINNING = b"PK\x03\x04"
"""The first bytes of a zip file."""


class UnpickledDDP(nn.Module):
    """Takes the place of a DistributedDataParallel: a plain module around the model."""

    wraps_module: ClassVar[bool] = True


class _UnpicklerWithoutDDP(pickle.Unpickler):
    """Python's unpickler, with `UnpickledDDP` in place of DistributedDataParallel."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns what a name in the pickle stands for."""
        if module == "torch.nn.parallel.distributed" and name == "DistributedDataParallel":
            return UnpickledDDP
        return super().find_class(module, name)


def _load_without_ddp(file: Any, **options: Any) -> Any:
    """Takes the place of `pickle.load`."""
    return _UnpicklerWithoutDDP(file, **options).load()


# What torch.load needs of its argument `pickle_module`.
_PICKLE_MODULE = SimpleNamespace(
    __name__="pickle", Unpickler=_UnpicklerWithoutDDP, load=_load_without_ddp
)


def read_torch(path: Path, trust: bool) -> Any:
    """Returns the object in a file of `torch.save`. Tensors are mapped if the format allows it.

    Args:
        path: the path of the file.
        trust: whether the file may run its author's code.

    Raises:
        CheckpointError: the file cannot be read, or holds pickled objects and is not trusted.
    """
    with opened(path) as file:
        is_archive = file.read(len(ARCHIVE_BEGINNING)) == ARCHIVE_BEGINNING
        if is_archive:
            check_archive(path, file)

    # A file with nothing but tensors, numbers and text is read without running code.
    try:
        return _load_weights_only(path, mapped=is_archive)
    except pickle.UnpicklingError as error:  # it holds other objects too
        if not trust:
            raise _not_trusted_error(path, error) from error
    except Exception as error:
        raise load_error(path, error) from error

    # The file holds other objects and is trusted. A DistributedDataParallel in it is read as a
    # plain module, because it can only be unpickled while a process group is open.
    try:
        return torch.load(
            path,
            map_location="cpu",
            mmap=is_archive,
            weights_only=False,
            pickle_module=_PICKLE_MODULE,
        )
    except Exception as error:  # the code of the file may raise any exception
        raise load_error(path, error) from error


def _load_weights_only(path: Path, *, mapped: bool) -> Any:
    """Loads a file with `weights_only=True`.

    Args:
        path: the path of the file.
        mapped: whether the file is mapped into memory, which works even if it is larger.
    """
    try:
        return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except RuntimeError as error:
        # "unable to mmap 9000000000 bytes from file <net.pt>: Cannot allocate memory (12)"
        file_exceeds_memory = mapped and os.strerror(errno.ENOMEM) in str(error)
        if not file_exceeds_memory:
            raise

    # The file is larger than memory, and so cannot have a private mapping, torch's default. A
    # shared mapping has no such limit. It needs permission to write to the file, although nothing
    # here writes to it.
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def read_torch_index(path: Path, weight_map: Mapping[str, str], trust: bool) -> dict[str, Any]:
    """Reads the tensors of all files of `torch.save` that an index names.

    Args:
        path: the path of the index.
        weight_map: the name of the file that holds each tensor, by the tensor's name.
        trust: whether the files may run their author's code.

    Raises:
        CheckpointError: a file cannot be read, or does not hold the tensors that the index says.
    """
    names_of_file = group_by_key((file_name, name) for name, file_name in weight_map.items())
    state: dict[str, Any] = {}
    for file_name, names in names_of_file.items():
        content = read_torch(path.parent / file_name, trust)
        tensors = content if isinstance(content, Mapping) else {}  # anything else has no names
        for name in names:
            if not isinstance(tensors.get(name), Tensor):
                raise misplaced_error(path, name, file_name)
            state[name] = tensors[name]

    # In the order of the index.
    return {name: state[name] for name in weight_map}


def check_archive(path: Path, file: IO[bytes]) -> list[zipfile.ZipInfo]:
    """Returns the members of an archive, after checking that they are not larger than the file.

    `torch.save` compresses nothing. A small file from elsewhere may be compressed, and torch would
    decompress it to more bytes than there is memory.

    Args:
        path: the path of the file, for errors.
        file: the open file, or a part of one. It is at its beginning afterwards.

    Raises:
        CheckpointError: the file is no archive, or is not as `torch.save` writes archives.
    """
    file_size = file.seek(0, os.SEEK_END)
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
        raise unreadable(
            path,
            f"torch.load cannot read it, it is no archive of torch.save: {short(error, 300)}",
            "check that the file is whole, and that it was written by torch.save",
        ) from error

    advice = "save the state_dict of the model with torch.save or lockstep.save_weights"
    compressed = [
        member.filename for member in members if member.compress_type != zipfile.ZIP_STORED
    ]
    if compressed:
        raise unreadable(
            path,
            f"it is an archive with packed contents ({short(', '.join(compressed[:3]))}), as "
            "torch.save never writes it; a TorchScript file may be one",
            advice,
        )

    # Even without compression a small file may claim a lot of memory, if several members are the
    # same bytes of the file.
    members_overlap = sum(member.file_size for member in members) > file_size
    if members_overlap:
        raise unreadable(
            path,
            "it is an archive whose members overlap, as torch.save never writes it",
            advice,
        )
    file.seek(0)
    return members


def _not_trusted_error(path: Path, error: Exception) -> CheckpointError:
    """Builds the error for a file that torch did not load with `weights_only=True`.

    Such a file needs `trust`, unless it is damaged. The error then names the code that the file
    would run.

    Args:
        path: the path of the file.
        error: the error of torch.
    """
    # The classes and functions that the pickle uses, for example ["numpy.ndarray"]. They cannot be
    # listed for a file of the older format, which is no zip archive, or for a damaged file.
    try:
        code_names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:
        code_names = []

    # If no names can be listed, the error tells whether the file needs trust or is damaged: torch
    # writes "Unsupported class ..." or "unsupported operation ..." about code that it refuses.
    refused_code = "unsupported" in str(error).lower()
    is_damaged = not code_names and not refused_code
    if is_damaged:
        return load_error(path, error)  # to trust the file would not help

    names = short(", ".join(code_names[:5]), 300) or "names of code"
    return unreadable(
        path,
        f"it is a pickle with more than tensors in it ({names}); reading such a file runs whatever "
        "code its author put there",
        "pass trust=True if you trust where it comes from, and keep it by lockstep.save_weights",
    )


def load_error(path: Path, error: Exception) -> CheckpointError:
    """Builds the error for a file that torch.load cannot read, with the first line of the cause."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    reason = lines[0] if lines else ""
    return unreadable(
        path,
        f"torch.load cannot read it: {type(error).__name__}: {short(reason, 300)}",
        "check that the file is whole, that it was written by torch.save, and that the classes of "
        "a pickled model can be imported",
    )
