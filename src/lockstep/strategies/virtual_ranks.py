"""Sums the gradients of virtual ranks, with the same bits on any number of processes.

A *virtual rank* has a fixed part of every global batch, and computes its gradient in its own
forward and backward passes. A process computes several virtual ranks, one after the other.
Gradients are added up over all virtual ranks in the order of a fixed binary tree
(`communication.summation_tree`), whichever process they come from. So the sum has the same bits on
any number of processes, unlike the sum of an all-reduce, which adds up the gradients of processes.

The gradient of a virtual rank is a *leaf* of the tree. When the next virtual rank begins, the leaf
is taken out of `parameter.grad` and added to the previous partial sums as far as the tree allows
(each such addition is a *merge*). In the last backward pass of the process, the remaining partial
sums are summed over the processes. The result, divided by the number of virtual ranks, is the
gradient of the mean loss over the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.batch.plan import part_sizes, virtual_rank_bounds
from lockstep.batch.shares import initial_shares
from lockstep.checkpoint.modules import plain_name_function
from lockstep.communication.shared_memory import do_nothing
from lockstep.communication.summation_tree import push
from lockstep.communication.tree_sum import TreeSums
from lockstep.distributed.process_group import Run
from lockstep.errors import LockstepError, UsageError, add_note_once
from lockstep.language import translate_sentences
from lockstep.session.delivery import TO_LEAVE_ONE_OUT, cleared_gradients_error
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.session.step import Step
from lockstep.strategies.base import (
    describe_change_of_kind,
    not_averaged_error,
    parameters_of,
)
from lockstep.strategies.pending_buckets import PendingBuckets
from lockstep.torch_compat import add_to_each, multiply_each, to_local


class VirtualRankTree:
    """The order in which the processes of a run sum over its virtual ranks.

    Args:
        num_virtual_ranks: the number of virtual ranks in the run.
        shares: one weight for each process, by which virtual ranks are divided over processes.
        process: the number of this process.
    """

    def __init__(self, num_virtual_ranks: int, shares: tuple[int, ...], process: int) -> None:
        self.num_virtual_ranks = num_virtual_ranks
        self.bounds = virtual_rank_bounds(shares, num_virtual_ranks)
        """Process p computes the virtual ranks from `bounds[p]` to `bounds[p + 1] - 1`.

        For example,
        [0, 2, 4] for 4 virtual ranks on 2 processes."""
        self.process = process
        self._sums_of_count: dict[int, TreeSums] = {}

    def sums(self, count: int) -> TreeSums:
        """Returns the object that sums over the virtual ranks of a global batch.

        Args:
            count: the number of samples in the global batch. Virtual ranks without samples have no
                leaf.
        """
        if count not in self._sums_of_count:
            sizes = part_sizes(count, (1,) * self.num_virtual_ranks)
            present = tuple(size > 0 for size in sizes)
            self._sums_of_count[count] = TreeSums(present, self.bounds, self.process)
        return self._sums_of_count[count]

    def num_merges(self, micro_batch: MicroBatch) -> int:
        """Returns how many merges follow after the gradient of a virtual rank was pushed.

        Args:
            micro_batch: a micro-batch of the virtual rank.
        """
        assert micro_batch.virtual_rank is not None
        sums = self.sums(micro_batch.global_samples)
        index_of_leaf = sums.leaves.index(micro_batch.virtual_rank.number)  # on this process
        return sums.merges[index_of_leaf]


def make_virtual_rank_tree(run: Run) -> VirtualRankTree:
    """Returns the summation order of a run with virtual ranks."""
    settings = run.settings
    assert settings.virtual_ranks is not None
    shares = initial_shares(settings.shares, run.topology.size)
    return VirtualRankTree(settings.virtual_ranks, shares, run.topology.rank)


Gradients = list[Tensor | None]
"""The gradient of each trained parameter; None for one that was not used."""


class _BucketGradients(NamedTuple):
    """The gradients in a bucket of DDP, with their parameters."""

    buffer: Tensor
    views: list[Tensor]
    """The gradient of each parameter, as returned by `gradients_of_bucket`."""
    parameters: list[Tensor]
    indices_in_module: list[int]
    """The index of each of these parameters among all parameters of the module."""

    def add(self, gradients_of_module: Gradients) -> None:
        """Adds gradients to those in the bucket, in place.

        Args:
            gradients_of_module: one gradient for each parameter of the module. Those of parameters
                that are in other buckets are ignored.
        """
        add_gradients(self.views, [gradients_of_module[index] for index in self.indices_in_module])

    def copy_with(self, gradients_of_module: Gradients) -> Tensor:
        """Returns a copy of the bucket's buffer that contains other gradients.

        Args:
            gradients_of_module: one gradient for each parameter of the module; None counts as zero.
                Those of parameters that are in other buckets are ignored.
        """
        flat = torch.zeros_like(self.buffer)
        for view, index in zip(self.views, self.indices_in_module, strict=True):
            gradient = gradients_of_module[index]
            if gradient is not None:
                self._same_place_in(flat, view).copy_(gradient)
        return flat

    def _same_place_in(self, flat: Tensor, view: Tensor) -> Tensor:
        """Returns a view of the place in `flat` that another view has in the bucket's buffer.

        Args:
            flat: tensor like the buffer, which begins at the start of its storage.
            view: the gradient of a parameter, as a view of the buffer. It may have another memory
                format, such as channels last, and may be complex in a real buffer.
        """
        # Offsets count from the start of a storage, which may lie before the buffer.
        begin_of_buffer = as_dtype_of(view, self.buffer).storage_offset()
        offset_in_buffer = view.storage_offset() - begin_of_buffer
        return as_dtype_of(view, flat).as_strided(view.shape, view.stride(), offset_in_buffer)


class SkippedVirtualRanks:
    """Notices virtual ranks of a global batch that had no backward pass.

    The script may skip a virtual rank if it leaves out the optimizer's step as well. So this raises
    no error before the step.

    Args:
        has_gradients: answers whether some gradient of a parameter is not zero, so that the script
            has not cleared them.
    """

    def __init__(self, has_gradients: Callable[[], bool]) -> None:
        self._has_gradients = has_gradients
        self.had_backward = False
        """True if a backward pass has ended since the present virtual rank began."""
        self._backward_began = False
        """True if a backward pass has begun since the present global batch began."""
        self._latest: MicroBatch | None = None
        """The first micro-batch of the virtual rank that was begun last; None before the first."""
        self._skipped: MicroBatch | None = None
        """A micro-batch of a virtual rank of the present global batch that had no backward pass."""
        self._skipped_earlier: MicroBatch | None = None
        """Such a micro-batch of an earlier global batch, until the script clears the gradients."""

    def begin(self, micro_batch: MicroBatch) -> None:
        """Notes that a virtual rank begins, with its first micro-batch."""
        if micro_batch.first:
            self._end_previous_global_batch()
        else:
            self._note_if_latest_was_skipped()
        self.had_backward = False
        self._latest = micro_batch

    def _end_previous_global_batch(self) -> None:
        """Remembers what was skipped: a script may step after several global batches."""
        # Without any backward pass, the global batch was left out as a whole, and is complete.
        if self._backward_began:
            self._note_if_latest_was_skipped()
            if self._skipped is not None:
                self._skipped_earlier = self._skipped

        self._skipped = None
        self._backward_began = False

    def _note_if_latest_was_skipped(self) -> None:
        """Notes the latest virtual rank if it had no backward pass."""
        latest = self._latest
        if latest is not None and counts_in_sum(latest) and not self.had_backward:
            self._skipped = latest

    def backward_begins(self) -> None:
        """Notes that a backward pass begins."""
        self._forget_earlier_if_cleared()
        self._backward_began = True

    def _forget_earlier_if_cleared(self) -> None:
        """Forgets earlier global batches if the script has cleared their incomplete gradients.

        It may call `zero_grad` as late as right before the first backward pass of the next one.
        From then on, there are gradients of the present global batch.
        """
        if self._skipped_earlier is None or self._backward_began:
            return
        if not self._has_gradients():
            self._skipped_earlier = None

    def backward_ended(self) -> None:
        """Notes that a backward pass has ended without an error."""
        self.had_backward = True

    def find(self) -> MicroBatch | None:
        """Returns a micro-batch of a skipped virtual rank before an optimizer's step, or None."""
        self._note_if_latest_was_skipped()  # in a step after the loop, the last one, too
        self._forget_earlier_if_cleared()
        return self._skipped or self._skipped_earlier


def has_nonzero_gradients(parameters: Iterable[Tensor]) -> bool:
    """Returns True if some parameter has a gradient that is not zero, in the shard of this process.

    This waits for the device, so it is not for every backward pass.
    """
    for parameter in parameters:
        if parameter.grad is not None and bool(to_local(parameter.grad).any()):
            return True
    return False


class VirtualRankGradients(Extension):
    """Keeps the gradients of virtual ranks apart, and sums them in the order of the tree.

    Args:
        parameters: the parameters of the module.
        tree: the summation order of the run.
        step: the state of the current optimizer step.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], tree: VirtualRankTree, step: Step
    ) -> None:
        self.tree = tree
        self._parameters = list(parameters)
        self._step = step
        self._partial_sums: list[Gradients] = []
        """A stack of partial sums over the virtual ranks that this process has computed so far."""
        self._index_in_module = {id(p): index for index, p in enumerate(self._parameters)}
        self._buckets: dict[int, _BucketGradients] = {}
        """The gradients in each bucket of DDP, by the number of the bucket."""
        self._previous: MicroBatch | None = None
        """The previous micro-batch; None if there was none."""
        self._backward_left_gradients = False
        """True if there were gradients at the end of the latest backward pass."""
        self._skipped_virtual_ranks = SkippedVirtualRanks(
            lambda: has_nonzero_gradients(self._parameters)
        )
        self._gradients_are_in_buckets = False
        """True if the gradients in `parameter.grad` are views of DDP's buckets, although they are
        those of a single virtual rank."""
        self._script_cleared_gradients = False
        """True if the script has cleared gradients of the present global batch before they were
        added to the sum."""

    # Events

    def begin(self, micro_batch: MicroBatch) -> None:
        """Adds the gradients of the previous virtual rank to the sum when another one begins.

        When a global batch begins, nothing is left to add: the gradients of the last virtual rank
        of a process are added in its own backward pass.
        """
        if micro_batch.virtual_rank is None:  # the script does not use a prepared loader
            return

        if micro_batch.first:
            self._partial_sums.clear()
            self._script_cleared_gradients = False
            self._skipped_virtual_ranks.begin(micro_batch)
        elif micro_batch.virtual_rank_begins and self._previous is not None:
            self._end_previous_virtual_rank(self._previous)
            self._skipped_virtual_ranks.begin(micro_batch)

        self._previous = micro_batch

    def _end_previous_virtual_rank(self, last_micro_batch: MicroBatch) -> None:
        """Adds the gradients of a virtual rank to the sum, once it has had all its micro-batches.

        If it had no backward pass, it adds zeros. The gradients in the parameters are then those of
        earlier global batches, and stay.
        """
        self._look_for_cleared_gradients(last_micro_batch)
        had_backward = self._skipped_virtual_ranks.had_backward
        self._move_gradients_to_sums(last_micro_batch, has_gradients=had_backward)

    def backward_begins(self, weighted_loss: Tensor, micro_batch: MicroBatch) -> None:
        """Raises UsageError for a backward pass that cannot be part of the sum."""
        check_virtual_rank_backward(self._step, micro_batch)
        self._skipped_virtual_ranks.backward_begins()

    def backward_ended(self, micro_batch: MicroBatch) -> None:
        """Notes that a virtual rank had a backward pass, and whether it left gradients."""
        self._skipped_virtual_ranks.backward_ended()
        self._backward_left_gradients = self._has_gradients()

    def clear_gradients(self) -> None:
        """Drops the partial sums when the loop has left a global batch early."""
        self._partial_sums.clear()

    def _has_gradients(self) -> bool:
        """Returns True if any parameter has a gradient."""
        return any(parameter.grad is not None for parameter in self._parameters)

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Raises UsageError if the sum of the gradients lacks those of a virtual rank.

        The script has skipped its backward pass, or cleared its gradients. Both are allowed in a
        global batch without `optimizer.step()`, for which this is not called.
        """
        skipped = self._skipped_virtual_ranks.find()
        if skipped is not None and self._trains_module(optimizer):
            raise skipped_error(skipped)
        if self._script_cleared_gradients and self._trains_module(optimizer):
            raise cleared_gradients_error()

    def _trains_module(self, optimizer: Optimizer) -> bool:
        """Returns True if an optimizer has parameters of the module."""
        return any(id(parameter) in self._index_in_module for parameter in parameters_of(optimizer))

    def _look_for_cleared_gradients(self, micro_batch: MicroBatch) -> None:
        """Finds out whether the script has cleared a virtual rank's gradients, by `zero_grad`.

        This raises no error yet: the script may leave the step out. `before_step` raises it.

        Args:
            micro_batch: the last micro-batch of the virtual rank.
        """
        had_gradients = self._skipped_virtual_ranks.had_backward and self._backward_left_gradients
        if counts_in_sum(micro_batch) and had_gradients and not self._has_gradients():
            self._script_cleared_gradients = True

    # Sums

    def handle_bucket(self, bucket: dist.GradBucket) -> Callable[[], None]:
        """Starts the sum of a bucket of DDP in the last micro-batch, and leaves it alone in others.

        DDP communicates in the last micro-batch only, except in this case: a forward pass of an
        earlier global batch had gradients that no backward pass has computed, such as that of a
        GAN's generator while the critic is trained. DDP still expects them, and takes the next
        gradients for them, in whichever micro-batch these come.

        Returns:
            A function that waits for the result.
        """
        if self._step.micro_batch.last:
            return self._start_bucket_sum(bucket)
        self._gradients_are_in_buckets = True
        return do_nothing

    def _start_bucket_sum(self, bucket: dist.GradBucket) -> Callable[[], None]:
        """Starts replacing the gradients in a bucket of DDP by those of the global batch.

        It is called in the last backward pass of this process. The bucket then has the gradients of
        this process's last virtual rank, and the stack of partial sums has those of all others. The
        sum over all processes is written to the buffer of the bucket.

        Returns:
            A function that waits for the result.
        """
        micro_batch = self._step.micro_batch
        sums = self.tree.sums(micro_batch.global_samples)
        scale = 1.0 / self.tree.num_virtual_ranks
        return sums.start(self._partial_sums_with(bucket), bucket.buffer(), scale=scale)

    def _partial_sums_with(self, bucket: dist.GradBucket) -> list[Tensor]:
        """Returns the partial sums of this process over its virtual ranks, in a bucket's layout.

        The bucket has the gradients of the last virtual rank, and the stack the sums before it.
        """
        micro_batch = self._step.micro_batch
        if not counts_in_sum(micro_batch):
            # What is in the bucket is left out: the process had no virtual rank left to compute, or
            # has repeated one to check a device.
            return self._copies_in_layout_of(bucket, self._partial_sums)

        # The usual case: this process has one virtual rank, and no extension (such as the journal)
        # wants to see the gradients of single parameters.
        is_only_virtual_rank = not self._partial_sums
        has_listener = len(self._step.extensions.listeners["leaf_gradient"]) > 0
        if is_only_virtual_rank and not has_listener:
            return [bucket.buffer()]

        gradients = self._gradients_in(bucket)
        self._step.extensions.leaf_gradient(micro_batch, gradients.parameters, gradients.views)
        sums_not_merged = self._merge_into_bucket(gradients, micro_batch)
        return [*self._copies_in_layout_of(bucket, sums_not_merged), bucket.buffer()]

    def _copies_in_layout_of(
        self, bucket: dist.GradBucket, partial_sums: Sequence[Gradients]
    ) -> list[Tensor]:
        """Returns copies of partial sums that have the layout of a bucket's buffer."""
        return [self._gradients_in(bucket).copy_with(partial_sum) for partial_sum in partial_sums]

    def _merge_into_bucket(
        self, gradients: _BucketGradients, micro_batch: MicroBatch
    ) -> list[Gradients]:
        """Adds the last `num_merges` partial sums of the stack to the gradients in a bucket.

        For example, this process has the virtual ranks 1, 2 and 3, and the tree is
        (0 + 1) + (2 + 3). The stack has 1 and 2, and the bucket has 3. One merge follows: the
        bucket becomes 2 + 3. The gradients of 1 are returned: 0 is on another process.

        Args:
            gradients: the gradients in the bucket.
            micro_batch: a micro-batch of the virtual rank that they come from.

        Returns:
            The partial sums that were not added. The stack itself is not changed: the gradients in
            other buckets are still to be merged with it.
        """
        num_merges = self.tree.num_merges(micro_batch)
        num_left = len(self._partial_sums) - num_merges
        for partial_sum in reversed(self._partial_sums[num_left:]):
            gradients.add(partial_sum)
        return self._partial_sums[:num_left]

    def _gradients_in(self, bucket: dist.GradBucket) -> _BucketGradients:
        """Returns the gradients in a bucket, which are looked up once for each buffer."""
        if not self._is_known(bucket):
            # DDP replaces all buckets at once, after the first backward pass. A new bucket 0, which
            # comes first, means that the known ones are no longer in use.
            if bucket.index() == 0:
                self._buckets.clear()

            parameters = bucket.parameters()
            indices = [self._index_in_module[id(parameter)] for parameter in parameters]
            views = gradients_of_bucket(bucket)
            self._buckets[bucket.index()] = _BucketGradients(
                bucket.buffer(), views, parameters, indices
            )
        return self._buckets[bucket.index()]

    def _is_known(self, bucket: dist.GradBucket) -> bool:
        """Returns True if `_buckets` has the gradients in this bucket, with the same buffer.

        An equal address means the same buffer: `_buckets` keeps each buffer alive, so torch cannot
        give its memory to another one.
        """
        known = self._buckets.get(bucket.index())
        return known is not None and known.buffer.data_ptr() == bucket.buffer().data_ptr()

    def _move_gradients_to_sums(
        self, micro_batch: MicroBatch, *, has_gradients: bool = True
    ) -> None:
        """Moves the gradients of a virtual rank from the parameters to the partial sums.

        If `counts_in_sum` is False for the virtual rank, its gradients are dropped.

        Args:
            micro_batch: the last micro-batch of the virtual rank.
            has_gradients: False if the virtual rank had no backward pass.
        """
        if has_gradients:
            gradients = self._take_gradients()
        else:
            # The tree needs a value for every virtual rank that counts. None stands for zero.
            gradients = [None] * len(self._parameters)

        if counts_in_sum(micro_batch):
            self._step.extensions.leaf_gradient(micro_batch, self._parameters, gradients)
            push(self._partial_sums, gradients, self.tree.num_merges(micro_batch), add=_merge)

    def _take_gradients(self) -> Gradients:
        """Takes the gradients out of the parameters, whose gradients are then None.

        Raises:
            UsageError: a gradient is sparse.
        """
        gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        for gradient in gradients:
            if gradient is not None and gradient.layout is not torch.strided:
                raise sparse_gradients_error()

        if not self._gradients_are_in_buckets:
            return gradients

        # They are views of DDP's buckets, which the next backward pass will overwrite.
        self._gradients_are_in_buckets = False
        return [None if gradient is None else gradient.clone() for gradient in gradients]


class GradientsOnOneProcess(VirtualRankGradients):
    """Sums the gradients of virtual ranks on a single process, where no DDP completes the sum.

    Args:
        module: the module.
        tree: the summation order of the run.
        step: the state of the current optimizer step.
    """

    def __init__(self, module: nn.Module, tree: VirtualRankTree, step: Step) -> None:
        super().__init__(list(module.parameters()), tree, step)
        self._kinds_in_prepare: list[_ParameterKind] = []
        to_plain_name = plain_name_function(module)  # "_orig_mod.fc.weight" -> "fc.weight"
        for name, parameter in module.named_parameters():
            kind = _ParameterKind(to_plain_name(name), parameter.dtype, parameter.device)
            self._kinds_in_prepare.append(kind)

    def begin(self, micro_batch: MicroBatch) -> None:
        """Adds the gradients of the previous virtual rank to the sum when another one begins."""
        try:
            super().begin(micro_batch)
        except RuntimeError as error:
            self._raise_if_parameters_changed(error)
            raise

    def backward_ended(self, micro_batch: MicroBatch) -> None:
        """Completes the sum after the last backward pass."""
        super().backward_ended(micro_batch)
        if not self._step.micro_batch.last:
            return
        try:
            self._complete_sum()
        except RuntimeError as error:
            self._raise_if_parameters_changed(error)
            raise

    def _complete_sum(self) -> None:
        """Writes the mean gradient of all virtual ranks to the parameters."""
        self._move_gradients_to_sums(self._step.micro_batch)
        if not self._partial_sums:  # no virtual rank had a gradient that counts
            return

        # After the last virtual rank all partial sums are merged into one: a list with the sum of
        # each parameter's gradients, or None for a parameter that was not used.
        (gradients,) = self._partial_sums
        self._partial_sums.clear()

        # The mean over the virtual ranks, in place.
        used = [gradient for gradient in gradients if gradient is not None]
        if used:
            multiply_each(used, 1.0 / self.tree.num_virtual_ranks)

        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def _raise_if_parameters_changed(self, error: RuntimeError) -> None:
        """Raises UsageError in place of torch's error if parameters were converted or moved.

        Torch adds gradients of one device only, and assigns them to parameters of their dtype.
        """
        if isinstance(error, LockstepError):
            return
        changes: list[str] = []
        for parameter, (name, dtype, device) in zip(
            self._parameters, self._kinds_in_prepare, strict=True
        ):
            change = describe_change_of_kind(name, parameter, dtype, device)
            if change and parameter.requires_grad:
                changes.append(change)
        if changes:
            raise not_averaged_error(changes) from error


class _ParameterKind(NamedTuple):
    """The name of a parameter, and its dtype and device in `World.prepare`."""

    name: str
    dtype: torch.dtype
    device: torch.device


def _merge(left: Gradients, right: Gradients) -> None:
    """Adds the gradients `right` to the gradients `left`, in place."""
    for index, gradient in enumerate(right):
        if left[index] is None and gradient is not None:
            left[index] = torch.zeros_like(gradient)  # DDP also has zeros for missing gradients
    add_gradients(left, right)


def skipped_error(micro_batch: MicroBatch) -> UsageError:
    """Returns the error for a virtual rank without a backward pass.

    Args:
        micro_batch: a micro-batch of the virtual rank.
    """
    return UsageError(
        "a loop that skips batches, with virtual_ranks",
        f"no backward pass has followed the batch of virtual rank "
        f"{micro_batch.virtual_rank_number}, so its part of the gradient is missing",
        f"call world.backward for every batch; {TO_LEAVE_ONE_OUT}",
    )


def sparse_gradients_error() -> UsageError:
    """Returns the error for sparse gradients, which cannot be part of the sum."""
    return UsageError(
        "sparse gradients with virtual_ranks",
        "they are added up in a fixed order, which needs dense ones",
        "build the embedding without sparse=True",
    )


def check_virtual_rank_backward(step: Step, micro_batch: MicroBatch) -> None:
    """Raises UsageError for a backward pass that cannot be part of the sum over virtual ranks.

    Args:
        step: the state of the current optimizer step.
        micro_batch: the micro-batch that the loss comes from.
    """
    if micro_batch.virtual_rank is None:
        raise UsageError(
            "world.backward outside of a prepared loader with virtual_ranks",
            "the loader says which virtual rank a batch belongs to",
            "train on a loader that world.prepare or world.loader returned, or leave "
            "virtual_ranks out",
        )

    num_backwards_of_micro_batch = step.training_pass.num_backwards
    if num_backwards_of_micro_batch > 0:
        raise UsageError(
            "several backward passes of a batch with virtual_ranks",
            "the gradients of each virtual rank are added up when its backward pass is over",
            "add the losses up and call world.backward once",
        )


def note_single_sample(error: BaseException | None, micro_batch: MicroBatch) -> None:
    """Explains torch's error about a BatchNorm layer that was called with a single sample.

    The message of that error is "Expected more than 1 value per channel when training". The note
    is, for example, "lockstep: virtual rank 3 has one of the 9 samples of this batch, ...".

    Args:
        error: an uncaught error; None if there was none.
        micro_batch: the latest micro-batch.
    """
    if not isinstance(error, ValueError) or "value per channel" not in str(error):
        return
    if isinstance(error, LockstepError):  # an error of SyncBatchNorm, about all virtual ranks
        return
    if micro_batch.virtual_rank is None or micro_batch.local_rows != 1:
        return

    note = translate_sentences(
        f"virtual rank {micro_batch.virtual_rank.number} has one of the "
        f"{micro_batch.global_samples} samples of this batch, and with virtual_ranks each takes "
        "the statistics of its own part.",
        "Leave short batches out (drop_last=True), use fewer virtual ranks, or a larger batch.",
    )
    add_note_once(error, "a single sample", note)


def counts_in_sum(micro_batch: MicroBatch) -> bool:
    """Returns True if the gradient of a micro-batch is part of the sum over virtual ranks."""
    return micro_batch.virtual_rank is not None and micro_batch.virtual_rank.contributes


def add_gradients(totals: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
    """Adds gradients to totals, in place. A gradient that is None counts as zero.

    Args:
        totals: the tensors to add to. An entry may only be None if the gradient is None as well.
        gradients: one gradient for each total.
    """
    used_totals = []
    used_gradients = []
    for total, gradient in zip(totals, gradients, strict=True):
        if gradient is not None and total is not None:
            used_totals.append(total)
            used_gradients.append(gradient)
        elif total is not None:
            # Another process may have zeros for this gradient instead of None, and add them. This
            # turns -0.0 into 0.0. Add zero here too, so that both get the same bits.
            total.add_(0.0)

    if used_totals:
        add_to_each(used_totals, used_gradients)


def gradients_of_bucket(bucket: dist.GradBucket) -> list[Tensor]:
    """Returns the gradient of each parameter in a bucket, as views of the bucket's buffer.

    DDP stores a gradient in the memory format of its parameter, such as channels last. The views
    that `bucket.gradients()` returns do not have these strides, and are real for complex gradients.
    """
    views: list[Tensor] = []
    num_before = 0  # in the bucket, the gradients follow each other without gaps
    for parameter in bucket.parameters():
        # As DDP does: the strides of the parameter if it is dense in memory, else contiguous ones.
        strides = torch.empty_like(parameter, device="meta").stride()
        # For a complex parameter a complex view, so that offsets count complex numbers.
        buffer = as_dtype_of(parameter, bucket.buffer())
        offset = buffer.storage_offset() + num_before
        views.append(buffer.as_strided(parameter.shape, strides, offset))
        num_before += parameter.numel()
    return views


def as_dtype_of(parameter: Tensor, buffer: Tensor) -> Tensor:
    """Returns a bucket's buffer as a view with the dtype of its parameters.

    DDP stores complex gradients as pairs of real numbers. Each bucket has parameters of one dtype.
    """
    return torch.view_as_complex(buffer.view(-1, 2)) if parameter.is_complex() else buffer


class BucketTreeSum:
    """A communication hook of DDP that sums gradients over virtual ranks.

    Between machines, this hook only starts the sum of a bucket, so that several buckets can be
    under way (`pending_buckets`).

    Args:
        gradients: the gradients of the module that DDP wraps.
    """

    def __init__(self, gradients: VirtualRankGradients) -> None:
        self._gradients = gradients
        self._pending = PendingBuckets()

    def __call__(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Starts the sum of a bucket; called by torch in the backward pass.

        Returns:
            A future that is completed with the gradient of the global batch.
        """
        if bucket.buffer().layout is not torch.strided:
            raise sparse_gradients_error()
        return self._pending.add(bucket, self._gradients.handle_bucket(bucket))
