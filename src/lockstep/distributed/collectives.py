"""Collectives on tensors, numbers and nests of them; on one process they are the identity.

Before any data moves, the ranks compare a digest of which collective each of them called and what
it brought (one 16-byte all-gather on the CPU side, the same for every collective). Where they
agree, which is nearly always, that is all; where they do not, every rank learns what every other
called, and either the difference is harmless (a rank whose loop had no batch brings the number 0
instead of a tensor) or all of them raise the same error. The alternative is what c10d does: wrong
numbers, a hang, an aborted process, or a message without a name.

Communication pattern, after the digest: `barrier` nothing; `exchange` one all-gather of lengths and
first bytes, and where a text is longer one of the rest, padded; `sum`, `mean`, `max` and `min` one
all-reduce for each tensor, all numbers of a nest travelling in one exchange; `gather` one
all-gather for each tensor, padded to the longest first dimension; `broadcast` one exchange and one
broadcast for each tensor.

Gloo and NCCL each take some of torch's dtypes only. What is merely moved travels as bytes, exact
for every dtype; what is reduced travels in the nearest dtype that both can reduce.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.communication import routing
from lockstep.distributed.topology import DataParallelRank, Topology
from lockstep.distributed.torch_compat import pytree
from lockstep.errors import CheckpointError, LockstepError, RanksDifferError, UsageError
from lockstep.user_code import user_call
from lockstep.wording import format_ranks, group_by_key

Number = bool | int | float

_CARRIERS = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.float8_e8m0fnu: torch.float32,
}
"""In what is reduced that torch or a backend cannot compute with."""

_LENGTH, _FIRST_BYTES = struct.Struct("=q"), 120
"""What goes ahead in an exchange: the length of a rank's text, and so much of it; numbers, and what
ranks mostly tell each other, are no longer."""

Problem = tuple[str, str, str]
"""The parts of a `UsageError`."""


class Collectives:
    """The collectives of one run.

    Args:
        topology: this process's place.
        device: where CUDA backends need their tensors; CPU tensors stay on the CPU.
    """

    def __init__(self, topology: Topology, device: torch.device) -> None:
        self.topology = topology
        self.device = device
        self.data_parallel = DataParallelRank(topology.rank, topology.size)
        """What this rank computes of a global batch; the strategy may say otherwise."""
        self.blocked: str | None = None
        """Why a collective would hang just now (set by an evaluation loop), or None."""
        self.in_turn = False
        """Whether this rank is inside of `main_process_first`, where other ranks are not."""
        self.summed: Callable[[Sequence[Any], Sequence[Any]], None] = _no_history
        """Called on all ranks with the leaves that this rank brought to a sum, and the sums."""
        self.history: Callable[[], Any] = _no_history
        """Gives what should have gone alike on all ranks since they were compared, as JSON. Each
        collective compares it, as a part of its digest."""
        self.whole_history: Callable[[], Any] = _no_history
        """Gives what `compare_histories` needs of each rank, as JSON."""
        self.compare_histories: Callable[[list[Any]], None] = _no_history
        """Called on all ranks, in the same collective, with what each rank's `whole_history` gave,
        where their calls or histories differ."""

    @property
    def alone(self) -> bool:
        """True on one process."""
        return self.topology.size == 1

    @property
    def contributes(self) -> bool:
        """Whether this rank's values count in reductions and gathers: see `DataParallelRank`."""
        return self.topology.rank < self.data_parallel.size

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value (JSON: tuples come back as lists), in the order of the ranks."""
        self._open(CallDescription("exchange"))
        return self._exchange(value)

    def sum(self, value: Any) -> Any:
        """The sum over ranks of every leaf: tensors of one shape everywhere, numbers exactly.

        Booleans are counted: they become integers, tensors of them int64. Other dtypes stay.
        """
        counted = pytree.tree_map(countable, value)
        return self._reduce("sum", counted, sum)

    def max(self, value: Any) -> Any:
        """The largest over ranks of every leaf; NaN where any rank has NaN."""
        return self._reduce("max", value, partial(_nan_or, max))

    def min(self, value: Any) -> Any:
        """The smallest over ranks of every leaf; NaN where any rank has NaN."""
        return self._reduce("min", value, partial(_nan_or, min))

    def mean(self, value: Any) -> Any:
        """The mean over ranks of every leaf; integer leaves become floating point."""
        total = self._reduce("mean", pytree.tree_map(real, value), sum)
        count = self.data_parallel.size
        return pytree.tree_map(lambda x: divided(x, count), total)

    def gather(self, value: Any, *, gradient: bool = False) -> Any:
        """The leaves of every rank that counts, on all ranks.

        Tensors of shape `(n_r, *)` are joined to `(sum of n_r, *)` in the order of the ranks,
        0-dimensional ones stacked to `(size,)`; numbers and texts become lists.

        Args:
            value: a tensor, a number, a text, or a nest of them.
            gradient: the result carries gradients back to the tensors of every rank. The gradient
                of a rank's rows is the sum of what the losses of all ranks have by these rows (one
                all-reduce in the backward pass, in which all ranks must take part).
        """
        leaves, spec = pytree.tree_flatten(value)
        call = call_on("gather", leaves, spec)
        described = self._open(call, same_but_first_dimension)
        gathered: list[Any] = []
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                lengths = [row[place].shape[:1] for row in described]
                if gradient and not self.alone and leaf.requires_grad and torch.is_grad_enabled():
                    joined: Any = _GatherWithGradient.apply(leaf, self, lengths)  # type: ignore[no-untyped-call]
                    gathered.append(joined)
                else:
                    gathered.append(self._gather_tensor(leaf, lengths))
            else:
                gathered.append(self._exchange(leaf)[: self.data_parallel.size])
        return pytree.tree_unflatten(gathered, spec)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Rank `source`'s value on every rank; what the others pass is ignored (None will do).

        It may hold what `gather` takes and None.
        """
        if self.alone:
            return value
        form: dict[str, Any] = {}
        tensors: list[Tensor] = []
        problem = None
        if type(source) is not int or not 0 <= source < self.topology.size:
            problem = (
                f"world.broadcast(..., source={source!r})",
                f"it is not the number of a rank: there are {self.topology.size} of them",
                f"give an integer from 0 to {self.topology.size - 1}",
            )
        elif self.topology.rank == source:
            form, tensors, problem = pack(value)
        self._open(CallDescription("broadcast", f"from rank {source}", problem=problem))
        sent = self._exchange(form)[source]
        received = []
        for leaf in sent["leaves"]:
            if isinstance(leaf, list):  # a `Leaf`, after JSON
                own = tensors.pop(0) if tensors else None
                leaf = self._broadcast_tensor(own, Leaf(*leaf), source)
            received.append(leaf)
        return pytree.tree_unflatten(received, pytree.treespec_loads(sent["structure"]))

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        if not self.alone:
            self._open(CallDescription("barrier"))

    def _reduce(self, name: str, value: Any, combine: Callable[[list[Number]], Number]) -> Any:
        leaves, spec = pytree.tree_flatten(value)
        described = self._open(call_on(name, leaves, spec), same_or_numbers)
        if self.alone:
            return value
        columns = list(zip(*described, strict=True))
        places = [p for p, column in enumerate(columns) if all(leaf.is_number for leaf in column)]
        mine = [x.item() if isinstance(x := leaves[p], Tensor) else x for p in places]
        rows = self._exchange(mine)[: self.data_parallel.size] if places else []
        numbers = {p: combine([row[i] for row in rows]) for i, p in enumerate(places)}
        operation = getattr(dist.ReduceOp, "SUM" if name == "mean" else name.upper())
        reduced = []
        for place, leaf in enumerate(leaves):
            if place in numbers:
                check_result(name, numbers[place], columns[place])
                reduced.append(number_like(leaf, numbers[place], columns[place]))
            else:
                own = leaf if self.contributes else identity_element(leaf, operation)
                reduced.append(all_reduced(own, operation))
        if name == "sum":
            self.summed(leaves, reduced)
        return pytree.tree_unflatten(reduced, spec)

    def _open(
        self, call: CallDescription, fits: Callable[[Sequence[Leaf]], bool] | None = None
    ) -> list[tuple[Leaf, ...]]:
        """Opens any collective; what every rank brought, one row a rank.

        Raises on all ranks where the calls differ, or a rank cannot take part. A difference in
        leaves is none where `fits` takes every column of them.
        """
        if self.blocked is not None and call.name != "exchange":
            raise UsageError(
                f"world.{call.name} in the body of an evaluation loop",
                self.blocked,
                "sum up inside the loop and call the collective once, after it",
            )
        self.check_turn(f"{call.name} {call.detail}".rstrip())
        history = self.history()
        if self.alone or self._all_agree(call, history):
            return self._of_all(call)
        told = self._exchange([call._replace(by_user=user_call()), self.whole_history()])
        calls = [CallDescription.from_json(other) for other, _ in told]
        self.compare_histories([other for _, other in told])
        if len({other._replace(by_user=None) for other in calls}) == 1:
            return self._of_all(call)
        if len({other.name for other in calls}) == 1:
            for rank, other in enumerate(calls):
                if other.problem is not None:
                    was_set, found, do = other.problem
                    raise UsageError(was_set, f"rank {rank}: {found}", do)
        rows = [other.leaves for other in calls]
        alike = len({(other.name, other.detail, other.structure) for other in calls}) == 1
        if alike and fits is not None and all(fits(c) for c in zip(*rows, strict=True)):
            return rows
        raise _differ(calls)

    def _of_all(self, call: CallDescription) -> list[tuple[Leaf, ...]]:
        """What every rank brought, where all have made the same call."""
        if call.problem is not None:
            raise UsageError(*call.problem)
        return [call.leaves] * self.topology.size

    def _all_agree(self, call: CallDescription, history: Any) -> bool:
        """Whether all ranks make the same call, with the same history before it.

        Raises:
            RanksDifferError: this rank has met ranks that do something else than a collective of
                Lockstep's, such as averaging gradients.
        """
        text = json.dumps([call, history])
        mine = _as_tensor(hashlib.md5(text.encode(), usedforsecurity=False).digest())
        try:
            digests = self._all_gather(mine)
        except RanksDifferError as error:
            called = user_call()
            if called is None:
                raise
            raise RanksDifferError(
                f"{called} on some ranks only", error.found, _call_on_all_ranks([called])
            ) from error
        return bool((digests == mine).all())

    def check_turn(self, doing: str) -> None:
        """Raises UsageError inside of `main_process_first`, where other ranks are not."""
        if self.in_turn:
            raise UsageError(
                f"{doing} inside of `with world.main_process_first()`",
                "all ranks do it together, and they run this block one after the other",
                "move it behind the block",
            )

    def _exchange(self, value: Any) -> list[Any]:
        text = json.dumps(value)
        if self.alone:
            return [json.loads(text)]
        data = text.encode()
        first = _LENGTH.pack(len(data)) + data[:_FIRST_BYTES].ljust(_FIRST_BYTES)
        heads = list(map(bytes, self._all_gather(_as_tensor(first)).tolist()))
        lengths = [_LENGTH.unpack_from(head)[0] for head in heads]
        texts = [head[_LENGTH.size :] for head in heads]
        if max(lengths) > _FIRST_BYTES:
            rest = [max(0, length - _FIRST_BYTES) for length in lengths]
            parts = self._all_gather_padded(_as_tensor(data[_FIRST_BYTES:]), rest)
            texts = [text + bytes(part.tolist()) for text, part in zip(texts, parts, strict=True)]
        return list(map(json.loads, texts))

    def _all_gather(self, tensor: Tensor) -> Tensor:
        """One row a rank."""
        rows = tensor.new_empty(self.topology.size, *tensor.shape)
        routing.all_gather(rows, tensor)
        return rows

    def _all_gather_padded(self, data: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        padded = data.new_zeros(max(lengths))
        padded[: len(data)] = data
        gathered = self._all_gather(padded)
        return [row[:n] for row, n in zip(gathered, lengths, strict=True)]

    def _gather_tensor(self, tensor: Tensor, lengths: list[tuple[int, ...]]) -> Tensor:
        rows = tensor.detach() if tensor.dim() else tensor.detach().reshape(1)
        if self.alone:
            return tensor if tensor.dim() else rows
        rows = rows if self.contributes else rows[:0]
        counts = [length[0] if length else 1 for length in lengths]
        counts[self.data_parallel.size :] = [0] * (len(counts) - self.data_parallel.size)
        width = rows.shape[1:].numel() * rows.element_size()
        joined = torch.cat(self._all_gather_padded(to_bytes(rows), [n * width for n in counts]))
        return from_bytes(joined, rows.dtype, (sum(counts), *rows.shape[1:]))

    def first_row(self, lengths: Sequence[tuple[int, ...]]) -> int:
        """Where the rows of this rank begin in what is gathered from tensors of these lengths."""
        return sum(length[0] if length else 1 for length in lengths[: self.topology.rank])

    def _broadcast_tensor(self, own: Tensor | None, leaf: Leaf, source: int) -> Tensor:
        dtype, shape = getattr(torch, leaf.dtype), torch.Size(leaf.shape)
        # The source may hold it on the CPU while the others, who hold nothing, use their device.
        if own is None:
            size = shape.numel() * dtype.itemsize
            carrier = torch.empty(size, dtype=torch.uint8, device=self.device)
        else:
            carrier = to_bytes(own).to(self.device, copy=True)
        routing.broadcast(carrier, source)
        received = from_bytes(carrier, dtype, shape)
        return received if own is None else received.to(own.device)


def _no_history(*_: Any) -> None:
    """There is no history to tell or to compare."""


class _GatherWithGradient(torch.autograd.Function):
    """An all-gather and its adjoint.

    What is minimised is the mean over ranks of their losses, each times its weight, and DDP or FSDP
    takes that mean. The rows of a rank are part of the loss of every rank, so their gradient is the
    sum over ranks; then the mean is exact for parts of any sizes, whether each rank computes the
    loss of the whole batch or of its own rows against all.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, collectives: Collectives, lengths: list[tuple[int, ...]]
    ) -> Tensor:
        ctx.shape = tensor.shape
        ctx.first = collectives.first_row(lengths)
        return collectives._gather_tensor(tensor, lengths)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        total = all_reduced(gradient, dist.ReduceOp.SUM)
        count = ctx.shape[0] if ctx.shape else 1
        return total[ctx.first : ctx.first + count].reshape(ctx.shape), None, None


T = TypeVar("T")


def run_on_all_ranks(collectives: Collectives, doing: str, work: Callable[[], T]) -> T:
    """Runs `work` on every rank; see `exchange_on_all_ranks`."""
    return exchange_on_all_ranks(collectives, doing, lambda: (work(), None))[0]


def exchange_on_all_ranks(
    collectives: Collectives,
    doing: str,
    work: Callable[[], tuple[T, Any]],
    kind: type[LockstepError] = CheckpointError,
) -> tuple[T, list[Any]]:
    """Runs `work` on every rank: its own result, and what each rank tells all.

    Communication: one exchange of text, which carries what went wrong too.

    Args:
        collectives: of the run.
        doing: what this is, for messages.
        work: gives this rank's result, and JSON for all ranks.
        kind: of the error that the other ranks raise.

    Raises:
        LockstepError: of that kind, what `work` has raised on another rank; its own error as it is.
        UsageError: in the body of an evaluation loop.
    """
    if collectives.blocked is not None:
        raise UsageError(
            f"{doing} in the body of an evaluation loop",
            collectives.blocked,
            "do it after the loop",
        )
    failure: Exception | None = None
    try:
        result, told = work()
        answer: dict[str, Any] = {"told": told}
    except LockstepError as error:
        failure, answer = error, {"error": (error.was_set, error.found, error.do)}
    except Exception as error:  # whatever it is, the others must not wait for this rank
        found = f"{type(error).__name__}: {error}"
        failure, answer = error, {"error": (doing, found, "see the traceback of that rank")}
    answers = collectives.exchange(answer)
    if failure is not None:
        raise failure
    for rank, heard in enumerate(answers):
        if "error" in heard:
            was_set, found, do = heard["error"]
            raise kind(was_set, f"rank {rank}: {found}", do)
    return result, [heard["told"] for heard in answers]


def check_same_metric(was_set: str, values: Sequence[Any], code: str | None = None) -> None:
    """Raises RanksDifferError where the ranks, in their order, give different values of a metric.

    NaN is the same as NaN.
    """
    if len(set(map(str, values))) > 1:
        raise RanksDifferError(
            was_set,
            ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values)),
            "give it a value that is equal everywhere: world.mean(metric) or world.sum(...)",
            code=code,
        )


def _differ(calls: Sequence[CallDescription]) -> RanksDifferError:
    """The error of ranks that do not make the same call; `calls` has one for each rank."""
    names = list(dict.fromkeys(call.name for call in calls))
    by_user = [call.by_user or _in_script(call.name) for call in calls]
    structures = len({call.structure for call in calls}) > 1 and len(names) == 1
    found = []
    for rank, call in enumerate(calls):
        # An exchange of Lockstep's own says nothing to users; what they called says it.
        described = call.by_user if call.name == "exchange" and call.by_user else str(call)
        structure = f" in {call.structure}" if structures else ""
        found.append(f"rank {rank}: {described}{structure}")
    of_user = group_by_key(zip(by_user, range(len(calls)), strict=True))
    if len(of_user) > 1:
        # A barrier waits for whatever the other ranks do, and is rarely what is wrong.
        ordered = sorted(of_user, key=lambda name: name == "world.barrier()")
        was_set = ", ".join(f"{name} on {format_ranks(of_user[name])}" for name in ordered)
        return RanksDifferError(was_set, "; ".join(found), _call_on_all_ranks(ordered))
    return RanksDifferError(
        by_user[0].removesuffix("()") if len(names) == 1 else f"collectives: {' and '.join(names)}",
        "; ".join(found),
        "call the same collective with the same structure, shapes and types on every rank",
    )


def _call_on_all_ranks(called: Sequence[str]) -> str:
    """Advice where ranks call different things."""
    if len(called) == 1:
        return f"all ranks must call {called[0]}: take it out of `if world.is_main:`"
    return (
        f"all ranks must call {' and '.join(called)}, in the same order: take what only some ranks "
        "call out of `if world.is_main:`"
    )


def _in_script(name: str) -> str:
    """What a script calls to make a collective of this name."""
    return "a collective of Lockstep's own" if name == "exchange" else f"world.{name}()"


# What a rank brings to a collective: its description, and the forms in which it can travel


class Leaf(NamedTuple):
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


class CallDescription(NamedTuple):
    """One rank's call of a collective, as the ranks tell it to each other."""

    name: str
    detail: str = ""
    structure: str = ""
    leaves: tuple[Leaf, ...] = ()
    problem: Problem | None = None
    """Why this rank cannot take part; all ranks raise it."""
    by_user: str | None = None
    """What the user's line has called, such as "checkpoint.save()"; None: not known, not asked."""

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> CallDescription:
        """From its fields, as JSON gives them back."""
        name, detail, structure, leaves, problem, by_user = fields
        rows = tuple(Leaf(kind, dtype, tuple(shape)) for kind, dtype, shape in leaves)
        return cls(name, detail, structure, rows, problem and tuple(problem), by_user)

    def __str__(self) -> str:
        brought = f"of {', '.join(map(str, self.leaves)) or 'nothing'}" if self.structure else ""
        return " ".join(part for part in (self.name, self.detail, brought) if part)


def call_on(name: str, leaves: Sequence[Any], spec: pytree.TreeSpec) -> CallDescription:
    """The call of collective `name` on a flattened nest."""
    problems = (problem_with(name, leaf) for leaf in leaves)
    problem = next((p for p in problems if p is not None), None)
    return CallDescription(name, "", str(spec), tuple(_describe(leaf) for leaf in leaves), problem)


def identity_element(leaf: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    """What changes nothing in a reduction, like `leaf` in shape and dtype."""
    if operation == dist.ReduceOp.SUM:
        return torch.zeros_like(leaf)
    largest = operation == dist.ReduceOp.MIN
    if leaf.dtype == torch.bool:
        return torch.full_like(leaf, largest)
    if leaf.is_floating_point() and leaf.itemsize > 1:
        return torch.full_like(leaf, torch.inf if largest else -torch.inf)
    # Some floating-point dtypes of 8 bits have no infinity.
    limits = torch.finfo(leaf.dtype) if leaf.is_floating_point() else torch.iinfo(leaf.dtype)
    return torch.full_like(leaf, limits.max if largest else limits.min)


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
        if isinstance(leaf, float) or leaf.bit_length() < 64 or name == "broadcast":
            return None
        return (
            f"a collective on an integer of {leaf.bit_length()} bits",
            "it does not fit into 64 bits",
            "reduce it as a float, or as two integers",
        )
    is_text = isinstance(leaf, str) and name in {"gather", "broadcast"}
    if is_text or (leaf is None and name == "broadcast"):
        return None
    return (
        f"a collective on a {type(leaf).__name__}",
        "collectives take tensors, numbers, text (gather and broadcast) and nests of them",
        "convert it first, for example with torch.as_tensor",
    )


def _problem_with_tensor(name: str, tensor: Tensor) -> Problem | None:
    was_set = f"world.{name} of a tensor of {tensor.dtype}"
    if not (_is_computed_with(tensor.dtype) or tensor.dtype in _CARRIERS):
        return was_set, "no backend can carry this dtype", "convert it first"
    if tensor.layout is not torch.strided or tensor.is_meta:
        return was_set, "it is sparse, or has no data", "convert it first, with .to_dense()"
    if name in {"max", "min"} and tensor.is_complex():
        return was_set, "complex numbers have no order", f"take the {name}imum of its .abs()"
    return None


def _is_computed_with(dtype: torch.dtype) -> bool:
    """False of quantized ones, those of a few bits, and those that are storage alone."""
    try:
        return torch.promote_types(dtype, torch.bool) is not None
    except RuntimeError:
        return False


def _describe(leaf: Any) -> Leaf:
    if isinstance(leaf, Tensor):
        return Leaf("tensor", str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape))
    kinds = ((int, "int"), (float, "float"), (str, "text"))  # a bool is an int
    names = (name for kind, name in kinds if isinstance(leaf, kind))
    return Leaf(next(names, type(leaf).__name__))


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


def number_like(leaf: Any, number: Number, column: Sequence[Leaf]) -> Any:
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


def check_result(name: str, number: Number, column: Sequence[Leaf]) -> None:
    """Raises UsageError where a number does not fit what some rank brought; alike on all ranks."""
    for leaf in column if type(number) is int else ():
        if leaf.kind != "tensor" or leaf.is_real or leaf.dtype == "bool":
            continue
        limits = torch.iinfo(getattr(torch, leaf.dtype))
        if not limits.min <= number <= limits.max:
            raise UsageError(
                f"world.{name} of 0-dimensional {leaf.dtype} tensors",
                f"the result, {number}, does not fit into {leaf.dtype}",
                "convert them to a wider dtype, or to plain numbers",
            )


def all_reduced(tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    """The reduction of a tensor of any sendable dtype; integers wrap as in torch's addition."""
    own = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if own.dtype is not torch.uint64:
        carrier = own.to(_CARRIERS.get(own.dtype, own.dtype), copy=True)
        if carrier.is_floating_point() and operation != dist.ReduceOp.SUM:
            return _extreme_or_nan(carrier, operation).to(own.dtype)
        routing.all_reduce(carrier, operation)
        return carrier.to(own.dtype)
    # Modulo 2**64 sums are the same, signed or not; for the order the highest bit is turned over.
    highest = 0 if operation == dist.ReduceOp.SUM else -(2**63)
    carrier = own.view(torch.int64) ^ highest
    routing.all_reduce(carrier, operation)
    return (carrier ^ highest).view(torch.uint64)


def _extreme_or_nan(tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    """The largest or smallest over ranks; NaN where any rank has NaN.

    Backends give NaN or the number, by the order in which ranks come. So NaN travels beside the
    numbers, as 1 for a maximum and as -1 for a minimum.
    """
    is_nan = tensor.isnan()
    sign = 1 if operation == dist.ReduceOp.MAX else -1
    numbers = tensor.masked_fill(is_nan, -sign * torch.inf)
    both = torch.stack([numbers, sign * is_nan.to(tensor.dtype)])
    routing.all_reduce(both, operation)
    return torch.where(both[1] == 0, both[0], torch.nan)


def _nan_or(choose: Callable[[list[Number]], Number], numbers: list[Number]) -> Number:
    """The chosen number, or NaN if one of them is NaN: Python's max and min go by the order."""
    return math.nan if any(map(math.isnan, numbers)) else choose(numbers)


def _as_tensor(data: bytes) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def to_bytes(tensor: Tensor) -> Tensor:
    """The tensor's data, `(bytes,)` in uint8; may share its memory."""
    own = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = own.reshape(-1) if own.numel() else own.new_empty(0)  # an empty one may have any stride
    return flat.view(torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The tensor of which `to_bytes` made `data`."""
    return data.view(dtype).reshape(tuple(shape))


def pack(value: Any) -> tuple[dict[str, Any], list[Tensor], Problem | None]:
    """What a broadcast sends: first a form for JSON, which says what is where; then the tensors.

    And why the value cannot be sent, or None.
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
        return {}, [], problem
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    forms = [_describe(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return {"leaves": forms, "structure": structure}, tensors, None
