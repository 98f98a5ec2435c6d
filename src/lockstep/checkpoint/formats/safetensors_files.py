"""Reads and writes weights in one safetensors file, or in several with an index.

This is the layout that Hugging Face's libraries use:

    net.safetensors                     one file, or
    net.safetensors.index.json          {"metadata": {"total_size": bytes},
    net-00001-of-00002.safetensors       "weight_map": {name: file, ...}}
    net-00002-of-00002.safetensors

Several files appear completely or not at all, too: they get names that are not in use, the index is
renamed to its final name after all of them, and only then the files of a former index are removed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from lockstep.checkpoint import layout, storage, termination
from lockstep.checkpoint.file_errors import make_parent_folders, opened, plain_errors, unreadable
from lockstep.checkpoint.formats.safetensors import TensorInFile, read_header, write_tensors
from lockstep.checkpoint.formats.text import short
from lockstep.checkpoint.lazy_tensor import LazyTensor, dtype_name
from lockstep.errors import CheckpointError, SettingError
from lockstep.units import parse_bytes

INDEX_ENDING = ".index.json"
TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")
"""The endings of files that `torch.save` wrote."""
DEFAULT_SHARD_BYTES = 5_000_000_000
"""Above this size, `convert` writes several files."""
MAX_INDEX_BYTES = 100_000_000
DTYPES_TO_CAST = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
"""Floats of 8 bits are never converted: their scales are in tensors of their own."""

Item = TypeVar("Item")


# Reading an index


def index_of(path: Path) -> Path:
    """Returns the path of the index if the weights for `path` are written to several files."""
    return path.with_name(path.name + INDEX_ENDING)


def read_weight_map(path: Path) -> dict[str, str]:
    """Reads an index: the name of the file that holds each tensor, by the tensor's name.

    Either all files are safetensors files, or all are files of `torch.save`.

    Raises:
        CheckpointError: the file cannot be read, is no index, or names files in other folders.
    """
    try:
        with opened(path) as file:
            text = file.read(MAX_INDEX_BYTES + 1)
        if len(text) > MAX_INDEX_BYTES:
            raise ValueError(f"it is longer than {MAX_INDEX_BYTES} bytes")
        weight_map = layout.parse_object(text)["weight_map"]
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("its weight_map is no object, or empty")
    except (ValueError, KeyError) as error:
        raise unreadable(
            path,
            f"it is no index of weights: {type(error).__name__}: {short(error, 300)}",
            'give a file with {"weight_map": {name: file}}, as lockstep checkpoint convert writes',
        ) from error

    # Refuse an index that names a file in another folder, such as "../secret.safetensors", or a
    # file that holds no weights.
    for file_name in weight_map.values():
        is_in_this_folder = layout.is_plain_name(file_name)
        is_weights_file = is_in_this_folder and file_name.endswith((".safetensors", *TORCH_ENDINGS))
        if not is_weights_file:
            raise unreadable(
                path,
                f"it names the file {short(file_name)!r}, which is not a name within its folder",
                "use no index from a source that you do not trust; its files are plain names",
            )

    are_torch_files = [name.endswith(TORCH_ENDINGS) for name in weight_map.values()]
    has_both_kinds = any(are_torch_files) and not all(are_torch_files)
    if has_both_kinds:
        raise unreadable(
            path,
            "it names safetensors files and files of torch.save",
            "make one form of them with lockstep checkpoint convert",
        )
    return weight_map


def names_torch_files(weight_map: Mapping[str, str]) -> bool:
    """Returns True if an index, such as pytorch_model.bin.index.json, names torch files."""
    return all(file_name.endswith(TORCH_ENDINGS) for file_name in weight_map.values())


def read_safetensors_index(path: Path) -> dict[str, TensorInFile]:
    """Returns the tensors of the safetensors files of an index. Reads the headers of all files.

    Raises:
        CheckpointError: the index or a file cannot be read, the index names files in other folders,
            or a tensor is not in the file that the index names.
    """
    weight_map = read_weight_map(path)
    headers: dict[str, dict[str, TensorInFile]] = {}
    for file_name in weight_map.values():
        if file_name not in headers:
            headers[file_name] = read_header(path.parent / file_name)

    tensors = {}
    for name, file_name in weight_map.items():
        if name not in headers[file_name]:
            raise misplaced_error(path, name, file_name)
        tensors[name] = headers[file_name][name]

    # If a file has tensors that the index does not name, it belongs to other weights.
    names_not_in_index = []
    for header in headers.values():
        names_not_in_index += [name for name in header if name not in weight_map]
    if names_not_in_index:
        examples = short(", ".join(names_not_in_index[:3]))
        raise _mixed_files_error(
            path, f"it does not name {len(names_not_in_index)} tensors of its files ({examples})"
        )
    return tensors


def misplaced_error(path: Path, name: str, file_name: str) -> CheckpointError:
    """Builds the error for a tensor that is not in the file that the index names for it."""
    return _mixed_files_error(
        path, f"the tensor {short(name)!r} is to be in {file_name}, which does not hold it"
    )


def _mixed_files_error(path: Path, found: str) -> CheckpointError:
    return unreadable(path, found, "the files do not belong together: copy all again")


# Writing


def parse_shard_size(size: int | str) -> int:
    """Converts a size such as "5GB", "500MB" or "2GiB" to bytes.

    Raises:
        SettingError: it is no size, or zero.
    """
    num_bytes = parse_bytes(size)
    if not num_bytes:
        raise SettingError(
            f"a shard size of {size!r}",
            "it is no size of a file",
            "give bytes, or a text such as '5GB' or '500MiB'",
        )
    return num_bytes


def write_weights(
    path: Path,
    tensors: Mapping[str, LazyTensor],
    shard_bytes: int | None,
    dtype: torch.dtype | None = None,
) -> list[Path]:
    """Writes tensors to one file, or to several with an index if they exceed `shard_bytes`.

    Files that were written under the same path before are removed once the new ones are complete.
    At most the tensors of one file are in memory at a time.

    Args:
        path: the path of the file.
        tensors: the tensors by name.
        shard_bytes: the maximum size of each file in bytes, which only a single tensor may exceed.
            None: one file.
        dtype: the dtype to which tensors are converted, see `cast`; None to keep their dtypes.

    Returns:
        The files that were written; the index comes first, if there is one.

    Raises:
        CheckpointError: the files cannot be written. Then nothing is left of them.
    """
    sizes = {}
    for name, tensor in tensors.items():
        sizes[name] = tensor.num_elements * result_dtype(tensor.dtype, dtype).itemsize
    groups_of_names = group_by_size(sizes.items(), shard_bytes)  # one group for each file

    index = index_of(path)
    with plain_errors("saving weights to", path):
        make_parent_folders(path)
        # The former weights may be in one file or in several.
        former_files = {path, index, *_files_of_index(index)}
        if len(groups_of_names) == 1:
            _write_file(path, tensors, groups_of_names[0], dtype)
            written = [path]
        else:
            files = _free_file_names(path, len(groups_of_names))
            _write_files_and_index(index, files, groups_of_names, tensors, dtype, sizes)
            written = [index, *files]

        for former_file in former_files.difference(written):
            former_file.unlink(missing_ok=True)
    return written


def _write_files_and_index(
    index: Path,
    files: Sequence[Path],
    groups_of_names: Sequence[Sequence[str]],
    tensors: Mapping[str, LazyTensor],
    dtype: torch.dtype | None,
    sizes: Mapping[str, int],
) -> None:
    """Writes several files and then their index. If that fails, the files are removed.

    Args:
        index: the path of the index.
        files: the paths of the files.
        groups_of_names: for each file, the names of its tensors.
        tensors: all tensors by name.
        dtype: the dtype to which tensors are converted; None to keep their dtypes.
        sizes: the size of each tensor in its file in bytes, by name.
    """

    def remove_new_files() -> None:
        """Removes the new files, except if the new index is in place already and needs them."""
        # If the former index is still in place, it names none of the new files.
        files_in_use = _files_of_index(index)
        for file in files:
            if file not in files_in_use:
                file.unlink(missing_ok=True)

    with termination.cleaned_up_on_failure(remove_new_files):
        weight_map = {}
        for file, names in zip(files, groups_of_names, strict=True):
            _write_file(file, tensors, names, dtype)
            for name in names:
                weight_map[name] = file.name

        content = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        text = json.dumps(content, indent=2) + "\n"
        with storage.replacing(index) as temporary, storage.new_file(temporary) as descriptor:
            storage.write(descriptor, text.encode())


def _write_file(
    file: Path,
    tensors: Mapping[str, LazyTensor],
    names: Sequence[str],
    dtype: torch.dtype | None,
) -> None:
    """Writes the tensors of these names to one file, completely or not at all.

    Args:
        file: the path of the file.
        tensors: all tensors by name.
        names: the names of the tensors to write.
        dtype: the dtype to which they are converted; None to keep their dtypes.
    """
    with storage.replacing(file) as temporary:
        values = {name: cast(tensors[name].read(), dtype, name) for name in names}
        write_tensors(temporary, values)


def group_by_size(sizes: Iterable[tuple[Item, int]], max_size: int | None) -> list[list[Item]]:
    """Splits items into consecutive groups whose sizes add up to at most `max_size`.

    With a maximum of 5: `[("a", 3), ("b", 2), ("c", 9), ("d", 1)] -> [["a", "b"], ["c"], ["d"]]`.
    An item that exceeds the maximum is a group of its own. There is always at least one group,
    which is empty if there are no items.

    Args:
        sizes: pairs of an item and its size.
        max_size: the maximum size of a group. None: all items form one group.
    """
    groups: list[list[Item]] = [[]]
    group_size = 0
    for item, size in sizes:
        is_too_large = max_size is not None and group_size + size > max_size
        if groups[-1] and is_too_large:
            groups.append([])
            group_size = 0
        groups[-1].append(item)
        group_size += size
    return groups


def result_dtype(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype that a tensor of the dtype `own` has after `cast`."""
    if dtype is None or own not in DTYPES_TO_CAST:
        return own
    return dtype


def cast(tensor: Tensor, dtype: torch.dtype | None, name: str) -> Tensor:
    """Converts a floating-point tensor of at least 16 bits to a dtype; returns others unchanged.

    Raises:
        CheckpointError: a value is beyond the range of the dtype.
    """
    new_dtype = result_dtype(tensor.dtype, dtype)
    if new_dtype == tensor.dtype:  # not to be converted
        return tensor

    largest = largest_lost_value(tensor, new_dtype)
    if largest is not None:
        raise CheckpointError(
            f"converting {name} to {dtype_name(new_dtype)}",
            f"its largest value {largest:.3g} is beyond what "
            f"that dtype can hold ({torch.finfo(new_dtype).max:.3g})",
            "use bf16, which has the range of fp32, or leave the dtype as it is",
        )
    return tensor.to(new_dtype)


def largest_lost_value(tensor: Tensor, dtype: torch.dtype) -> float | None:
    """Returns the largest value that is lost when a tensor is converted to another dtype.

    A value is lost if it is beyond the range of the dtype, so that it becomes infinite.

    Args:
        tensor: a floating-point tensor of at least 16 bits.
        dtype: the other floating-point dtype.

    Returns:
        The largest absolute value that is lost; None if there is none.
    """
    # A larger dtype can hold all values. One of the same size may not: bfloat16 can hold 1e38, but
    # float16 cannot.
    if dtype.itemsize > tensor.dtype.itemsize or tensor.numel() == 0:
        return None

    # Nearly always, all values are within the range. The least and the greatest one show that in a
    # single pass, which takes a tenth of the time of the conversion below. (Both are NaN if any
    # value is; then the comparison is False.)
    smallest, greatest = torch.aminmax(tensor)
    limit = torch.finfo(dtype).max
    if -limit <= float(smallest) and float(greatest) <= limit:
        return None

    lost_values = tensor[_is_lost(tensor, dtype)]
    return float(lost_values.abs().max()) if lost_values.numel() > 0 else None


def _is_lost(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns for each value of a tensor whether it would become infinite in another dtype."""
    if dtype == torch.float8_e4m3fn:
        # It has no infinity: depending on the version of torch, the result is NaN or the largest
        # value of the dtype.
        return tensor.abs() > torch.finfo(dtype).max

    result = tensor.to(dtype)
    if dtype.itemsize == 1:
        result = result.float()  # torch cannot look for infinite values in floats of 8 bits
    return result.isinf() != tensor.isinf()


def _free_file_names(path: Path, num_files: int) -> list[Path]:
    """Returns the paths of several files, none of which exists yet.

    For net.safetensors these are net-00001-of-00002.safetensors and so on. If one of them exists,
    net-v2-00001-of-00002.safetensors and so on, then net-v3-..., until all are free.
    """
    name = path.name.removesuffix(".safetensors")
    prefix = name
    version = 1
    while True:
        files = []
        for number in range(1, num_files + 1):
            files.append(path.with_name(f"{prefix}-{number:05d}-of-{num_files:05d}.safetensors"))
        if not any(file.exists() for file in files):
            return files

        version += 1
        prefix = f"{name}-v{version}"


def _files_of_index(index: Path) -> list[Path]:
    """Returns the files that an index names, as far as Lockstep may have written them.

    Files with other names than `_free_file_names` gives are left out: they may belong to somebody
    else.
    """
    try:
        file_names = set(read_weight_map(index).values())
    except CheckpointError:  # there is no index, or it cannot be read
        return []

    name = re.escape(index.name.removesuffix(INDEX_ENDING).removesuffix(".safetensors"))
    # "net-00001-of-00002.safetensors", "net-v2-00001-of-00002.safetensors"
    own_name = re.compile(rf"{name}(-v\d+)?-\d{{5,}}-of-\d{{5,}}\.safetensors")
    return [index.with_name(file) for file in sorted(file_names) if own_name.fullmatch(file)]
