"""The files that a rank writes while it is recorded, and functions that read them.

Each rank has a folder inside the folder of the run. It contains a pickle file for each `RankUpdate`
(the record of one optimizer step), an empty file for each step, from which progress is counted, and
at the end a JSON file with a `RankEnd`.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.run.watch.error_record import describe_error
from lockstep.verify.names import name_of_replica, rename_tensors
from lockstep.verify.run_config import MIN_STEPS
from lockstep.verify.training_record import Place, RankUpdate
from lockstep.verify.unsupported import not_recorded_error

# Matches torch's error if a connection breaks because another rank has ended.
LOST_PEER_PATTERN = "by peer|Broken pipe"

_END_FILE = "ended.json"
_STEP_FILE_PREFIX = "step"


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How the script ended on one rank, and everything that is only known at that time."""

    # The error that ended the script, as text; empty if it ended normally.
    error: str = ""
    # The code of the catalogue in the error.
    code: str = ""
    # Whether the output of the script may tell why it ended, as after `sys.exit` with an error.
    output_may_tell_why: bool = False
    # Whether a connection broke because another rank had ended.
    lost_peer: bool = False
    # The time of the end, in seconds since 1970.
    time: float = 0.0
    # What was switched off for the comparison.
    switched_off: Sequence[str] = ()
    # Whether the script trains with Lockstep.
    uses_lockstep: bool = False
    # Number of virtual ranks; None if there are none, or if bits are not compared.
    virtual_ranks: int | None = None
    # Whether the script itself has set that number, and not `lockstep verify`.
    script_sets_virtual_ranks: bool = False
    # Where the rank was stopped after enough steps; empty if the script ran to its end.
    stopped_at: str = ""
    # Option of the script that changes results on purpose, such as compression; it is switched off.
    chosen_difference: str = ""
    # The line that started the first process of the script's own.
    own_process_line: str = ""
    # The traceback of an error in the recorder itself.
    internal_error: str = ""
    # The line of a DataLoader whose batches could not be made larger.
    line_of_loader_without_batch_size: str = ""
    # Number of torch's DataLoaders that were iterated for training.
    num_loaders: int = 0
    # Number of backward passes since the last step. The default stands for a rank that has trained.
    num_backward_passes: int = MIN_STEPS
    # Number of backward passes since any parameter has changed, on a rank without an optimizer. It
    # is 0 on a rank with one.
    num_passes_without_step: int = 0
    # Outcomes of the script's tests since the last update, by place.
    branch_outcomes: Sequence[tuple[Place, int]] = ()
    # Sums over the parameters that the next forward pass would use.
    final_sums: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def only_lost_peer(self) -> bool:
        """Whether a lost connection is all that is known: no code says why it was lost."""
        return self.lost_peer and not self.code

    @property
    def was_stopped(self) -> bool:
        """Whether the rank was stopped after enough steps."""
        return bool(self.stopped_at)


class UpdateWriter:
    """Writes the updates of one rank.

    Args:
        folder: folder of the run, in which the rank creates a folder of its own.
        rank: number of the rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder / f"rank{rank}"
        self.folder.mkdir(parents=True)
        self.count = 0
        self._process_id = os.getpid()

    def write(self, update: RankUpdate, replica: int | None = None) -> None:
        """Writes and counts an update.

        The file is renamed once it is complete, so that nobody reads an incomplete file.

        Args:
            update: the update.
            replica: number of the model's replica, if one process trains several replicas. It
                becomes part of the names of tensors, since each replica has its own.

        Raises:
            UsageError: The script has made the step in a process that it started itself.
        """
        if os.getpid() != self._process_id:  # this is a forked process
            raise not_recorded_error(
                "an optimizer step in a process that the script has started itself"
            )

        if replica is not None:
            update = rename_tensors(update, lambda name: name_of_replica(name, replica))

        incomplete = self.folder / "unfinished"
        with incomplete.open("wb") as file:
            pickle.dump(update, file)

        incomplete.rename(self.folder / f"{self.count}.pickle")

        # `count_steps` counts these empty files. If several optimizers make a step with this
        # number, it counts once, because they touch the same file.
        (self.folder / f"{_STEP_FILE_PREFIX}{update.step}").touch()
        self.count += 1

    def end(self, error: BaseException | None, recorded: RankEnd | None = None) -> None:
        """Writes how the script has ended.

        Args:
            error: error that ended the script; None if it ended normally.
            recorded: what the recorder knows at the end. Its fields about the error are replaced.
        """
        lost_peer = error is not None and re.search(LOST_PEER_PATTERN, str(error)) is not None
        # The code of the catalogue, such as LS103. Only errors of Lockstep have one.
        code = ""
        if isinstance(error, LockstepError) and error.code:
            code = error.code

        rank_end = replace(
            recorded or RankEnd(),
            error="" if error is None else _describe(error),
            code=code,
            output_may_tell_why=isinstance(error, SystemExit),
            lost_peer=lost_peer,
            time=time.time(),
        )
        (self.folder / _END_FILE).write_text(json.dumps(asdict(rank_end)), encoding="utf-8")


def _describe(error: BaseException) -> str:
    """Formats an error as text, with the line of the script that raised it."""
    if isinstance(error, LockstepError):
        return f"{type(error).__name__}: {error}"  # the text of the error contains the line

    description = describe_error(error)
    if isinstance(error, SystemExit):
        text = description.headline  # such as "sys.exit(2)"
    else:
        text = f"{description.type}: {description.message}"

    if description.line is None:
        return text

    return f"{text}\n  at:    {description.line}"


def read_updates(rank_folder: Path) -> Iterator[RankUpdate]:
    """Reads the updates that a rank has written, in order."""
    number = 0
    path = rank_folder / f"{number}.pickle"
    while path.exists():
        # Unpickling is safe: the file was written by `lockstep verify` itself, in a folder that
        # only this user can enter.
        with path.open("rb") as file:
            yield pickle.load(file)
        number += 1
        path = rank_folder / f"{number}.pickle"


def read_end(rank_folder: Path) -> RankEnd | None:
    """Reads how the script ended on a rank; None if the rank has not written it."""
    path = rank_folder / _END_FILE
    if not path.exists():
        return None
    return RankEnd(**json.loads(path.read_text(encoding="utf-8")))


def count_steps(run_folder: Path) -> int:
    """Returns how many steps rank 0 has written, of its optimizer with the most steps."""
    return len(list(run_folder.glob(f"rank0/{_STEP_FILE_PREFIX}*")))
