"""Collectives on tensors, numbers and nests of them; on one process they are the identity.

A *nest* is a tensor, number or text, or lists and dicts of them; those are its *leaves*. A rank
*contributes* if its values count: all do, but in a pipeline only the first ranks, which hold the
results. Before any data moves, the ranks compare a *digest* of which collective each of them called
and what it passed.

That is one 16-byte all-gather on the CPU side, the same for every collective. If the ranks agree,
which is nearly always, the collective proceeds. If not, every rank learns what every other called,
and either the difference is harmless (a rank whose loop had no batch passes the number 0 instead of
a tensor) or all of them raise the same error. The alternative is what c10d does: wrong numbers, a
hang, an aborted process, or a message without a name.

Communication pattern, after the digest: `barrier` nothing; `exchange` one all-gather of lengths and
first bytes, and where a text is longer one of the rest, padded; `sum`, `mean`, `max` and `min` one
all-reduce for each tensor, all numbers of a nest travelling in one exchange; `gather` one
all-gather for each tensor, padded to the longest first dimension; `broadcast` one exchange and one
broadcast for each tensor.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.communication import routing
from lockstep.distributed.collective_calls import (
    CallDescription,
    LeafDescription,
    PackedNest,
    advise_call_on_all_ranks,
    calls_differ_error,
    can_be_joined,
    can_be_reduced,
    describe_call,
    pack_nest,
)
from lockstep.distributed.reductions import (
    Number,
    all_reduced_copy,
    bool_to_int,
    check_fits,
    divide,
    identity_element,
    max_or_nan,
    min_or_nan,
    number_like,
    to_floating_point,
)
from lockstep.distributed.tensor_bytes import from_bytes, to_bytes
from lockstep.distributed.topology import DataParallelRank, Topology
from lockstep.distributed.torch_compat import pytree
from lockstep.errors import CheckpointError, LockstepError, RanksDifferError, UsageError
from lockstep.user_code import user_call
from lockstep.wording import format_ranks

TEXT_LENGTH = struct.Struct("=q")
"""How an exchange sends the length of a rank's text."""
FIRST_TEXT_BYTES = 120
"""An exchange sends this much of a text together with its length. Numbers, and most of what ranks
tell each other, are no longer."""


class RankHistory(Protocol):
    """What each rank did since the ranks were last compared. It must be equal on all ranks."""

    def history_digest(self) -> Any:
        """Returns, as JSON, a summary that each collective includes in its digest."""

    def history_details(self) -> Any:
        """Returns, as JSON, what `compare_histories` needs of each rank."""

    def compare_histories(self, details_of_ranks: list[Any]) -> None:
        """Called on all ranks if their digests differ, with the details of each rank."""


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
        """What this rank computes of a global batch; the strategy may replace it."""
        self.blocked_reason: str | None = None
        """Why a collective would hang just now (set by an evaluation loop), or None."""
        self.in_main_process_first = False
        """True inside the block of `main_process_first`, where the other ranks are not."""
        self.sum_listeners: list[Callable[[Sequence[Any], Sequence[Any]], None]] = []
        """Called on all ranks with the leaves that this rank passed to a sum, and the sums."""
        self.rank_histories: list[RankHistory] = []
        """What each collective compares besides the call itself."""

    @property
    def single_process(self) -> bool:
        """True if the run has only one process."""
        return self.topology.size == 1

    @property
    def num_contributing_ranks(self) -> int:
        """How many ranks contribute. In a pipeline these are the first ranks; otherwise all."""
        return self.data_parallel.size

    @property
    def contributes(self) -> bool:
        """True if this rank's values count in reductions and gathers (see `DataParallelRank`)."""
        return self.topology.rank < self.num_contributing_ranks

    def exchange(self, value: Any) -> list[Any]:
        """Returns every rank's value, in the order of the ranks.

        Args:
            value: what JSON can hold. Tuples come back as lists.
        """
        self._agree_on_call(CallDescription("exchange"))
        return self._exchange(value)

    def sum(self, value: Any) -> Any:
        """Sums every leaf over the ranks.

        Numbers are summed exactly. Tensors must have the same shape on all ranks and keep their
        dtype; booleans become integers (tensors int64), so that their sum is a count.
        """
        return self._reduce("sum", pytree.tree_map(bool_to_int, value), sum)

    def max(self, value: Any) -> Any:
        """Returns the maximum of every leaf over the ranks; NaN where any rank has NaN."""
        return self._reduce("max", value, max_or_nan)

    def min(self, value: Any) -> Any:
        """Returns the minimum of every leaf over the ranks; NaN where any rank has NaN."""
        return self._reduce("min", value, min_or_nan)

    def mean(self, value: Any) -> Any:
        """Returns the mean of every leaf over the ranks; integers become floating point."""
        total = self._reduce("mean", pytree.tree_map(to_floating_point, value), sum)
        return pytree.tree_map(lambda leaf: divide(leaf, self.num_contributing_ranks), total)

    def gather(self, value: Any, *, gradient: bool = False) -> Any:
        """Returns the leaves of all ranks that contribute, on every rank.

        Tensors of shape `(n_r, *)` are concatenated to `(sum of n_r, *)` in the order of the ranks,
        0-dimensional ones stacked to `(size,)`; numbers and texts become lists of length `size`,
        where `size` is the number of ranks that contribute.

        Args:
            value: a tensor, a number, a text, or a nest of them.
            gradient: the result carries gradients back to the tensors of every rank. The gradient
                of a rank's rows is the sum, over ranks, of the gradients of their losses with
                respect to these rows (one all-reduce in the backward pass, in which all ranks must
                take part).
        """
        leaves, spec = pytree.tree_flatten(value)
        # For each rank the descriptions of its leaves: type, dtype and shape.
        leaves_of_rank = self._agree_on_call(describe_call("gather", leaves, spec), can_be_joined)
        if gradient and not self.single_process:
            leaves = self._with_gradients_alike(leaves)
        gathered: list[Any] = []
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):  # a number or a text
                leaf_of_rank = self._exchange(leaf)
                # The ranks that contribute come first.
                gathered.append(leaf_of_rank[: self.num_contributing_ranks])
                continue
            rows_of_rank = [descriptions[position].num_rows for descriptions in leaves_of_rank]
            needs_gradient = gradient and leaf.requires_grad and torch.is_grad_enabled()
            if needs_gradient and not self.single_process:
                joined: Any = _GatherWithGradient.apply(leaf, self, rows_of_rank)  # type: ignore[no-untyped-call]
                gathered.append(joined)
            else:
                gathered.append(self._gather_tensor(leaf, rows_of_rank))
        return pytree.tree_unflatten(gathered, spec)

    def _with_gradients_alike(self, leaves: list[Any]) -> list[Any]:
        """Returns the leaves so that each needs a gradient on all ranks, or on none.

        All ranks must take part in the backward pass. A rank whose tensor needs no gradient, such
        as the output of a frozen model, takes part with a copy whose gradient is thrown away.

        Raises:
            UsageError: some ranks record no gradients, so that they could not take part.
        """
        needs_gradient = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        state_of_rank = self._exchange([torch.is_grad_enabled(), needs_gradient])
        silent_ranks = [rank for rank, state in enumerate(state_of_rank) if not state[0]]
        if len(silent_ranks) == len(state_of_rank):  # nobody wants gradients
            return leaves
        if silent_ranks:
            raise UsageError(
                "world.gather(..., gradient=True)",
                f"{format_ranks(silent_ranks)} called it under torch.no_grad(), the others did not",
                "call it under no_grad() on all ranks or on none",
            )
        alike = []
        for position, leaf in enumerate(leaves):
            is_needed = any(state[1][position] for state in state_of_rank)
            if is_needed and not leaf.requires_grad:
                leaf = leaf.detach().requires_grad_()
            alike.append(leaf)
        return alike

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Returns rank `source`'s value on every rank.

        Args:
            value: what `gather` takes, or None, or a nest of these. It is used on rank `source`
                only; the other ranks may pass None.
            source: the rank that sends.
        """
        if self.single_process:
            return value
        # What this rank sends: its value, taken apart, on rank `source`, and nothing elsewhere.
        sent = PackedNest(form={}, tensors=[], problem=None)
        if type(source) is not int or not 0 <= source < self.topology.size:
            problem = (
                f"world.broadcast(..., source={source!r})",
                f"it is not the number of a rank: there are {self.topology.size} of them",
                f"give an integer from 0 to {self.topology.size - 1}",
            )
            sent = PackedNest(form={}, tensors=[], problem=problem)
        elif self.topology.rank == source:
            sent = pack_nest(value)
        # If there is a problem on any rank, all ranks raise it here.
        self._agree_on_call(
            CallDescription("broadcast", f"from rank {source}", problem=sent.problem)
        )
        # First the structure and the leaves that are no tensors, as JSON. Then each tensor.
        form_of_rank = self._exchange(sent.form)
        form = form_of_rank[source]
        tensors_to_send = iter(sent.tensors)
        received = []
        for leaf in form["leaves"]:
            if isinstance(leaf, list):  # JSON has made a list of the `LeafDescription` of a tensor
                tensor_to_send = next(tensors_to_send, None)  # None on the ranks that receive
                leaf = self._broadcast_tensor(tensor_to_send, LeafDescription(*leaf), source)
            received.append(leaf)
        return pytree.tree_unflatten(received, pytree.treespec_loads(form["structure"]))

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        if not self.single_process:
            self._agree_on_call(CallDescription("barrier"))

    def check_not_in_main_process_first(self, action: str) -> None:
        """Raises UsageError inside `main_process_first`, where the other ranks are not."""
        if self.in_main_process_first:
            raise UsageError(
                f"{action} inside of `with world.main_process_first()`",
                "all ranks do it together, and they run this block one after the other",
                "move it behind the block",
            )

    def _reduce(self, name: str, value: Any, combine: Callable[[list[Number]], Number]) -> Any:
        """Reduces every leaf over the ranks: tensors by an all-reduce, numbers by an exchange.

        Args:
            name: "sum", "mean" (which sums too), "max" or "min".
            value: a nest of tensors and numbers.
            combine: reduces the numbers of all ranks to one.

        Returns:
            A nest like `value`, with the reduction of each leaf. On one process it is `value`.
        """
        leaves, spec = pytree.tree_flatten(value)
        leaves_of_rank = self._agree_on_call(describe_call(name, leaves, spec), can_be_reduced)
        if self.single_process:
            return value
        # `leaves_of_rank` has a row for each rank. This has one for each leaf: its type, dtype and
        # shape on each rank.
        descriptions_of_leaf = list(zip(*leaves_of_rank, strict=True))

        reduced_numbers = self._reduce_numbers(leaves, descriptions_of_leaf, combine)
        operation = getattr(dist.ReduceOp, "SUM" if name == "mean" else name.upper())
        reduced = []
        for position, leaf in enumerate(leaves):
            if position in reduced_numbers:
                number = reduced_numbers[position]
                check_fits(name, number, descriptions_of_leaf[position])
                reduced.append(number_like(leaf, number, descriptions_of_leaf[position]))
            else:
                # Every rank must take part. One that does not contribute must not change anything.
                contribution = leaf if self.contributes else identity_element(leaf, operation)
                reduced.append(all_reduced_copy(contribution, operation))
        if name == "sum":
            for listener in self.sum_listeners:  # checks that look for mistakes of the script
                listener(leaves, reduced)
        return pytree.tree_unflatten(reduced, spec)

    def _reduce_numbers(
        self,
        leaves: Sequence[Any],
        descriptions_of_leaf: Sequence[Sequence[LeafDescription]],
        combine: Callable[[list[Number]], Number],
    ) -> dict[int, Number]:
        """Reduces the leaves that are numbers, or tensors without dimensions, on all ranks.

        All of them travel in one exchange.

        Args:
            leaves: what this rank passed.
            descriptions_of_leaf: for each leaf, its type, dtype and shape on each rank.
            combine: reduces the numbers of all ranks to one.

        Returns:
            The reduced numbers, by the positions of the leaves.
        """
        positions = []
        local_numbers = []
        for position, leaf in enumerate(leaves):
            if all(description.is_number for description in descriptions_of_leaf[position]):
                positions.append(position)
                local_numbers.append(leaf.item() if isinstance(leaf, Tensor) else leaf)
        if not positions:
            return {}
        numbers_of_rank = self._exchange(local_numbers)
        # The ranks that contribute come first.
        contributed = numbers_of_rank[: self.num_contributing_ranks]
        reduced: dict[int, Number] = {}
        for column, position in enumerate(positions):
            reduced[position] = combine([numbers[column] for numbers in contributed])
        return reduced

    def _agree_on_call(
        self,
        call: CallDescription,
        is_compatible: Callable[[Sequence[LeafDescription]], bool] | None = None,
    ) -> list[tuple[LeafDescription, ...]]:
        """Compares this rank's call with the calls of all others; every collective begins with it.

        Args:
            call: what this rank called.
            is_compatible: returns True if the descriptions of one leaf on all ranks, which are not
                equal, are no mistake; None: they must be equal.

        Returns:
            The leaves that each rank passed, in the order of the ranks.

        Raises:
            UsageError: a collective cannot be called here, or some rank cannot take part.
            RanksDifferError: the ranks called different collectives. All of them raise it.
        """
        # Exchanges are Lockstep's own, and made only where all ranks make them.
        if self.blocked_reason is not None and call.name != "exchange":
            raise UsageError(
                f"world.{call.name} in the body of an evaluation loop",
                self.blocked_reason,
                "sum up inside the loop and call the collective once, after it",
            )
        self.check_not_in_main_process_first(f"{call.name} {call.detail}".rstrip())
        history = [part.history_digest() for part in self.rank_histories]
        if self.single_process or self._digests_agree(call, history):
            return self._same_leaves_on_all_ranks(call)
        return self._compare_calls(call, is_compatible)

    def _compare_calls(
        self,
        call: CallDescription,
        is_compatible: Callable[[Sequence[LeafDescription]], bool] | None,
    ) -> list[tuple[LeafDescription, ...]]:
        """Finds out on all ranks how their calls, or their histories, differ.

        The history of a rank is what it did before the call (`RankHistory`). Every rank sends its
        call and its history. If the difference is harmless, the collective proceeds. Otherwise all
        ranks raise the same error.

        Args:
            call: what this rank called.
            is_compatible: returns True if the descriptions of one leaf on all ranks, which are not
                equal, are no mistake; None: they must be equal.

        Returns:
            The leaves that each rank passed, in the order of the ranks.
        """
        call_with_user_call = call._replace(user_call=user_call())
        details = [part.history_details() for part in self.rank_histories]
        answers = self._exchange([call_with_user_call, details])
        calls = [CallDescription.from_json(call_fields) for call_fields, _ in answers]
        # `compare_histories` raises an error if the histories differ in a way that is a mistake.
        for index, part in enumerate(self.rank_histories):
            part.compare_histories([details_of_rank[index] for _, details_of_rank in answers])
        # If the calls are equal, only the histories differ, and that is no mistake.
        calls_without_user_call = {other._replace(user_call=None) for other in calls}
        if len(calls_without_user_call) == 1:
            return self._same_leaves_on_all_ranks(call)
        # All ranks called the same collective, and some rank cannot take part: all raise its error.
        if len({other.name for other in calls}) == 1:
            for rank, other in enumerate(calls):
                if other.problem is not None:
                    was_set, found, do = other.problem
                    raise UsageError(was_set, f"rank {rank}: {found}", do, of_rank=rank)
        # All passed nests of the same structure, and the leaves differ in ways that are no mistake,
        # such as the number of rows of what is gathered.
        leaves_of_rank = [other.leaves for other in calls]
        forms = {(other.name, other.detail, other.structure) for other in calls}
        if len(forms) == 1 and is_compatible is not None:
            descriptions_of_leaf = zip(*leaves_of_rank, strict=True)
            if all(is_compatible(descriptions) for descriptions in descriptions_of_leaf):
                return leaves_of_rank
        raise calls_differ_error(calls)

    def _same_leaves_on_all_ranks(self, call: CallDescription) -> list[tuple[LeafDescription, ...]]:
        """Returns the leaves of each rank if all have made this call; raises its problem."""
        if call.problem is not None:
            raise UsageError(*call.problem)
        return [call.leaves] * self.topology.size

    def _digests_agree(self, call: CallDescription, history: Any) -> bool:
        """Returns True if all ranks make the same call, with the same history before it.

        Args:
            call: what this rank called.
            history: what it did before, as JSON (see `RankHistory`).

        Raises:
            RanksDifferError: other ranks do something else than a collective of Lockstep's, such
                as averaging gradients.
        """
        text = json.dumps([call, history])
        digest = _bytes_to_tensor(hashlib.md5(text.encode(), usedforsecurity=False).digest())
        try:
            digest_of_rank = self._all_gather(digest)  # shape (ranks, 16)
        except RanksDifferError as error:
            called = user_call()
            if called is None:  # the user's line is not known, so the error cannot name it
                raise
            # Not `from error`: it says the same, with lines of Lockstep's own in its traceback.
            raise RanksDifferError(
                f"{called} on some ranks only", error.found, advise_call_on_all_ranks([called])
            ) from None
        return bool((digest_of_rank == digest).all())

    def _exchange(self, value: Any) -> list[Any]:
        """Returns a list with the value of every rank, without comparing calls before.

        Each value travels as JSON: its length and first bytes in one all-gather, and the rest, if
        the text of some rank is longer, in another one.
        """
        text = json.dumps(value)
        if self.single_process:
            return [json.loads(text)]
        data = text.encode()
        # All ranks must send equally much. A short text is padded with spaces, which JSON ignores.
        first_bytes = data[:FIRST_TEXT_BYTES].ljust(FIRST_TEXT_BYTES)
        message = _bytes_to_tensor(TEXT_LENGTH.pack(len(data)) + first_bytes)
        lengths = []
        texts = []
        for row in self._all_gather(message).tolist():
            received = bytes(row)
            (length,) = TEXT_LENGTH.unpack_from(received)
            lengths.append(length)
            texts.append(received[TEXT_LENGTH.size :])
        if max(lengths) > FIRST_TEXT_BYTES:
            rest_lengths = [max(0, length - FIRST_TEXT_BYTES) for length in lengths]
            own_rest = _bytes_to_tensor(data[FIRST_TEXT_BYTES:])
            rest_of_rank = self._all_gather_padded(own_rest, rest_lengths)
            for rank, rest in enumerate(rest_of_rank):
                texts[rank] += bytes(rest.tolist())
        return [json.loads(text) for text in texts]

    def _all_gather(self, tensor: Tensor) -> Tensor:
        """Returns the tensors of all ranks, which have one shape, stacked: one row a rank."""
        rows = tensor.new_empty(self.topology.size, *tensor.shape)
        routing.all_gather(rows, tensor)
        return rows

    def _all_gather_padded(self, data: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Returns the one-dimensional tensors of all ranks, whose lengths may differ.

        Args:
            data: this rank's tensor.
            lengths: the length of each rank's tensor.
        """
        padded = data.new_zeros(max(lengths))
        padded[: len(data)] = data
        gathered = self._all_gather(padded)
        return [row[:length] for row, length in zip(gathered, lengths, strict=True)]

    def _gather_tensor(self, tensor: Tensor, rows_of_rank: Sequence[int]) -> Tensor:
        """Returns the rows of all ranks that contribute, concatenated; without a gradient.

        Args:
            tensor: this rank's rows; a 0-dimensional tensor is one row.
            rows_of_rank: the number of rows of each rank.
        """
        if self.single_process:  # the tensor itself, which may have a gradient
            return tensor if tensor.dim() else tensor.detach().reshape(1)
        rows = tensor.detach() if tensor.dim() else tensor.detach().reshape(1)
        if not self.contributes:
            rows = rows[:0]
        # The rows travel as bytes, since a backend can gather some dtypes only.
        bytes_per_row = rows.shape[1:].numel() * rows.element_size()
        contributed_rows = rows_of_rank[: self.num_contributing_ranks]
        lengths = [num_rows * bytes_per_row for num_rows in contributed_rows]
        # The ranks that do not contribute take part with no bytes.
        lengths += [0] * (self.topology.size - self.num_contributing_ranks)
        joined = torch.cat(self._all_gather_padded(to_bytes(rows), lengths))
        return from_bytes(joined, rows.dtype, (sum(contributed_rows), *rows.shape[1:]))

    def _broadcast_tensor(
        self, tensor: Tensor | None, description: LeafDescription, source: int
    ) -> Tensor:
        """Returns the tensor of rank `source` on every rank.

        Args:
            tensor: what this rank sends; None on all ranks but the source.
            description: the dtype and shape of the tensor.
            source: the rank that sends.
        """
        dtype: torch.dtype = getattr(torch, description.dtype)
        shape = torch.Size(description.shape)
        # The tensor of the source may be on the CPU; the others receive it on their device.
        if tensor is None:
            num_bytes = shape.numel() * dtype.itemsize
            data = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        else:
            # A copy, because the result is made of this memory.
            data = to_bytes(tensor).to(self.device, copy=True)
        routing.broadcast(data, source)
        received = from_bytes(data, dtype, shape)
        return received if tensor is None else received.to(tensor.device)


class _GatherWithGradient(torch.autograd.Function):
    """An all-gather and its adjoint.

    What is minimised is the mean over ranks of their losses, each times its weight, and DDP or FSDP
    takes that mean. The rows of a rank are part of the loss of every rank, so their gradient is the
    sum over ranks; then the mean is exact for parts of any sizes, whether each rank computes the
    loss of the whole batch or of its own rows against all.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, collectives: Collectives, rows_of_rank: list[int]
    ) -> Tensor:
        """Returns the rows of all ranks that contribute; `tensor` has those of this rank."""
        rank = collectives.topology.rank
        ctx.shape = tensor.shape
        ctx.contributes = collectives.contributes
        # The rows of this rank in the result, which has the rows of rank 0, of rank 1, ...
        ctx.first_row = sum(rows_of_rank[:rank])
        ctx.num_rows = rows_of_rank[rank]
        return collectives._gather_tensor(tensor, rows_of_rank)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Returns the gradient of this rank's rows, summed over the losses of all ranks."""
        total = all_reduced_copy(gradient, dist.ReduceOp.SUM)
        if ctx.contributes:
            own_rows = total[ctx.first_row : ctx.first_row + ctx.num_rows]
            gradient_of_tensor = own_rows.reshape(ctx.shape)
        else:  # the rows of this rank are not in the result
            gradient_of_tensor = total.new_zeros(ctx.shape)
        # One gradient for each argument of `forward`; only the tensor has one.
        return gradient_of_tensor, None, None


def _bytes_to_tensor(data: bytes) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


T = TypeVar("T")


def run_on_all_ranks(collectives: Collectives, action: str, work: Callable[[], T]) -> T:
    """Calls `work` on every rank and returns this rank's result. If it raises, all ranks raise.

    Args:
        collectives: of the run.
        action: what `work` does, for messages.
        work: returns the result of this rank.
    """

    def work_without_answer() -> tuple[T, None]:
        return work(), None

    result, _ = exchange_on_all_ranks(collectives, action, work_without_answer)
    return result


def gather_answers(
    collectives: Collectives,
    action: str,
    make_answer: Callable[[], Any],
    error_type: type[LockstepError] = CheckpointError,
) -> list[Any]:
    """Calls `make_answer` on every rank and returns the answers of all ranks, on every rank.

    If it raises on one rank, all ranks raise, as in `exchange_on_all_ranks`.

    Args:
        collectives: of the run.
        action: what `make_answer` does, for messages.
        make_answer: returns the answer of this rank, which JSON can hold.
        error_type: what the other ranks raise.
    """

    def work_without_result() -> tuple[None, Any]:
        return None, make_answer()

    _, answers = exchange_on_all_ranks(collectives, action, work_without_result, error_type)
    return answers


def exchange_on_all_ranks(
    collectives: Collectives,
    action: str,
    work: Callable[[], tuple[T, Any]],
    error_type: type[LockstepError] = CheckpointError,
) -> tuple[T, list[Any]]:
    """Calls `work` on every rank. If it raises on one rank, all ranks raise.

    No rank waits in vain: a rank on which `work` raises takes part in the exchange that follows,
    and sends its error instead of an answer.

    Args:
        collectives: of the run.
        action: what `work` does, for messages.
        work: returns the result of this rank, and an answer that JSON can hold for all ranks.
        error_type: what the other ranks raise.

    Returns:
        The result of this rank, and the answers of all ranks.

    Raises:
        LockstepError: `work` raised. The rank where it did raises its own error, the others one of
            `error_type` with the same text.
        UsageError: in the body of an evaluation loop.
    """
    if collectives.blocked_reason is not None:
        raise UsageError(
            f"{action} in the body of an evaluation loop",
            collectives.blocked_reason,
            "do it after the loop",
        )
    failure: Exception | None = None
    message: dict[str, Any]
    try:
        result, answer = work()
        message = {"answer": answer}
    except LockstepError as error:
        failure = error
        message = {"error": (error.was_set, error.found, error.do)}
    except Exception as error:  # whatever it is, the others must not wait for this rank
        failure = error
        found = f"{type(error).__name__}: {error}"
        message = {"error": (action, found, "see the traceback of that rank")}
    messages = collectives.exchange(message)
    if failure is not None:
        raise failure
    for rank, message in enumerate(messages):
        if "error" in message:
            was_set, found, do = message["error"]
            raise error_type(was_set, f"rank {rank}: {found}", do, of_rank=rank)
    return result, [message["answer"] for message in messages]


def check_same_metric(was_set: str, values: Sequence[Any], code: str | None = None) -> None:
    """Raises RanksDifferError if the ranks have different values of a metric.

    Args:
        was_set: where the metric was passed, for the message.
        values: the metric of each rank. NaN is equal to NaN.
        code: of the entry in the catalogue of findings.
    """
    distinct_values = {str(value) for value in values}
    if len(distinct_values) > 1:
        raise RanksDifferError(
            was_set,
            ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values)),
            "give it a value that is equal everywhere: world.mean(metric) or world.sum(...)",
            code=code,
        )
