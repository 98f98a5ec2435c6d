"""Torch's DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


def watch_indices(
    draw_indices: Callable[[Any, Callable[[], Any]], Any], on_new_pass: Callable[[Any], object]
) -> None:
    """Replaces the function that draws the indices of a batch, in all DataLoaders.

    Args:
        draw_indices: called for each batch, with the loader's iterator and torch's function that
            draws the indices. It must call this function and return its result.
        on_new_pass: called with the iterator of a loader with workers, when the iterator is created
            and, if the workers are persistent, when each further pass begins. Without workers it is
            not called.
    """
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    original_next_index: Any = _BaseDataLoaderIter._next_index
    original_reset: Any = _BaseDataLoaderIter._reset

    def next_index(self: _BaseDataLoaderIter) -> Any:
        return draw_indices(self, partial(original_next_index, self))

    def reset(self: _BaseDataLoaderIter, *args: Any, **kwargs: Any) -> None:
        """Begins a pass; called by iterators with workers, also by their `__init__`."""
        on_new_pass(self)
        original_reset(self, *args, **kwargs)

    _BaseDataLoaderIter._next_index = next_index  # type: ignore[method-assign]
    _BaseDataLoaderIter._reset = reset  # type: ignore[method-assign]


END_OF_PASS = object()
"""Passed by `watch_data_loaders` instead of a batch when a pass is over."""


def watch_data_loaders(on_batch: Callable[[Any, Any, Any, Any], None]) -> Callable[[], None]:
    """Calls `on_batch` with each batch that a DataLoader delivers in this process.

    Torch has no public hook for batches, so this replaces `__next__` of torch's iterators. An
    iterator of our own around them would not have all their attributes, which some programs use.

    Args:
        on_batch: called with four arguments: the iterator; its dataset; the sampler, or the batch
            sampler if that is not of torch's own class; and the batch, or `END_OF_PASS`.

    Returns:
        A function that stops the watching.
    """
    from torch.utils.data import BatchSampler, dataloader

    iterator_class: Any = dataloader._BaseDataLoaderIter
    original_next = iterator_class.__next__

    def watched_next(iterator: Any) -> Any:
        """Returns the next batch of a DataLoader's iterator, as `original_next` does.

        This takes the place of torch's `__next__`. It calls `on_batch` (the argument of
        `watch_data_loaders`) with each batch, and with `END_OF_PASS` after the last one.
        """
        # `on_batch` gets what the user has chosen: the sampler inside of torch's BatchSampler, or a
        # batch sampler of the user's own.
        chosen_sampler = iterator._index_sampler
        if type(chosen_sampler) is BatchSampler:
            chosen_sampler = chosen_sampler.sampler

        try:
            batch = original_next(iterator)
        except StopIteration:
            on_batch(iterator, iterator._dataset, chosen_sampler, END_OF_PASS)
            raise

        on_batch(iterator, iterator._dataset, chosen_sampler, batch)
        return batch

    def stop_watching() -> None:
        if iterator_class.__next__ is watched_next:  # nobody has replaced it since
            iterator_class.__next__ = original_next

    iterator_class.__next__ = watched_next
    return stop_watching


@contextmanager
def without_worker_info() -> Iterator[None]:
    """Makes `torch.utils.data.get_worker_info` return None inside a worker of a DataLoader.

    Many iterable datasets call it and give each worker a part of their own. A worker that needs the
    whole dataset, to take its samples from it, has no public way to get that.
    """
    from torch.utils.data._utils import worker

    worker_info = worker._worker_info
    worker._worker_info = None
    try:
        yield
    finally:
        worker._worker_info = worker_info
