"""`world.checkpoint(folder, **objects)`: saves the full state of a training run, and resumes it.

The *state* is what `state_dict()` of each object returns, by the object's name. Each rank writes
the part of the state that it stores (its *part*) into a hidden folder, in a thread while training
continues. Rank 0 then adds the *manifest*, a JSON file that lists what the checkpoint contains.

If `lockstep run` may restart the ranks, the state of each step is also kept in memory that survives
the ranks (`kept_steps`), and `resume` looks there first.

Communication: `save` makes two small exchanges of text, `resume` three, `wait` one. No tensor is
sent. Each exchange also carries errors, so an error on one rank is raised on all of them. Errors of
the writing thread are carried by the next exchange.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.batch.loader import Loader
from lockstep.checkpoint import layout
from lockstep.checkpoint.checks import (
    check_is_no_checkpoint,
    check_state,
)
from lockstep.checkpoint.file_errors import plain_errors
from lockstep.checkpoint.find_latest import (
    FolderView,
    check_views,
    find_latest_complete,
    find_latest_sound,
    read_manifest_of,
    removed_meanwhile_error,
    step_and_epoch,
)
from lockstep.checkpoint.formats.reading import read_stored
from lockstep.checkpoint.host_copies import HostCopies
from lockstep.checkpoint.kept_fetching import RESUMING_FROM_MEMORY, fetch_step
from lockstep.checkpoint.kept_reading import (
    KeptStep,
    PartReport,
    choose_step,
    describe_incomplete,
)
from lockstep.checkpoint.kept_steps import KeptSteps
from lockstep.checkpoint.preemption import SignalRequests
from lockstep.checkpoint.random_states import CommonStream, RandomStates
from lockstep.checkpoint.rank_parts import (
    RankSummary,
    copy_rank_part,
    has_own_tensors,
)
from lockstep.checkpoint.save import RankPart, RankReports, write_checkpoint
from lockstep.checkpoint.schedule import Policy, SaveSchedule
from lockstep.checkpoint.step_keeper import KeptTraining, TakenState
from lockstep.checkpoint.training_state import CheckpointWorld, Replicas, TrainingState
from lockstep.checkpoint.unsaved_loaders import WarningAfterResume, WarningAfterSave
from lockstep.checkpoint.writer import Writer
from lockstep.distributed.collectives import (
    check_same_metric,
    exchange_on_all_ranks,
    gather_answers,
    run_on_all_ranks,
)
from lockstep.distributed.process_group import Run
from lockstep.errors import EXIT_SIGNAL, CheckpointError, UsageError, warn
from lockstep.keyword_arguments import check_keywords_of_methods
from lockstep.language import translate
from lockstep.session.extension import Extension, Place
from lockstep.settings import is_quiet
from lockstep.user_code import Location, user_location

Method = TypeVar("Method", bound=Callable[..., Any])

MAX_WRITING_AFTER_SIGTERM_S = 5.0
"""How long a checkpoint may still be written if the run fails after SIGTERM: whoever has sent the
signal kills the process before long."""


def _in_checkpoint_phase(method: Method) -> Method:
    """Decorates a method of `Checkpoint` so that its time is reported as time for checkpoints.

    The run's report divides the time of each rank into *phases*, listed in `extension.PHASES`. When
    the method returns, the rank goes back to the phase in which it was before.
    """

    @wraps(method)
    def wrapper(self: Checkpoint, *args: Any, **options: Any) -> Any:
        previous_phase = self._progress.enter_phase("checkpoint")
        try:
            return method(self, *args, **options)
        finally:
            self._progress.enter_phase(previous_phase)

    return cast(Method, wrapper)


class _EndOfRun(Extension):
    """Completes the save that is in progress when the run ends, and restores signal handlers."""

    def __init__(self, writer: Writer, requests: SignalRequests) -> None:
        self._writer = writer
        self._requests = requests

    def close(self, failed: bool) -> None:
        """Restores the former signal handlers, and waits until everything is written."""
        stopped_by_signal = failed and self._requests.stop
        timeout_s = MAX_WRITING_AFTER_SIGTERM_S if stopped_by_signal else None
        self._requests.close()
        self._writer.close(failed, timeout_s)


class _UnresumedWarning(Extension):
    """Warns at the first step if the folder has checkpoints and the script has not called `resume`.

    The training then begins anew beside the checkpoints of another one, and may be refused to save
    only after hours.

    Args:
        folder: the folder of the checkpoints.
        line: the line of `world.checkpoint`.
    """

    def __init__(self, folder: Path, line: Location | None) -> None:
        self.is_due = True
        self._folder = folder
        self._line = line

    def step_finished(self, number: int) -> None:
        """Warns at the first step if the folder has a checkpoint, which this run did not resume."""
        if not self.is_due:
            return
        self.is_due = False

        # If the folder cannot be read, there is no warning: the first save will raise the error.
        latest = None
        with suppress(CheckpointError):
            latest = layout.latest(self._folder)
        if latest is not None:
            warn(
                f"world.checkpoint({str(self._folder)!r}) without resume()",
                found=f"{latest.name} is there already, from a run that this one does not "
                "continue: this step or an earlier one cannot be saved there, and saves of later "
                "ones may remove it",
                do="call checkpoint.resume() before the loop, or choose another folder",
                at=self._line,
            )


class PreparedSave(NamedTuple):
    """What a rank writes in a save."""

    part: RankPart
    manifest: dict[str, Any]
    """Empty on all ranks except rank 0, which writes it."""


class ResultOfMemory(NamedTuple):
    """What has come of the attempt to resume a step from memory."""

    reason_not_resumed: str | None
    """None if the step was resumed. Otherwise the reason, as the end of a message: "; it is newer
    than step 7 in memory"."""
    views: list[FolderView] | None
    """What each rank sees in the folder of the checkpoints; None if that was not looked up."""


@check_keywords_of_methods("checkpoint")
class Checkpoint:
    """Saves and resumes the state of a training run. All ranks create one and call its methods.

    Args:
        folder: the folder for the run's checkpoints. Rank 0 creates it with the first save.
        run: the run that the checkpoints belong to.
        policy: when to save, and which checkpoints to keep.
        state: the objects to save, by name: modules, optimizers, schedulers, loaders, and anything
            else with `state_dict` and `load_state_dict`. Each module is saved in a file of its own,
            under the names of the bare module, so that it can be loaded into a run of any size and
            with any wrapper.
        world: the `World`, whose own state is saved too.
        replicas: the states of DiLoCo's replicas; None if all ranks train one model.
        common_stream: the random stream that all ranks share if virtual ranks train one model.
        memory: True to keep each step in memory, and to fail if that is not possible; False to
            keep none. None: as the launcher decides.
        world_state_without_checks: returns the same as `world.state_dict`, but without asking the
            checks for results that they still hold back, which may take as long as a step.

    Raises:
        UsageError: there is nothing to save, or one of the objects has no `state_dict`.
        SettingError: the folder is that of a single checkpoint.
    """

    def __init__(
        self,
        folder: str | Path,
        run: Run,
        policy: Policy,
        state: Mapping[str, Any],
        *,
        world: CheckpointWorld,
        replicas: Replicas | None = None,
        common_stream: CommonStream | None = None,
        memory: bool | None = None,
        world_state_without_checks: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        check_state(state)
        self.folder = Path(folder)
        check_is_no_checkpoint(self.folder)
        self.last_resume_note = ""
        """What the last `resume()` found and did, in a sentence or two."""
        self._collectives = run.collectives
        self._extensions = run.extensions
        self._random_states = RandomStates(run.collectives, common_stream)
        self._joined = run.joined
        self._progress = run.step
        self._policy = policy
        self._world = world
        self._state = TrainingState(
            state,
            world=world,
            world_state_without_checks=world_state_without_checks or world.state_dict,
            replicas=replicas,
            random_states=self._random_states,
            settings=run.settings,
            collectives=run.collectives,
        )
        self._action = f"saving a checkpoint in {self.folder}"
        self._damaged_names: tuple[str, ...] = ()
        """Checkpoints that `resume` has skipped. A save ignores them when it counts checkpoints."""
        self._copies = HostCopies()
        """The memory to which states are copied before they are written."""
        self._writer = Writer(self.folder, run.collectives)
        self._kept = self._make_kept_steps(run, asked_for=memory)
        self._has_resumed = False
        self._continues_folder = False
        """True once a checkpoint of the folder, or a step in memory, was resumed. The checkpoints
        in the folder are then earlier ones of the same training."""
        self._saved_steps: set[int] = set()
        """The steps that this object has saved."""
        requests = SignalRequests()
        self._schedule = SaveSchedule(policy.every, run.collectives, requests)
        self._last_step_called = 0
        """The number of optimizer steps that had been made when `step` was last called."""
        # The run gets a separate object: a reference to this one would keep the state alive.
        run.extensions.add(_EndOfRun(self._writer, requests), Place.OBSERVER)
        line = user_location()  # of `world.checkpoint`
        self._unresumed_warning = _UnresumedWarning(self.folder, line)
        self._loaders: list[Loader] = run.loaders
        self._saved_ids = frozenset(id(value) for value in state.values())
        self._warning_after_save = WarningAfterSave(
            self.folder, self._loaders, self._saved_ids, line
        )
        self._is_for_resuming = any(isinstance(value, Optimizer) for value in state.values())
        """True if an optimizer is saved. Otherwise the checkpoints hold weights for another use."""
        if run.topology.is_main:
            run.extensions.add(self._unresumed_warning, Place.OBSERVER)
            run.extensions.add(self._warning_after_save, Place.OBSERVER)

    def _make_kept_steps(self, run: Run, asked_for: bool | None) -> KeptSteps | None:
        """Creates the object that keeps each step in memory, or returns None to keep no steps.

        Args:
            run: the run.
            asked_for: the argument `memory` of `world.checkpoint`. True: keep every step, or fail.
                False: keep none. None: keep steps if the launcher has memory for them, by default
                as often as it costs little.
        """
        topology = run.topology
        paths_of_areas = topology.memory  # empty if the launcher has no memory for steps
        if asked_for is False or not paths_of_areas:
            return None

        # If the launcher is in another container, this process cannot open its memory.
        can_be_opened = all(os.access(path, os.R_OK | os.W_OK) for path in paths_of_areas)
        if not can_be_opened:
            return None

        keeps_every_step = asked_for is True or topology.keeps_every_step
        training = KeptTraining(
            self.folder,
            run.collectives,
            take_state=self._take_state,
            ids_changed_only_by_optimizer=self._state.ids_changed_only_by_optimizer,
            say=self._say,
            every_step=keeps_every_step,  # if not, as often as it costs little
            timeout=run.settings.collective_timeout,
            bandwidth=None if run.link is None else run.link.bandwidth,
        )
        return KeptSteps(training, run.step)

    def _say(self, line: str) -> None:
        """Prints an English line on rank 0, in the language of this process."""
        self._world.print(translate(line))

    def _all_ranks_keep_steps(self) -> bool:
        """Returns True if every rank keeps its steps in memory.

        On several machines the ranks ask each other, because each launcher provides the memory of
        its own machine.
        """
        keeps_steps = self._kept is not None
        if self._collectives.topology.one_node:
            return keeps_steps
        return all(self._collectives.exchange(keeps_steps))

    @_in_checkpoint_phase
    def save(self, metric: float | Tensor | None = None) -> Path | None:
        """Saves the present step and returns the folder of its checkpoint.

        The checkpoint holds the state of this moment, including the random state of every rank:
        training may continue while the ranks write. It appears in the folder only when it is
        complete, and replaces an earlier checkpoint of the same step, unless that is of a training
        which this run does not continue. With `asynchronous=False` it is safely on disk when this
        method returns, otherwise when `wait()` does.

        Args:
            metric: the present value of the metric that decides which checkpoint is `best`. It must
                be the same on all ranks.

        Returns:
            The folder, or None if the save was skipped because an earlier checkpoint is still being
            written and `busy="skip"` was set.

        Raises:
            CheckpointError: on all ranks. The state of one of them cannot be stored; another run
                writes into the folder; the folder has a later step, or the same one of a training
                that was not resumed; or the previous checkpoint could not be written (disk full,
                not writable). The state of the training is unchanged, and so are earlier
                checkpoints.
            RanksDifferError: the metric differs between ranks.
        """
        self._extensions.saving_begins()
        try:
            return self._save(metric)
        finally:
            self._extensions.saving_ended()

    def _save(self, metric: float | Tensor | None) -> Path | None:
        """Does what `save` promises, in three steps.

        1. The ranks wait for the previous save, and tell each other what each of them stores.
        2. Each rank copies its states to host memory. Rank 0 creates the hidden folder and tells
           the others its name. When all ranks have done so, training may change the states.
        3. Each rank that stores something starts a thread that writes the copies.
        """
        # Step 1: `states` are those of this rank, `summaries` those of all ranks.
        states, summaries = self._collect_states(None if metric is None else float(metric))
        is_skipped = summaries[0].skip  # rank 0 decides for all
        if is_skipped:
            return None

        # All ranks wait for the previous save in this one. If that has failed on one of them, all
        # raise its error here, so `close` need not exchange it at the end of the run.
        self._writer.has_unconfirmed_save = False
        other_writers = _writers_besides_rank_0(summaries)

        # The memory of the copies of the previous save is used again.
        self._copies.begin(states.values())
        try:
            # Step 2: what this rank writes stays here, the name of the hidden folder is exchanged.
            prepared, folder_name_of_rank = exchange_on_all_ranks(
                self._collectives,
                self._action,
                lambda: self._prepare_save(states, summaries, other_writers),
            )
            folder_name = folder_name_of_rank[0]  # only rank 0 has created a folder

            # Step 3
            self._start_writing(prepared, folder_name, other_writers)
        except BaseException:  # also Ctrl-C
            self._writer.cancel()  # removes the hidden folder if it was made
            raise

        if not self._policy.asynchronous:
            self.wait()
        self._schedule.saved()

        step = int(states["world"]["step"])
        self._saved_steps.add(step)
        path = layout.step_folder(self.folder, step)
        # If the checkpoint of this step was damaged, a sound one now replaces it.
        self._damaged_names = tuple(name for name in self._damaged_names if name != path.name)

        # If the run was resumed, it has warned of unsaved loaders at its first step.
        if self._is_for_resuming and not self._continues_folder:
            self._warning_after_save.saved()
        return path

    def _collect_states(self, metric: float | None) -> tuple[dict[str, Any], list[RankSummary]]:
        """Collects the states of this rank, and exchanges short summaries of them with all ranks.

        Every rank first waits for the previous save. If it has failed on any rank, all ranks raise
        the error. With `busy="skip"`, a rank votes to skip this save instead of waiting.

        Returns:
            The states of this rank by name, and the summary of each rank.

        Raises:
            RanksDifferError: the metric or the common random stream differs between ranks.
        """
        # The states stay here; the fields of the summary are sent to all ranks.
        states, sent_summaries = exchange_on_all_ranks(
            self._collectives, self._action, lambda: self._wait_and_collect(metric)
        )
        summaries = [RankSummary(**fields) for fields in sent_summaries]

        self._random_states.check_common([summary.rng_state for summary in summaries])
        check_same_metric("checkpoint.save(metric=...)", [summary.metric for summary in summaries])
        return states, summaries

    def _wait_and_collect(self, metric: float | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Waits for the previous save, and collects the states of this rank with their summary.

        With `busy="skip"`, it votes to skip this save instead of waiting for the previous one.

        Returns:
            The states by name, and the fields of their `RankSummary`, which can be sent as JSON.
        """
        skip = self._policy.busy == "skip" and self._writer.busy
        if not skip:
            self._writer.finish()  # waits, and raises the error of the previous save

        # A state is partial if each rank has only some of its entries, as under a pipeline.
        states = self._state.collect()
        partial_keys = self._state.keys_of_partial(states)
        summary = RankSummary(
            skip=skip,
            metric=metric,
            rng_state=self._random_states.to_text(),
            random_stream_is_common=self._random_states.is_common,
            partial_keys=partial_keys,
            has_own_tensors=has_own_tensors(states, partial_keys),
        )
        return states, asdict(summary)

    def _prepare_save(
        self,
        states: Mapping[str, Any],
        summaries: Sequence[RankSummary],
        other_writers: Sequence[int],
    ) -> tuple[PreparedSave, str | None]:
        """Copies what this rank stores to host memory; rank 0 also creates the hidden folder.

        Args:
            states: the states of this rank, by name.
            summaries: the summaries of all ranks.
            other_writers: the ranks that write, other than rank 0.

        Returns:
            What this rank writes, and on rank 0 the name of the hidden folder (None on the others).
        """
        # A rank that has voted to skip this save has not waited for the previous one yet. Rank 0
        # has decided against it.
        self._writer.finish()

        rank = self._collectives.topology.rank
        writes_something = rank == 0 or rank in other_writers
        if not writes_something:  # rank 0 has the same values as this rank, and writes them
            return PreparedSave(part=RankPart({}), manifest={}), None

        part, trees = copy_rank_part(
            states, self._state.module_names, summaries, rank, self._copies.copy
        )
        self._copies.finish()
        if rank > 0:
            return PreparedSave(part, manifest={}), None

        manifest = self._manifest(states, summaries[0].metric, trees)
        folder_name = self._create_hidden_folder(manifest["step"])
        return PreparedSave(part, manifest), folder_name

    def _create_hidden_folder(self, step: int) -> str:
        """Creates the hidden folder for the checkpoint of a step, and returns its name.

        Raises:
            CheckpointError: the folder of the run has a sound checkpoint of a later step, or one of
                this step that another training has saved.
        """
        temporary = layout.temporary_folder(self.folder, step)
        is_own_step = self._continues_folder or step in self._saved_steps
        self._writer.begin(temporary, self._damaged_names, may_replace_step=is_own_step)
        return temporary.name

    def _start_writing(
        self, prepared: PreparedSave, folder_name: str, other_writers: Sequence[int]
    ) -> None:
        """Starts the thread that writes this rank's part, if it has one.

        Rank 0 writes its part, waits for the other writers, and completes the checkpoint. The other
        writers write their parts, and report that to rank 0.

        Args:
            prepared: what this rank writes.
            folder_name: name of the hidden folder that rank 0 has created.
            other_writers: the ranks that write, besides rank 0.
        """
        rank = self._collectives.topology.rank
        temporary = self.folder / folder_name
        reports = RankReports(self._joined, folder_name, other_writers)

        if rank == 0:
            self._writer.start(self._work_of_rank_0(temporary, prepared, reports))
        elif rank in other_writers:
            self._writer.protect_folder(temporary)
            self._writer.start(self._work_of_other_writer(temporary, prepared.part, reports))

        # The ranks do not know yet how this save ends on the others.
        self._writer.has_unconfirmed_save = True

    def _work_of_rank_0(
        self, temporary: Path, prepared: PreparedSave, reports: RankReports
    ) -> Callable[[], object]:
        """Returns the function that rank 0 calls in its thread: it completes the checkpoint.

        The function has no reference to this object, which would keep the state of the training
        alive while the thread runs.
        """
        raise_if_given_up = self._writer.raise_if_given_up  # called often while the thread writes
        wait_for_others = partial(
            reports.wait, run_has_failed=self._writer.run_has_failed, check=raise_if_given_up
        )
        return partial(
            write_checkpoint,
            temporary,
            prepared.part,
            prepared.manifest,
            keep=self._policy.keep,
            best=self._policy.best,
            damaged_names=self._damaged_names,
            wait_for_others=wait_for_others,
            check=raise_if_given_up,
        )

    def _work_of_other_writer(
        self, temporary: Path, part: RankPart, reports: RankReports
    ) -> Callable[[], object]:
        """Returns the function that another writer than rank 0 calls in its thread.

        Like that of rank 0, it has no reference to this object.
        """
        return partial(
            _write_and_report,
            temporary,
            part,
            reports,
            rank=self._collectives.topology.rank,
            check=self._writer.raise_if_given_up,
        )

    def step(self) -> Path | None:
        """Saves if `every` or a signal asks for it. Call it after each optimizer step.

        After SIGUSR1 to any process of the run, all ranks save in the same step and go on. After
        SIGTERM, all ranks save in the same step and the run ends with exit code 143, the usual one
        after SIGTERM. Signals are noticed only in this method, within about half a second of
        training.

        Returns:
            The folder of the checkpoint if one was saved, otherwise None.

        Raises:
            SystemExit: after SIGTERM, when the checkpoint is on disk.
            CheckpointError: as `save` does.
        """
        number = self._progress.number
        if number == self._last_step_called:
            # The loop is in the middle of a global batch, and the optimizer has not stepped.
            return None
        self._last_step_called = number

        self._keep_in_memory_unless_loader_does()

        decision = self._schedule.decide(number)
        if decision is None:
            return None
        path = self.save()
        if decision == "stop":
            self._stop_after_sigterm(path)
        return path

    def _keep_in_memory_unless_loader_does(self) -> None:
        """Keeps the present step in memory, unless a loop over a prepared loader will do so.

        A step is kept once its global batch is done. A prepared loader reports that. In any other
        loop, the batch is done when the script calls `step`.
        """
        loader_reports_it = self._progress.in_training_loop
        if self._kept is not None and not loader_reports_it:
            self._kept.batch_is_done()

    def _stop_after_sigterm(self, path: Path | None) -> None:
        """Waits for the last checkpoint, and ends the process.

        Args:
            path: the checkpoint that is being written for the present step. None: it was skipped,
                because an earlier one was still being written.
        """
        self.wait()
        if path is None:
            path = self.save()  # the earlier one is complete now, so this one is not skipped
            self.wait()
        self._say(f"stopped by SIGTERM; {path} is complete, resume() goes on")
        raise SystemExit(EXIT_SIGNAL + signal.SIGTERM)

    @_in_checkpoint_phase
    def resume(self) -> bool:
        """Resumes the latest sound checkpoint; returns False if the folder has none.

        A step that is still in memory is resumed instead, unless the checkpoint is of a later step.
        Rank 0 chooses, and all ranks read the same checkpoint. Damaged checkpoints are skipped, and
        a message says so. Nothing is changed before everything has been checked on all ranks.
        Random states are restored if the run has as many ranks as the one that saved; with virtual
        ranks, on any number of ranks. `last_resume_note` says what was done.

        Raises:
            CheckpointError: on all ranks, if any of them cannot see or read the checkpoint that
                rank 0 has found, if it does not fit this run, or if there are checkpoints and none
                of them is sound.
        """
        self.wait()
        # There is no need to warn that the script does not resume.
        self._unresumed_warning.is_due = False

        has_resumed = self._resume_from_memory_or_disk()
        if has_resumed:
            # From now on a save may replace a checkpoint of the same step in the folder.
            self._continues_folder = True
            self._warn_later_of_unsaved_loaders()
        return has_resumed

    def _warn_later_of_unsaved_loaders(self) -> None:
        """Makes the first step warn if it trains on a loader that was not resumed."""
        some_steps_were_trained = self._progress.number > 0
        if self._collectives.topology.is_main and some_steps_were_trained:
            self._extensions.add(
                WarningAfterResume(self.folder, self._loaders, self._saved_ids), Place.OBSERVER
            )

    def _resume_from_memory_or_disk(self) -> bool:
        """Does what `resume` promises."""
        if not self._all_ranks_keep_steps():
            self._kept = None
        kept = self._kept
        if kept is None:
            is_restart = self._collectives.topology.restarts > 0
            why_not_from_memory = "; no steps are kept in memory" if is_restart else ""
            return self._resume_from_disk(why_not_from_memory)

        # From now on the run notifies `kept` of each step.
        self._attach(kept)

        # If this run has resumed before, a step may still be copied, and what is resumed changes
        # the tensors that are copied.
        kept.finish_present_step()

        # Collect what the ranks find in the memory of their machines. If this run has resumed
        # before, it now goes back to a checkpoint on disk.
        has_resumed_before = self._has_resumed
        answers = gather_answers(
            self._collectives,
            RESUMING_FROM_MEMORY,
            lambda: self._report_memory(kept, has_resumed_before=has_resumed_before),
        )
        self._has_resumed = True

        # The folder of the checkpoints may have another path on each machine. Steps in memory are
        # marked with these paths, to tell to which run they belong.
        paths_of_folder = sorted({answer["folder"] for answer in answers})

        # Resume a step from memory, or else a checkpoint from disk.
        chosen, why_not_from_memory = self._choose_kept_step(
            answers, paths_of_folder, has_resumed_before=has_resumed_before
        )
        views: list[FolderView] | None = None
        resumed_step: KeptStep | None = None
        if chosen is not None:
            step, epoch = answers[0]["latest_on_disk"]  # as rank 0 sees the folder
            result = self._resume_unless_disk_is_newer(chosen, (step, epoch))
            views = result.views
            if result.reason_not_resumed is None:
                resumed_step = chosen
            else:
                why_not_from_memory = result.reason_not_resumed
        found = resumed_step is not None or self._resume_from_disk(why_not_from_memory, views)

        # Begin to keep the steps of this attempt in memory. All ranks use the id of rank 0.
        attempt_id = int(answers[0]["attempt_id"])
        kept.start(attempt_id, paths_of_folder, resumed_step)

        # The steps in memory are later than the checkpoint to which the run has gone back. If it
        # fails before it keeps a step, its next start must not resume one of these.
        if has_resumed_before:
            kept.forget_other_steps()
        return found

    def _view_folder(self) -> list[FolderView]:
        """Returns what each rank sees in the folder. Notes the damaged checkpoints for later saves.

        Rank 0 reads all files, to find the latest checkpoint whose checksums are right. The other
        ranks only look for one with all files.
        """
        find = find_latest_sound if self._collectives.topology.is_main else find_latest_complete
        answers = gather_answers(
            self._collectives,
            f"resuming from {self.folder}",
            lambda: find(self.folder).as_json(),
        )
        views = [FolderView(**answer) for answer in answers]
        self._damaged_names = tuple(views[0].passed_over.keys())  # only rank 0 knows them
        return views

    def _resume_from_disk(
        self, why_not_from_memory: str = "", views: list[FolderView] | None = None
    ) -> bool:
        """Resumes the latest sound checkpoint of the folder; returns False if it has none.

        Args:
            why_not_from_memory: why no step in memory was resumed, as the end of a sentence: "; no
                steps are kept in memory". It is "" if none could be expected, as at a first start.
            views: the result of `_view_folder`; None if it was not called yet.
        """
        action = f"resuming from {self.folder}"
        if views is None:
            views = self._view_folder()
        chosen = views[0]  # rank 0 decides
        check_views(self.folder, views)

        # The folder has no checkpoint. At a first start the user knows that, and is told so only if
        # a step in memory was expected.
        if chosen.name is None:
            self.last_resume_note = f"nothing to resume in {self.folder}{why_not_from_memory}"
            if why_not_from_memory:
                self._announce_resumed(self.last_resume_note)
            return False

        # Two exchanges: if any rank cannot read its states, no rank loads any.
        path = self.folder / chosen.name
        loaded = run_on_all_ranks(
            self._collectives, action, lambda: self._read_states(path, chosen.id)
        )
        note = run_on_all_ranks(self._collectives, action, lambda: self._state.load(path, loaded))
        self._announce_resumed(note + chosen.describe_problems() + why_not_from_memory)
        return True

    @_in_checkpoint_phase
    def wait(self) -> None:
        """Waits until everything saved so far is on disk, on all ranks.

        Raises:
            CheckpointError: on all ranks, if something could not be written.
        """
        run_on_all_ranks(self._collectives, self._action, self._writer.finish)
        self._writer.has_unconfirmed_save = False

    @property
    def best(self) -> Path | None:
        """The complete checkpoint with the best metric, or None if there is none.

        A checkpoint that is still being written is not considered.

        Raises:
            UsageError: `world.checkpoint` was not told which metric is the best.
        """
        if self._policy.best is None:
            raise UsageError(
                "checkpoint.best",
                "nothing says which metric is the best",
                'say world.checkpoint(..., best="min") or "max", and save(metric=...)',
            )
        return layout.best(layout.list_checkpoints(self.folder), self._policy.best)

    # Steps in memory

    def _choose_kept_step(
        self,
        answers: Sequence[Mapping[str, Any]],
        folders: Sequence[str],
        *,
        has_resumed_before: bool,
    ) -> tuple[KeptStep | None, str]:
        """Chooses the last complete step in memory.

        Args:
            answers: the result of `_report_memory` on each rank.
            folders: the paths under which the ranks see the folder of the checkpoints.
            has_resumed_before: True if the run has resumed before. Memory is ignored then.

        Returns:
            The step, or None. If there is none, also the reason, as the end of a message: "; step
            12 in memory is incomplete: what rank 1 kept is missing". The reason is "" if no step
            could be expected in memory.
        """
        if has_resumed_before:
            return None, ""

        reports = []
        for answer in answers:
            reports += [PartReport(**part) for part in answer["parts"]]
        is_first_start = self._collectives.topology.restarts == 0
        if is_first_start and not reports:
            return None, ""  # no step was kept yet

        chosen = choose_step(reports, folders)
        reason = "" if chosen is not None else f"; {describe_incomplete(reports, folders)}"
        return chosen, reason

    def _resume_unless_disk_is_newer(
        self, chosen: KeptStep, latest_on_disk: tuple[int, int]
    ) -> ResultOfMemory:
        """Resumes a step from memory, unless there is a sound checkpoint on disk that is newer.

        Args:
            chosen: the step.
            latest_on_disk: step and epoch of the latest checkpoint, which may be damaged; -1 and -1
                if there is none.
        """
        # Steps are compared as (step, epoch), because there may be two states of one step: before
        # and after what a loop does at the end of an epoch.
        in_memory = (chosen.step, chosen.epoch)
        views: list[FolderView] | None = None
        if latest_on_disk > in_memory:
            views = self._view_folder()  # skips damaged checkpoints
            view_of_rank_0 = views[0]
            latest_sound = (view_of_rank_0.step, view_of_rank_0.epoch)
            if latest_sound > in_memory:
                return ResultOfMemory(f"; it is newer than step {chosen.step} in memory", views)

        note_about_disk = _note_about_disk(latest_on_disk[0], views)
        reason_not_resumed = self._resume_kept_step(chosen, note_about_disk)
        return ResultOfMemory(reason_not_resumed, views)

    def _resume_kept_step(self, chosen: KeptStep, note_about_disk: str) -> str | None:
        """Resumes a step from memory, and announces that.

        Args:
            chosen: the step.
            note_about_disk: what the folder holds, as the end of the announcement: "; there is no
                checkpoint on disk".

        Returns:
            None if the step was resumed. Otherwise the reason, as the end of a message: "; step 7
            in memory cannot be read: its checksums are wrong".
        """
        where = f"step {chosen.step} in memory"
        with ExitStack() as received:  # closes the memory that was received from other machines
            try:
                loaded = fetch_step(self._collectives, chosen, self._state.module_names, received)
            except CheckpointError as error:
                return f"; {where} cannot be read: {error.found}"

            def check_and_load() -> str:
                """Loads the states, if they fit this run; returns what was resumed."""
                states = self._state.match(where, loaded)
                return self._state.load(where, states)

            what_was_resumed = run_on_all_ranks(
                self._collectives, RESUMING_FROM_MEMORY, check_and_load
            )

        self._announce_resumed(what_was_resumed + note_about_disk)
        return None

    def _report_memory(self, kept: KeptSteps, *, has_resumed_before: bool) -> dict[str, Any]:
        """Collects what the other ranks must know to choose a step in memory.

        Args:
            kept: the object that keeps the steps.
            has_resumed_before: True if the run has resumed before. Memory is ignored then.

        Returns:
            A dictionary that can be sent as JSON. `parts`: a `PartReport` of each part of a step in
            the memory of this rank's machine. `folder`: the path of the checkpoint folder here.
            `latest_on_disk`: [step, epoch] of the latest checkpoint in it, which may be damaged;
            [-1, -1] if there is none. `attempt_id`: a random number, to tell the steps of this
            start of the run from those of other starts (all ranks use the number of rank 0).
        """
        latest = layout.latest(self.folder)
        kept.open()  # opens the memory of all ranks of this machine

        # At a second resume, memory holds what this training itself has just kept. The user wants
        # to go back to a checkpoint on disk then.
        parts = [] if has_resumed_before else kept.report()
        return {
            "parts": parts,
            "folder": kept.folder,
            "latest_on_disk": [-1, -1] if latest is None else step_and_epoch(latest),
            "attempt_id": secrets.randbits(63),
        }

    def _attach(self, kept: KeptSteps) -> None:
        """Makes the run notify `kept` of each step, instead of any other `KeptSteps`.

        If a run has several checkpoints, only the one that was resumed last keeps steps in memory.
        """
        notified = self._extensions.of_type(KeptSteps)  # there is one at most
        if notified is kept:
            return
        if notified is not None:
            self._extensions.remove(notified)
            notified.stop()
        self._extensions.add(kept, Place.OBSERVER)

    def _take_state(self) -> TakenState:
        """Returns the state that `save` would save now, without copying it."""
        self._extensions.saving_begins()
        try:
            return TakenState(*self._state.collect_sections())
        finally:
            self._extensions.saving_ended()

    # Reading and loading a checkpoint

    def _read_states(self, path: Path, checkpoint_id: str | None) -> dict[str, Any]:
        """Reads the states of a checkpoint, and checks that they fit this run.

        Args:
            path: the folder of the checkpoint.
            checkpoint_id: the id in the manifest that rank 0 has read.

        Returns:
            The states by name, and the manifest under "manifest".

        Raises:
            CheckpointError: the checkpoint cannot be read, or some state does not fit this run.
        """
        try:
            manifest = read_manifest_of(path, checkpoint_id)
            modules = {name: read_stored(path, manifest, name) for name in manifest["modules"]}
            other_states = read_stored(path, manifest, layout.TRAINING)
        except CheckpointError as error:
            # Rank 0 has just read all files of the folder. If it is gone now, it was removed since.
            # (The other ranks may never have seen it.)
            is_rank_0 = self._collectives.topology.is_main
            if is_rank_0 and not path.exists():
                raise removed_meanwhile_error(path) from error
            raise

        # In a damaged manifest the other states may be no dictionary. Then `match` reports all of
        # them as missing.
        if not isinstance(other_states, dict):
            other_states = {}
        return self._state.match(path, {"manifest": manifest, **other_states, **modules})

    def _announce_resumed(self, note: str) -> None:
        """Prints on rank 0 what was resumed, and stores it as `last_resume_note`."""
        self.last_resume_note = note
        if not is_quiet(os.environ):
            self._say(note)
        # The step that was just resumed need not be saved again by `step`.
        self._last_step_called = self._progress.number

    # What is saved

    def _manifest(
        self, states: Mapping[str, Any], metric: float | None, trees: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Builds the manifest of this save, without the list of files, which is not known yet.

        Args:
            states: the states of this rank, by name.
            metric: the metric that was given to `save`.
            trees: the states as JSON, from `copy_rank_part`: one by the name of each module, and
                one as `layout.TRAINING` for everything else.
        """
        from lockstep import __version__  # the package itself imports this module

        # A metric that is NaN or infinite, which JSON does not have, is left out: a checkpoint
        # without a metric is never the best one.
        if metric is not None and not math.isfinite(metric):
            metric = None

        return {
            **self._state.facts(states),
            # Distinguishes checkpoints of the same name on machines without a shared file system.
            "id": secrets.token_hex(8),
            "lockstep": __version__,
            "torch": torch.__version__,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "world_size": self._collectives.topology.size,
            "metric": metric,
            "best": self._policy.best,
            "modules": {name: trees[name] for name in self._state.module_names},
            "training": trees[layout.TRAINING],
        }


def _writers_besides_rank_0(summaries: Sequence[RankSummary]) -> list[int]:
    """Returns the ranks that write files in a save, other than rank 0, which always does."""
    writers = []
    for rank, summary in enumerate(summaries):
        if rank > 0 and summary.has_own_tensors:
            writers.append(rank)
    return writers


def _note_about_disk(step_on_disk: int, views: Sequence[FolderView] | None) -> str:
    """Returns a note on what is on disk when a step in memory is resumed.

    Example: "; the last checkpoint on disk is of step 10".

    Args:
        step_on_disk: the step of the latest complete checkpoint; -1 if there is none.
        views: what the ranks see in the folder; None if no checkpoint seemed newer than memory.
    """
    problems = ""
    if views is not None:  # rank 0 has read all files, and knows which checkpoints are damaged
        step_on_disk = views[0].step
        problems = views[0].describe_problems()
    if step_on_disk < 0:
        return f"; there is no checkpoint on disk{problems}"
    return f"; the last checkpoint on disk is of step {step_on_disk}{problems}"


def _write_and_report(
    temporary: Path,
    part: RankPart,
    reports: RankReports,
    rank: int,
    check: Callable[[], object],
) -> None:
    """Writes the part of a rank other than 0, and tells rank 0 whether it succeeded.

    Args:
        temporary: the hidden folder of the checkpoint.
        part: what the rank stores.
        reports: sends the report to rank 0.
        rank: the rank that writes.
        check: called often during writing; it raises an error to interrupt it.
    """
    report = None
    try:
        with plain_errors("saving the checkpoint", temporary):
            report = part.write(temporary, check)
    finally:
        reports.send(rank, report)  # None if the part could not be written
