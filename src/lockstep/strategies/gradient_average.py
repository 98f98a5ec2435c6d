"""Averages gradients over the ranks of a group while the backward pass is still running.

Gradients are sent in *buckets*: lists of parameters whose gradients travel in one message
(`replication.make_buckets`). A bucket is sent as soon as all of its gradients are complete. All
ranks send the buckets in the same order, which is the reverse order of the parameters, because
gradients are completed roughly in that order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep import torch_compat
from lockstep.communication import routing
from lockstep.communication.routing import carrier_device
from lockstep.errors import UsageError
from lockstep.strategies.replication import make_buckets


class GradientAverage:
    """Averages the gradients of one global batch.

    All ranks of the group create one and use it once. It has two uses: under `pipeline`, the ranks
    of several pipelines average, and under `diloco`, the ranks that compute one replica.

    If a parameter has no gradient on some ranks, it counts as zero there. If it has no gradient on
    any rank, it stays None.

    Args:
        group: the ranks to average over; None for all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._buckets: list[_Bucket] = []

    @contextmanager
    def during_backward(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """A context for a backward pass. Gradients are sent as soon as they are complete.

        The sums over the ranks are waited for in `finish`, after the last backward pass.

        Args:
            parameters: parameters whose gradients are complete after this backward pass, in the
                same order on all ranks.

        Raises:
            UsageError: a gradient is sparse.
        """
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        buckets: list[_Bucket] = []
        for bucket_parameters in make_buckets(trained[::-1], attrgetter("device", "dtype")):
            buckets.append(_Bucket(bucket_parameters, self._group))

        self._buckets += buckets
        unsent = deque(buckets)

        def on_gradient(bucket: _Bucket, parameter: nn.Parameter) -> None:
            """Notes a complete gradient, and sends the buckets that may go now; called by torch."""
            bucket.add(parameter)
            while unsent and unsent[0].is_complete:
                unsent.popleft().send()

        with ExitStack() as hooks:
            for bucket in buckets:
                for parameter in bucket.parameters:
                    # Hooks run in the order of registration. The user's hooks may change the
                    # gradient, so this one is registered last.
                    hook = partial(on_gradient, bucket)
                    untyped_parameter: Any = parameter  # this method of torch's has no types
                    handle = untyped_parameter.register_post_accumulate_grad_hook(hook)
                    hooks.callback(handle.remove)

            yield

        # The remaining buckets hold parameters that got no gradient in this backward pass.
        while unsent:
            unsent.popleft().send()

    def finish(self) -> None:
        """Waits until all gradients have been added up, and replaces each gradient by its mean.

        Raises:
            UsageError: a gradient is sparse.
        """
        if not self._buckets:
            return

        # The flags of a bucket say what it contains on this rank, e.g. which parameters have a
        # gradient. A sum of flags over the ranks is above 0 if the flag is set on any of them.
        flags_of_buckets = [bucket.flags() for bucket in self._buckets]
        sums_of_flags = torch.tensor([*chain(*flags_of_buckets)], dtype=torch.int32)
        wait_for_flags = routing.start_all_reduce(sums_of_flags, self._group)

        # Sums must be waited for in the order in which they were started.
        for bucket in self._buckets:
            bucket.wait()

        wait_for_flags()

        num_ranks = dist.get_world_size(self._group)
        sums_of_buckets = torch.split(sums_of_flags, [len(flags) for flags in flags_of_buckets])
        for bucket, sums in zip(self._buckets, sums_of_buckets, strict=True):
            bucket.complete(num_ranks, flags_on_any_rank=(sums > 0).tolist())

        self._buckets = []


class _Bucket:
    """Parameters whose gradients are sent together.

    Args:
        parameters: parameters of the same device and dtype.
        group: the ranks to average over; None for all ranks.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None) -> None:
        self.parameters = parameters
        self.has_changed = False
        """True if a gradient was written after it was sent. This happens with reentrant activation
        checkpointing, which runs several backward passes inside one."""
        self._group = group
        self._without_gradient = set(parameters)
        """The parameters whose gradients are not complete yet."""
        self._message: Tensor | None = None
        """The concatenated gradients, which the all-reduce replaces by their sum."""
        self._wait: Callable[[], None] | None = None

    def add(self, parameter: nn.Parameter) -> None:
        """Notes that the gradient of a parameter is complete."""
        self._without_gradient.discard(parameter)
        if self._message is not None:
            self.has_changed = True

    @property
    def is_complete(self) -> bool:
        """True if all gradients of this bucket are complete."""
        return not self._without_gradient

    def flags(self) -> list[bool]:
        """Returns whether this bucket has changed, and for each parameter, if it has a gradient.

        For 2 parameters: `[has changed, parameter 0 has a gradient, parameter 1 has a gradient]`.
        """
        return [self.has_changed, *(parameter.grad is not None for parameter in self.parameters)]

    def complete(self, num_ranks: int, flags_on_any_rank: Sequence[bool]) -> None:
        """Replaces each gradient by its mean, after the sums have been waited for.

        Args:
            num_ranks: the number of ranks to average over.
            flags_on_any_rank: the `flags` of this bucket, each True if it is on any rank.
        """
        has_changed, *any_rank_has_gradient = flags_on_any_rank
        if has_changed:  # the sum is of earlier gradients, so all ranks send the bucket once more
            self.send()
            self.wait()
        self.write_mean(num_ranks, any_rank_has_gradient)

    @torch.no_grad()
    def send(self) -> None:
        """Starts adding up the gradients over the ranks. A missing gradient is sent as zeros.

        `write_mean` divides the sums by the number of ranks, after `wait`.

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

        # The backend of the group may need the message on another device, as gloo does on a CPU.
        flat = torch.cat(gradients)
        self._message = flat.to(carrier_device(flat.device, self._group))
        self._wait = routing.start_all_reduce(self._message, self._group)

    def wait(self) -> None:
        """Waits until the gradients are added up."""
        assert self._wait is not None  # it was sent
        self._wait()

    @torch.no_grad()
    def write_mean(self, num_ranks: int, any_rank_has_gradient: Sequence[bool]) -> None:
        """Writes the mean of each gradient into `parameter.grad`, after `wait`.

        Args:
            num_ranks: the number of ranks in the group.
            any_rank_has_gradient: for each parameter, True if any rank has a gradient of it.
        """
        assert self._message is not None  # `send` has set it
        means = self._message.div_(num_ranks).to(self.parameters[0].device)
        gradients: list[Tensor] = []
        sources: list[Tensor] = []
        sizes = [parameter.numel() for parameter in self.parameters]

        for parameter, mean, has_gradient in zip(
            self.parameters, torch.split(means, sizes), any_rank_has_gradient, strict=True
        ):
            if not has_gradient:
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
        parameters: the parameters whose gradients are averaged, in the same order on all ranks.
        group: the ranks to average over; None for all ranks.

    Raises:
        UsageError: a gradient is sparse.
    """
    average = GradientAverage(group)
    with average.during_backward(parameters):
        pass
    average.finish()
