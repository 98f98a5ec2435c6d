"""The tensors of a file, of several files or of a checkpoint: looked at, compared, converted.

What the commands of `lockstep checkpoint` see of every form: names, shapes, dtypes, and a way to
read a part of one tensor, so that no tensor has to fit into memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint import layout, storage
from lockstep.checkpoint.encoding import encode, separate, unstorable
from lockstep.checkpoint.formats import safetensors
from lockstep.checkpoint.formats.reading import Source, read, read_value
from lockstep.checkpoint.formats.safetensors import cast
from lockstep.checkpoint.modules import match_names, without_parts
from lockstep.checkpoint.sharding import HeldTensor, LazyTensor, dtype_name, in_memory, view_of
from lockstep.errors import CheckpointError, SettingError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What `--dtype` may be."""
_EXPANDED = 2**26  # bytes that a tensor may have beyond its memory, as expanded ones do
_ELEMENTS = 2**22  # compared at a time, in at most 16 bytes each
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@dataclass(frozen=True)
class Contents:
    """What is in a file or a checkpoint."""

    source: Source
    tensors: Mapping[str, LazyTensor]
    """By name, in the order of the file; one that has several names stands under each of them."""
    extra: Mapping[str, Any]
    """What a state of a module holds besides tensors."""
    facts: Mapping[str, Any]
    """Step, epoch, versions and the like, as far as the form has them."""
    files: Mapping[str, int]
    """Sizes in bytes."""
    training: Mapping[str, LazyTensor]
    """If asked for: the tensors of the optimizer and of what else is no model."""


def open_contents(
    path: Path,
    *,
    name: str | None = None,
    trust: bool = False,
    everything: bool = False,
    training: bool = False,
) -> Contents:
    """Finds out what is there; reads no values. See `read`, which takes the same arguments.

    Args:
        path: of the file or folder.
        name: one model of several.
        trust: a torch file may run code of its author's while it is read.
        everything: all models of a checkpoint.
        training: of a checkpoint also what is no model, such as the optimizer's tensors.

    Raises:
        CheckpointError: it cannot be read, or is not sound.
        SettingError: there is no such name.
    """
    source = read(path, trust=trust, name=name, everything=everything, lazy=True)
    found = max(source.states, key=lambda found: sum(map(_size, found.state.values())))
    tensors: dict[str, LazyTensor] = {}
    extra: dict[str, Any] = {}
    views: dict[object, LazyTensor] = {}
    for key, value in found.state.items():
        if isinstance(value, Tensor):
            _check_tensor(source.path, key, value)
            tensors[key] = views.setdefault(view_of(value) or key, HeldTensor(value))
        elif isinstance(value, LazyTensor):
            tensors[key] = value
        else:
            extra[key] = in_memory(read_value(value))
    chosen = set(map(id, tensors.values()))
    others = {n: t for n, t in source.training() if id(t) not in chosen} if training else {}
    for tensor in (*tensors.values(), *others.values()):
        tensor.check()
    return Contents(
        source,
        tensors,
        extra,
        ({"read": found.place} if found.place and not source.modules else {}) | {**source.facts},
        {file.name: file.stat().st_size for file in source.files},
        others,
    )


def tied_to(tensors: Mapping[str, LazyTensor]) -> dict[str, str]:
    """Of the names of a tensor that has several all but the first, each with the first."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}
    return {name: other for name, other in names.items() if name != other}


def totals(tensors: Iterable[LazyTensor]) -> dict[str, Any]:
    """How much it is in all; a tensor with several names counts once."""
    own = {id(tensor): tensor for tensor in tensors}.values()
    kinds = Counter(dtype_name(tensor.dtype) for tensor in own)
    return {
        "tensors": len(own),
        "values": sum(tensor.count for tensor in own),
        "bytes": sum(tensor.nbytes for tensor in own),
        "dtypes": dict(kinds.most_common()),
    }


def _size(value: object) -> int:
    return value.nbytes if isinstance(value, Tensor | LazyTensor) else 0


def _check_tensor(path: Path, name: str, value: Tensor) -> None:
    problem = unstorable(value)
    if problem is None and value.nbytes > value.untyped_storage().nbytes() + _EXPANDED:
        problem = f"claims {value.nbytes} bytes and has {value.untyped_storage().nbytes()}"
    if problem:
        raise layout.unreadable(
            path,
            f"{name} {problem}",
            "save plain tensors, as the state_dict of a model on the CPU has them",
        )


@dataclass
class Values:
    """By how much the values of two tensors of one shape differ."""

    count: int = 0
    """Elements that differ by more than is allowed; a NaN differs from all but a NaN."""
    absolute: float = 0.0
    """The largest |a - b|."""
    relative: float = 0.0
    """The largest |a - b| / max(|a|, |b|)."""
    nans: list[int] = field(default_factory=lambda: [0, 0])
    """NaNs on either side."""


@dataclass(frozen=True)
class Pair:
    """A tensor's name, and the tensor on either side."""

    name: str
    a: LazyTensor | None
    b: LazyTensor | None
    values: Values | None
    """Where both are there in one shape."""

    @property
    def differs(self) -> bool:
        """In being there, shape, dtype or values."""
        if self.a is None or self.b is None or self.values is None:
            return True
        return self.a.dtype is not self.b.dtype or bool(self.values.count)


def compare(
    a: Mapping[str, LazyTensor],
    b: Mapping[str, LazyTensor],
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
) -> Iterator[Pair]:
    """Each name of `a` and then those of `b` alone, compared as they are asked for.

    Args:
        a: tensors by name.
        b: the others.
        atol: elements are equal where |a - b| <= atol + rtol * |b|.
        rtol: see `atol`.
    """
    for name in {**a, **b}:
        first, second = a.get(name), b.get(name)
        values = None
        if first and second and first.shape == second.shape:
            values = compare_values(first, second, atol, rtol)
        yield Pair(name, first, second, values)


def compare_values(a: LazyTensor, b: LazyTensor, atol: float = 0.0, rtol: float = 0.0) -> Values:
    """Compares two tensors of one shape, in float64 (complex ones in complex128)."""
    values = Values()
    for begin in range(0, a.count, _ELEMENTS):
        end = min(begin + _ELEMENTS, a.count)
        _add_part(values, a.part(begin, end), b.part(begin, end), atol, rtol)
    return values


def same_extra(a: Any, b: Any) -> bool:
    """Whether two values that are no tensors (but may hold some) are the same."""
    try:
        (tree, tensors, _), (other, others, _) = encode(a), encode(b)
    except CheckpointError:  # objects of a trusted pickle
        return bool(repr(a) == repr(b))
    return tree == other and all(torch.equal(tensors[name], others[name]) for name in tensors)


def renamed(
    a: Mapping[str, LazyTensor], b: Mapping[str, LazyTensor]
) -> tuple[dict[str, LazyTensor], str]:
    """`b` under the names of `a`, where wrappers alone have changed them; what was done, in words.

    A name that has no counterpart stays as it is.
    """
    match = match_names({n: s.shape for n, s in b.items()}, {n: s.shape for n, s in a.items()})
    if not match.changes:
        return dict(b), ""
    taken = set(match.names.values())
    others = {n: s for n, s in b.items() if n not in match.names and n not in taken}
    return {match.names[n]: b[n] for n in match.names} | others, "; ".join(match.changes)


def _add_part(values: Values, a: Tensor, b: Tensor, atol: float, rtol: float) -> None:
    if a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        # Mostly so, and many times faster than what follows.
        narrow = a.dtype.itemsize == 1  # 8-bit floats have no isnan of their own
        nans = int((a.float() if narrow else a).isnan().sum()) if _has_fractions(a) else 0
        values.nans = [count + nans for count in values.nans]
        return
    exact = a.dtype == b.dtype and not _has_fractions(a)
    # Not in float64, which has not all integers beyond 2**53.
    wrong = _integers(a) != _integers(b) if exact else None
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    a_nan, b_nan = a.isnan(), b.isnan()
    values.nans[0] += int(a_nan.sum())
    values.nans[1] += int(b_nan.sum())
    wrong = (a != b) & ~(a_nan & b_nan) if wrong is None else wrong
    if not wrong.any():
        return
    a, b = a[wrong], b[wrong]
    apart = (a - b).abs()
    # Infinite on one side is apart by any measure; NaN is no number, and counts in any case.
    beyond = ~(apart <= atol + rtol * b.abs()) | apart.isinf()
    values.count += int(beyond.sum()) if atol or rtol else a.numel()
    number = ~apart.isnan()
    if number.any():
        relative = apart / torch.maximum(a.abs(), b.abs())
        values.absolute = max(values.absolute, float(apart[number].max()))
        relative = relative[number].nan_to_num(nan=math.inf, posinf=math.inf)
        values.relative = max(values.relative, float(relative.max()))


def _integers(tensor: Tensor) -> Tensor:
    """The same bits in a dtype that torch compares."""
    return tensor.view(_SIGNED.get(tensor.dtype, tensor.dtype))


def _has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


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
    shard_size: int = safetensors.SHARD_SIZE,
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
    _check_out(contents.source, out)
    tensors = {names[name]: stored for name, stored in contents.tensors.items()}
    extra = {names[name]: value for name, value in contents.extra.items()}
    if out.suffix == ".safetensors":
        if extra:
            raise CheckpointError(
                f"writing {out}",
                f"{next(iter(extra))} is no tensor, and the file can hold plain tensors alone",
                f"convert to a torch file ({', '.join(safetensors.TORCH_ENDINGS)})",
            )
        files = safetensors.write_weights(out, tensors, shard_size, dtype)
    else:
        files = [out]
        _write_torch(out, tensors, extra, dtype)
    return Converted(
        tuple(files),
        len(tensors),
        sum(safetensors.cast_to(s.dtype, dtype) is not s.dtype for s in tensors.values()),
        sum(old != new for old, new in names.items()),
    )


def _write_torch(
    out: Path,
    tensors: Mapping[str, LazyTensor],
    extra: Mapping[str, Any],
    dtype: torch.dtype | None,
) -> None:
    state: dict[str, Any] = {}
    made: dict[int, Tensor] = {}
    memory: set[int] = set()
    for name, stored in tensors.items():
        if id(stored) not in made:  # tied ones stay so
            values = cast(stored.full(), dtype, name).contiguous()
            made[id(stored)] = separate(values, memory)  # torch.save writes a view's whole storage
        state[name] = made[id(stored)]
    with layout.plain_errors("saving weights to", out):
        layout.make_way(out)
        with storage.in_place(out) as temporary:
            with temporary.open("wb") as file:
                torch.save(state | dict(extra), file)
            storage.sync_folder(temporary)


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
        return without_parts(name, ["_orig_mod"])
    return name.removeprefix(prefix)


def _check_out(source: Source, out: Path) -> None:
    read = {path.resolve() for path in (source.path, *source.files)}
    if out.suffix not in (".safetensors", *safetensors.TORCH_ENDINGS):
        found = "its ending says nothing of the form to write"
        do = f"use .safetensors, or {', '.join(safetensors.TORCH_ENDINGS)} for a torch file"
    elif out.resolve() in read or safetensors.index_of(out).resolve() in read:
        found, do = "it is among the files that are read", "choose another name"
    elif (out.parent / layout.MANIFEST).exists():
        found = "its folder is a checkpoint, whose files belong together"
        do = "choose another folder"
    else:
        return
    raise SettingError(f"the output {out}", found, do)
