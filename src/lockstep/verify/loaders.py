"""Sees what loaders hand out: torch's, and Lockstep's own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lockstep.data.loader import Loader
from lockstep.verify.neutral import Neutral
from lockstep.verify.recorder import Recorder
from lockstep.verify.samples import random_streams

Queues = dict[int, deque[list[int]]]
"""The indices of batches that were drawn and not handed out yet, by the id of their sampler."""


def watch_loaders(recorder: Recorder, neutral: Neutral) -> None:
    """For the rest of this process.

    Args:
        recorder: is told what is handed out to be trained on.
        neutral: changes it first.
    """
    waiting: Queues = {}
    _keep_indices(waiting, neutral)
    plain, pieces = DataLoader.__iter__, Loader.__iter__

    def of_torch(self: DataLoader[Any]) -> Iterator[Any]:
        if _is_ours(self.dataset):
            return plain(self)
        queue: deque[list[int]] | None = None
        stream = isinstance(self.dataset, IterableDataset)
        if type(self.batch_sampler) is BatchSampler and not stream:
            queue = waiting[id(self.batch_sampler)] = deque()
        if torch.is_grad_enabled():
            recorder.begins_pass(self)
        return _told(recorder, neutral, self, plain(self), queue)

    def of_lockstep(self: Loader) -> Iterator[Any]:
        return map(neutral.batch, pieces(self))

    DataLoader.__iter__ = of_torch  # type: ignore[method-assign, assignment]
    Loader.__iter__ = of_lockstep  # type: ignore[method-assign]


def enlarge_batches(times: int) -> None:
    """DataLoaders of torch get so many times the batch size, for the rest of this process."""
    build: Any = DataLoader.__init__

    def built(
        self: DataLoader[Any], dataset: Any, batch_size: int | None = 1, *args: Any, **kwargs: Any
    ) -> None:
        if batch_size is not None and not _is_ours(dataset):
            batch_size *= 1 if kwargs.get("batch_sampler") else times
        build(self, dataset, batch_size, *args, **kwargs)

    DataLoader.__init__ = built  # type: ignore[method-assign]


def _is_ours(dataset: Any) -> bool:
    """The inside of one of Lockstep's loaders, not what a training loop is handed."""
    return type(dataset).__module__.startswith("lockstep.")


def _keep_indices(waiting: Queues, neutral: Neutral) -> None:
    batches = BatchSampler.__iter__

    def of_sampler(self: BatchSampler) -> Iterator[list[int]]:
        queue = waiting.pop(id(self), None)
        running = batches(self)
        while True:
            with neutral.unwatched():  # the order of samples is drawn, not what is in them
                batch = next(running, None)
            if batch is None:
                return
            if queue is not None:
                queue.append([int(index) for index in batch])
            yield batch

    BatchSampler.__iter__ = of_sampler  # type: ignore[method-assign]


def _told(
    recorder: Recorder,
    neutral: Neutral,
    loader: DataLoader[Any],
    running: Iterator[Any],
    queue: deque[list[int]] | None,
) -> Iterator[Any]:
    while True:
        neutral.watch_draws()
        before = random_streams()
        try:
            batch = neutral.batch(next(running))
        except StopIteration:
            return
        ids = None if queue is None else queue.popleft()
        if torch.is_grad_enabled():
            # torch's numbers are seen themselves; of the others, the streams they come from.
            others = zip(before[1:], random_streams()[1:], strict=False)
            moved = [a for a, b in others if a != b]
            recorder.took(loader, ids, batch, neutral.draws() + "".join(moved))
        yield batch
