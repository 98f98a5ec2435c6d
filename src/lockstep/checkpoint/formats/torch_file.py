"""What `torch.save` wrote, in a file of its own or in a part of another; nothing of it can run.

https://docs.pytorch.org/docs/stable/notes/serialization.html. Only `trust` lets a pickled model be
unpickled, and then DistributedDataParallel is left out: unpickled, it would join a process group.
"""

from __future__ import annotations

import errno
import io
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

from lockstep.checkpoint import layout
from lockstep.checkpoint.formats.safetensors import check_plain, misplaced, short
from lockstep.errors import CheckpointError


class UnpickledDDP(nn.Module):
    """What was a DistributedDataParallel: a plain module around the model."""

    wraps_module: ClassVar[bool] = True


class _Unpickler(pickle.Unpickler):
    """Python's own, but for DistributedDataParallel."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.nn.parallel.distributed", "DistributedDataParallel"):
            return UnpickledDDP
        return super().find_class(module, name)


_PICKLE_MODULE = SimpleNamespace(
    __name__="pickle",
    Unpickler=_Unpickler,
    load=lambda file, **options: _Unpickler(file, **options).load(),
)
"""For `torch.load(..., pickle_module=...)`."""


def read_torch(path: Path, trust: bool) -> Any:
    """What `torch.save` wrote; tensors are mapped where the file's format allows it.

    Raises:
        CheckpointError: it cannot be read, or holds pickled objects and is not trusted.
    """
    check_plain(path)
    with layout.plain_errors("reading weights from", path), path.open("rb") as file:
        archive = file.read(4) == b"PK\x03\x04"  # of the newer format
        if archive:
            check_archive(path, file)
    options: dict[str, Any] = {"map_location": "cpu", "mmap": archive}
    try:
        return _load_tensors(path, options)
    except pickle.UnpicklingError as error:
        if not trust:
            raise _not_trusted(path, error) from error
    except Exception as error:
        raise _unreadable(path, error) from error
    try:
        return torch.load(path, weights_only=False, pickle_module=_PICKLE_MODULE, **options)
    except Exception as error:  # unpickling runs the file's code, which may raise anything
        raise _unreadable(path, error) from error


def read_torch_index(path: Path, places: Mapping[str, str], trust: bool) -> dict[str, Any]:
    """The tensors of an index over files of `torch.save`.

    Raises:
        CheckpointError: a file cannot be read, or does not hold what the index says.
    """
    state: dict[str, Any] = {}
    for file in dict.fromkeys(places.values()):
        content = read_torch(path.parent / file, trust)
        held = content if isinstance(content, Mapping) else {}
        for name in (name for name, place in places.items() if place == file):
            if not isinstance(held.get(name), Tensor):
                raise misplaced(path, name, file)
            state[name] = held[name]
    return {name: state[name] for name in places}


class FilePart(io.RawIOBase):
    """A part of a file as if it were a file."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self._file, self._offset, self._length = file, offset, length
        self._at = 0

    def seekable(self) -> bool:
        """As of any file."""
        return True

    def readable(self) -> bool:
        """As of any file."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As of any file; places count from the beginning of the part."""
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        """As of any file."""
        left = max(0, self._length - self._at)
        self._file.seek(self._offset + self._at)
        content = self._file.read(min(len(buffer), left))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


def load_tensors(path: Path, content: IO[bytes]) -> Any:
    """What `torch.save` wrote into a part of a file: tensors, numbers, text and nests of them.

    Raises:
        CheckpointError: it cannot be read, or holds anything else.
    """
    check_archive(path, content)
    try:
        return torch.load(content, weights_only=True, map_location="cpu")
    except Exception as error:
        raise _unreadable(path, error) from error


def load_tensor(
    path: Path, content: IO[bytes], dtype: torch.dtype, shape: tuple[int, ...], device: str
) -> Tensor:
    """The one tensor that `torch.save` wrote into a part of a file.

    Args:
        path: of the file, for messages.
        content: the part.
        dtype: that it must have.
        shape: that it must have.
        device: `cpu`, or `meta` to look without reading the values.

    Raises:
        CheckpointError: it cannot be read, or holds anything else.
    """
    sizes = [m.file_size for m in check_archive(path, content) if m.filename.endswith("/data/0")]
    try:
        found = torch.load(content, weights_only=True, map_location="meta")
        if type(found) is not Tensor or (found.dtype, found.shape) != (dtype, shape):
            raise ValueError(f"it is not the one tensor of {dtype} and shape {list(shape)}")
        # torch.load would read beyond the values that are there.
        if sizes != [found.untyped_storage().nbytes()]:
            raise ValueError(f"its values are to have {found.untyped_storage().nbytes()} bytes")
        if device != "meta":
            content.seek(0)
            found = torch.load(content, weights_only=True, map_location=device)
    except Exception as error:
        raise _unreadable(path, error) from error
    tensor: Tensor = found
    return tensor


def _load_tensors(path: Path, options: dict[str, Any]) -> Any:
    try:
        return torch.load(path, weights_only=True, **options)
    except RuntimeError as error:
        if not options["mmap"] or os.strerror(errno.ENOMEM) not in str(error):
            raise
    # A private mapping, torch's default, may not be larger than memory. A shared one may; nothing
    # here writes to it, but the file has to be writable.
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        return torch.load(path, weights_only=True, **options)


def check_archive(path: Path, file: IO[bytes]) -> list[zipfile.ZipInfo]:
    """The members of an archive, none of which is packed: torch would unpack any amount.

    Raises:
        CheckpointError: it is no archive as `torch.save` writes it.
    """
    size = file.seek(0, os.SEEK_END)
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
        raise CheckpointError(
            f"reading weights from {path}",
            f"torch.load cannot read it, it is no archive of torch.save: {short(error, 300)}",
            "check that the file is whole, and that it was written by torch.save",
        ) from error
    packed = [m.filename for m in members if m.compress_type != zipfile.ZIP_STORED]
    if packed or sum(m.file_size for m in members) > size:
        raise CheckpointError(
            f"reading weights from {path}",
            f"it is an archive with packed contents ({short(', '.join(packed[:3]))}), as "
            "torch.save never writes it; a TorchScript file may be one",
            "save the state_dict of the model with torch.save or lockstep.save_weights",
        )
    file.seek(0)
    return members


def _not_trusted(path: Path, error: Exception) -> CheckpointError:
    try:
        asked = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # a file of the older format, or a broken one
        asked = []
    if not asked and "nsupported" not in str(error):
        return _unreadable(path, error)
    names = short(", ".join(asked[:5]), 300) or "names of code"
    return CheckpointError(
        f"reading weights from {path}",
        f"it is a pickle with more than tensors in it ({names}); reading such a file runs whatever "
        "code its author put there",
        "pass trust=True if you trust where it comes from, then keep what lockstep.save_weights "
        "makes of it",
    )


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    reason = next((line for line in str(error).splitlines() if line.strip()), "")
    return CheckpointError(
        f"reading weights from {path}",
        f"torch.load cannot read it: {type(error).__name__}: {short(reason, 300)}",
        "check that the file is whole, that it was written by torch.save, and that the classes of "
        "a pickled model can be imported",
    )
