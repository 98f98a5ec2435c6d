"""Runs a script once and reads what its ranks have recorded.

A `RunConfig` says how the script is run. Each rank writes a `RankUpdate` for every optimizer step,
and a `RankEnd` when its script has ended. The steps of all ranks are lined up to `Update`s, and
together they are the `RunRecord` of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.verify.files import restore
from lockstep.verify.lines_up import group_by_step, line_up, with_idle_ranks
from lockstep.verify.rank_files import RankEnd, read_end, read_updates
from lockstep.verify.run_config import RunConfig
from lockstep.verify.run_failure import find_idle_ranks, first_failure, most_steps
from lockstep.verify.tolerance import Array
from lockstep.verify.training_record import Place, Update
from lockstep.verify.unsupported import recording_failed_error

MAX_OUTPUT_LINES = 15


@dataclass(frozen=True)
class RunRecord:
    """What a run did."""

    config: RunConfig
    updates: list[Update]
    # What the script ended with; empty if nothing went wrong.
    error: str = ""
    # The code of the catalogue that the error carries.
    code: str = ""
    # The last lines that were printed, unless the error says it all.
    output: str = ""
    # What was switched off for the comparison.
    switched_off: tuple[str, ...] = ()
    # Whether the script trains by Lockstep, which alone honours `RunConfig.overrides`.
    uses_lockstep: bool = False
    # Where the script was stopped; empty if it came to its end.
    stopped_at: str = ""
    # What the script has chosen that gives other numbers, and was left out.
    by_choice: str = ""
    # The line that started the first process of the script's own.
    own_process_line: str = ""
    # The line of a DataLoader whose batches could not be made larger.
    unenlarged_loader_line: str = ""
    # Number of torch's DataLoaders that were iterated to train.
    num_loaders: int = 0
    # For each rank, sums over the parameters with which its next forward pass would begin.
    final_sums: Sequence[Mapping[str, Array]] = ()
    # For each rank, outcomes of the script's tests since its last update.
    branch_outcomes: Sequence[Mapping[Place, int]] = ()
    # Ranks that made no step while others trained.
    idle_ranks: Sequence[int] = ()

    @property
    def steps(self) -> int:
        """Number of steps of the optimizer that made the most."""
        return most_steps([update[0] for update in self.updates])


def record_run(
    config: RunConfig, folder: Path, start: Callable[[Path, RunConfig], str]
) -> RunRecord:
    """Runs the script and returns what its ranks have recorded.

    Args:
        config: how the script is run.
        folder: for the records; it is made.
        start: starts the processes, which write into the folder, and returns what they printed.

    Raises:
        RecordingFailedError: the recorder itself has failed.
    """
    folder.mkdir(parents=True)
    config.write(folder)
    try:
        output = start(folder, config)
    finally:
        restore(folder)
    rank_folders = [folder / f"rank{rank}" for rank in range(config.nproc)]
    ends: dict[int, RankEnd] = {}
    for rank, rank_folder in enumerate(rank_folders):
        end = read_end(rank_folder)
        if end is not None:
            ends[rank] = end
    updates_of_ranks = [list(read_updates(rank_folder)) for rank_folder in rank_folders]

    internal_error = _first_text(ends, "internal_error")
    if internal_error:
        raise recording_failed_error(f"{config.name} of {config.script.path}", internal_error)

    failure = first_failure(ends, updates_of_ranks, config.steps)
    if failure is None and len(ends) < config.nproc:
        failure = RankEnd(error="the loss of a process", exited=True)
    idle_ranks: tuple[int, ...] = ()
    if failure is None and len(ends) == config.nproc:
        idle_ranks = find_idle_ranks(ends, updates_of_ranks)
    steps_of_trained_ranks = []
    for rank, updates in enumerate(updates_of_ranks):
        if rank not in idle_ranks:
            steps_of_trained_ranks.append(group_by_step(updates))

    switched_off: dict[str, None] = {}
    for end in ends.values():
        switched_off |= dict.fromkeys(end.switched_off)
    last_lines = output.splitlines()[-MAX_OUTPUT_LINES:]
    # The error of a script that exits by `sys.exit` says little, so its output is shown as well.
    shows_output = failure is None or failure.exited
    ends_in_order = [ends[rank] for rank in sorted(ends)]
    return RunRecord(
        config,
        with_idle_ranks(line_up(steps_of_trained_ranks), idle_ranks),
        error=failure.error if failure else "",
        code=failure.code if failure else "",
        output="\n".join(last_lines) if shows_output else "",
        switched_off=tuple(switched_off),
        uses_lockstep=any(end.uses_lockstep for end in ends.values()),
        stopped_at=_first_text(ends, "stopped_at"),
        by_choice=_first_text(ends, "by_choice"),
        own_process_line=_first_text(ends, "own_process_line"),
        unenlarged_loader_line=_first_text(ends, "unenlarged_loader_line"),
        num_loaders=max((end.num_loaders for end in ends.values()), default=0),
        final_sums=[_arrays(end.final_sums) for end in ends_in_order],
        branch_outcomes=[_outcomes(end.branch_outcomes) for end in ends_in_order],
        idle_ranks=idle_ranks,
    )


def _first_text(ends: Mapping[int, RankEnd], field_name: str) -> str:
    """Returns a field of the first rank that has it."""
    for end in ends.values():
        text: str = getattr(end, field_name)
        if text:
            return text
    return ""


def _arrays(sums: Mapping[str, Sequence[float]]) -> dict[str, Array]:
    return {name: np.array(numbers) for name, numbers in sums.items()}


def _outcomes(pairs: Sequence[tuple[Place, int]]) -> dict[Place, int]:
    """Returns outcomes by place. JSON has made lists of the places."""
    outcomes: dict[Place, int] = {}
    for (file, first_line, last_line), outcome in pairs:
        outcomes[file, first_line, last_line] = outcome
    return outcomes
