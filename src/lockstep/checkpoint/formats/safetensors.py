"""Safetensors: one file, or several with an index, in the form that is common.

    net.safetensors                     one file, or
    net.safetensors.index.json          {"metadata": {"total_size": bytes},
    net-00001-of-00002.safetensors       "weight_map": {name: file, ...}}
    net-00002-of-00002.safetensors

A file is a length (8 bytes, little endian), so many bytes of JSON, then the values:
https://huggingface.co/docs/safetensors/index#format. The header is checked before it is believed,
and values are read a part at a time with plain reads: a file that is larger than memory cannot
always be mapped into it. `safetensors.torch.save_file` would copy all tensors before it writes.

Several files are there in full or not at all too: they get names that are free, the index is
renamed into place after all of them, and only then those of a former index go.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from lockstep.checkpoint import layout, storage, termination
from lockstep.checkpoint.encoding import DTYPES, separate
from lockstep.checkpoint.sharding import LazyTensor, as_shape, dtype_name
from lockstep.distributed.collectives import to_bytes
from lockstep.errors import CheckpointError, SettingError
from lockstep.units import parse_bytes
from lockstep.wording import replace_unprintable

MAX_HEADER = 100_000_000
"""Bytes; the format's own limit."""

CODES = {dtype: code for code, dtype in DTYPES.items()}
"""What the header of a file calls a dtype; the others cannot be in a file."""
_CHUNK = 1 << 23
"""Bytes that are summed up and written at a time."""

INDEX = ".index.json"
TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")
"""Of files that `torch.save` wrote."""
SHARD_SIZE = 5_000_000_000
"""Bytes; above it `convert` writes several files."""

# Not the 8-bit ones: their scales stand beside them, in tensors of their own.
_CAST = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_MAX_INDEX = 100_000_000  # bytes

T = TypeVar("T")


@dataclass(frozen=True)
class Entry(LazyTensor):
    """One tensor of a file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Bytes from the beginning of the file."""

    def part(self, begin: int, end: int) -> Tensor:
        """The elements from `begin` to before `end`, flat, in memory of their own."""
        memory = np.empty((end - begin) * self.dtype.itemsize, np.uint8)
        if not len(memory):
            return torch.empty(0, dtype=self.dtype)
        with layout.opened(self.file) as file:
            file.seek(self.offset + begin * self.dtype.itemsize)
            got = file.readinto(memory.data)
        if got != len(memory):
            raise layout.unreadable(self.file, "it became shorter while it was read")
        return torch.frombuffer(memory, dtype=self.dtype)


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file in the order of their values. Reads the header alone.

    Raises:
        CheckpointError: the file cannot be read, is cut short, or its header is not sound: it is
            no JSON, a dtype is unknown, or shapes, places and the file's size contradict.
    """
    with layout.opened(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise layout.unreadable(
                path, f"its header is to have {length} bytes, the whole file has {size}"
            )
        text = file.read(length)
    try:
        content = layout.parsed(text)
        content.pop("__metadata__", None)
        entries = {name: _entry(path, name, says, 8 + length) for name, says in content.items()}
        entries = dict(sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)))
        _check_places(entries, 8 + length, size)
    except ValueError as error:
        raise layout.unreadable(path, f"its header is damaged: {error}") from error
    return entries


def _entry(path: Path, name: str, says: Any, begin: int) -> Entry:
    if not isinstance(says, dict) or not {"dtype", "shape", "data_offsets"} <= says.keys():
        raise ValueError(f"{short(name)} lacks a dtype, a shape or a place")
    dtype, shape, places = says["dtype"], says["shape"], says["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{short(name)} has the dtype {short(dtype)}, which is not known here")
    try:
        first, last = as_shape(places)
        entry = Entry(path, DTYPES[dtype], as_shape(shape), begin + first)
    except ValueError:
        found = f"{short(name)} has the shape {short(shape)} at {short(places)}"
        raise ValueError(found) from None
    if last - first != entry.nbytes:
        raise ValueError(f"{short(name)} takes {entry.nbytes} bytes and has {last - first}")
    return entry


def _check_places(entries: dict[str, Entry], begin: int, size: int) -> None:
    """Every byte after the header belongs to one tensor."""
    end = begin
    for name, entry in entries.items():
        if entry.offset != end:
            raise ValueError(f"{short(name)} is at byte {entry.offset}, where {end} is next")
        end += entry.nbytes
    if end != size:
        file = f"goes on to {size}" if end < size else f"at {size}: it was cut short"
        raise ValueError(f"its tensors end at byte {end}, the file {file}")


def short(value: object, length: int = 80) -> str:
    """A text of a file's in a message: what would move the cursor, or fill the screen, is not."""
    text = replace_unprintable(str(value)[: length + 1])
    return text if len(text) <= length else f"{text[: length - 3]}..."


class Written(NamedTuple):
    """A file that is on the disk."""

    size: int
    """Bytes."""
    checksum: str


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], check: Callable[[], object] = lambda: None
) -> Written:
    """Writes a new safetensors file and flushes it to disk.

    Straight from the tensors' memory, which `safetensors.torch.save_file` copies first; and what
    is written is summed up on the way. The format:
    https://huggingface.co/docs/safetensors/index#format

    Args:
        path: of a file that is not there yet.
        tensors: by name, contiguous and on the CPU.
        check: called before each part of the file; may raise what ends the writing.

    Raises:
        CheckpointError: the format has no name for a tensor's dtype.
    """
    size, crc = 0, 0
    with storage.new_file(path) as file:
        for data in content_of(path, tensors):
            for begin in range(0, len(data), _CHUNK):
                check()
                chunk = data[begin : begin + _CHUNK]
                crc = zlib.crc32(chunk, crc)
                storage.write(file, chunk)
            size += len(data)
    return Written(size, storage.in_words(crc))


def content_of(path: Path, tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """All bytes of a safetensors file, the header first; the tensors' own memory after it.

    Raises:
        CheckpointError: as `write_tensors`.
    """
    # By size of their elements, so that each begins where one of its kind may; as safetensors does.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    yield memoryview(_header(path, ordered))
    yield from (to_bytes(tensor).numpy().data for _, tensor in ordered)


def _header(path: Path, tensors: list[tuple[str, Tensor]]) -> bytes:
    """The length of the header and the header of a safetensors file."""
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors:
        if tensor.dtype not in CODES:
            raise no_such_dtype(f"writing {path.name}", name, tensor.dtype)
        begin, end = end, end + tensor.nbytes
        content[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def no_such_dtype(doing: str, name: str, dtype: torch.dtype) -> CheckpointError:
    """The error of a tensor whose dtype the format cannot hold."""
    other = ", such as torch.complex64" if dtype.is_complex else ""
    return CheckpointError(
        doing,
        f"{name} has the dtype {dtype}, which the safetensors format cannot hold",
        f"convert it to another dtype{other}, or keep it in a checkpoint (world.checkpoint) or a "
        "file of torch.save",
    )


def shard_bytes(size: int | str) -> int:
    """A size such as `5GB`, `500MB` or `2GiB` in bytes.

    Raises:
        SettingError: it is no size, or nothing fits into it.
    """
    found = parse_bytes(size)
    if not found:
        raise SettingError(
            f"a shard size of {size!r}",
            "it is no size of a file",
            "give bytes, or a text such as '5GB' or '500MiB'",
        )
    return found


def index_of(path: Path) -> Path:
    """Where the index is, if weights that are called `path` are in several files."""
    return path.with_name(path.name + INDEX)


def read_index(path: Path) -> dict[str, Entry]:
    """The tensors of an index's safetensors files, all of which are looked at; reads the headers.

    Raises:
        CheckpointError: the index or a file cannot be read, the index names files outside of its
            folder, or a tensor is not in the file that it names.
    """
    places = weight_map(path)
    headers = {name: read_header(path.parent / name) for name in dict.fromkeys(places.values())}
    for name, file in places.items():
        if name not in headers[file]:
            raise misplaced(path, name, file)
    extra = [n for header in headers.values() for n in header if n not in places]
    if extra:
        names = short(", ".join(extra[:3]))
        raise _unlike(path, f"it does not name {len(extra)} tensors of its files ({names})")
    return {name: headers[file][name] for name, file in places.items()}


def misplaced(path: Path, name: str, file: str) -> CheckpointError:
    """The error of an index by which a tensor is in a file that does not hold it."""
    return _unlike(path, f"the tensor {short(name)!r} is to be in {file}, which does not hold it")


def _unlike(path: Path, found: str) -> CheckpointError:
    return layout.unreadable(path, found, "the files do not belong together: copy all again")


def write_weights(
    path: Path,
    tensors: Mapping[str, LazyTensor],
    shard_size: int | None,
    dtype: torch.dtype | None = None,
) -> list[Path]:
    """Writes tensors in one file, or in several with an index where they exceed `shard_size`.

    What was there under that name goes once the new is complete. At most one file's tensors are
    in memory at a time.

    Args:
        path: of the file.
        tensors: by name.
        shard_size: bytes; None: one file.
        dtype: see `cast`.

    Returns:
        What was written; the index, if there is one, first.

    Raises:
        CheckpointError: it cannot be written; nothing is left of it then.
    """
    sizes = {name: t.count * cast_to(t.dtype, dtype).itemsize for name, t in tensors.items()}
    groups = in_groups(sizes.items(), shard_size)
    index, several = index_of(path), len(groups) > 1
    with layout.plain_errors("saving weights to", path):
        layout.make_way(path)
        former = _former(index)
        files = _free_names(path, len(groups)) if several else [path]

        def remove_new_parts() -> None:
            in_use = _former(index)  # all of them, if the new index is in place already
            for file in files if several else ():
                if file not in in_use:
                    file.unlink(missing_ok=True)

        with termination.undone_unless_finished(remove_new_parts):
            for file, names in zip(files, groups, strict=True):
                with storage.in_place(file) as temporary:
                    memory: set[int] = set()
                    values = (cast(tensors[name].full(), dtype, name) for name in names)
                    own = (separate(value, memory) for value in values)
                    write_tensors(temporary, dict(zip(names, own, strict=True)))
            if several:
                _write_index(index, files, groups, sum(sizes.values()))
        written = [index, *files] if several else files
        for old in {path, index, *former}.difference(written):
            old.unlink(missing_ok=True)
    return written


def _write_index(
    index: Path, files: Sequence[Path], groups: Sequence[Sequence[str]], total: int
) -> None:
    places = {name: file.name for file, names in zip(files, groups, strict=True) for name in names}
    content = {"metadata": {"total_size": total}, "weight_map": places}
    with storage.in_place(index) as temporary, storage.new_file(temporary) as descriptor:
        storage.write(descriptor, json.dumps(content, indent=2).encode() + b"\n")


def in_groups(sizes: Iterable[tuple[T, int]], most: int | None) -> list[list[T]]:
    """In the given order, each group within `most` but for one item that alone exceeds it."""
    groups: list[list[T]] = [[]]
    size = 0
    for item, more in sizes:
        if groups[-1] and most is not None and size + more > most:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += more
    return groups


def cast_to(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """What becomes of a tensor's own dtype where another is asked for."""
    return own if dtype is None or own not in _CAST else dtype


def cast(tensor: Tensor, dtype: torch.dtype | None, name: str) -> Tensor:
    """A tensor in another dtype, if it has fractions and at least 16 bits; else itself.

    Raises:
        CheckpointError: a finite value would become infinite.
    """
    result = tensor.to(dtype := cast_to(tensor.dtype, dtype))
    if result is tensor:
        return tensor
    if dtype.itemsize <= tensor.dtype.itemsize and not torch.equal(result.isinf(), tensor.isinf()):
        raise CheckpointError(
            f"converting {name} to {dtype_name(dtype)}",
            f"its largest value {float(tensor.abs().nan_to_num(0, 0).max()):.3g} is beyond what "
            f"that dtype can hold ({torch.finfo(dtype).max:.3g})",
            "use bf16, which has the range of fp32, or leave the dtype as it is",
        )
    return result


def _free_names(path: Path, number: int) -> list[Path]:
    stem = path.name.removesuffix(".safetensors")
    starts = chain([stem], (f"{stem}-v{attempt}" for attempt in count(2)))
    choices = (
        [path.with_name(f"{s}-{i:05d}-of-{number:05d}.safetensors") for i in range(1, number + 1)]
        for s in starts
    )
    return next(files for files in choices if not any(file.exists() for file in files))


def _former(index: Path) -> list[Path]:
    """The files of an index that is about to be replaced, as far as their names are ours."""
    stem = re.escape(index.name.removesuffix(INDEX).removesuffix(".safetensors"))
    ours = re.compile(rf"{stem}(-v\d+)?-\d{{5,}}-of-\d{{5,}}\.safetensors")
    try:
        names = set(weight_map(index).values())
    except CheckpointError:  # none there, or nothing that could be read through it
        return []
    return [index.with_name(name) for name in sorted(names) if ours.fullmatch(name)]


def of_torch(places: Mapping[str, str]) -> bool:
    """Whether an index is one over files of `torch.save`, as `pytorch_model.bin.index.json` is."""
    return all(file.endswith(TORCH_ENDINGS) for file in places.values())


def weight_map(path: Path) -> dict[str, str]:
    """Which file each tensor of an index is in; all of one kind.

    Raises:
        CheckpointError: it cannot be read, is no index, or names files that are not beside it.
    """
    try:
        with layout.opened(path) as file:
            text = file.read(_MAX_INDEX + 1)
        if len(text) > _MAX_INDEX:
            raise ValueError(f"it is longer than {_MAX_INDEX} bytes")
        places = layout.parsed(text)["weight_map"]
        if not isinstance(places, dict) or not places:
            raise ValueError("its weight_map is no object, or empty")
    except (ValueError, KeyError) as error:
        raise layout.unreadable(
            path,
            f"it is no index of weights: {type(error).__name__}: {short(error, 300)}",
            'give a file with {"weight_map": {name: file}}, as lockstep checkpoint convert writes',
        ) from error
    for file in places.values():
        if not (layout.is_plain(file) and file.endswith((".safetensors", *TORCH_ENDINGS))):
            raise layout.unreadable(
                path,
                f"it names the file {short(file)!r}, which is not one beside it",
                "use no index from a source that you do not trust; its files are plain names",
            )
    if not of_torch(places) and any(file.endswith(TORCH_ENDINGS) for file in places.values()):
        raise layout.unreadable(
            path,
            "it names safetensors files and files of torch.save",
            "make one form of them with lockstep checkpoint convert",
        )
    return places
