"""The same bits on any number of processes: gradients and buffers of virtual ranks.

A *virtual rank* has a fixed part of every global batch and computes its gradient in forward and
backward passes of its own; a process computes several of them, one after the other. Gradients are
added up over all virtual ranks in the order of a fixed binary tree
(`communication.summation_tree`), whatever process they come from. So the sum has the same bits on
any number of processes, unlike the sum of an all-reduce, which adds the gradients of processes.

The gradient of a virtual rank is a *leaf* of the tree. When the next virtual rank begins, the leaf
is taken out of `parameter.grad` and added to those before it as far as the tree allows; in the last
backward pass of the process what is left is summed over the processes. The result, divided by the
number of virtual ranks, is the gradient of the mean loss over the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.batch.plan import part_sizes, virtual_rank_bounds
from lockstep.batch.shares import initial_shares
from lockstep.communication.summation_tree import push
from lockstep.communication.tree_sum import TreeSums
from lockstep.distributed.process_group import Run
from lockstep.distributed.torch_compat import add_to_each, multiply_each
from lockstep.errors import LockstepError, UsageError, add_note_once
from lockstep.session.delivery import cleared_gradients_error
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.session.step import Step
from lockstep.strategies.pending_buckets import PendingBuckets


class VirtualRankTree:
    """How the processes of a run sum over its virtual ranks.

    Args:
        num_virtual_ranks: of the run.
        shares: one weight a process.
        process: the number of this one.
    """

    def __init__(self, num_virtual_ranks: int, shares: tuple[int, ...], process: int) -> None:
        self.num_virtual_ranks = num_virtual_ranks
        self.bounds = virtual_rank_bounds(shares, num_virtual_ranks)
        """Process p computes the virtual ranks from `bounds[p]` to `bounds[p + 1] - 1`."""
        self.process = process
        self._sums_of_count: dict[int, TreeSums] = {}

    def sums(self, count: int) -> TreeSums:
        """Returns what sums over the virtual ranks of a global batch.

        Args:
            count: samples of the global batch. Virtual ranks without samples have no leaf.
        """
        if count not in self._sums_of_count:
            sizes = part_sizes(count, (1,) * self.num_virtual_ranks)
            present = tuple(size > 0 for size in sizes)
            self._sums_of_count[count] = TreeSums(present, self.bounds, self.process)
        return self._sums_of_count[count]

    def num_merges(self, micro_batch: MicroBatch) -> int:
        """Returns how many merges follow when the leaf of a micro-batch was pushed."""
        assert micro_batch.virtual_rank is not None
        sums = self.sums(micro_batch.global_samples)
        place = sums.leaves.index(micro_batch.virtual_rank.number)
        return sums.merges[place]


def make_virtual_rank_tree(run: Run) -> VirtualRankTree:
    """Returns how the processes of a run sum over its virtual ranks, which it must have."""
    settings = run.settings
    assert settings.virtual_ranks is not None
    shares = initial_shares(settings.shares, run.topology.size)
    return VirtualRankTree(settings.virtual_ranks, shares, run.topology.rank)


Gradients = list[Tensor | None]
"""A gradient for each trained parameter; None if it was not used."""


class _ViewsOfBucket(NamedTuple):
    """The gradients of a bucket of DDP."""

    buffer: Tensor
    views: list[Tensor]
    """As `gradients_of_bucket` returns them."""
    parameters: list[Tensor]
    places: list[int]
    """Of the parameters, among those of the module."""


class VirtualRankGradients(Extension):
    """Keeps the gradients of a module's virtual ranks apart, and adds them in the tree.

    Args:
        parameters: of the module.
        tree: of the run.
        step: of the run.
        single_process: True if there is one process, so that nothing else sums the gradients.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        tree: VirtualRankTree,
        step: Step,
        *,
        single_process: bool = False,
    ) -> None:
        self._single_process = single_process
        self.tree = tree
        self._parameters = list(parameters)
        self._step = step
        self._nodes: list[Gradients] = []
        """The partial sums of this process's virtual ranks before the present one; a stack."""
        self._place = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        self._views: dict[int, _ViewsOfBucket] = {}
        """By the number of the bucket."""
        self._previous: MicroBatch | None = None
        """The micro-batch before the present one, if it is of the same global batch."""
        self._backward_left_gradients = False
        """True if there were gradients when the latest backward pass had ended."""

    # Events

    def begin(self, micro_batch: MicroBatch) -> None:
        """Takes the gradients of the virtual rank before this one out of the parameters."""
        if micro_batch.virtual_rank is None:  # outside of a loader
            return
        previous = self._previous
        self._previous = micro_batch
        if micro_batch.first:
            self._nodes.clear()
        elif micro_batch.virtual_rank_begins and previous is not None:
            self._check_not_cleared(previous)
            self._push_gradients(previous)

    def backward_begins(self, weighted_loss: Tensor, micro_batch: MicroBatch) -> None:
        """Raises UsageError for what has no place in the tree."""
        check_virtual_rank_backward(self._step, micro_batch)

    def backward_ended(self, micro_batch: MicroBatch) -> None:
        """Writes the gradient of the global batch to the parameters, on one process."""
        self._backward_left_gradients = self._has_gradients()
        if self._single_process and self._step.micro_batch.last:
            self._sum_on_one_process()

    def clear_gradients(self) -> None:
        """Forgets the gradients of a global batch that was broken off."""
        self._nodes.clear()

    def _has_gradients(self) -> bool:
        """Returns True if some parameter has a gradient."""
        return any(parameter.grad is not None for parameter in self._parameters)

    def _check_not_cleared(self, micro_batch: MicroBatch) -> None:
        """Raises UsageError if the script has cleared the gradients of a virtual rank.

        They are only partial sums, so `zero_grad` of the prepared optimizer keeps them.
        """
        was_cleared = self._backward_left_gradients and not self._has_gradients()
        if was_cleared and has_leaf(micro_batch):
            raise cleared_gradients_error()

    # Sums

    def _sum_on_one_process(self) -> None:
        """Writes the gradient of the global batch to the parameters; there is one process."""
        self._push_gradients(self._step.micro_batch)
        if not self._nodes:
            return
        (total,) = self._nodes
        self._nodes.clear()
        used = [gradient for gradient in total if gradient is not None]
        if used:
            multiply_each(used, 1.0 / self.tree.num_virtual_ranks)
        for parameter, gradient in zip(self._parameters, total, strict=True):
            parameter.grad = gradient

    def start_bucket_sum(self, bucket: dist.GradBucket) -> Callable[[], None]:
        """Begins to write the gradient of the global batch to a bucket of DDP.

        The bucket has this process's gradients of the last backward pass.

        Returns:
            A function that waits for it.
        """
        micro_batch = self._step.micro_batch
        sums = self.tree.sums(micro_batch.global_samples)
        total = bucket.buffer()
        scale = 1.0 / self.tree.num_virtual_ranks
        if not self._nodes and not self._step.extensions.listeners["leaf_gradient"]:
            # Most often a process has one virtual rank, whose gradient the bucket holds.
            nodes = [total] if has_leaf(micro_batch) else []
            return sums.start(nodes, total, scale=scale)
        _, views, parameters, places = self._views_of_bucket(bucket)
        # The stack has partial sums over the virtual ranks before the last one of this process, and
        # the bucket has the gradient of the last one. The partial sums with which the tree merges
        # it are added to it there. The others stay as they are.
        unmerged_nodes = self._nodes
        nodes = []
        if has_leaf(micro_batch):
            self._step.extensions.leaf_gradient(micro_batch, parameters, views)
            num_merges = self.tree.num_merges(micro_batch)
            unmerged_nodes = self._nodes[: len(self._nodes) - num_merges]
            merged_nodes = self._nodes[len(unmerged_nodes) :]
            for node in reversed(merged_nodes):
                add_gradients(views, [node[place] for place in places])
            nodes = [total]
        flat_nodes = []
        for node in unmerged_nodes:
            flat_nodes.append(_like_bucket(total, views, [node[place] for place in places]))
        return sums.start([*flat_nodes, *nodes], total, scale=scale)

    def _views_of_bucket(self, bucket: dist.GradBucket) -> _ViewsOfBucket:
        """Returns the gradients of a bucket, which are found once for each buffer."""
        buffer = bucket.buffer()
        known = self._views.get(bucket.index())
        if known is None or known.buffer.data_ptr() != buffer.data_ptr():
            # While the views are kept, no other buffer has this address.
            if bucket.index() == 0:
                self._views.clear()  # torch has made other buckets
            parameters = bucket.parameters()
            places = [self._place[id(parameter)] for parameter in parameters]
            known = _ViewsOfBucket(buffer, gradients_of_bucket(bucket), parameters, places)
            self._views[bucket.index()] = known
        return known

    def _push_gradients(self, micro_batch: MicroBatch) -> None:
        """Takes the gradients of a micro-batch's virtual rank, and adds them to those before it.

        Gradients of a micro-batch that does not count are dropped.
        """
        gradients = self._take_gradients()
        if has_leaf(micro_batch):
            self._step.extensions.leaf_gradient(micro_batch, self._parameters, gradients)
            push(self._nodes, gradients, self.tree.num_merges(micro_batch), _merge)

    def _take_gradients(self) -> Gradients:
        """Takes the gradients out of the parameters, so that the next ones begin anew.

        Raises:
            UsageError: one is sparse.
        """
        gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        for gradient in gradients:
            if gradient is not None and gradient.layout is not torch.strided:
                raise sparse_gradients_error()
        return gradients


def _merge(left: Gradients, right: Gradients) -> None:
    """Adds gradients to others, in place."""
    for place, gradient in enumerate(right):
        if left[place] is None and gradient is not None:
            # As the zeros that DDP has in the place of a gradient that is not there.
            left[place] = torch.zeros_like(gradient)
    add_gradients(left, right)


def sparse_gradients_error() -> UsageError:
    """Returns the error for sparse gradients, which have no place in the sum."""
    return UsageError(
        "sparse gradients with virtual_ranks",
        "they are added up in a fixed order, which needs dense ones",
        "build the embedding without sparse=True",
    )


def check_virtual_rank_backward(step: Step, micro_batch: MicroBatch) -> None:
    """Raises UsageError for a backward pass that has no place in the sum over virtual ranks.

    Args:
        step: of the run.
        micro_batch: that the loss comes from.
    """
    if micro_batch.virtual_rank is None:
        raise UsageError(
            "world.backward outside of a prepared loader with virtual_ranks",
            "the loader says which virtual rank a batch belongs to",
            "train on a loader that world.prepare or world.loader returned, or leave "
            "virtual_ranks out",
        )
    if step.training_pass.num_backwards:
        raise UsageError(
            "several backward passes of a batch with virtual_ranks",
            "the gradients of each virtual rank are added up when its backward pass is over",
            "add the losses up and call world.backward once",
        )


_SINGLE_SAMPLE_NOTE = "lockstep: virtual rank"
"""How the note of `note_single_sample` begins."""


def note_single_sample(error: BaseException | None, micro_batch: MicroBatch) -> None:
    """Adds a note to torch's error of a BatchNorm layer that has got a single sample.

    It says "Expected more than 1 value per channel when training".
    """
    if not isinstance(error, ValueError) or "value per channel" not in str(error):
        return
    if isinstance(error, LockstepError):  # of a SyncBatchNorm, about all virtual ranks
        return
    if micro_batch.virtual_rank is None or micro_batch.local_rows != 1:
        return
    add_note_once(
        error,
        _SINGLE_SAMPLE_NOTE,
        f" {micro_batch.virtual_rank.number} has one of the "
        f"{micro_batch.global_samples} samples of this batch, and with virtual_ranks each takes "
        "the statistics of its own part. Leave short batches out (drop_last=True), use fewer "
        "virtual ranks, or a larger batch.",
    )


def has_leaf(micro_batch: MicroBatch) -> bool:
    """Returns True if the gradient of a micro-batch belongs to the sum over virtual ranks."""
    return micro_batch.virtual_rank is not None and micro_batch.virtual_rank.counts


def add_gradients(totals: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
    """Adds gradients to others, in place. A gradient that is None counts as zero.

    Args:
        totals: None only where the gradient is None too.
        gradients: one for each of them.
    """
    used_totals = []
    used_gradients = []
    for total, gradient in zip(totals, gradients, strict=True):
        if gradient is not None and total is not None:
            used_totals.append(total)
            used_gradients.append(gradient)
        elif total is not None:
            total.add_(0.0)  # so that -0.0 becomes 0.0, as in a sum with zeros
    if used_totals:
        add_to_each(used_totals, used_gradients)


def gradients_of_bucket(bucket: dist.GradBucket) -> list[Tensor]:
    """Returns the gradient of each parameter of a bucket, as views of its buffer.

    DDP stores a gradient in the memory format of its parameter, such as channels last, which
    `bucket.gradients()` does not know: it has the right places in the buffer and wrong strides.
    """
    views: list[Tensor] = []
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        # It has the strides of the parameter if these leave no gaps, else those of a new tensor.
        strides = torch.empty_like(parameter, device="meta").stride()
        views.append(gradient.as_strided(parameter.shape, strides, gradient.storage_offset()))
    return views


def _like_bucket(
    buffer: Tensor, views: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> Tensor:
    """Returns a flat tensor with gradients in the places that they have in a bucket of DDP.

    Args:
        buffer: of the bucket.
        views: the views of the buffer that hold the gradient of each parameter.
        gradients: one for each of them; None counts as zero.
    """
    flat = torch.zeros_like(buffer)
    for view, gradient in zip(views, gradients, strict=True):
        if gradient is not None:
            offset = view.storage_offset() - buffer.storage_offset()
            flat.as_strided(view.shape, view.stride(), offset).copy_(gradient)
    return flat


class BucketTreeSum:
    """A communication hook of DDP that sums gradients over virtual ranks.

    Between machines the hook only starts the sum of a bucket (`pending_buckets`).

    Args:
        gradients: of the module that DDP wraps.
    """

    def __init__(self, gradients: VirtualRankGradients) -> None:
        self._gradients = gradients
        self._pending = PendingBuckets()

    def __call__(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Sums a bucket; torch calls this in the backward pass.

        Returns:
            A future of the gradient of the global batch.
        """
        if bucket.buffer().layout is not torch.strided:
            raise sparse_gradients_error()
        return self._pending.add(bucket, self._gradients.start_bucket_sum(bucket))
