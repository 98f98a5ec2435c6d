"""Collectives on tensors, numbers and nests of them; on one process they are the identity.

Before any data moves, the ranks compare a digest of which collective each of them called and what
it brought (one 16-byte all-gather on the CPU side, the same for every collective). Where they
agree, which is nearly always, that is all; where they do not, every rank learns what every other
called, and either the difference is harmless (a rank whose loop had no batch brings the number 0
instead of a tensor) or all of them raise the same error. The alternative is what c10d does: wrong
numbers, a hang, an aborted process, or a message without a name.

Communication pattern, after the digest: `barrier` nothing; `exchange` two all-gathers (lengths,
padded bytes); `sum`, `mean` and `max` one all-reduce for each tensor, all numbers of a nest
travelling in one exchange; `gather` one all-gather for each tensor, padded to the longest first
dimension; `broadcast` one exchange and one broadcast for each tensor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from lockstep.errors import RanksDifferError, UsageError
from lockstep.runtime import payload
from lockstep.runtime.payload import Call, Leaf
from lockstep.topology import Part, Topology

Number = bool | int | float


class Collectives:
    """The collectives of one run.

    Args:
        topology: this process's place.
        device: where CUDA backends need their tensors; CPU tensors stay on the CPU.
    """

    def __init__(self, topology: Topology, device: torch.device) -> None:
        self.topology = topology
        self.device = device
        self.part = Part(topology.rank, topology.size)
        """What this rank computes of a global batch; the strategy may say otherwise."""
        self.blocked: str | None = None
        """Why a collective would hang just now (set by an evaluation loop), or None."""
        self.in_turn = False
        """Whether this rank is inside of `main_first`, where other ranks are not."""

    @property
    def alone(self) -> bool:
        """True on one process."""
        return self.topology.size == 1

    @property
    def counts(self) -> bool:
        """Whether this rank's values count in reductions and gathers: see `Part`."""
        return self.topology.rank < self.part.count

    def exchange(self, text: str) -> list[str]:
        """Every rank's text, in the order of the ranks; the texts may differ."""
        self._open(Call("exchange", "(preparing, saving or resuming, for example)"))
        return self._exchange(text)

    def sum(self, value: Any) -> Any:
        """The sum over ranks of every leaf: tensors of one shape everywhere, numbers exactly.

        Booleans are counted: they become integers, tensors of them int64. Other dtypes stay.
        """
        counted = pytree.tree_map(payload.countable, value)
        return self._reduce("sum", counted, lambda rows: sum(rows))

    def max(self, value: Any) -> Any:
        """The largest over ranks of every leaf."""
        return self._reduce("max", value, lambda rows: max(rows))

    def mean(self, value: Any) -> Any:
        """The mean over ranks of every leaf; integer leaves become floating point."""
        total = self._reduce("mean", pytree.tree_map(payload.real, value), lambda rows: sum(rows))
        count = self.part.count
        return pytree.tree_map(lambda x: payload.divided(x, count), total)

    def gather(self, value: Any) -> Any:
        """The leaves of every rank that counts, on all ranks.

        Tensors of shape `(n_r, *)` are joined to `(sum of n_r, *)` in the order of the ranks,
        0-dimensional ones stacked to `(size,)`; numbers and texts become lists.
        """
        self._check_blocked("gather")
        leaves, spec = pytree.tree_flatten(value)
        call = payload.call_on("gather", leaves, spec)
        described = self._open(call, payload.same_but_first_dimension)
        gathered: list[Any] = []
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                lengths = [row[place].shape[:1] for row in described]
                gathered.append(self._gather_tensor(leaf, lengths))
            else:
                texts = self._exchange(json.dumps(leaf))[: self.part.count]
                gathered.append([json.loads(text) for text in texts])
        return pytree.tree_unflatten(gathered, spec)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Rank `source`'s value on every rank; what the others pass is ignored (None will do).

        It may hold what `gather` takes and None.
        """
        if self.alone:
            return value
        self._check_blocked("broadcast")
        problem = None
        if type(source) is not int or not 0 <= source < self.topology.size:
            problem = (
                f"world.broadcast(..., source={source!r})",
                f"it is not the number of a rank: there are {self.topology.size} of them",
                f"give an integer from 0 to {self.topology.size - 1}",
            )
        self._open(Call("broadcast", f"from rank {source}", problem=problem))
        text, tensors = payload.pack(value) if self.topology.rank == source else ("", [])
        sent = json.loads(self._exchange(text)[source])
        if "error" in sent:
            raise _usage_error(source, sent["error"])
        received = []
        for form in sent["leaves"]:
            if isinstance(form, dict):
                own = tensors.pop(0) if tensors else None
                received.append(self._broadcast_tensor(own, form, source))
            else:
                received.append(form)
        return pytree.tree_unflatten(received, pytree.treespec_loads(sent["structure"]))

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        if not self.alone:
            self._check_blocked("barrier")
            self._open(Call("barrier"))

    def _reduce(self, name: str, value: Any, combine: Callable[[list[Number]], Number]) -> Any:
        self._check_blocked(name)
        leaves, spec = pytree.tree_flatten(value)
        described = self._open(payload.call_on(name, leaves, spec), payload.same_or_numbers)
        if self.alone:
            return value
        columns = list(zip(*described, strict=True))
        places = [p for p, column in enumerate(columns) if all(leaf.is_number for leaf in column)]
        mine = [x.item() if isinstance(x := leaves[p], Tensor) else x for p in places]
        texts = self._exchange(json.dumps(mine))[: self.part.count] if places else []
        rows = [json.loads(text) for text in texts]
        numbers = {p: combine([row[i] for row in rows]) for i, p in enumerate(places)}
        for place, number in numbers.items():
            problem = payload.problem_with_result(name, number, columns[place])
            if problem is not None:
                raise UsageError(*problem)
        reduced = [
            payload.number_like(leaf, numbers[place], columns[place])
            if place in numbers
            else self._all_reduce(name, leaf)
            for place, leaf in enumerate(leaves)
        ]
        return pytree.tree_unflatten(reduced, spec)

    def _all_reduce(self, name: str, leaf: Tensor) -> Tensor:
        operation = dist.ReduceOp.MAX if name == "max" else dist.ReduceOp.SUM
        return payload.all_reduced(leaf if self.counts else payload.neutral(leaf, name), operation)

    def _open(
        self, call: Call, fits: Callable[[Sequence[Leaf]], bool] | None = None
    ) -> list[tuple[Leaf, ...]]:
        """Opens any collective; what every rank brought, one row a rank.

        Raises on all ranks where the calls differ, or a rank cannot take part. A difference in
        leaves is none where `fits` takes every column of them.
        """
        if self.alone:
            if call.problem is not None:
                raise UsageError(*call.problem)
            return [call.leaves]
        self.check_turn(f"{call.name} {call.detail}".rstrip())
        text = call.to_text()
        digest = hashlib.md5(text.encode(), usedforsecurity=False).digest()
        mine = torch.tensor(list(digest), dtype=torch.uint8)
        if all(torch.equal(other, mine) for other in self._all_gather(mine)):
            if call.problem is not None:
                raise UsageError(*call.problem)
            return [call.leaves] * self.topology.size
        calls = [Call.from_text(other) for other in self._exchange(text)]
        if len({other.name for other in calls}) == 1:
            for rank, other in enumerate(calls):
                if other.problem is not None:
                    raise _usage_error(rank, other.problem)
        rows = [other.leaves for other in calls]
        alike = len({(other.name, other.detail, other.structure) for other in calls}) == 1
        if alike and fits is not None and all(fits(c) for c in zip(*rows, strict=True)):
            return rows
        raise _differ(calls)

    def check_turn(self, doing: str) -> None:
        """Raises UsageError inside of `main_first`: what all ranks do together never ends there."""
        if self.in_turn:
            raise UsageError(
                f"{doing} inside of `with world.main_first()`",
                "all ranks do it together, and they run this block one after the other",
                "move it behind the block",
            )

    def _check_blocked(self, name: str) -> None:
        if self.blocked is not None:
            raise UsageError(
                f"world.{name} in the body of an evaluation loop",
                self.blocked,
                "sum up inside the loop and call the collective once, after it",
            )

    def _exchange(self, text: str) -> list[str]:
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

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.topology.size)]
        dist.all_gather(parts, tensor)
        return parts

    def _gather_tensor(self, tensor: Tensor, lengths: list[tuple[int, ...]]) -> Tensor:
        rows = tensor.detach() if tensor.dim() else tensor.detach().reshape(1)
        if self.alone:
            return tensor if tensor.dim() else rows
        lengths = lengths[: self.part.count] + [(0,)] * (len(lengths) - self.part.count)
        rows = rows if self.counts else rows[:0]
        counts = [length[0] if length else 1 for length in lengths]
        width = rows.shape[1:].numel() * rows.element_size()
        data = payload.to_bytes(rows)
        padded = data.new_zeros(max(counts) * width)
        padded[: len(data)] = data
        parts = self._all_gather(padded)
        joined = torch.cat([part[: n * width] for part, n in zip(parts, counts, strict=True)])
        return payload.from_bytes(joined, rows.dtype, (sum(counts), *rows.shape[1:]))

    def _broadcast_tensor(self, own: Tensor | None, form: dict[str, Any], source: int) -> Tensor:
        dtype = getattr(torch, form["dtype"])
        shape = torch.Size(form["shape"])
        # The source may hold it on the CPU while the others, who hold nothing, use their device.
        if own is None:
            size = shape.numel() * dtype.itemsize
            carrier = torch.empty(size, dtype=torch.uint8, device=self.device)
        else:
            carrier = payload.to_bytes(own).to(self.device, copy=True)
        dist.broadcast(carrier, source)
        received = payload.from_bytes(carrier, dtype, shape)
        return received if own is None else received.to(own.device)


def _usage_error(rank: int, problem: Sequence[str]) -> UsageError:
    was_set, found, do = problem
    return UsageError(was_set, f"rank {rank}: {found}", do)


def _differ(calls: Sequence[Call]) -> RanksDifferError:
    names = list(dict.fromkeys(call.name for call in calls))
    structures = len({call.structure for call in calls}) > 1 and len(names) == 1
    return RanksDifferError(
        f"world.{names[0]}" if len(names) == 1 else f"collectives: {' and '.join(names)}",
        "; ".join(
            f"rank {rank}: {call}{f' in {call.structure}' if structures else ''}"
            for rank, call in enumerate(calls)
        ),
        "call the same collective with the same structure, shapes and types on every rank",
    )
