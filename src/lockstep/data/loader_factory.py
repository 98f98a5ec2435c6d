"""From what the user gave, a dataset, a stream or a DataLoader, to a prepared loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from lockstep.data.batch_plan import global_batch_size
from lockstep.data.iterable_source import (
    Shard,
    StreamSource,
    from_stream,
    from_stream_loader,
    is_stream,
)
from lockstep.data.loader import Loader
from lockstep.data.source import Source, from_dataset, from_loader
from lockstep.errors import UsageError


def source_of(
    data: Any,
    batch_size: int | None = None,
    *,
    per_device: int | None = None,
    devices: int = 1,
    shuffle: bool = False,
    drop_last: bool = False,
    collate: Callable[[Any], Any] | None = None,
    transform: Callable[[Any], Any] | None = None,
    shard: Shard = None,
    options: dict[str, Any] | None = None,
) -> Source:
    """The source of a loader; see `World.loader`.

    Raises:
        DataError: data or sizes that make no global batch.
        UsageError: arguments that do not fit these data.
    """
    options = {} if options is None else options
    stream = is_stream(data.dataset if isinstance(data, DataLoader) else data)
    if not stream and (transform is not None or shard is not None):
        raise UsageError(
            "transform= or shard= for data with an index",
            "they are for streams; of these data every rank reads the samples of its part alone",
            "leave them out, and transform samples in the dataset's __getitem__",
        )
    if isinstance(data, DataLoader):
        given_twice = options or shuffle or drop_last or collate is not None
        if batch_size is not None or per_device is not None or given_twice:
            raise UsageError(
                "world.loader of a DataLoader with batch_size or loader options",
                "the DataLoader has these already",
                "set them in the DataLoader, or pass its dataset",
            )
        if stream:
            return from_stream_loader(data, transform=transform, shard=shard)
        return from_loader(data)
    size = global_batch_size(batch_size, per_device, devices)
    given: dict[str, Any] = {
        "shuffle": shuffle,
        "drop_last": drop_last,
        "collate": collate,
        "options": options,
    }
    if stream:
        return from_stream(data, size, transform=transform, shard=shard, **given)
    return from_dataset(data, size, **given)


def loader_of(source: Source, **options: Any) -> Loader:
    """The loader of a source; `options` are those of `Loader`."""
    if isinstance(source, StreamSource):
        from lockstep.data.iterable_loader import StreamLoader  # not all scripts read streams

        return StreamLoader(source, **options)
    return Loader(source, **options)
