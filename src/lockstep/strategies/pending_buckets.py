"""Lets several gradient buckets of DDP travel to other machines at the same time.

In a backward pass DDP passes each *bucket* of gradients to a communication hook, which returns a
future. The hook only starts the exchange of a bucket and adds it here. All exchanges are waited for
when the last bucket is added.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


class PendingBuckets:
    """The exchanges of one backward pass that were started and not waited for yet."""

    def __init__(self) -> None:
        self._pending: list[tuple[Callable[[], None], torch.futures.Future[Tensor], Tensor]] = []
        """For each bucket: a function that waits for its exchange, the future to complete then, and
        the bucket's buffer."""

    def add(
        self, bucket: dist.GradBucket, wait: Callable[[], None]
    ) -> torch.futures.Future[Tensor]:
        """Adds a bucket. If it is the last one of the backward pass, waits for all of them.

        Waiting for a bucket earlier would keep the backward pass from computing the gradients of
        the next one, which can be computed while this bucket travels.

        Args:
            bucket: a bucket of DDP. The buckets of a backward pass are added in order.
            wait: waits for the exchange of this bucket, which leaves its result in the bucket's
                buffer.

        Returns:
            A future of the buffer, for DDP's communication hook to return.
        """
        if bucket.index() == 0:
            # A backward pass that raised an error has left its buckets here.
            self._pending.clear()

        buffer = bucket.buffer()
        devices: list[int | str | torch.device] = [buffer.device] if buffer.is_cuda else []
        future = torch.futures.Future[Tensor](devices=devices)
        self._pending.append((wait, future, buffer))

        if bucket.is_last():
            for wait_for_bucket, future_of_bucket, buffer_of_bucket in self._pending:
                wait_for_bucket()
                future_of_bucket.set_result(buffer_of_bucket)
            self._pending.clear()

        return future
