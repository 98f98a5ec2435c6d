"""Sums, gathers and broadcasts over all ranks, of tensors, numbers and nested containers of them.

A *nest* is a tensor, number or string, or a list or dict of nests; the values inside it are its
*leaves*. All ranks *contribute* to a result, except in a pipeline, where only the first ranks hold
values that count. Before any data moves, the ranks compare a hash (the *digest*) of what each of
them called and passed.

Comparing digests takes one all-gather of 16 bytes per rank. The ranks nearly always agree, and the
collective proceeds. If they do not, every rank learns what every other rank called. Either the
difference is harmless (a rank whose loop had no batch passes the number 0 instead of a tensor), or
all ranks raise the same error. Without this check, c10d would return wrong numbers, hang, abort the
process, or raise an error that does not say which collectives were mixed up.

What each collective communicates after the digest:

- `barrier`: nothing.
- `exchange`: one all-gather of the length and the first bytes of each rank's text; if a text is
  longer, a second, padded all-gather of the rest.
- `sum`, `mean`, `max`, `min`: one all-reduce for each tensor, and one exchange for all numbers.
- `gather`: one all-gather for each tensor, padded to the largest number of rows.
- `broadcast`: one exchange, and one broadcast for each tensor.

In a run with a single process, nothing is communicated.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    find_problem_of_source,
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
from lockstep.error_in_flight import find_error_that_led_here
from lockstep.errors import CheckpointError, LockstepError, RanksDifferError, UsageError
from lockstep.machine.topology import DataParallelRank, Topology
from lockstep.torch_compat import pytree
from lockstep.user_code import user_call
from lockstep.wording import format_ranks

TEXT_LENGTH = struct.Struct("=q")
"""The format in which an exchange sends the length of a rank's text: an 8-byte integer."""
FIRST_TEXT_BYTES = 120
"""The number of bytes of a text that an exchange sends together with its length. Most texts that
ranks exchange fit, so that a second all-gather is rarely needed."""


class RankHistory(Protocol):
    """Records what this rank has done since the ranks were last compared.

    Each collective checks that the records are equal on all ranks.
    """

    def history_digest(self) -> Any:
        """Returns a short summary, as JSON, which becomes part of each collective's digest."""

    def history_details(self) -> Any:
        """Returns the details, as JSON, that `compare_histories` needs from each rank."""

    def compare_histories(self, details_of_ranks: list[Any]) -> None:
        """Raises an error if the histories differ by mistake.

        It is called on all ranks when their digests differ.

        Args:
            details_of_ranks: the result of `history_details` on each rank.
        """


class Collectives:
    """The collectives of one run.

    Args:
        topology: this process's rank, and how many ranks there are.
        device: the device on which this rank receives tensors from other ranks.
    """

    def __init__(self, topology: Topology, device: torch.device) -> None:
        self.topology = topology
        self.device = device
        self.data_parallel = DataParallelRank(topology.rank, topology.size)
        """Which part of each global batch this rank computes; the strategy may replace it."""
        self.blocked_reason: str | None = None
        """Why a collective would hang at this point of the program, or None if it would not. See
        `blocked_because`."""
        self.why_ranks_are_apart: str | None = None
        """Why other ranks may be at another micro-batch of the training loop than this one, or None
        if all ranks have equally many. The strategy sets it."""
        self.in_main_process_first = False
        """True inside the block of `main_process_first`, which ranks do not run together."""
        self.rank_histories: list[RankHistory] = []
        """Records that each collective compares between the ranks, besides the call itself."""

    @contextmanager
    def blocked_because(self, reason: str | None) -> Iterator[None]:
        """Refuses collectives of the script inside this context.

        Args:
            reason: why a collective would hang, in words for an error. None to leave the present
                reason, for example in an evaluation loop which all ranks run equally often.
        """
        reason_before = self.blocked_reason
        if reason is not None:
            self.blocked_reason = reason
        try:
            yield
        finally:
            self.blocked_reason = reason_before

    def unblock(self) -> None:
        """Allows collectives again although a training loop that has blocked them was left open."""
        self.blocked_reason = None
        self.why_ranks_are_apart = None

    @property
    def single_process(self) -> bool:
        """True if the run has only one process."""
        return self.topology.size == 1

    @property
    def num_contributing_ranks(self) -> int:
        """The number of ranks that contribute: in a pipeline the first ones, otherwise all."""
        return self.data_parallel.size

    @property
    def contributes(self) -> bool:
        """True if this rank's values count in reductions and gathers (see `DataParallelRank`)."""
        return self.topology.rank < self.num_contributing_ranks

    def exchange(self, value: Any) -> list[Any]:
        """Returns a list with the value of every rank, in the order of the ranks.

        Args:
            value: this rank's value, which must be serializable as JSON. Tuples come back as lists.
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
        """Gathers the leaves of all contributing ranks, and returns them on every rank.

        With 2 ranks that pass tensors of shapes `(3, 8)` and `(2, 8)`, the result has shape `(5,
        8)`: tensors are concatenated along the first dimension, in the order of the ranks.
        0-dimensional tensors are stacked to a vector; numbers and strings become lists. Both have
        one element for each contributing rank.

        Args:
            value: a tensor, number or string, or a nest of them.
            gradient: True to let gradients flow back to the tensors of every rank. The gradient of
                a tensor is then the sum of its gradients from the losses of all ranks. This takes
                one all-reduce in the backward pass, in which all ranks must take part.
        """
        leaves, spec = pytree.tree_flatten(value)

        # For each rank, the descriptions of its leaves: type, dtype and shape.
        call = describe_call("gather", leaves, spec)
        descriptions_of_rank = self._agree_on_call(call, can_be_joined)

        # Either all ranks take part in the backward pass of a leaf or none, even if the leaf
        # requires a gradient on some ranks only.
        gradients_cross_ranks = gradient and not self.single_process
        if gradients_cross_ranks:
            leaves = self._with_equal_requires_grad(leaves)

        gathered: list[Any] = []
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                rows_of_rank = [
                    descriptions[position].num_rows for descriptions in descriptions_of_rank
                ]
                gathered.append(self._gather_rows(leaf, rows_of_rank, gradients_cross_ranks))
            else:
                # Numbers and strings become a list, with an item for each rank that contributes.
                # These ranks come first; in a pipeline the other ranks have the same values.
                leaf_of_rank = self._exchange(leaf)
                gathered.append(leaf_of_rank[: self.num_contributing_ranks])
        return pytree.tree_unflatten(gathered, spec)

    def _gather_rows(
        self, tensor: Tensor, rows_of_rank: list[int], gradients_cross_ranks: bool
    ) -> Tensor:
        """Concatenates the rows of all contributing ranks.

        Args:
            tensor: this rank's rows.
            rows_of_rank: the number of rows of each rank.
            gradients_cross_ranks: True if gradients flow back to the tensors of every rank.
        """
        needs_gradient = tensor.requires_grad and torch.is_grad_enabled()
        if gradients_cross_ranks and needs_gradient:
            joined: Tensor = _GatherWithGradient.apply(tensor, self, rows_of_rank)  # type: ignore[no-untyped-call]
            return joined
        return self._gather_tensor(tensor, rows_of_rank)

    def _with_equal_requires_grad(self, leaves: list[Any]) -> list[Any]:
        """Makes each leaf require a gradient on all ranks, if it requires one on any rank.

        All ranks must take part in the backward pass of a gather. A rank whose own tensor requires
        no gradient (the output of a frozen model, for example) takes part with a detached copy of
        its tensor that does require one. Nobody reads this gradient.

        Raises:
            UsageError: some ranks are under `torch.no_grad()`, so they would not take part.
        """
        requires_grad = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        answers = self._exchange([torch.is_grad_enabled(), requires_grad])
        grad_enabled_on_rank = [grad_enabled for grad_enabled, _ in answers]
        requires_grad_on_rank = [flags for _, flags in answers]  # each has one flag per leaf

        if not any(grad_enabled_on_rank):  # no rank will run a backward pass
            return leaves
        if not all(grad_enabled_on_rank):
            silent_ranks = [
                rank for rank, grad_enabled in enumerate(grad_enabled_on_rank) if not grad_enabled
            ]
            raise UsageError(
                "world.gather(..., gradient=True)",
                f"{format_ranks(silent_ranks)} called it under torch.no_grad(), the others did not",
                "call it under no_grad() on all ranks or on none",
            )

        result = []
        for position, leaf in enumerate(leaves):
            # Only tensors require gradients, and all ranks have tensors at the same positions.
            required_on_any_rank = any(flags[position] for flags in requires_grad_on_rank)
            if required_on_any_rank and not leaf.requires_grad:
                result.append(leaf.detach().requires_grad_())
            else:
                result.append(leaf)
        return result

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Sends the value of rank `source` to all ranks, and returns it on every rank.

        Args:
            value: a tensor, number, string or None, or a nest of them. Only rank `source`'s value
                is used; the other ranks may pass None.
            source: the rank that sends.
        """
        if self.single_process:
            return value

        # If there is a problem on any rank, all ranks raise it here.
        packed = self._pack_on_source(value, source)
        self._agree_on_call(
            CallDescription("broadcast", f"from rank {source}", problem=packed.problem)
        )

        # First the form is sent: the structure, with the numbers and strings in it. Of the nest
        # `{"a": 3, "b": tensor}` it is
        # `{"structure": "...", "leaves": [3, ["tensor", "float32", [2]]]}`. This is an exchange
        # among all ranks, in which the ranks other than `source` send an empty form.
        form_of_rank = self._exchange(packed.form)
        form = form_of_rank[source]

        # Then the tensors are sent one by one. In the form, a tensor's description is in its place.
        tensors_to_send = iter(packed.tensors)
        received = []
        for leaf_or_description in form["leaves"]:
            if _is_description(leaf_or_description):
                tensor_to_send = next(tensors_to_send, None)  # None on the ranks that receive
                description = LeafDescription(*leaf_or_description)
                received.append(self._broadcast_tensor(tensor_to_send, description, source))
            else:
                received.append(leaf_or_description)
        return pytree.tree_unflatten(received, pytree.treespec_loads(form["structure"]))

    def _pack_on_source(self, value: Any, source: int) -> PackedNest:
        """Returns what rank `source` sends in a broadcast, and an empty nest on the other ranks.

        If `source` is not the number of a rank, the nest has a problem, on every rank.
        """
        problem = find_problem_of_source(source, self.topology.size)
        is_source = self.topology.rank == source
        if problem is not None or not is_source:
            return PackedNest(form={}, tensors=[], problem=problem)
        return pack_nest(value)

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        if not self.single_process:
            self._agree_on_call(CallDescription("barrier"))

    def check_not_in_main_process_first(self, action: str) -> None:
        """Raises UsageError inside the block of `main_process_first`.

        The ranks run the block one after the other, so a collective would hang there.

        Args:
            action: what the caller was about to do, for the message.
        """
        if self.in_main_process_first:
            raise UsageError(
                f"{action} inside of `with world.main_process_first()`",
                "all ranks do it together, and they run this block one after the other",
                "move it behind the block",
            )

    def _reduce(self, name: str, value: Any, combine: Callable[[list[Number]], Number]) -> Any:
        """Reduces every leaf over the ranks: tensors by an all-reduce, numbers by an exchange.

        Args:
            name: "sum", "mean", "max" or "min". For "mean", only the sum is computed here; the
                caller divides it.
            value: a nest of tensors and numbers.
            combine: function that reduces a list with one number for each rank to one number.

        Returns:
            A nest like `value` that has the reduced leaves. In a single process, `value` itself.
        """
        leaves, spec = pytree.tree_flatten(value)
        call = describe_call(name, leaves, spec)
        descriptions_of_rank = self._agree_on_call(call, can_be_reduced)
        if self.single_process:
            return value

        # Transposed from [rank][leaf] to [leaf][rank]: the type, dtype and shape of one leaf on
        # each rank.
        descriptions_of_leaf = list(zip(*descriptions_of_rank, strict=True))

        # The reduced leaves that are Python numbers or 0-dimensional tensors, by the position of
        # the leaf: `{1: 3, 2: 11}`. All others are reduced below.
        reduced_numbers = self._reduce_numbers(leaves, descriptions_of_leaf, combine)
        operation = getattr(dist.ReduceOp, "SUM" if name == "mean" else name.upper())

        reduced = []
        for position, leaf in enumerate(leaves):
            is_number = position in reduced_numbers
            if not is_number:
                reduced.append(self._reduce_tensor(leaf, operation))
                continue

            # `number_like` makes a 0-dimensional tensor again if this rank has passed one.
            number = reduced_numbers[position]
            descriptions = descriptions_of_leaf[position]
            check_fits(name, number, descriptions)
            reduced.append(number_like(leaf, number, descriptions))

        return pytree.tree_unflatten(reduced, spec)

    def _reduce_tensor(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """Reduces a tensor over the ranks that contribute; all ranks take part.

        A rank that does not contribute passes a tensor that leaves the result unchanged, such as
        zeros for a sum.
        """
        contribution = tensor if self.contributes else identity_element(tensor, operation)
        return all_reduced_copy(contribution, operation)

    def _reduce_numbers(
        self,
        leaves: Sequence[Any],
        descriptions_of_leaf: Sequence[Sequence[LeafDescription]],
        combine: Callable[[list[Number]], Number],
    ) -> dict[int, Number]:
        """Reduces, in one exchange, all leaves that are numbers or 0-dimensional tensors.

        Example, for a sum: rank 0 passes the leaves `[tensor, 1, 5]` and rank 1 `[tensor, 2, 6]`.
        The result is `{1: 3, 2: 11}`.

        Args:
            leaves: the leaves that this rank passed.
            descriptions_of_leaf: for each leaf, its type, dtype and shape on each rank.
            combine: function that reduces a list with one number for each rank to one number.

        Returns:
            The reduced numbers, by the position of their leaf in `leaves`.
        """
        positions = []
        local_numbers = []
        for position, leaf in enumerate(leaves):
            if all(description.is_number for description in descriptions_of_leaf[position]):
                positions.append(position)
                local_numbers.append(leaf.item() if isinstance(leaf, Tensor) else leaf)
        if not positions:
            return {}

        # The ranks that contribute come first. Each has sent a number for each position.
        numbers_of_rank = self._exchange(local_numbers)
        contributed_numbers_of_rank = numbers_of_rank[: self.num_contributing_ranks]

        reduced = {}
        for index, position in enumerate(positions):
            reduced[position] = combine([numbers[index] for numbers in contributed_numbers_of_rank])
        return reduced

    def _agree_on_call(
        self,
        call: CallDescription,
        is_compatible: Callable[[Sequence[LeafDescription]], bool] | None = None,
    ) -> list[tuple[LeafDescription, ...]]:
        """Checks that all ranks make the same call. Every collective begins with this.

        Args:
            call: the collective that this rank called, and what was passed to it.
            is_compatible: function that takes the descriptions of one leaf on all ranks, and
                returns True if their differences are allowed. If None, they must be equal.

        Returns:
            For each rank, the descriptions of the leaves that it passed.

        Raises:
            UsageError: a collective cannot be called here, or some rank cannot take part.
            RanksDifferError: the ranks called different collectives. All ranks raise it.
        """
        # Only Lockstep itself makes exchanges, at points that all ranks reach.
        is_called_by_user = call.name != "exchange"
        if is_called_by_user:
            advice = "sum up inside the loop and call the collective once, after it"
            self.check_all_ranks_call(f"world.{call.name}", advice_in_evaluation=advice)

        # Inside a block of `main_process_first` the ranks do not run together.
        call_for_message = f"{call.name} {call.detail}".rstrip()
        self.check_not_in_main_process_first(call_for_message)

        # The usual case: 16 bytes from each rank show that all make the same call, and that all did
        # the same before it. Each history records one thing that all ranks must do alike, for
        # example which batches they take from the loaders.
        history_digests = [history.history_digest() for history in self.rank_histories]
        if self.single_process or self._digests_agree(call, history_digests):
            return self._same_leaves_on_all_ranks(call)

        # The slow case: the ranks exchange the full descriptions, to find out what differs.
        return self._compare_calls(call, is_compatible)

    def check_all_ranks_call(self, action: str, advice_in_evaluation: str) -> None:
        """Raises UsageError if not all ranks reach this point of the script equally often.

        A collective would wait forever for a rank that does not call it, or meet the call of that
        rank for another batch.

        Args:
            action: what needs all ranks, such as "world.sum", for the message.
            advice_in_evaluation: what to do in the body of an evaluation loop, which some ranks run
                more often than others.
        """
        if self.blocked_reason is not None:
            raise UsageError(
                f"{action} in the body of an evaluation loop",
                self.blocked_reason,
                advice_in_evaluation,
            )
        if self.why_ranks_are_apart is not None:
            raise UsageError(
                f"{action} in a micro-batch that only some ranks have",
                self.why_ranks_are_apart,
                "do it where world.is_last_micro_batch is true, which all ranks reach once for "
                "each global batch, or after the loop",
            )

    def _compare_calls(
        self,
        call: CallDescription,
        is_compatible: Callable[[Sequence[LeafDescription]], bool] | None,
    ) -> list[tuple[LeafDescription, ...]]:
        """Decides what happens after the digests of the ranks have turned out to differ.

        Every rank sends its call and its history (what it did before the call, see `RankHistory`).
        If the difference is harmless, the collective proceeds. Otherwise all ranks raise the same
        error.

        Args:
            call: the collective that this rank called, and what was passed to it.
            is_compatible: function that takes the descriptions of one leaf on all ranks, and
                returns True if their differences are allowed. If None, they must be equal.

        Returns:
            For each rank, the descriptions of the leaves that it passed.
        """
        # Errors name the line of the script that each rank has come to, such as "world.gather()".
        # It is only looked up here, since that takes time.
        call_with_script_line = call._replace(user_call=user_call())
        own_histories = [history.history_details() for history in self.rank_histories]
        answers = self._exchange([call_with_script_line, own_histories])

        self._check_histories_are_compatible([histories for _, histories in answers])

        # The calls may be equal although each rank makes its own at another line of the script.
        # Then only the histories differed, in a harmless way.
        calls = [CallDescription.from_json(call_fields) for call_fields, _ in answers]
        calls_without_script_line = {other._replace(user_call=None) for other in calls}
        if len(calls_without_script_line) == 1:
            return self._same_leaves_on_all_ranks(call)

        return self._leaves_if_compatible(calls, is_compatible)

    def _check_histories_are_compatible(self, histories_of_ranks: Sequence[list[Any]]) -> None:
        """Raises an error if the histories of the ranks differ, unless the difference is harmless.

        Args:
            histories_of_ranks: for each rank, the details of each of its `rank_histories`.
        """
        for index, history in enumerate(self.rank_histories):
            history.compare_histories([histories[index] for histories in histories_of_ranks])

    def _leaves_if_compatible(
        self,
        calls: Sequence[CallDescription],
        is_compatible: Callable[[Sequence[LeafDescription]], bool] | None,
    ) -> list[tuple[LeafDescription, ...]]:
        """Returns the leaves of calls that differ, if they differ in an allowed way.

        Args:
            calls: the call of each rank.
            is_compatible: function that takes the descriptions of one leaf on all ranks, and
                returns True if their differences are allowed. None if no difference is.

        Returns:
            For each rank, the descriptions of the leaves that it passed.

        Raises:
            UsageError: all ranks called the same collective, but one of them cannot take part.
            RanksDifferError: the calls differ in something else than their leaves, or in leaves
                that are not compatible.
        """
        # If all ranks called the same collective, but one cannot take part, all raise its error.
        if len({call.name for call in calls}) == 1:
            for rank, call in enumerate(calls):
                if call.problem is not None:
                    situation, found, do = call.problem
                    raise UsageError(situation, f"rank {rank}: {found}", do, of_rank=rank)

        # If only the leaves differ, this may be allowed: for example, ranks may pass tensors with
        # different numbers of rows to `gather`.
        leaves_of_rank = [call.leaves for call in calls]
        calls_without_leaves = {(call.name, call.detail, call.structure) for call in calls}
        only_leaves_differ = len(calls_without_leaves) == 1
        if only_leaves_differ and is_compatible is not None:
            # For each leaf, its description on every rank.
            descriptions_of_leaf = zip(*leaves_of_rank, strict=True)
            if all(is_compatible(descriptions) for descriptions in descriptions_of_leaf):
                return leaves_of_rank

        raise calls_differ_error(calls)

    def _same_leaves_on_all_ranks(self, call: CallDescription) -> list[tuple[LeafDescription, ...]]:
        """Returns the leaves of each rank, given that all ranks have made this same call.

        Raises:
            UsageError: the call is one that cannot be carried out.
        """
        if call.problem is not None:
            raise UsageError(*call.problem)
        return [call.leaves] * self.topology.size

    def _digests_agree(self, call: CallDescription, history: Any) -> bool:
        """Returns True if all ranks make the same call, with the same history before it.

        Args:
            call: the collective that this rank called, and what was passed to it.
            history: what this rank did before, as JSON (see `RankHistory`).

        Raises:
            RanksDifferError: other ranks are doing something else, such as averaging gradients.
                The error names the user's call on this rank.
        """
        text = json.dumps([call, history])
        digest = _bytes_to_tensor(hashlib.md5(text.encode(), usedforsecurity=False).digest())

        digests = self._all_gather_digests(digest)
        if isinstance(digests, RanksDifferError):
            raise digests
        return bool((digests == digest).all())

    def _all_gather_digests(self, digest: Tensor) -> Tensor | RanksDifferError:
        """Returns the digests of all ranks, shape (ranks, 16), or the error that is to be raised.

        The caller raises it: if it were raised in the `except` block below, the error of shared
        memory, which says the same, would be shown too. (`from None` would also hide an exception
        that the script handles.)
        """
        # Through shared memory, each rank sees what the others send, such as gradients.
        try:
            return self._all_gather(digest)
        except RanksDifferError as error:
            return _error_naming_users_call(error)

    def _exchange(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, without first checking that all ranks call this.

        Each value is sent as JSON. A first all-gather sends the length of the text and its first
        bytes. If any text is longer, a second all-gather sends the rest.
        """
        text = json.dumps(value)
        if self.single_process:
            return [json.loads(text)]

        # All ranks must send the same number of bytes, so a short text is padded with spaces, which
        # JSON ignores.
        data = text.encode()
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
        """Stacks the tensors of all ranks, which must have the same shape: row 0 is rank 0's."""
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
        """Concatenates the rows of all contributing ranks.

        The result is detached: no gradient flows back through it. Only in a single process, where
        there is nothing to concatenate, a tensor with rows is returned as it is.

        Args:
            tensor: this rank's rows. A 0-dimensional tensor is taken as one row.
            rows_of_rank: the number of rows of each rank.
        """
        rows = tensor if tensor.dim() else tensor.detach().reshape(1)
        if self.single_process:
            return rows

        rows = rows.detach()
        if not self.contributes:
            rows = rows[:0]

        # The rows are sent as bytes, because some backends cannot gather every dtype.
        bytes_per_row = rows.shape[1:].numel() * rows.element_size()
        contributed_rows = rows_of_rank[: self.num_contributing_ranks]
        lengths = [num_rows * bytes_per_row for num_rows in contributed_rows]

        # The ranks that do not contribute must take part too, and send no bytes.
        lengths += [0] * (self.topology.size - self.num_contributing_ranks)

        joined = torch.cat(self._all_gather_padded(to_bytes(rows), lengths))
        return from_bytes(joined, rows.dtype, (sum(contributed_rows), *rows.shape[1:]))

    def _broadcast_tensor(
        self, tensor: Tensor | None, description: LeafDescription, source: int
    ) -> Tensor:
        """Sends the tensor of rank `source` to all ranks, and returns it on every rank.

        The result is on the device of the tensor on rank `source`, and on `self.device` elsewhere.

        Args:
            tensor: the tensor to send; None on all ranks but `source`.
            description: the dtype and shape of the tensor.
            source: the rank that sends.
        """
        dtype: torch.dtype = getattr(torch, description.dtype)
        shape = torch.Size(description.shape)

        # `data` is the memory of the returned tensor, so it must not be that of the user's tensor.
        if tensor is None:
            num_bytes = shape.numel() * dtype.itemsize
            data = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        else:
            data = to_bytes(tensor).to(self.device, copy=True)

        routing.broadcast(data, source)
        received = from_bytes(data, dtype, shape)  # a view of `data`
        return received if tensor is None else received.to(tensor.device)


class _GatherWithGradient(torch.autograd.Function):
    """An all-gather whose backward pass sums the gradients over the ranks.

    The rows of one rank enter the losses of all ranks, so their gradient is the sum of the
    gradients of all these losses. DDP or FSDP then averages the gradients of the parameters over
    the ranks, which gives the exact gradient of the mean of the (weighted) losses. This holds for
    any distribution of the rows, and whether each rank computes the loss of the whole batch or that
    of its own rows against all rows.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, collectives: Collectives, rows_of_rank: list[int]
    ) -> Tensor:
        """Concatenates the rows of all contributing ranks, and returns the result on every rank.

        Args:
            ctx: object that keeps what `backward` needs.
            tensor: this rank's rows.
            collectives: the collectives of the run.
            rows_of_rank: the number of rows that each rank has passed, also those that do not
                contribute.
        """
        ctx.shape = tensor.shape
        ctx.contributes = collectives.contributes

        # The result has the rows of rank 0, then those of rank 1, and so on. If rank 0 has 2 rows
        # and rank 1 has 3, then rank 1 has first_row 2 and num_rows 3. (The ranks that do not
        # contribute come last, and `backward` does not use these numbers there.)
        rank = collectives.topology.rank
        ctx.first_row = sum(rows_of_rank[:rank])
        ctx.num_rows = rows_of_rank[rank]
        return collectives._gather_tensor(tensor, rows_of_rank)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Returns the gradient of this rank's rows, summed over the losses of all ranks.

        `forward` has concatenated the rows of all ranks. This rank's rows begin at `ctx.first_row`.

        Args:
            ctx: object in which `forward` has kept what is needed here.
            gradient: gradient of all rows, from the loss of this rank.
        """
        total = all_reduced_copy(gradient, dist.ReduceOp.SUM)

        if ctx.contributes:
            # A tensor without dimensions was gathered as one row, and gets its shape () back.
            own_rows = total[ctx.first_row : ctx.first_row + ctx.num_rows]
            gradient_of_tensor = own_rows.reshape(ctx.shape)
        else:  # the rows of this rank are not in the result
            gradient_of_tensor = total.new_zeros(ctx.shape)

        # One gradient for each argument of `forward`; only the tensor has one.
        return gradient_of_tensor, None, None


def _bytes_to_tensor(data: bytes) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def _is_description(leaf: Any) -> bool:
    """Returns True if a leaf of a received form describes a tensor.

    JSON has turned the description into a list, and numbers and strings are no lists.
    """
    return isinstance(leaf, list)


def _error_naming_users_call(error: RanksDifferError) -> RanksDifferError:
    """Returns an error like the given one that names the call in the user's script.

    Args:
        error: the error of shared memory: other ranks have called another collective.

    Returns:
        The given error if the user's call is not known.
    """
    called = user_call()
    if called is None:
        return error

    # A rank that calls the collective in a `finally`, for example, may only have come there because
    # of another error. Then that error is the cause.
    handled_error = _error_being_handled(error)
    if handled_error is None:
        advice = advise_call_on_all_ranks([called])
    else:
        advice = (
            f"look first at the {type(handled_error).__name__} that this rank was handling "
            f"when it called {called}"
        )
    return RanksDifferError(f"{called} on some ranks only", error.found, advice)


def _error_being_handled(error: RanksDifferError) -> BaseException | None:
    """Returns the error that the script was handling when the given one was raised, or None."""
    if error.__context__ is None:
        return None
    return find_error_that_led_here(error.__context__)


T = TypeVar("T")


def run_on_all_ranks(collectives: Collectives, action: str, work: Callable[[], T]) -> T:
    """Calls `work` and returns its result. If `work` raises on one rank, all ranks raise.

    Otherwise a rank would go on, and wait forever for the rank that has failed. All ranks must call
    this function.

    Args:
        collectives: the collectives of the run.
        action: what `work` does, for error messages.
        work: function that returns the result of this rank.
    """

    def work_and_send_nothing() -> tuple[T, None]:
        return work(), None  # the result of this rank, and what is sent to the others

    result, _ = exchange_on_all_ranks(collectives, action, work_and_send_nothing)
    return result


def gather_answers(
    collectives: Collectives,
    action: str,
    make_answer: Callable[[], Any],
    error_type: type[LockstepError] = CheckpointError,
) -> list[Any]:
    """Calls `make_answer` on every rank, and returns the answers of all ranks on every rank.

    If `make_answer` raises on one rank, all ranks raise, as in `exchange_on_all_ranks`.

    Args:
        collectives: the collectives of the run.
        action: what `make_answer` does, for error messages.
        make_answer: function that returns the answer of this rank, which must be serializable as
            JSON.
        error_type: type of the error that the other ranks raise.
    """

    # `exchange_on_all_ranks` wants two values: a result that stays on this rank, and the answer.
    def make_answer_only() -> tuple[None, Any]:
        return None, make_answer()

    _, answers = exchange_on_all_ranks(collectives, action, make_answer_only, error_type)
    return answers


def exchange_on_all_ranks(
    collectives: Collectives,
    action: str,
    work: Callable[[], tuple[T, Any]],
    error_type: type[LockstepError] = CheckpointError,
) -> tuple[T, list[Any]]:
    """Calls `work` on every rank, and exchanges the answers. If one rank fails, all ranks raise.

    A rank on which `work` raises still takes part in the exchange, and sends its error instead of
    an answer. So the other ranks do not wait for it in vain.

    Args:
        collectives: the collectives of the run.
        action: what `work` does, for error messages.
        work: function that returns two values: the result of this rank, and an answer for all
            ranks, which must be serializable as JSON.
        error_type: type of the error that the other ranks raise.

    Returns:
        The result of this rank, and the answers of all ranks.

    Raises:
        LockstepError: `work` raised. That rank raises its own error; the others raise an error of
            type `error_type` with the same text.
        UsageError: this was called in the body of an evaluation loop, or in a micro-batch that only
            some ranks have.
    """
    collectives.check_all_ranks_call(action, "do it after the loop")

    failure: Exception | None = None
    try:
        result, answer = work()
        own_message = {"answer": answer}
    except Exception as error:  # of any type, as the other ranks must not wait for this rank
        failure = error
        own_message = {"error": _parts_of_text(error, action)}

    messages = collectives.exchange(own_message)
    if failure is not None:
        raise failure

    for rank, message in enumerate(messages):
        if "error" in message:
            was_set, found, do = message["error"]
            raise error_type(was_set, f"rank {rank}: {found}", do, of_rank=rank)
    return result, [message["answer"] for message in messages]


def _parts_of_text(error: Exception, action: str) -> tuple[str, str, str]:
    """Returns the three parts of the text with which the other ranks raise an error of this rank.

    Args:
        error: the error.
        action: what this rank was doing.
    """
    if isinstance(error, LockstepError):
        return error.was_set, error.found, error.do
    found = f"{type(error).__name__}: {error}"
    return action, found, "see the traceback of that rank"


def check_same_metric(setting: str, values: Sequence[Any], code: str | None = None) -> None:
    """Raises RanksDifferError if the ranks have different values of a metric.

    Args:
        setting: the call or setting by which the user passed the metric, for the message.
        values: the value of the metric on each rank. NaN counts as equal to NaN.
        code: code of the error in the catalogue of findings.
    """
    distinct_values = {str(value) for value in values}
    if len(distinct_values) > 1:
        raise RanksDifferError(
            setting,
            ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values)),
            "give it a value that is equal everywhere: world.mean(metric) or world.sum(...)",
            code=code,
        )
