"""Averages gradients over the ranks of a group while the backward pass still runs.

The gradients travel in *buckets* (`replication.make_buckets`). A bucket is sent as soon as all of
its gradients are complete, and the buckets are sent in one order, the same on all ranks. Gradients
are complete in about the reverse order of the parameters, so the buckets are in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.communication import routing
from lockstep.communication.routing import carrier_device
from lockstep.distributed import torch_compat
from lockstep.errors import UsageError
from lockstep.strategies.replication import make_buckets


class GradientAverage:
    """The average of the gradients of one global batch, taken once. All ranks of a group make one.

    If a parameter has no gradient on some ranks, it counts as zero there. If it has none on any
    rank, it stays None.

    Args:
        group: the ranks; None for all.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._buckets: list[_Bucket] = []

    @contextmanager
    def during_backward(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Sends the gradients of some parameters while the backward pass inside completes them.

        Args:
            parameters: in the same order on all ranks. Their gradients are complete after this
                backward pass.

        Raises:
            UsageError: a gradient is sparse.
        """
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        buckets: list[_Bucket] = []
        for bucket_parameters in make_buckets(trained[::-1], attrgetter("device", "dtype")):
            buckets.append(_Bucket(bucket_parameters, self._group))

        self._buckets += buckets
        unsent = iter(buckets)
        next_bucket = next(unsent, None)

        def on_gradient(bucket: _Bucket, parameter: nn.Parameter) -> None:
            """Called by torch when a parameter's gradient is complete."""
            nonlocal next_bucket
            bucket.add(parameter)
            while next_bucket is not None and next_bucket.is_complete:
                next_bucket.send()
                next_bucket = next(unsent, None)

        with ExitStack() as hooks:
            for bucket in buckets:
                for parameter in bucket.parameters:
                    # It is registered now, so that it is called after the hooks of the user.
                    hook = partial(on_gradient, bucket)
                    register: Any = parameter.register_post_accumulate_grad_hook
                    handle = register(hook)
                    hooks.callback(handle.remove)
            yield

        while next_bucket is not None:  # it has parameters without a gradient
            next_bucket.send()
            next_bucket = next(unsent, None)

    def finish(self) -> None:
        """Waits for the sums, and replaces every gradient by its mean.

        Raises:
            UsageError: a gradient is sparse.
        """
        if not self._buckets:
            return

        marks: list[int] = []
        for bucket in self._buckets:
            marks.append(int(bucket.has_changed))
            marks += [int(parameter.grad is not None) for parameter in bucket.parameters]

        sums_of_marks = torch.tensor(marks, dtype=torch.int32)
        wait_for_marks = routing.start_all_reduce(sums_of_marks, self._group)

        # Sums are waited for in the order in which they were started.
        for bucket in self._buckets:
            bucket.wait()

        wait_for_marks()
        remaining_marks = iter(sums_of_marks.tolist())
        num_ranks = dist.get_world_size(self._group)
        for bucket in self._buckets:
            if next(remaining_marks) > 0:  # on some rank a gradient has changed since it was sent
                bucket.send()
                bucket.wait()
            has_gradient = [next(remaining_marks) > 0 for _ in bucket.parameters]
            bucket.write_mean(num_ranks, has_gradient)

        self._buckets = []


class _Bucket:
    """Parameters whose gradients are sent together.

    Args:
        parameters: of one device and dtype.
        group: the ranks; None for all.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None) -> None:
        self.parameters = parameters
        self.has_changed = False
        """True if a gradient was written after it was sent. Activation checkpointing does so with
        `use_reentrant=True`, which runs several backward passes inside of one."""
        self._group = group
        self._without_gradient = set(parameters)
        """The parameters whose gradients are not complete yet."""
        self._message: Tensor | None = None
        """The gradients one after the other, as they were sent; then their sum."""
        self._wait: Callable[[], None] | None = None

    def add(self, parameter: nn.Parameter) -> None:
        """Notes that a gradient is complete."""
        self._without_gradient.discard(parameter)
        if self._message is not None:
            self.has_changed = True

    @property
    def is_complete(self) -> bool:
        """True if all of its gradients are complete."""
        return not self._without_gradient

    @torch.no_grad()
    def send(self) -> None:
        """Starts to sum up the gradients over the ranks; a missing one is sent as zeros.

        Raises:
            UsageError: a gradient is sparse.
        """
        gradients: list[Tensor] = []
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter)

            if gradient.layout != torch.strided:
                raise UsageError(
                    "an average of sparse gradients over pipelines, or over the ranks of a replica",
                    "a layer was built with sparse=True",
                    "leave sparse=True out, or use one pipeline, or no more ranks than replicas",
                )

            gradients.append(gradient.reshape(-1))

        flat = torch.cat(gradients)
        self._message = flat.to(carrier_device(flat.device, self._group))
        self._wait = routing.start_all_reduce(self._message, self._group)

    def wait(self) -> None:
        """Waits for the sum."""
        assert self._wait is not None  # it was sent
        self._wait()

    @torch.no_grad()
    def write_mean(self, num_ranks: int, has_gradient: Sequence[bool]) -> None:
        """Replaces the gradients by their mean, once the sum is there.

        Args:
            num_ranks: of the group.
            has_gradient: for each parameter, whether any rank has a gradient of it.
        """
        assert self._message is not None  # it was sent
        means = self._message.div_(num_ranks).to(self.parameters[0].device)
        gradients: list[Tensor] = []
        sources: list[Tensor] = []
        sizes = [parameter.numel() for parameter in self.parameters]

        for parameter, mean, is_there in zip(
            self.parameters, torch.split(means, sizes), has_gradient, strict=True
        ):
            if not is_there:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
            sources.append(mean.view_as(parameter))

        if gradients:
            torch_compat.copy_to_each(gradients, sources)


def average_gradients(
    parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None = None
) -> None:
    """Replaces every gradient by its mean over the ranks of a group, after the backward pass.

    Args:
        parameters: in the same order on all ranks.
        group: None for all ranks.

    Raises:
        UsageError: a gradient is sparse.
    """
    average = GradientAverage(group)
    with average.during_backward(parameters):
        pass
    average.finish()
