"""A stream as data: an iterable without index, read again from its beginning in every epoch.

Sample `i` of an epoch is the `i`-th that the stream gives, and global batch `t` holds the samples
from `t * B` on, on any number of ranks. How a rank comes by its own part of them says `shard`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch.utils.data import DataLoader, IterableDataset, default_collate

from lockstep.data.global_batch import batches_in_epoch, check_batch_size
from lockstep.data.source import Source, check_options, what_it_reads
from lockstep.errors import DataError, LengthUnknownError, UsageError

Shard = Callable[[int, int], Iterable[Any]] | Literal[False] | None
"""`(start, step)` gives the samples start, start + step, ...; False: the stream splits itself over
the ranks; None: every rank reads the whole stream and keeps its part."""


@dataclass(frozen=True, kw_only=True)
class StreamSource(Source):
    """A stream and how its samples are grouped."""

    transform: Callable[[Any], Any] | None = None
    """Applied to a rank's own samples, each with random streams of its own."""
    shard: Shard = None

    @property
    def length(self) -> int:
        """Samples of an epoch, as the stream itself says.

        Raises:
            LengthUnknownError: it does not.
        """
        try:
            return len(self.dataset)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            raise LengthUnknownError(
                f"the length of the stream {type(self.dataset).__name__}",
                "it has no __len__: its end is known when it comes",
                "count what the loop was handed, or give the stream a __len__ that returns the "
                "number of its samples",
            ) from None

    @property
    def steps(self) -> int | None:  # type: ignore[override]
        """Global batches of an epoch; None: the stream does not say its length."""
        try:
            return batches_in_epoch(self.length, self.batch_size, drop_last=self.drop_last)
        except LengthUnknownError:
            return None

    @property
    def description(self) -> str:
        """What must be equal on all ranks, in words."""
        return (
            f"a loader over a stream ({type(self.dataset).__name__}) in global batches of "
            f"{self.batch_size}, drop_last={self.drop_last}, shard={self.how}"
        )

    @property
    def how(self) -> str:
        """Which way of sharding, in a word."""
        return "own" if self.shard is False else "whole" if self.shard is None else "seek"


def is_stream(data: object) -> bool:
    """Whether data are read from the beginning to the end, not by index."""
    return isinstance(data, IterableDataset) or (
        hasattr(data, "__iter__") and not hasattr(data, "__getitem__")
    )


def from_stream(
    stream: Any,
    batch_size: object,
    *,
    shuffle: bool,
    drop_last: bool,
    collate: Callable[[Any], Any] | None,
    options: dict[str, Any],
    transform: Callable[[Any], Any] | None,
    shard: Shard,
) -> StreamSource:
    """A stream with a global batch size.

    Args:
        stream: `iter(stream)` begins a new pass.
        batch_size: samples of a global batch.
        shuffle: must be False: a stream has the order that it has.
        drop_last: leave a last batch that is not full out.
        collate: joins samples into a batch; None: torch's own.
        options: of `torch.utils.data.DataLoader`, those that say how samples are read.
        transform: see `StreamSource`.
        shard: likewise.

    Raises:
        DataError: it can be read but once, or a size or an option is wrong.
        UsageError: `shuffle`, or a `shard` of another kind.
    """
    name = type(stream).__name__
    if shuffle:
        raise UsageError(
            f"shuffle=True for the stream {name}",
            "a stream is read in the order that it has",
            "shuffle inside its __iter__ (whose random streams are seeded alike on all ranks), or "
            "with the stream's own .shuffle(...)",
        )
    if not (shard is None or shard is False or callable(shard)):
        raise UsageError(
            f"shard={shard!r}",
            "it is neither a function (start, step) nor False",
            "give a function that returns the samples start, start + step, ...; False, if the "
            "stream splits itself over the ranks; or leave it out",
        )
    check_batch_size(batch_size)
    _check_again(stream)
    check_options(stream, options)
    return StreamSource(
        dataset=stream,
        batch_size=int(batch_size),  # type: ignore[call-overload]
        drop_last=drop_last,
        collate=collate or default_collate,
        options=options,
        transform=transform,
        shard=shard,
    )


def from_stream_loader(
    loader: DataLoader[Any], *, transform: Callable[[Any], Any] | None = None, shard: Shard = None
) -> StreamSource:
    """A DataLoader's settings, its `batch_size` being the global batch.

    Raises:
        DataError: without a batch size.
        UsageError: see `from_stream`.
    """
    read = what_it_reads(loader)
    return from_stream(
        read["dataset"],
        loader.batch_size,
        shuffle=False,
        drop_last=loader.drop_last,
        collate=read["collate"],
        options=read["options"],
        transform=transform,
        shard=shard,
    )


def _check_again(stream: object) -> None:
    if hasattr(stream, "__next__"):
        raise DataError(
            f"data of type {type(stream).__name__}, which is an iterator",
            "it can be read once, and every epoch reads from the beginning",
            "give an object whose __iter__ begins anew, such as an IterableDataset",
        )
