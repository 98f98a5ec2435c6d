"""Reads batches in the worker processes of torch's DataLoader, or in this process.

A *key* says what is to be read; `fetch[key]` reads it. Keys are given to the workers in order, and
what they read comes back in that order. *Persistent* workers live on from one pass to the next.
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
    """Reads with worker processes, or in this process if there are none.

    Args:
        options: of `torch.utils.data.DataLoader`.
        seed: of the run.
    """

    def __init__(self, options: dict[str, Any], seed: int) -> None:
        self._options = {name: value for name, value in options.items() if value is not None}
        self._options["pin_memory"] = False  # `to_device` pins, in a thread of its own
        self._options["worker_init_fn"] = partial(_start_worker, options["worker_init_fn"])
        self._seed = seed
        self._persistent: DataLoader[Any] | None = None
        self._persistent_keys = _KeysOfPass()
        self._persistent_are_busy = False
        """True in the middle of a pass: persistent workers can do only one at a time."""

    def read(self, fetch: Dataset[Any], keys: Iterable[Any]) -> Generator[Any, None, None]:
        """Yields `fetch[key]` for each key, in order. Without keys no worker is started.

        Persistent workers have the `fetch` of the first pass; that of later passes is not used.
        """
        if not self._options["num_workers"]:
            for key in keys:
                yield fetch[key]
            return

        keys = iter(keys)
        first_key = next(keys, None)
        if first_key is None:  # there are no keys
            return

        keys = chain([first_key], keys)

        # A pass inside another one, such as an evaluation, finds the persistent workers busy. It
        # gets workers that live for this pass alone.
        if self._persistent_are_busy or not self._options["persistent_workers"]:
            options = {**self._options, "persistent_workers": False}
            yield from self._start(fetch, keys, options)
            return

        self._persistent_are_busy = True

        # `_persistent_keys` is the sampler of the persistent workers. It iterates these keys now.
        self._persistent_keys.keys = keys
        try:
            if self._persistent is None:
                self._persistent = self._start(fetch, self._persistent_keys, self._options)
            yield from self._persistent
        finally:
            self._persistent_are_busy = False

    def release(self) -> None:
        """Ends persistent workers."""
        self._persistent = None

    def _start(
        self, fetch: Dataset[Any], keys: Iterable[Any], options: dict[str, Any]
    ) -> DataLoader[Any]:
        """Returns a DataLoader whose workers read the keys."""
        # Without this generator, torch would draw the workers' seed from the global stream.
        generator = torch.Generator().manual_seed(mix_seed(self._seed, _WORKER_SEED))
        return DataLoader(
            fetch,
            batch_size=None,
            sampler=keys,
            collate_fn=_unchanged,
            generator=generator,
            **options,
        )


class _KeysOfPass:
    """The sampler of persistent workers: iterates the keys of the current pass."""

    def __init__(self) -> None:
        self.keys: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys)


def _unchanged(batch: Any) -> Any:
    """Collates nothing: `fetch` returns finished batches."""
    return batch


def _start_worker(user_function: Callable[[int], None] | None, worker: int) -> None:
    """Prepares a new worker process, and calls the user's `worker_init_fn` there.

    Args:
        user_function: the `worker_init_fn` that the user gave.
        worker: the number of the worker.
    """
    # torch has put our `Fetch` there, which has the user's dataset as an attribute. The user's code
    # shall find its own dataset. `WorkerInfo` refuses an ordinary assignment.
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)
    if user_function is not None:
        user_function(worker)
