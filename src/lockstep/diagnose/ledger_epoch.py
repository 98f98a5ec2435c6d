"""One epoch of one loader in a sample ledger: is every sample in it, and none twice?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.diagnose.ledger_files import Samples
from lockstep.errors import spans

SHOWN = 5
"""Of several things in a text."""


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be."""

    code: str
    """Of its entry in the catalogue."""
    what: str
    step: int | None = None
    loader: int | None = None
    epoch: int | None = None
    samples: tuple[int, ...] = ()
    """The first of those concerned."""


@dataclass
class Batch:
    """A global batch in the step that trained it."""

    attempt: int
    step: int
    position: int
    samples: Samples
    whole: bool
    """All of its samples are written down."""


class Epoch:
    """The check of one epoch of one loader.

    Args:
        loader: what is known of the loader.
        epoch: which.
        batches: those of its global batches that were trained.
        begins: the first step of the ledger.
    """

    def __init__(
        self, loader: dict[str, Any], epoch: int, batches: list[Batch], begins: int
    ) -> None:
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self._loader = loader
        self._epoch = epoch
        self._batches = sorted(batches, key=lambda batch: batch.step)
        self._samples = np.concatenate([batch.samples for batch in self._batches])
        unknown = begins > 0 and self._batches[0].step == begins
        self._from = self._batches[0].position if unknown else 0
        """Where the ledger begins in this epoch."""

    def check(self, following: Batch | None) -> dict[str, Any]:
        """Fills `findings` and `notes`; returns the epoch in numbers.

        `following` is the first global batch of the next epoch that was trained, if there is one.
        """
        positions = {batch.position for batch in self._batches}
        steps, last = self._loader["steps"], max(positions)
        ended = steps is not None and last == steps - 1
        if following is not None and steps is not None and not ended:
            self._check_left(following, last)
        missing = sorted(set(range(self._from, last)) - positions)
        if missing:
            self._find("LS102", f"global batches were left out: {spans(missing, SHOWN)}")
        if not self._loader["own_order"]:
            self._check_repeats()
            if not missing and all(batch.whole for batch in self._batches):
                self._check_gaps(ended)
        elif len(positions) < len(self._batches):
            self._find("LS101", "a global batch of the user's own order was trained twice")
        return {
            "loader": self._loader["loader"],
            "dataset": self._loader["dataset"],
            "epoch": self._epoch,
            "samples": len(self._samples),
            "batches": len(positions),
            "steps": steps,
            "ended": ended,
        }

    def _check_left(self, following: Batch, last: int) -> None:
        """The epoch stops early: by the script's own will, or where the run was taken up."""
        steps = self._loader["steps"]
        if following.attempt != self._batches[-1].attempt:
            left = spans(range(last + 1, steps), SHOWN)
            self._find(
                "LS102",
                f"global batches were left out: {left}; the run was then taken up in another epoch",
            )
            return
        self.notes.append(
            f"loader {self._loader['loader']}: the script left epoch {self._epoch} after global "
            f"batch {last} of {steps}"
        )

    def _check_repeats(self) -> None:
        distinct, counts = np.unique(self._samples, return_counts=True)
        twice = distinct[counts > 1]
        if not len(twice):
            return
        shown = []
        for sample in twice[:SHOWN].tolist():
            steps = [batch.step for batch in self._batches if sample in batch.samples]
            shown.append(f"{sample} (step{'s' * (len(steps) > 1)} {_listed(steps)})")
        more = f" and {len(twice) - SHOWN} more" if len(twice) > SHOWN else ""
        self._find(
            "LS101",
            f"{counted(len(twice), 'sample')} trained more than once: {', '.join(shown)}{more}",
            twice,
        )

    def _check_gaps(self, ended: bool) -> None:
        """Where no global batch is missing, are there samples that are in none?"""
        length = self._loader["length"]
        if self._loader["stream"] is None:
            if not ended or self._from or self._loader["drop_last"]:
                return
            absent = np.setdiff1d(np.arange(length), self._samples)
        elif self._loader["stream"] == "own":  # its samples have no numbers in a row
            return
        else:
            first = self._from * self._loader["batch_size"]
            absent = np.setdiff1d(np.arange(first, self._samples.max() + 1), self._samples)
        if len(absent):
            shown = _listed(absent[:SHOWN].tolist())
            more = f" and {len(absent) - SHOWN} more" if len(absent) > SHOWN else ""
            self._find("LS102", f"{counted(len(absent), 'sample')} left out: {shown}{more}", absent)

    def _find(self, code: str, what: str, samples: Iterable[int] = ()) -> None:
        loader = self._loader["loader"]
        text = f"loader {loader} ({self._loader['dataset']}), epoch {self._epoch}: {what}"
        first = tuple(int(sample) for sample in list(samples)[:SHOWN])
        found = Finding(code, text, loader=loader, epoch=self._epoch, samples=first)
        self.findings.append(found)


def counted(number: int, noun: str) -> str:
    """`3 samples`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
