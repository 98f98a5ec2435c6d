"""What a rank brings to a collective: its description, and the forms in which it can travel.

Gloo and NCCL each take some of torch's dtypes only. What is merely moved travels as bytes, exact
for every dtype; what is reduced travels in the nearest dtype that both can reduce.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

INT64_MAX = 2**63 - 1

_CARRIERS = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.float8_e8m0fnu: torch.float32,
}
_DTYPES = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    *_CARRIERS,
}

Problem = tuple[str, str, str]
"""The parts of a `UsageError`."""


@dataclass(frozen=True)
class Leaf:
    """What one rank brought at one place of a nest."""

    kind: str
    """`tensor`, `int`, `float`, `text`, or the name of a type that cannot be sent."""
    dtype: str = ""
    shape: tuple[int, ...] = ()

    @property
    def is_number(self) -> bool:
        """Whether it is one real number, which travels as text."""
        if self.kind == "tensor":
            return not self.shape and "complex" not in self.dtype
        return self.kind in {"int", "float"}

    @property
    def is_real(self) -> bool:
        """Whether it is in floating point."""
        return self.kind == "float" or "float" in self.dtype

    def __str__(self) -> str:
        return self.kind if self.kind != "tensor" else f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Call:
    """One rank's call of a collective, as the ranks tell it to each other."""

    name: str
    detail: str = ""
    structure: str = ""
    leaves: tuple[Leaf, ...] = ()
    problem: Problem | None = None
    """Why this rank cannot take part; all ranks raise it."""

    def to_text(self) -> str:
        """For `from_text`."""
        leaves = [[x.kind, x.dtype, x.shape] for x in self.leaves]
        return json.dumps([self.name, self.detail, self.structure, leaves, self.problem])

    @classmethod
    def from_text(cls, text: str) -> Call:
        """What `to_text` has written."""
        name, detail, structure, leaves, problem = json.loads(text)
        rows = tuple(Leaf(kind, dtype, tuple(shape)) for kind, dtype, shape in leaves)
        return cls(name, detail, structure, rows, problem and tuple(problem))

    def __str__(self) -> str:
        brought = f"of {', '.join(map(str, self.leaves)) or 'nothing'}" if self.structure else ""
        return " ".join(part for part in (self.name, self.detail, brought) if part)


def call_on(name: str, leaves: Sequence[Any], spec: pytree.TreeSpec) -> Call:
    """The call of collective `name` on a flattened nest."""
    problems = (problem_with(name, leaf) for leaf in leaves)
    problem = next((p for p in problems if p is not None), None)
    return Call(name, "", str(spec), tuple(_describe(leaf) for leaf in leaves), problem)


def neutral(leaf: Tensor, name: str) -> Tensor:
    """What changes nothing in the reduction `name`, like `leaf` in shape and dtype."""
    if name != "max" or leaf.dtype == torch.bool:
        return torch.zeros_like(leaf)
    if not leaf.is_floating_point():
        return torch.full_like(leaf, torch.iinfo(leaf.dtype).min)
    # Some dtypes of 8 bits have no infinity.
    return torch.full_like(leaf, -torch.inf if leaf.itemsize > 1 else torch.finfo(leaf.dtype).min)


def same_or_numbers(column: Sequence[Leaf]) -> bool:
    """Whether a reduction can make one value of what the ranks brought at one place."""
    return len(set(column)) == 1 or all(leaf.is_number for leaf in column)


def same_but_first_dimension(column: Sequence[Leaf]) -> bool:
    """Whether what the ranks brought at one place can be joined."""
    return len({(x.kind, x.dtype, len(x.shape), x.shape[1:]) for x in column}) == 1


def problem_with(name: str, leaf: Any) -> Problem | None:
    """Why the collective cannot take the leaf, or None."""
    if isinstance(leaf, Tensor):
        return _problem_with_tensor(name, leaf)
    if isinstance(leaf, bool | int | float):
        if isinstance(leaf, float) or abs(leaf) <= INT64_MAX or name == "broadcast":
            return None
        return (
            f"a collective on an integer of {leaf.bit_length()} bits",
            "it does not fit into 64 bits",
            "reduce it as a float, or as two integers",
        )
    if (isinstance(leaf, str) and name in {"gather", "broadcast"}) or (
        leaf is None and name == "broadcast"
    ):
        return None
    return (
        f"a collective on a {type(leaf).__name__}",
        "collectives take tensors, numbers, text (gather and broadcast) and nests of them",
        "convert it first, for example with torch.as_tensor",
    )


def _problem_with_tensor(name: str, tensor: Tensor) -> Problem | None:
    was_set = f"world.{name} of a tensor of {tensor.dtype}"
    if tensor.dtype not in _DTYPES:
        return was_set, "no backend can carry this dtype", "convert it first"
    if tensor.layout is not torch.strided or tensor.is_meta:
        return was_set, "it is sparse, or has no data", "convert it first, with .to_dense()"
    if name == "max" and tensor.is_complex():
        return was_set, "complex numbers have no order", "take the maximum of its .abs()"
    return None


def _describe(leaf: Any) -> Leaf:
    if isinstance(leaf, Tensor):
        return Leaf("tensor", str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape))
    if isinstance(leaf, bool | int):
        return Leaf("int")
    for kind, name in ((float, "float"), (str, "text")):
        if isinstance(leaf, kind):
            return Leaf(name)
    return Leaf(type(leaf).__name__)


def countable(leaf: Any) -> Any:
    """Booleans as integers: their sum is a count, not a logical or."""
    if isinstance(leaf, Tensor) and leaf.dtype is torch.bool:
        return leaf.to(torch.int64)
    return int(leaf) if isinstance(leaf, bool) else leaf


def real(leaf: Any) -> Any:
    """Integers and booleans in floating point; what cannot be reduced is left as it is."""
    if problem_with("mean", leaf) is not None:
        return leaf
    if isinstance(leaf, Tensor):
        inexact = leaf.is_floating_point() or leaf.is_complex()
        return leaf if inexact else leaf.to(torch.get_default_dtype())
    return float(leaf)


def divided(leaf: Any, count: int) -> Any:
    """`leaf / count`, for a leaf made by `real`, in its own dtype."""
    if isinstance(leaf, Tensor) and leaf.dtype in _CARRIERS:
        return (leaf.to(_CARRIERS[leaf.dtype]) / count).to(leaf.dtype)
    return leaf / count


def number_like(leaf: Any, number: bool | int | float, column: Sequence[Leaf]) -> Any:
    """A reduced number in the form that this rank brought it in.

    Args:
        leaf: what this rank brought: a number, or a 0-dimensional tensor.
        number: the result.
        column: what all ranks brought; an integer tensor among floats gives a float tensor.
    """
    if not isinstance(leaf, Tensor):
        return number
    dtype = leaf.dtype
    if not dtype.is_floating_point and any(x.is_real for x in column):
        dtype = torch.get_default_dtype()
    return torch.tensor(number, dtype=dtype, device=leaf.device)


def problem_with_result(
    name: str, number: bool | int | float, column: Sequence[Leaf]
) -> Problem | None:
    """Why the reduced number does not fit what some rank brought, or None; alike on all ranks."""
    if type(number) is not int:
        return None
    for leaf in column:
        if leaf.kind != "tensor" or leaf.is_real or leaf.dtype == "bool":
            continue
        limits = torch.iinfo(getattr(torch, leaf.dtype))
        if not limits.min <= number <= limits.max:
            return (
                f"world.{name} of 0-dimensional {leaf.dtype} tensors",
                f"the result, {number}, does not fit into {leaf.dtype}",
                "convert them to a wider dtype, or to plain numbers",
            )
    return None


def all_reduced(tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    """The reduction of a tensor of any sendable dtype; integers wrap as in torch's addition."""
    own = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if own.dtype is not torch.uint64:
        carrier = own.to(_CARRIERS.get(own.dtype, own.dtype), copy=True)
        dist.all_reduce(carrier, operation)
        return carrier.to(own.dtype)
    # Modulo 2**64 sums are the same, signed or not; for the order the highest bit is turned over.
    highest = 0 if operation == dist.ReduceOp.SUM else -(2**63)
    carrier = own.view(torch.int64) ^ highest
    dist.all_reduce(carrier, operation)
    return (carrier ^ highest).view(torch.uint64)


def to_bytes(tensor: Tensor) -> Tensor:
    """The tensor's data, `(bytes,)` in uint8; may share its memory."""
    own = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return own.reshape(-1).view(torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The tensor of which `to_bytes` made `data`."""
    return data.view(dtype).reshape(tuple(shape))


def pack(value: Any) -> tuple[str, list[Any]]:
    """What a broadcast tells before the tensors: a JSON text for `unpack`; and the tensors.

    The text holds a problem instead where the value cannot be sent.
    """
    leaves, spec = pytree.tree_flatten(value)
    problem = call_on("broadcast", leaves, spec).problem
    try:
        structure = pytree.treespec_dumps(spec)
        survives = pytree.treespec_loads(structure) == spec
    except Exception:  # whatever a node's own serialisation raises
        survives = False
    if problem is None and not survives:
        problem = (
            "world.broadcast of a nest",
            f"its structure cannot be sent: {spec}",
            "send plain dictionaries with text as keys, lists and tuples",
        )
    if problem is not None:
        return json.dumps({"error": problem}), []
    forms = [
        {"shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch.")}
        if isinstance(x, Tensor)
        else x
        for x in leaves
    ]
    text = json.dumps({"leaves": forms, "structure": structure})
    return text, [x for x in leaves if isinstance(x, Tensor)]
