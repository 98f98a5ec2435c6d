"""Collectives on tensors, numbers and nests of them; on one process they are the identity.

Before any data moves, the ranks compare a digest of what each of them brought (one 16-byte
all-gather on the CPU side). Where they agree, which is nearly always, that is all; where they do
not, every rank learns what every other brought, and either the difference is harmless (a rank
whose loop had no batch brings the number 0 instead of a tensor) or all of them raise the same
error. The alternative is what c10d does: wrong numbers, a hang, or a message without a name.

Communication pattern: `exchange` is two all-gathers (lengths, padded bytes); `sum`, `mean` and
`max` are the digest and one all-reduce for each tensor, all numbers of a nest travelling in one;
`gather` pads to the longest first dimension; `broadcast` is one exchange and one broadcast for
each tensor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from lockstep.errors import RanksDifferError, UsageError
from lockstep.topology import Topology

Number = bool | int | float
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True)
class _Leaf:
    """What one rank brought at one place of a nest."""

    kind: str
    """`tensor`, `int`, `float` or `text`."""
    dtype: str = ""
    shape: tuple[int, ...] = ()

    @property
    def is_number(self) -> bool:
        return self.kind in {"int", "float"} or (self.kind == "tensor" and not self.shape)

    @property
    def is_real(self) -> bool:
        return self.kind == "float" or "float" in self.dtype

    def __str__(self) -> str:
        return self.kind if self.kind != "tensor" else f"{self.dtype}{list(self.shape)}"


def _describe(leaf: Any) -> _Leaf:
    if isinstance(leaf, Tensor):
        return _Leaf("tensor", str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape))
    if isinstance(leaf, float):
        return _Leaf("float")
    if isinstance(leaf, bool | int):
        if abs(leaf) > _INT64_MAX:
            raise UsageError(
                f"a collective on the integer {leaf}",
                "it does not fit into 64 bits",
                "reduce it as a float, or as two integers",
            )
        return _Leaf("int")
    if isinstance(leaf, str):
        return _Leaf("text")
    raise UsageError(
        f"a collective on a {type(leaf).__name__}",
        "collectives take tensors, numbers, text (gather and broadcast) and nests of them",
        "convert it first, for example with torch.as_tensor",
    )


class Collectives:
    """The collectives of one run.

    Args:
        topology: this process's place.
        device: where CUDA backends need their tensors; CPU tensors stay on the CPU.
    """

    def __init__(self, topology: Topology, device: torch.device) -> None:
        self.topology = topology
        self.device = device
        self.blocked: str | None = None
        """Why a collective would hang just now (set by an evaluation loop), or None."""

    @property
    def alone(self) -> bool:
        """True on one process."""
        return self.topology.size == 1

    def exchange(self, text: str) -> list[str]:
        """Every rank's text, in the order of the ranks."""
        if self.alone:
            return [text]
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        lengths = self._all_gather(torch.tensor([len(data)]))
        padded = torch.zeros(max(int(n) for n in lengths), dtype=torch.uint8)
        padded[: len(data)] = data
        parts = self._all_gather(padded)
        return [
            bytes(part[: int(n)].tolist()).decode() for part, n in zip(parts, lengths, strict=True)
        ]

    def sum(self, value: Any) -> Any:
        """The sum over ranks of every leaf: tensors of one shape everywhere, numbers exactly."""
        return self._reduce("sum", value, lambda rows: sum(rows))

    def max(self, value: Any) -> Any:
        """The largest over ranks of every leaf."""
        return self._reduce("max", value, lambda rows: max(rows))

    def mean(self, value: Any) -> Any:
        """The mean over ranks of every leaf; integer leaves become floating point."""
        real = pytree.tree_map(
            lambda x: (
                x.to(torch.get_default_dtype())
                if isinstance(x, Tensor) and not (x.is_floating_point() or x.is_complex())
                else (float(x) if isinstance(x, bool | int) else x)
            ),
            value,
        )
        size = self.topology.size
        return pytree.tree_map(lambda x: x / size, self.sum(real))

    def gather(self, value: Any) -> Any:
        """Every rank's leaves, on all ranks.

        Tensors of shape `(n_r, *)` are joined to `(sum of n_r, *)` in the order of the ranks,
        0-dimensional ones stacked to `(size,)`; numbers and texts become lists.
        """
        leaves, spec = pytree.tree_flatten(value)
        described = self._agree("gather", leaves, spec, _same_but_first_dimension)
        gathered: list[Any] = []
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                lengths = [row[place].shape[:1] for row in described]
                gathered.append(self._gather_tensor(leaf, lengths))
            elif isinstance(leaf, str):
                gathered.append(self.exchange(leaf))
            else:
                gathered.append([_number(x) for x in self.exchange(json.dumps(leaf))])
        return pytree.tree_unflatten(gathered, spec)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Rank `source`'s value on every rank; what the others pass is ignored (None will do)."""
        if self.alone:
            return value
        self._check_blocked("broadcast")
        mine = self.topology.rank == source
        leaves, spec = pytree.tree_flatten(value)
        packed = [
            {"shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch.")}
            if isinstance(x, Tensor)
            else x
            for x in leaves
        ]
        text = json.dumps([packed, pytree.treespec_dumps(spec)]) if mine else ""
        packed, dumped = json.loads(self.exchange(text)[source])
        received = []
        for place, leaf in enumerate(packed):
            if isinstance(leaf, dict):
                received.append(self._broadcast_tensor(leaves[place] if mine else leaf, source))
            else:
                received.append(leaf)
        return pytree.tree_unflatten(received, pytree.treespec_loads(dumped))

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        if not self.alone:
            self._check_blocked("barrier")
            self._all_gather(torch.zeros(1, dtype=torch.uint8))

    def _reduce(self, name: str, value: Any, combine: Callable[[list[Number]], Number]) -> Any:
        leaves, spec = pytree.tree_flatten(value)
        described = self._agree(name, leaves, spec, _same_or_numbers)
        if self.alone:
            return value
        places = [p for p in range(len(leaves)) if all(row[p].is_number for row in described)]
        mine = [x.item() if isinstance(x := leaves[p], Tensor) else x for p in places]
        rows = [json.loads(row) for row in self.exchange(json.dumps(mine))] if places else []
        reduced = list(leaves)
        for column, place in enumerate(places):
            number = combine([row[column] for row in rows])
            leaf = leaves[place]
            reduced[place] = (
                torch.tensor(number, dtype=leaf.dtype, device=leaf.device)
                if isinstance(leaf, Tensor)
                else number
            )
        for place in set(range(len(leaves))) - set(places):
            tensor = leaves[place].detach().contiguous().clone()
            operation = dist.ReduceOp.SUM if name == "sum" else dist.ReduceOp.MAX
            dist.all_reduce(tensor, operation)
            reduced[place] = tensor
        return pytree.tree_unflatten(reduced, spec)

    def _agree(
        self,
        name: str,
        leaves: list[Any],
        spec: pytree.TreeSpec,
        fits: Callable[[Sequence[_Leaf]], bool],
    ) -> list[list[_Leaf]]:
        """What every rank brought, one row a rank; raises on all ranks where it does not fit."""
        self._check_blocked(name)
        mine = [_describe(leaf) for leaf in leaves]
        if self.alone:
            return [mine]
        text = json.dumps([name, str(spec), [[x.kind, x.dtype, x.shape] for x in mine]])
        digest = torch.tensor(list(hashlib.md5(text.encode(), usedforsecurity=False).digest()))
        if all(torch.equal(other, digest) for other in self._all_gather(digest.to(torch.uint8))):
            return [mine] * self.topology.size
        heard = [json.loads(row) for row in self.exchange(text)]
        rows = [[_Leaf(k, d, tuple(s)) for k, d, s in row[2]] for row in heard]
        same_call = all(row[:2] == heard[0][:2] for row in heard)
        if same_call and all(fits(column) for column in zip(*rows, strict=True)):
            return rows
        brought = "; ".join(
            f"rank {rank}: {row[0]} of {', '.join(map(str, leaves)) or 'nothing'}"
            for rank, (row, leaves) in enumerate(zip(heard, rows, strict=True))
        )
        raise RanksDifferError(
            f"world.{name}",
            brought,
            "call the same collective with the same structure, shapes and types on every rank",
        )

    def _check_blocked(self, name: str) -> None:
        if self.blocked is not None:
            raise UsageError(
                f"world.{name} in the body of an evaluation loop",
                self.blocked,
                "sum up inside the loop and call the collective once, after it",
            )

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.topology.size)]
        dist.all_gather(parts, tensor)
        return parts

    def _gather_tensor(self, tensor: Tensor, lengths: list[tuple[int, ...]]) -> Tensor:
        if self.alone:
            return tensor if tensor.dim() else tensor.reshape(1)
        rows = tensor.detach() if tensor.dim() else tensor.detach().reshape(1)
        counts = [length[0] if length else 1 for length in lengths]
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: len(rows)] = rows
        parts = self._all_gather(padded)
        return torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])

    def _broadcast_tensor(self, leaf: Tensor | dict[str, Any], source: int) -> Tensor:
        if isinstance(leaf, Tensor):
            tensor = leaf.detach().contiguous().clone()
        else:
            dtype = getattr(torch, leaf["dtype"])
            tensor = torch.empty(leaf["shape"], dtype=dtype, device=self.device)
        # The source may hold it on the CPU while the others, who hold nothing, use their device.
        carrier = tensor.to(self.device)
        dist.broadcast(carrier, source)
        return carrier.to(tensor.device)


def _same_or_numbers(column: Sequence[_Leaf]) -> bool:
    numbers = all(leaf.is_number for leaf in column)
    return numbers or (len(set(column)) == 1 and column[0].kind != "text")


def _same_but_first_dimension(column: Sequence[_Leaf]) -> bool:
    return len({(x.kind, x.dtype, len(x.shape), x.shape[1:]) for x in column}) == 1


def _number(text: str) -> Number:
    value: Number = json.loads(text)
    return value
