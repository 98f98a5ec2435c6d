"""The buckets of a backward pass of DDP whose exchange is under way."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


class PendingBuckets:
    """Waits for the exchanges of all buckets in the last one.

    So several buckets are on their way to other machines at the same time.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[Callable[[], None], torch.futures.Future[Tensor], Tensor]] = []
        """What waits for each exchange, and the future that gets the bucket's buffer then."""

    def add(
        self, bucket: dist.GradBucket, wait: Callable[[], None]
    ) -> torch.futures.Future[Tensor]:
        """Adds a bucket, and waits for all of them if it is the last one.

        Args:
            bucket: the buckets of a backward pass are added in order.
            wait: waits for the exchange, whose result is then in the bucket's buffer.

        Returns:
            A future of the buffer, which a communication hook of DDP returns.
        """
        if bucket.index() == 0:
            # If a backward pass has raised, its buckets are still here.
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
