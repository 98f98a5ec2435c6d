"""Writes the sample ledger: which samples this rank trained in which optimizer step.

The folder and its files are described in `file_format`. A global batch counts as trained when the
first optimizer has stepped for it. Loaders are written down by their *number*, which is their place
among all prepared loaders of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.distributed.rank_files import cannot_write_error, open_rank_file
from lockstep.extensions.ledger.file_format import (
    FORMAT_VERSION,
    LEDGER_SUFFIX,
    NO_LOADER,
    RANK_INFIX,
    json_content,
    record_bytes,
    step_content,
)
from lockstep.session.extension import DeliveredBatch, Extension

if TYPE_CHECKING:
    from lockstep.batch.loader import Loader
    from lockstep.distributed.collectives import Collectives


class Ledger(Extension):
    """Writes down which samples this rank trains.

    Args:
        folder: the folder of the file, which is made if it does not exist.
        collectives: the collectives of the run; the ranks agree on a name for this start.
        loaders: all prepared loaders. More may be added to the list later.

    Raises:
        SettingError: some rank cannot write there; raised on all ranks.
    """

    def __init__(
        self, folder: str | Path, collectives: Collectives, loaders: Sequence[Loader]
    ) -> None:
        self._folder = Path(folder)
        self._loaders = loaders
        self._described_loaders: set[int] = set()
        """The numbers of the loaders that the file describes."""
        self._recorded_beginnings: set[tuple[int, int]] = set()
        """The streams and epochs whose first samples are in the file."""
        self._untrained: dict[Loader, list[DeliveredBatch]] = {}
        """The micro-batches of each loader's current global batch, until an optimizer steps."""
        name = None
        if collectives.contributes:
            name = f"{RANK_INFIX}{collectives.data_parallel.rank}{LEDGER_SUFFIX}"
        self._file = open_rank_file(folder, collectives, name, "ledger")
        header = {"ledger": FORMAT_VERSION, "ranks": collectives.data_parallel.size}
        self._write(json_content(header))

    def close(self, failed: bool) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def delivered(self, batch: DeliveredBatch) -> None:
        """Remembers a micro-batch that is about to be trained, until an optimizer steps."""
        # With a new global batch, one that was left untrained is forgotten.
        begins_global_batch = batch.micro_batch.first
        if begins_global_batch or batch.loader not in self._untrained:
            self._untrained[batch.loader] = []
        if not batch.micro_batch.is_repeat:
            self._untrained[batch.loader].append(batch)

    def step_finished(self, number: int) -> None:
        """Writes down the global batch that the optimizer step of this number has trained.

        If no prepared loader gave one, it writes a step without samples.
        """
        wrote_samples = False
        # `_untrained` has what each loader has handed out since the last step.
        for loader, batches in self._untrained.items():
            # If the pass over this loader has ended, it ended before its last global batch was
            # trained, and this step trains something else.
            pass_is_running = loader.mid_epoch
            if pass_is_running:
                self._write_step(number, loader, batches)
                wrote_samples = True
        self._untrained.clear()
        if not wrote_samples:  # the step trained on something that no prepared loader gave
            content = step_content(
                number, NO_LOADER, epoch=0, position=0, global_samples=0, samples=None
            )
            self._write(content)

    def _write_step(self, number: int, loader: Loader, batches: list[DeliveredBatch]) -> None:
        """Writes down the micro-batches of one loader that a step has trained.

        The description of the loader is written before it, and for a stream the first samples of
        the epoch after it, unless the file has them already.
        """
        first = batches[0]
        loader_number = self._describe_loader(loader)
        content = step_content(
            number,
            loader_number,
            first.epoch,
            first.position,
            first.micro_batch.global_samples,
            samples=np.concatenate([batch.samples for batch in batches]),
        )
        self._write(content)
        self._write_beginning(loader_number, loader, first.epoch)

    def _describe_loader(self, loader: Loader) -> int:
        """Returns the number of a loader. The first time, a description of it is written."""
        number = list(self._loaders).index(loader)
        if number in self._described_loaders:
            return number
        self._described_loaders.add(number)
        source = loader.source
        fingerprint = loader.fingerprint
        length_is_known = source.steps is not None  # a stream need not say its length
        description = {
            "loader": number,
            "dataset": type(source.dataset).__name__,
            "stream": source.sharding,  # None unless the dataset is a stream
            "length": source.length if length_is_known else None,
            "steps": source.steps,
            "batch_size": source.batch_size,
            "drop_last": source.drop_last,
            "own_order": source.custom_order,  # True if the script has a sampler of its own
            "data": None if fingerprint is None else fingerprint.to_text(),
        }
        self._write(json_content(description))
        return number

    def _write_beginning(self, number: int, loader: Loader, epoch: int) -> None:
        """Writes down, once an epoch, digests of the samples with which a stream began."""
        if (number, epoch) in self._recorded_beginnings:
            return
        first_samples = loader.first_samples_of_epoch
        if not first_samples:  # the dataset is not a stream
            return
        self._recorded_beginnings.add((number, epoch))
        values: dict[str, Any] = {"stream": number, "epoch": epoch, "beginning": first_samples}
        self._write(json_content(values))

    def _write(self, content: bytes) -> None:
        """Appends a record.

        It is written by one system call, so that it is complete whatever ends this process.

        Raises:
            SettingError: not all bytes could be written, for example because the disk is full.
        """
        if self._file is None:  # this rank has no samples of its own, and so no file
            return
        if self._file.closed:
            return
        record = record_bytes(content)
        try:
            num_written = self._file.write(record)
        except OSError as error:
            raise cannot_write_error("ledger", self._folder, str(error)) from error
        if num_written < len(record):
            found = f"{num_written} of {len(record)} bytes were written"
            raise cannot_write_error("ledger", self._folder, found)
