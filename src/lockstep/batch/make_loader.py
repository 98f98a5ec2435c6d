"""Makes the loader of a source: `Loader` for data with an index, `IterableLoader` for a stream."""

from __future__ import annotations

from typing import Any

from lockstep.batch.loader import Loader
from lockstep.batch.source import IterableSource, Source
from lockstep.batch.stream import IterableLoader


def make_loader(source: Source, **options: Any) -> Loader:
    """Returns the loader of a source; `options` are the arguments of `Loader`."""
    if isinstance(source, IterableSource):
        return IterableLoader(source, **options)
    return Loader(source, **options)
