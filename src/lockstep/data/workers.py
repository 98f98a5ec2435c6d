"""The worker processes of a loader, which are those of torch's DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lockstep.data.fetch import Fetch, as_it_is
from lockstep.runtime.seeding import mix


class Workers:
    """Reads with worker processes.

    Args:
        options: of `torch.utils.data.DataLoader`; `num_workers` is at least 1.
        seed: of the run.
    """

    def __init__(self, options: dict[str, Any], seed: int) -> None:
        self._options = {name: value for name, value in options.items() if value is not None}
        self._options["pin_memory"] = False  # `to_device` pins what can be pinned
        self._options["worker_init_fn"] = partial(_begin, self._options.get("worker_init_fn"))
        self._seed = seed
        self._persistent: DataLoader[Any] | None = None
        self._keys: Iterable[Any] = ()
        self._busy = False
        """The persistent ones are in the middle of a pass: they can do but one at a time."""

    def read(self, fetch: Dataset[Any], keys: Iterable[Any]) -> Iterator[Any]:
        """`fetch[key]` for each key, in order."""
        if self._busy or not self._options.get("persistent_workers"):
            yield from self._new(fetch, keys, persistent_workers=False)
            return
        self._busy, self._keys = True, keys
        try:
            if self._persistent is None:
                self._persistent = self._new(fetch, _Present(self))
            yield from self._persistent
        finally:
            self._busy = False

    def release(self) -> None:
        """Ends persistent workers."""
        self._persistent = None

    def _new(self, fetch: Dataset[Any], keys: Iterable[Any], **changed: Any) -> DataLoader[Any]:
        # A generator of its own: torch would draw the workers' seed from the global stream.
        generator = torch.Generator().manual_seed(mix(self._seed, 0x10AD))
        return DataLoader(
            fetch,
            batch_size=None,
            sampler=keys,
            collate_fn=as_it_is,
            generator=generator,
            **{**self._options, **changed},
        )


class _Present:
    """What persistent workers are to read in the present pass."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def __iter__(self) -> Iterator[Any]:
        return iter(self._workers._keys)


def _begin(given: Callable[[int], None] | None, worker: int) -> None:
    """Begins a worker process; the user's code finds its own dataset there, as ever."""
    info: Any = get_worker_info()
    if isinstance(info.dataset, Fetch):
        object.__setattr__(info, "dataset", info.dataset.dataset)
    if given is not None:
        given(worker)
