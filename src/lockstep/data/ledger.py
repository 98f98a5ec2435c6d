"""The sample ledger: every rank writes which samples it trained in which optimizer step.

A folder holds one file for each rank and each start of the run. A file is a row of records that is
only ever added to: 4 bytes length and 4 bytes CRC-32, both of what follows; then `J` and JSON, or
`S` and a step: the numbers of `STEP`, and the indices of this rank's samples as 64-bit integers,
all little-endian. The first record is JSON and tells whose file it is. A record that was cut off
shows by its length. `lockstep.data.ledger_check` reads it.
"""

from __future__ import annotations

import json
import os
import secrets
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.batch_plan import Indices
from lockstep.data.ledger_check import FORMAT, FRAME, NO_LOADER, STEP
from lockstep.data.loader import Loader
from lockstep.data.source import IterableSource
from lockstep.distributed.collectives import Collectives
from lockstep.errors import SettingError
from lockstep.step import BatchEvent, Callback


class Ledger(Callback):
    """Watches a training and writes its samples down; see `step.Callback`.

    A global batch counts as trained when the first optimizer has stepped for it.

    Args:
        folder: where; made when it is needed.
        collectives: of the run; the ranks agree on a name for this start of it.
        loaders: all prepared ones, by whose order they are numbered; the list may still grow.

    Raises:
        SettingError: on all ranks, where one cannot write there.
    """

    def __init__(
        self, folder: str | Path, collectives: Collectives, loaders: Sequence[Loader]
    ) -> None:
        self._folder = Path(folder)
        self._loaders = loaders
        self._numbers: dict[Loader, int] = {}
        """Of the loaders that have been written down."""
        self._open: dict[Loader, list[BatchEvent]] = {}
        """The micro-batches of a global batch for which no optimizer has stepped."""
        rank = collectives.data_parallel.rank
        self._file = -1
        proposed = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
        attempt = collectives.exchange(proposed)[0]
        problem = ""
        if collectives.contributes:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                name = self._folder / f"{attempt}.rank{rank}.ledger"
                self._file = os.open(
                    name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL, 0o666
                )
            except OSError as error:
                problem = f"rank {rank}: {error}"
        problems = [text for text in collectives.exchange(problem) if text]
        if problems:
            self.close()
            raise _cannot_write(folder, problems[0])
        self._write_json(
            {
                "ledger": FORMAT,
                "attempt": attempt,
                "started_ns": int(attempt.partition("-")[0]),
                "rank": rank,
                "ranks": collectives.data_parallel.size,
                "processes": collectives.topology.size,
                "step": STEP.format,
                "no_loader": NO_LOADER,
            }
        )

    def close(self) -> None:
        """Writes nothing more."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def delivered(self, event: BatchEvent) -> None:
        """Remembers what the training loop is about to get."""
        if event.micro_batch.first:
            self._open[event.loader] = []
        self._open.setdefault(event.loader, []).append(event)

    def stepped(self, number: int) -> None:
        """Writes down what the step of this number was made of."""
        # The last global batch of an earlier pass was not trained now.
        trained = {loader: events for loader, events in self._open.items() if loader.mid_epoch}
        self._open.clear()
        for loader, events in trained.items():
            self._write_step(number, loader, events)
        if not trained:
            self._write(b"S" + STEP.pack(number, NO_LOADER, 0, 0, 0))

    def _write_step(self, number: int, loader: Loader, events: list[BatchEvent]) -> None:
        if loader not in self._numbers:
            self._numbers[loader] = self._introduce(loader)
        first = events[0]
        count = first.micro_batch.count
        head = STEP.pack(number, self._numbers[loader], first.epoch, first.position, count)
        samples: Indices = np.concatenate([event.samples for event in events])
        self._write(b"S" + head + samples.astype("<i8", copy=False).tobytes())

    def _introduce(self, loader: Loader) -> int:
        """Writes down what the positions of a loader mean; returns its number."""
        number = list(self._loaders).index(loader)
        source = loader.source
        self._write_json(
            {
                "loader": number,
                "dataset": type(source.dataset).__name__,
                "stream": source.sharding if isinstance(source, IterableSource) else None,
                "length": None if source.steps is None else source.length,
                "steps": source.steps,
                "batch_size": source.batch_size,
                "drop_last": source.drop_last,
                "own_order": source.custom_order,
            }
        )
        return number

    def _write_json(self, values: dict[str, Any]) -> None:
        self._write(b"J" + json.dumps(values).encode())

    def _write(self, record: bytes) -> None:
        """With one call of the system, so that it is there whole, whatever ends this process."""
        if self._file < 0:
            return
        data = FRAME.pack(len(record), zlib.crc32(record)) + record
        try:
            written = os.write(self._file, data)
        except OSError as error:
            raise _cannot_write(self._folder, str(error)) from error
        if written < len(data):
            raise _cannot_write(self._folder, f"{written} of {len(data)} bytes were written")


def _cannot_write(folder: str | Path, found: str) -> SettingError:
    return SettingError(
        f"ledger={str(folder)!r}",
        f"it cannot be written: {found}",
        "make room or choose another folder; or leave the ledger out",
    )
