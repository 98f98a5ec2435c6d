"""Runs a script once, and reads what its ranks have recorded.

A `RunConfig` is the configuration of a run. Each rank writes a `RankUpdate` for every optimizer
step, and a `RankEnd` when its script has ended, with its error and anything else that is only known
then. The steps of all ranks are aligned to `Update`s, one for each step, which form the `RunRecord`
of the run. *Sums* over a tensor are numbers that change when its values do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.language import translate
from lockstep.verify.lines_up import group_by_step, line_up, with_idle_ranks
from lockstep.verify.rank_files import RankEnd, read_end, read_updates
from lockstep.verify.restored_files import restore
from lockstep.verify.run_config import MIN_STEPS, RunConfig
from lockstep.verify.run_failure import find_idle_ranks, first_failure, most_steps
from lockstep.verify.tolerance import Array
from lockstep.verify.training_record import Place, RankUpdate, Update
from lockstep.verify.unsupported import recording_failed_error

MAX_OUTPUT_LINES = 15
STEPS_OF_ADVICE = 10

# How the script has ended if a rank was killed, for example by an abort in a C++ library.
LOST_PROCESS = "the loss of a process"


@dataclass(frozen=True)
class RunRecord:
    """The record of a run of the script on all ranks."""

    config: RunConfig
    updates: list[Update]
    # The error that ended the script; empty if nothing went wrong.
    error: str = ""
    # The code of the catalogue that the error carries, such as LS303; empty if it has none.
    code: str = ""
    # The last lines that were printed; empty if the error says it all.
    output: str = ""
    # What was switched off for the comparison.
    switched_off: tuple[str, ...] = ()
    # Whether the script trains with Lockstep. Otherwise, `RunConfig.overrides` has no effect.
    uses_lockstep: bool = False
    # Number of virtual ranks; None if there are none, or if bits are not compared.
    virtual_ranks: int | None = None
    # Whether the script itself has set that number, and not `lockstep verify`.
    script_sets_virtual_ranks: bool = False
    # Where the script was stopped; empty if it ran to its end.
    stopped_at: str = ""
    # Option of the script that changes results on purpose, such as compression, and that was
    # switched off in the run; empty if there is none.
    chosen_difference: str = ""
    # The line at which the script started a process itself, whose steps are not recorded.
    own_process_line: str = ""
    # The line of a DataLoader whose batches could not be made larger; empty if all could.
    line_of_loader_without_batch_size: str = ""
    # Number of torch's DataLoaders that were iterated for training.
    num_loaders: int = 0
    # For each rank, sums over the parameters that its next forward pass would use.
    final_sums: Sequence[Mapping[str, Array]] = ()
    # For each rank, outcomes of the script's tests since its last update.
    branch_outcomes: Sequence[Mapping[Place, int]] = ()
    # Ranks that did not train while others did.
    idle_ranks: Sequence[int] = ()
    # True if the steps were so slow that the time limit ended the run after `MIN_STEPS` of them.
    time_was_short: bool = False

    @property
    def steps(self) -> int:
        """Number of steps of the optimizer with the most steps."""
        return most_steps([update[0] for update in self.updates])

    @property
    def advice_on_more_steps(self) -> str:
        """How to compare more steps if the time limit was short; empty if it was not."""
        if not self.time_was_short:
            return ""
        return (
            f"{MIN_STEPS} steps took more than {self.config.seconds:g} seconds: "
            f"`--steps {STEPS_OF_ADVICE}` compares more of them"
        )


def record_run(
    config: RunConfig, folder: Path, start: Callable[[Path, RunConfig], str]
) -> RunRecord:
    """Runs the script, and returns what its ranks have recorded.

    Args:
        config: configuration of the run.
        folder: folder for the records, which is created.
        start: function that starts the processes, which write into the folder, and returns their
            output.

    Raises:
        RecordingFailedError: The recorder itself has failed.
    """
    folder.mkdir(parents=True)
    config.write(folder)

    try:
        output = start(folder, config)
    finally:
        restore(folder)  # undo the changes of the script to the user's files

    rank_folders = [folder / f"rank{rank}" for rank in range(config.nproc)]
    updates_of_ranks = [list(read_updates(rank_folder)) for rank_folder in rank_folders]
    ends = _read_ends(rank_folders)

    internal_error = _first_text(ends, "internal_error")
    if internal_error:
        raise recording_failed_error(f"{config.name} of {config.script.path}", internal_error)

    failure = _find_failure(config, ends, updates_of_ranks)
    idle_ranks: tuple[int, ...] = ()
    if failure is None:
        idle_ranks = find_idle_ranks(ends, updates_of_ranks)

    # What any rank has switched off, without duplicates and in the order of ranks.
    switched_off: dict[str, None] = {}
    for end in ends.values():
        switched_off |= dict.fromkeys(end.switched_off)

    # With `--steps 3`, the run has no time limit, and is ended after as many steps as were wanted.
    stopped_at = _first_text(ends, "stopped_at")
    has_time_limit = config.seconds is not None and config.steps > MIN_STEPS
    num_steps = max((most_steps(updates) for updates in updates_of_ranks), default=0)

    # One entry for each rank: a rank that was killed has left no end, and so an empty entry.
    end_of_each_rank = [ends.get(rank, RankEnd()) for rank in range(config.nproc)]

    return RunRecord(
        config,
        _line_up_ranks(updates_of_ranks, idle_ranks),
        error=failure.error if failure else "",
        code=failure.code if failure else "",
        output=_output_to_keep(output, failure),
        switched_off=tuple(switched_off),
        uses_lockstep=any(end.uses_lockstep for end in ends.values()),
        virtual_ranks=next(iter(ends.values())).virtual_ranks if ends else None,
        script_sets_virtual_ranks=any(end.script_sets_virtual_ranks for end in ends.values()),
        stopped_at=stopped_at,
        chosen_difference=_first_text(ends, "chosen_difference"),
        own_process_line=_first_text(ends, "own_process_line"),
        line_of_loader_without_batch_size=_first_text(ends, "line_of_loader_without_batch_size"),
        num_loaders=max((end.num_loaders for end in ends.values()), default=0),
        final_sums=[_arrays(end.final_sums) for end in end_of_each_rank],
        branch_outcomes=[_outcomes(end.branch_outcomes) for end in end_of_each_rank],
        idle_ranks=idle_ranks,
        time_was_short=bool(stopped_at) and has_time_limit and num_steps == MIN_STEPS,
    )


def _read_ends(rank_folders: Sequence[Path]) -> dict[int, RankEnd]:
    """Reads how the script ended on each rank. A rank that was killed has written nothing."""
    ends = {}
    for rank, rank_folder in enumerate(rank_folders):
        end = read_end(rank_folder)
        if end is not None:
            ends[rank] = end
    return ends


def _line_up_ranks(
    updates_of_ranks: Sequence[list[RankUpdate]], idle_ranks: Collection[int]
) -> list[Update]:
    """Aligns the steps of all ranks to updates.

    Idle ranks have no steps. They are added afterwards, as ranks that missed all updates.
    """
    steps_of_active_ranks = []
    for rank, updates in enumerate(updates_of_ranks):
        if rank not in idle_ranks:
            steps_of_active_ranks.append(group_by_step(updates))

    return with_idle_ranks(line_up(steps_of_active_ranks), idle_ranks)


def _find_failure(
    config: RunConfig, ends: Mapping[int, RankEnd], updates_of_ranks: Sequence[list[RankUpdate]]
) -> RankEnd | None:
    """Returns how the rank that failed first has ended; None if nothing went wrong.

    Args:
        config: configuration of the run.
        ends: how the script ended, by rank; ranks that were killed are missing.
        updates_of_ranks: records of each rank.
    """
    failure = first_failure(ends, updates_of_ranks, config.steps)

    # A rank that was killed failed first if the others have only lost their connections to it.
    a_rank_was_killed = len(ends) < config.nproc
    no_other_cause_is_known = failure is None or failure.only_lost_peer
    if a_rank_was_killed and no_other_cause_is_known:
        return RankEnd(error=LOST_PROCESS, output_may_tell_why=True)

    return failure


def _output_to_keep(output: str, failure: RankEnd | None) -> str:
    """Returns the last lines of the script's output; empty if the error says what went wrong.

    Args:
        output: all that the processes have printed.
        failure: how the rank that failed first has ended; None if nothing went wrong.
    """
    error_says_enough = failure is not None and not failure.output_may_tell_why
    if error_says_enough:
        return ""

    last_lines = output.splitlines()[-MAX_OUTPUT_LINES:]
    a_rank_was_killed = failure is not None and failure.error == LOST_PROCESS
    if a_rank_was_killed:
        last_lines = _report_of_launcher(output) or last_lines

    return "\n".join(last_lines)


def _report_of_launcher(output: str) -> list[str]:
    """Returns the lines in which the launcher reports the first failure; empty if it does not.

    They name the rank that was killed, or the deadlock for which ranks were ended, with the lines
    of the script.
    """
    lines = output.splitlines()
    heading = translate("FIRST FAILURE:")
    for number, line in enumerate(lines):
        if heading in line:
            return lines[number:]
    return []


def _first_text(ends: Mapping[int, RankEnd], field_name: str) -> str:
    """Returns a text field of `RankEnd` from the first rank where it is not empty.

    Args:
        ends: how the script ended, by rank.
        field_name: name of the field, such as "stopped_at".

    Returns:
        The text; empty if it is empty on all ranks.
    """
    for end in ends.values():
        text: str = getattr(end, field_name)
        if text:
            return text
    return ""


def _arrays(sums: Mapping[str, Sequence[float]]) -> dict[str, Array]:
    """Converts sums over tensors, by name, from lists of numbers in JSON to arrays."""
    return {name: np.array(numbers) for name, numbers in sums.items()}


def _outcomes(pairs: Sequence[tuple[Place, int]]) -> dict[Place, int]:
    """Converts the outcomes of the script's tests from JSON to a dictionary by place.

    Args:
        pairs: places with their outcomes. In JSON, a place is a list, which cannot be a key.
    """
    outcomes: dict[Place, int] = {}
    for (file, first_line, last_line), outcome in pairs:
        outcomes[file, first_line, last_line] = outcome
    return outcomes
