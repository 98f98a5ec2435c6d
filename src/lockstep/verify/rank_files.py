"""The files that a rank writes while it is recorded, and how they are read.

Each rank has a folder in that of the run: a pickle for each `RankUpdate` (what it recorded of one
optimizer step), an empty file for each step (so that progress can be counted), and at the end a
JSON file with a `RankEnd`.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError
from lockstep.run.watch.error_record import describe_error
from lockstep.verify.names import rename_tensors
from lockstep.verify.run_config import MIN_STEPS
from lockstep.verify.training_record import Place, RankUpdate
from lockstep.verify.unsupported import not_recorded_error

# What torch says if a connection breaks because another rank is gone.
LOST_PEER_PATTERN = "by peer|Broken pipe"

_END_FILE = "ended.json"
_STEP_FILE_PREFIX = "step"


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How the script ended on one rank, and what is known only then."""

    # The error that ended the script, in words; empty if it ended as it should.
    error: str = ""
    # The code of the catalogue that the error carries.
    code: str = ""
    # Whether the script called `sys.exit` with an error.
    exited: bool = False
    # Whether a connection broke because another rank was gone.
    lost_peer: bool = False
    # When it ended, in seconds since 1970.
    time: float = 0.0
    # What was switched off for the comparison.
    switched_off: Sequence[str] = ()
    # Whether the script trains by Lockstep.
    uses_lockstep: bool = False
    # The virtual ranks of the script's run; None if it has none, or if bits are not compared.
    virtual_ranks: int | None = None
    # False if `lockstep verify` has set them.
    virtual_ranks_are_own: bool = False
    # Where the rank was stopped after enough steps; empty if the script came to its end.
    stopped_at: str = ""
    # What the script has chosen that gives other numbers, such as compression; it was left out.
    by_choice: str = ""
    # The line that started the first process of the script's own.
    own_process_line: str = ""
    # The traceback of a failure of the recorder itself.
    internal_error: str = ""
    # The line of a DataLoader whose batches could not be made larger.
    unenlarged_loader_line: str = ""
    # Number of torch's DataLoaders that were iterated to train.
    num_loaders: int = 0
    # Number of backward passes. If it is not known, the rank counts as one that has trained.
    backward_passes: int = MIN_STEPS
    # Number of backward passes during which no parameter changed.
    backward_passes_without_step: int = 0
    # Outcomes of the script's tests since the last update, with their places.
    branch_outcomes: Sequence[tuple[Place, int]] = ()
    # Sums over the parameters with which the next forward pass would begin.
    final_sums: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def was_stopped(self) -> bool:
        """Whether the rank was stopped after enough steps."""
        return bool(self.stopped_at)


class UpdateWriter:
    """Writes the updates of one rank.

    Args:
        folder: of the run; the rank makes a folder of its own in it.
        rank: the number of the rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder / f"rank{rank}"
        self.folder.mkdir(parents=True)
        self.count = 0
        self._process_id = os.getpid()

    def write(self, update: RankUpdate, replica: int | None = None) -> None:
        """Writes one more update, and counts it.

        It is written under another name first, so that nobody reads an incomplete file.

        Args:
            update: what was recorded.
            replica: number of the model's replica, if one process trains several. Each has tensors
                of its own, so the number becomes part of their names.

        Raises:
            UsageError: the script has made the step in a process that it started itself.
        """
        if os.getpid() != self._process_id:  # a process that was forked from this one
            raise not_recorded_error(
                "an optimizer step in a process that the script has started itself"
            )

        if replica is not None:
            update = rename_tensors(update, lambda name: f"{name} (replica {replica})")

        incomplete = self.folder / "unfinished"
        with incomplete.open("wb") as file:
            pickle.dump(update, file)

        incomplete.rename(self.folder / f"{self.count}.pickle")
        # For `count_steps`. Several optimizers may make a step of the same number.
        (self.folder / f"{_STEP_FILE_PREFIX}{update.step}").touch()
        self.count += 1

    def end(
        self, error: BaseException | None, switched_off: Sequence[str] = (), **known: Any
    ) -> None:
        """Writes how the script has ended.

        Args:
            error: the error that ended it; None if it ended as it should.
            switched_off: what was switched off for the comparison.
            **known: other fields of `RankEnd`.
        """
        code = ""  # of the catalogue; only errors of Lockstep have one
        if isinstance(error, LockstepError) and error.code:
            code = error.code

        end = RankEnd(
            error="" if error is None else _describe(error),
            code=code,
            exited=isinstance(error, SystemExit),
            lost_peer=re.search(LOST_PEER_PATTERN, str(error)) is not None,
            time=time.time(),
            switched_off=list(switched_off),
            **known,
        )
        (self.folder / _END_FILE).write_text(json.dumps(asdict(end)), encoding="utf-8")


def _describe(error: BaseException) -> str:
    """Returns an error as a text, with the line of the script that raised it."""
    if isinstance(error, LockstepError):
        return f"{type(error).__name__}: {error}"  # its text has the line already

    description = describe_error(error)
    if isinstance(error, SystemExit):
        text = description.headline  # such as "sys.exit(2)"
    else:
        text = f"{description.type}: {description.message}"

    if description.line is None:
        return text

    return f"{text}\n  at:    {description.line}"


def read_updates(rank_folder: Path) -> Iterator[RankUpdate]:
    """Yields the updates that a rank has written, in their order."""
    number = 0
    path = rank_folder / f"{number}.pickle"
    while path.exists():
        # The file was written by our own process, into a folder that only this user may enter.
        with path.open("rb") as file:
            yield pickle.load(file)
        number += 1
        path = rank_folder / f"{number}.pickle"


def read_end(rank_folder: Path) -> RankEnd | None:
    """Reads how the script ended on a rank; None if the rank has written nothing."""
    path = rank_folder / _END_FILE
    if not path.exists():
        return None
    return RankEnd(**json.loads(path.read_text(encoding="utf-8")))


def count_steps(run_folder: Path) -> int:
    """Returns how many steps rank 0 has written so far, of the optimizer that made the most."""
    return len(list(run_folder.glob(f"rank0/{_STEP_FILE_PREFIX}*")))
