"""Reads batches in the worker processes of torch's DataLoader, or in this process.

A *key* identifies a batch, which `fetch[key]` reads. Workers get the keys in order, and batches are
returned in the same order. *Persistent* workers are kept from one pass over the data to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lockstep.distributed.seeding import mix_seed

_WORKER_SEED = 0x10AD  # distinguishes the seed of the workers from others made of the run's seed


class Workers:
    """Reads batches in worker processes, or in this process if there are none.

    Args:
        options: options of `torch.utils.data.DataLoader`.
        seed: seed of the run.
    """

    def __init__(self, options: dict[str, Any], seed: int) -> None:
        self._options = {name: value for name, value in options.items() if value is not None}
        self._options["pin_memory"] = False  # `to_device` pins, in a thread of its own
        self._options["worker_init_fn"] = partial(_start_worker, options["worker_init_fn"])
        self._seed = seed
        self._persistent: DataLoader[Any] | None = None
        self._sampler_of_persistent = _KeysOfPass()
        self._persistent_are_busy = False
        """True during a pass, because persistent workers can serve only one pass at a time."""

    def read(self, fetch: Dataset[Any], keys: Iterable[Any]) -> Generator[Any, None, None]:
        """Yields `fetch[key]` for each key, in order. Without keys, no worker is started.

        Args:
            fetch: the dataset of batches. Persistent workers keep that of their first pass.
            keys: the keys of the batches.
        """
        # Without workers, this process reads.
        if not self._options["num_workers"]:
            for key in keys:
                yield fetch[key]
            return

        # Start no worker if there are no keys.
        remaining_keys = iter(keys)
        first_key = next(remaining_keys, None)
        if first_key is None:
            return
        all_keys = chain([first_key], remaining_keys)

        # The persistent workers are busy if this is an evaluation inside of a training pass that
        # uses them. Then, or if the user wants no persistent ones, this pass gets new workers.
        if self._options["persistent_workers"] and not self._persistent_are_busy:
            yield from self._read_with_persistent(fetch, all_keys)
        else:
            options = {**self._options, "persistent_workers": False}
            yield from self._start(fetch, all_keys, options)

    def _read_with_persistent(
        self, fetch: Dataset[Any], keys: Iterable[Any]
    ) -> Generator[Any, None, None]:
        """Yields `fetch[key]` for each key, read by the persistent workers.

        The first pass starts them. Their DataLoader keeps its sampler, so each pass puts its keys
        into that sampler.
        """
        self._persistent_are_busy = True
        self._sampler_of_persistent.keys = keys
        try:
            if self._persistent is None:
                self._persistent = self._start(fetch, self._sampler_of_persistent, self._options)
            yield from self._persistent
        finally:
            self._persistent_are_busy = False

    def release(self) -> None:
        """Ends persistent workers."""
        self._persistent = None

    def _start(
        self, fetch: Dataset[Any], keys: Iterable[Any], options: dict[str, Any]
    ) -> DataLoader[Any]:
        """Returns a DataLoader that yields `fetch[key]` for each key, in order, read by workers.

        To torch, `fetch` is the dataset and the keys are the indices from a sampler.
        """
        # Without a generator, torch would draw the workers' seed from the global random stream.
        generator = torch.Generator().manual_seed(mix_seed(self._seed, _WORKER_SEED))

        return DataLoader(
            fetch,
            batch_size=None,  # an item is a whole batch already
            sampler=keys,
            collate_fn=_unchanged,
            generator=generator,
            **options,
        )


class _KeysOfPass:
    """The sampler of persistent workers, which yields the keys of the current pass."""

    def __init__(self) -> None:
        self.keys: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys)


def _unchanged(batch: Any) -> Any:
    """Returns the batch unchanged: the collate function, since `fetch` returns whole batches."""
    return batch


def _start_worker(user_function: Callable[[int], None] | None, worker: int) -> None:
    """Prepares a new worker process, and calls the user's `worker_init_fn` there.

    Args:
        user_function: the user's `worker_init_fn`, or None.
        worker: number of the worker.
    """
    # In `WorkerInfo.dataset` the user's code must find its own dataset instead of our `Fetch`. The
    # class refuses an ordinary assignment.
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)
    if user_function is not None:
        user_function(worker)
