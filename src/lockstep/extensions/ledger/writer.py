"""Writes the sample ledger: which samples this rank trained in which optimizer step.

A global batch is recorded as trained when the first optimizer has stepped for it. Loaders are
identified by their *number*: their index in the list of all prepared loaders of the run. The folder
and its files are described in `file_format`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.distributed.rank_files import append_or_end, close_rank_file, open_rank_file
from lockstep.extensions.framed_records import framed, json_content
from lockstep.extensions.ledger.file_format import (
    FORMAT_VERSION,
    LEDGER_SUFFIX,
    NO_LOADER,
    step_content,
)
from lockstep.session.extension import DeliveredBatch, Extension

if TYPE_CHECKING:
    from lockstep.batch.loader import Loader
    from lockstep.distributed.collectives import Collectives


class Ledger(Extension):
    """Records which samples this rank trains.

    Args:
        folder: folder of the ledger files; created if it does not exist.
        collectives: collectives of the run, by which the ranks agree on the names of the files.
        loaders: all prepared loaders. More may be added to the list later.

    Raises:
        SettingError: if a rank cannot write to the folder; raised on all ranks.
    """

    def __init__(
        self, folder: str | Path, collectives: Collectives, loaders: Sequence[Loader]
    ) -> None:
        self._folder = str(folder)
        self._loaders = loaders
        self._described_loaders: set[int] = set()
        """The numbers of the loaders whose description is in the file."""
        self._recorded_beginnings: set[tuple[int, int]] = set()
        """Pairs of a stream's loader number and an epoch whose first samples are in the file."""
        self._untrained: dict[Loader, list[DeliveredBatch]] = {}
        """The micro-batches of each loader's current global batch, until an optimizer steps."""

        # Only ranks that have samples of their own write a file.
        rank = collectives.data_parallel.rank if collectives.contributes else None
        self._file = open_rank_file(folder, collectives, rank, LEDGER_SUFFIX, "ledger")
        header = {"ledger": FORMAT_VERSION, "ranks": collectives.data_parallel.size}
        self._write(json_content(header))

    def close(self, failed: bool) -> None:
        """Closes the file."""
        close_rank_file(self._file)

    def delivered(self, batch: DeliveredBatch) -> None:
        """Keeps a micro-batch that is about to be trained, until an optimizer steps."""
        # A new global batch replaces the previous one of the same loader. Micro-batches of that
        # which are still here were not trained: no optimizer has stepped for them.
        begins_global_batch = batch.micro_batch.first
        if begins_global_batch or batch.loader not in self._untrained:
            self._untrained[batch.loader] = []

        # A repeat computes samples again, only to check the devices.
        if not batch.micro_batch.is_repeat:
            self._untrained[batch.loader].append(batch)

    def step_finished(self, number: int) -> None:
        """Writes the samples that the optimizer step with this number has trained.

        If the samples came from no prepared loader, a step without samples is written.
        """
        wrote_samples = False
        for loader, batches in self._untrained.items():
            # If the script has left the loop over the loader by a `break`, it has dropped these
            # batches, and the step has trained something else.
            is_in_loop = loader.mid_epoch  # also in the body of the last batch
            if is_in_loop:
                self._write_step(number, loader, batches)
                wrote_samples = True
        self._untrained.clear()

        if not wrote_samples:
            content = step_content(
                number, NO_LOADER, epoch=0, position=0, global_samples=0, samples=None
            )
            self._write(content)

    def _write_step(self, step_number: int, loader: Loader, batches: list[DeliveredBatch]) -> None:
        """Writes which samples of a loader a step has trained.

        Writes the description of the loader first, if the file does not have it. For a stream, also
        writes the first samples of the epoch.
        """
        loader_number = self._describe_loader(loader)

        first = batches[0]
        content = step_content(
            step_number,
            loader_number,
            first.epoch,
            first.position,
            first.micro_batch.global_samples,
            samples=np.concatenate([batch.samples for batch in batches]),
        )
        self._write(content)
        self._write_beginning_of_stream(loader_number, loader, first.epoch)

    def _describe_loader(self, loader: Loader) -> int:
        """Writes the description of a loader if the file does not have it.

        Returns:
            The number of the loader.
        """
        number = list(self._loaders).index(loader)
        if number in self._described_loaders:
            return number

        self._described_loaders.add(number)

        source = loader.source
        fingerprint = loader.fingerprint
        length_is_known = source.steps is not None  # None for a stream that does not say its length
        description = {
            "loader": number,
            "dataset": type(source.dataset).__name__,
            "stream": source.sharding,  # how the ranks divide a stream; None for other datasets
            "length": source.length if length_is_known else None,
            "steps": source.steps,
            "batch_size": source.batch_size,
            "drop_last": source.drop_last,
            "own_order": source.custom_order,  # True if the script has a sampler of its own
            "data": None if fingerprint is None else fingerprint.to_text(),
        }
        self._write(json_content(description))
        return number

    def _write_beginning_of_stream(self, loader_number: int, loader: Loader, epoch: int) -> None:
        """Writes digests of the first samples of a stream, once in each epoch.

        Does nothing if the dataset is no stream.
        """
        if (loader_number, epoch) in self._recorded_beginnings:
            return

        digests_of_first_samples = loader.first_samples_of_epoch
        is_stream = bool(digests_of_first_samples)
        if not is_stream:
            return

        self._recorded_beginnings.add((loader_number, epoch))
        values: dict[str, Any] = {
            "stream": loader_number,
            "epoch": epoch,
            "beginning": digests_of_first_samples,
        }
        self._write(json_content(values))

    def _write(self, content: bytes) -> None:
        """Appends a record to the file, if this rank has one.

        The record is written at once, so that it is there even if this process is killed right
        afterwards. If that fails, the ledger ends here with a warning, and the training goes on.
        """
        append_or_end(
            self._file, framed(content), setting="ledger", folder=self._folder, content="ledger"
        )
