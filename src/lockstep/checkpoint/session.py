"""`world.checkpoint(folder, **state)`: saves and resumes the full state of a training.

The *state* is what `state_dict()` of each object returned, by the object's name. In a save, each
rank writes its part into a hidden folder, in a thread while the training goes on, and rank 0 adds
the *manifest*, which says what is there. *Virtual ranks* are the copies of the model that DiLoCo
trains apart. After each *round* (their steps between two exchanges), `step` keeps their state in
memory that outlives the ranks (`rounds`), and `resume` looks there first.

Communication: `save` makes two small exchanges of text, `resume` three, `wait` one. No tensor is
sent. Each exchange also carries errors, so whatever goes wrong on one rank is raised on all. Rank 0
writes what is equal on all ranks, and every rank writes its own shards, in a thread while the
training goes on. Errors of that thread are carried by the next exchange.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.batch.loader import Loader
from lockstep.checkpoint import layout, sharding
from lockstep.checkpoint.bits import check_virtual_ranks, facts_about_bits, restore_threads
from lockstep.checkpoint.checks import BUILD_AS_SAVED, changed_lengths, check_fits, check_state
from lockstep.checkpoint.file_errors import plain_errors
from lockstep.checkpoint.find_latest import (
    FolderView,
    check_views,
    find_latest_complete,
    find_latest_sound,
    read_manifest_of,
)
from lockstep.checkpoint.formats.reading import read_stored
from lockstep.checkpoint.host_copies import HostCopies
from lockstep.checkpoint.kept_fetching import RESUMING_FROM_MEMORY, fetch_step
from lockstep.checkpoint.kept_layout import Section, sections_of
from lockstep.checkpoint.kept_reading import (
    RANDOM,
    KeptStep,
    PartReport,
    choose_step,
    describe_incomplete,
)
from lockstep.checkpoint.kept_steps import KeptSteps, TakenState
from lockstep.checkpoint.modules import PlainState, load_plain, plain_state_dict
from lockstep.checkpoint.optimizer_state import load_saved_state, saved_parameter_dtypes
from lockstep.checkpoint.preemption import SignalRequests
from lockstep.checkpoint.random_states import CommonStream, RandomStates
from lockstep.checkpoint.rank_parts import (
    RankSummary,
    copy_rank_part,
    has_own_tensors,
    keys_of_partial_states,
)
from lockstep.checkpoint.save import RankPart, RankReports, write_checkpoint
from lockstep.checkpoint.schedule import Policy, SaveSchedule
from lockstep.checkpoint.sharding import without_meta
from lockstep.checkpoint.writer import Writer
from lockstep.distributed.collectives import (
    check_same_metric,
    exchange_on_all_ranks,
    gather_answers,
    run_on_all_ranks,
)
from lockstep.distributed.process_group import Run
from lockstep.errors import CheckpointError, UsageError
from lockstep.optim.deferred_init import shapes_are_enough
from lockstep.session.extension import Extension, Place
from lockstep.settings import is_quiet
from lockstep.wording import count_noun

Method = TypeVar("Method", bound=Callable[..., Any])

EXIT_CODE_AFTER_SIGTERM = 128 + 15
"""What a shell reports for a process that was ended by SIGTERM."""
MAX_WRITING_AFTER_SIGTERM_S = 5.0
"""How long a checkpoint may still be written if the run fails after SIGTERM: whoever has sent the
signal kills the process before long."""


def _in_checkpoint_phase(method: Method) -> Method:
    """Decorates a method of `Checkpoint`, so that the report of the run counts its time.

    A rank says at each moment which *phase* it spends its time on, one of `extension.PHASES`.
    Inside the method it is "checkpoint", afterwards again what it was before.
    """

    @wraps(method)
    def wrapper(self: Checkpoint, *args: Any, **options: Any) -> Any:
        previous_phase = self._progress.enter_phase("checkpoint")
        try:
            return method(self, *args, **options)
        finally:
            self._progress.enter_phase(previous_phase)

    return cast(Method, wrapper)


class CheckpointWorld(Protocol):
    """What a checkpoint needs of the `World`."""

    strategy: str
    """The name of the strategy."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the run's own state, with the integers `step` and `epoch`."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Loads what `state_dict` returned."""

    def print(self, *values: object) -> None:
        """Prints on rank 0."""


class VirtualRanks(Protocol):
    """What a checkpoint needs of `lockstep.training.virtual_rank_states.VirtualRankStates`."""

    count: int
    """Number of virtual ranks of the run."""

    @property
    def own(self) -> list[int]:
        """The virtual ranks that this process computes."""

    def state_dict(self, shared: bool | None = None) -> dict[str, Any]:
        """Returns the states of this process's virtual ranks; with `shared` also what is equal."""

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError if a saved state does not fit."""

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Loads a saved state. None: all virtual ranks begin with the present weights."""


class _EndOfRun(Extension):
    """Finishes what is being written when the run ends, and stops listening for signals."""

    def __init__(self, writer: Writer, requests: SignalRequests) -> None:
        self._writer = writer
        self._requests = requests

    def close(self, failed: bool) -> None:
        """Gives signals their former handlers back, and waits until everything is written."""
        stopped_by_signal = failed and self._requests.stop
        timeout_s = MAX_WRITING_AFTER_SIGTERM_S if stopped_by_signal else None
        self._requests.close()
        self._writer.close(failed, timeout_s)


class PreparedSave(NamedTuple):
    """What a rank is going to write in a save."""

    part: RankPart
    manifest: dict[str, Any]
    """Empty on all ranks except rank 0, which writes it."""


class Checkpoint:
    """Saves and resumes the state of a training. All ranks make one and call its methods.

    Args:
        folder: the folder of the run's checkpoints; rank 0 makes it with the first save.
        run: the run that the checkpoints belong to.
        policy: when to save and what to keep.
        state: what to save, by name: modules, optimizers, schedulers, loaders, and anything else
            that has `state_dict` and `load_state_dict`. Modules are saved under the names of the
            bare module, each in a file of its own, so that they fit a run of any size and any
            wrapper.
        world: the run's own state.
        virtual_ranks: the states of virtual ranks that train apart; None: the run has none.
        common_stream: the random stream of all ranks, if virtual ranks train one model.
        memory: True to keep each step in memory, and to fail where that is not possible; False not
            to keep any. None: as the launcher says.
        unsettled_world_state: returns what `world.state_dict` does, without asking checks for what
            they hold back, which may take as long as a step.

    Raises:
        UsageError: there is nothing to save, or something that has no state.
    """

    def __init__(
        self,
        folder: str | Path,
        run: Run,
        policy: Policy,
        state: Mapping[str, Any],
        *,
        world: CheckpointWorld,
        virtual_ranks: VirtualRanks | None = None,
        common_stream: CommonStream | None = None,
        memory: bool | None = None,
        unsettled_world_state: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        check_state(state)
        self.folder = Path(folder)
        self.last_resume_note = ""
        """What the last `resume()` found and did, in a sentence or two."""
        self._collectives = run.collectives
        self._extensions = run.extensions
        self._settings = run.settings
        self._random_states = RandomStates(run.collectives, common_stream)
        self._joined = run.joined
        self._progress = run.step
        self._policy = policy
        self._state = dict(state)
        for value in state.values():
            if isinstance(value, Loader):
                _ = value.fingerprint  # read before the training: some datasets change in it
        self._world = world
        self._unsettled_world_state = unsettled_world_state or world.state_dict
        self._virtual_ranks = virtual_ranks
        self._action = f"saving a checkpoint in {self.folder}"
        self._damaged_names: tuple[str, ...] = ()
        """Checkpoints that `resume` has passed over. Saving does not count them."""
        self._copies = HostCopies()
        """The memory that states are copied to, before they are written."""
        self._writer = Writer(self.folder, run.collectives)
        self._kept = self._make_kept_steps(run, memory)
        self._has_resumed = False
        self._plain_states: dict[str, PlainState] = {}
        self._bits: dict[str, Any] | None = None
        """What the manifest says about bits, once it was asked for; it takes long to find out."""
        requests = SignalRequests()
        self._schedule = SaveSchedule(policy.every, run.collectives, requests)
        self._last_step_called = 0
        """The optimizer steps that were done when `step` was last called."""
        # The run gets an object of its own, because this one would keep the state alive.
        run.extensions.add(_EndOfRun(self._writer, requests), Place.OBSERVER)

    def _make_kept_steps(self, run: Run, memory: bool | None) -> KeptSteps | None:
        """Returns what keeps each step in memory; None: no step is kept.

        Args:
            run: the run.
            memory: as in `Checkpoint`.
        """
        topology = run.topology
        if memory is False or not topology.memory:
            return None
        # The launcher may be in another container.
        if not all(os.access(path, os.R_OK | os.W_OK) for path in topology.memory):
            return None
        return KeptSteps(
            self.folder,
            run.collectives,
            run.step,
            self._take_state,
            self._steady_ids,
            self._world.print,
            every_step=memory is True or topology.keeps_every_step,
            timeout=run.settings.collective_timeout,
            bandwidth=None if run.link is None else run.link.bandwidth,
        )

    def _all_ranks_keep_steps(self) -> bool:
        """Returns True if the launchers of all machines hold memory for what ranks keep."""
        if self._collectives.topology.one_node:
            return self._kept is not None
        answers = self._collectives.exchange(self._kept is not None)
        return all(answers)

    @_in_checkpoint_phase
    def save(self, metric: float | Tensor | None = None) -> Path | None:
        """Saves the present step; returns its folder, in which it will be complete soon.

        What is saved is the state of this moment, including the random state of every rank: the
        training may go on while the ranks write. The checkpoint is complete or not there at all; an
        earlier one of the same step is replaced. With `asynchronous=False` it is safely on disk
        when this returns, otherwise when `wait()` does.

        Args:
            metric: how good the training is just now, the same on all ranks; see `best`.

        Returns:
            None if the save was left out, because an earlier checkpoint is being written and
            `busy="skip"` was set.

        Raises:
            CheckpointError: on all ranks, when any of them cannot do its part (a state that cannot
                be stored, a later step in the folder, another run that writes there), or when the
                checkpoint before this one could not be written (disk full, not writable). The
                state of the training is as it was, and so are earlier checkpoints.
            RanksDifferError: the metric differs between ranks.
        """
        self._extensions.saving_begins()
        try:
            return self._save(metric)
        finally:
            self._extensions.saving_ended()

    def _save(self, metric: float | Tensor | None) -> Path | None:
        """Saves the present step, as `save` describes it.

        1. The ranks wait for the previous save, and tell each other what each of them stores.
        2. Each rank copies its states to host memory. Rank 0 makes the hidden folder and tells the
           others its name. When all ranks have done so, the training may change the states.
        3. Each rank that stores something starts a thread, which writes the copies.
        """
        states, summaries = self._collect_states(None if metric is None else float(metric))
        if summaries[0].skip:  # the answer of rank 0 counts
            return None
        # That exchange has also told all ranks how the previous save ended.
        self._writer.has_unconfirmed_save = False
        other_writers: list[int] = []
        for rank, summary in enumerate(summaries):
            if rank > 0 and summary.has_own_tensors:
                other_writers.append(rank)

        self._copies.begin(states.values())
        try:
            prepared, folder_names = exchange_on_all_ranks(
                self._collectives,
                self._action,
                lambda: self._prepare_save(states, summaries, other_writers),
            )
            self._start_writing(prepared, folder_names[0], other_writers)
        except BaseException:  # also Ctrl-C
            self._writer.cancel()  # removes the hidden folder if it was made
            raise

        self._writer.has_unconfirmed_save = True
        if not self._policy.asynchronous:
            self.wait()
        self._schedule.saved()
        path = layout.step_folder(self.folder, int(states["world"]["step"]))
        # A damaged checkpoint of this step is being replaced.
        self._damaged_names = tuple(name for name in self._damaged_names if name != path.name)
        return path

    def _collect_states(self, metric: float | None) -> tuple[dict[str, Any], list[RankSummary]]:
        """Returns the states of this rank by name, and the summaries of all ranks.

        `_summarize_rank` makes them, and first waits for the previous save. One exchange of text.
        """
        states, answers = exchange_on_all_ranks(
            self._collectives, self._action, lambda: self._summarize_rank(metric)
        )
        summaries = [RankSummary(**answer) for answer in answers]
        self._random_states.check_common([summary.rng_state for summary in summaries])
        check_same_metric("checkpoint.save(metric=...)", [summary.metric for summary in summaries])
        return states, summaries

    def _summarize_rank(self, metric: float | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the states of this rank by name, and a `RankSummary` of them as JSON.

        First it waits for the previous save. It does not wait if that one is still being written
        and the user wants to skip a save in this case (`busy="skip"`).
        """
        skip = self._policy.busy == "skip" and self._writer.busy
        if not skip:
            self._writer.finish()  # waits, and raises the error of the previous save
        objects = self._objects()
        states = self._states_of(objects)
        partial_keys = keys_of_partial_states(states, objects)
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
        """Copies what this rank stores to host memory; rank 0 also makes the hidden folder.

        Args:
            states: the states of this rank, by name.
            summaries: the summaries of all ranks.
            other_writers: the ranks that write besides rank 0.

        Returns:
            What this rank writes, and on rank 0 the name of the hidden folder.
        """
        rank = self._collectives.topology.rank
        # Rank 0 decides whether a save is skipped. This rank may have voted for skipping, and then
        # it has not waited for the previous save yet.
        self._writer.finish()
        if rank > 0 and rank not in other_writers:
            # All that this rank has is equal on rank 0, which writes it.
            return PreparedSave(part=RankPart({}), manifest={}), None
        part, trees = copy_rank_part(
            states, self._module_names(), summaries, rank, self._copies.copy
        )
        self._copies.finish()
        if rank > 0:
            return PreparedSave(part, manifest={}), None
        manifest = self._manifest(states, summaries[0].metric, trees)
        temporary = layout.temporary_folder(self.folder, manifest["step"])
        self._writer.begin(temporary, self._damaged_names)
        return PreparedSave(part, manifest), temporary.name

    def _start_writing(
        self, prepared: PreparedSave, folder_name: str, other_writers: Sequence[int]
    ) -> None:
        """Starts the thread that writes this rank's part, if it has one.

        Args:
            prepared: what this rank writes.
            folder_name: name of the hidden folder that rank 0 has made.
            other_writers: the ranks that write besides rank 0.
        """
        writer = self._writer
        rank = self._collectives.topology.rank
        give_up_check = writer.raise_if_given_up  # the thread calls it many times
        temporary = self.folder / folder_name
        # By these, rank 0 learns that the other ranks have written their parts.
        reports = RankReports(self._joined, folder_name, other_writers)
        if rank == 0:
            wait_for_others = partial(reports.wait, writer.run_has_failed, give_up_check)
            write = partial(
                write_checkpoint,
                temporary,
                prepared.part,
                prepared.manifest,
                keep=self._policy.keep,
                best=self._policy.best,
                damaged_names=self._damaged_names,
                wait_for_others=wait_for_others,
                check=give_up_check,
            )
            writer.start(write)
        elif rank in other_writers:
            writer.protect_folder(temporary)
            write_part = partial(
                _write_and_report, temporary, prepared.part, reports, rank, give_up_check
            )
            writer.start(write_part)

    def step(self) -> Path | None:
        """To be called after each optimizer step: saves when `every` says so, or a signal asks.

        SIGUSR1 to any process of the run: all save in the same step, and go on. SIGTERM: all save
        in the same step, and the run ends with exit code 143, as one that SIGTERM has ended. Both
        are noticed within about half a second of training, and only here.

        Under DiLoCo, if `lockstep run` may start the ranks again, it also copies the state of each
        round to memory, from which `resume()` then takes it.

        Returns:
            The folder of the checkpoint, if it has saved one.

        Raises:
            SystemExit: after SIGTERM, when the checkpoint is on disk.
            CheckpointError: as `save` does.
        """
        number = self._progress.number
        if number == self._last_step_called:
            return None  # in the middle of a global batch, where the optimizer has not stepped
        self._last_step_called = number
        if self._kept is not None and not self._progress.in_training_loop:
            self._kept.batch_is_done()  # no loader says it
        decision = self._schedule.decide(number)
        if decision is None:
            return None
        path = self.save()
        if decision == "stop":
            self.wait()
            if path is None:
                # The save was left out because an earlier one was being written. Now that is done.
                path = self.save()
                self.wait()
            self._world.print(f"stopped by SIGTERM; {path} is complete, resume() goes on")
            raise SystemExit(EXIT_CODE_AFTER_SIGTERM)
        return path

    @_in_checkpoint_phase
    def resume(self) -> bool:
        """Resumes the latest sound checkpoint; returns False if the folder has none.

        A round that is still in memory is resumed instead, unless the checkpoint is of a later
        step. Rank 0 chooses, and all ranks read the same checkpoint. A damaged checkpoint is passed
        over, which is printed. Everything is checked on all ranks before anything is changed.
        Random states are restored if the run has as many ranks as the one that saved, with virtual
        ranks on any number of ranks; `last_resume_note` says what was done.

        Raises:
            CheckpointError: on all ranks, when any of them cannot see or read the checkpoint that
                rank 0 has found, when it does not fit what this run has, or when there are
                checkpoints and none of them is sound.
        """
        self.wait()
        if not self._all_ranks_keep_steps():
            self._kept = None
        kept = self._kept
        if kept is None:
            is_restart = self._collectives.topology.restarts > 0
            return self._resume_from_disk("; no steps are kept in memory" if is_restart else "")
        self._attach(kept)
        goes_back = self._has_resumed
        answers = gather_answers(
            self._collectives, RESUMING_FROM_MEMORY, lambda: self._report_memory(kept)
        )
        folders = sorted({answer["folder"] for answer in answers})
        resumed, note = self._resume_kept_step(answers, folders, goes_back=goes_back)
        found = resumed is not None or self._resume_from_disk(note)
        kept.start(int(answers[0]["attempt"]), folders, resumed)
        if goes_back:
            kept.forget_others()
        return found

    def _resume_from_disk(self, more: str = "") -> bool:
        """Resumes the latest sound checkpoint of the folder; returns False if it has none.

        Args:
            more: the end of the sentence that says what was resumed.
        """
        action = f"resuming from {self.folder}"
        # Each rank tells the others what it sees in the folder. Only rank 0 reads all files, to
        # find out whether a checkpoint is sound.
        find = find_latest_sound if self._collectives.topology.is_main else find_latest_complete
        answers = gather_answers(self._collectives, action, lambda: find(self.folder).as_json())
        views = [FolderView(**answer) for answer in answers]
        chosen = views[0]  # what rank 0 has found
        self._damaged_names = tuple(chosen.passed_over)
        check_views(self.folder, views)
        if chosen.name is None:
            self.last_resume_note = f"nothing to resume in {self.folder}{more}"
            if more:  # ranks that were started again begin anew
                self._announce_resumed(self.last_resume_note)
            return False
        path = self.folder / chosen.name
        # If any rank cannot read its states, no rank loads any.
        loaded = run_on_all_ranks(
            self._collectives, action, lambda: self._read_states(path, chosen.id)
        )
        note = run_on_all_ranks(self._collectives, action, lambda: self._load_states(path, loaded))
        self._announce_resumed(note + chosen.describe_problems() + more)
        return True

    @_in_checkpoint_phase
    def wait(self) -> None:
        """Waits until everything saved so far is on disk, on all ranks.

        Raises:
            CheckpointError: on all ranks, when something could not be written.
        """
        run_on_all_ranks(self._collectives, self._action, self._writer.finish)
        self._writer.has_unconfirmed_save = False

    @property
    def best(self) -> Path | None:
        """The complete checkpoint with the best metric, or None if there is none.

        A checkpoint that is still being written does not count.

        Raises:
            UsageError: `world.checkpoint` was not told which is the best.
        """
        if self._policy.best is None:
            raise UsageError(
                "checkpoint.best",
                "nothing says which metric is the best",
                'say world.checkpoint(..., best="min") or "max", and save(metric=...)',
            )
        return layout.best(layout.list_checkpoints(self.folder), self._policy.best)

    # Steps in memory

    def _resume_kept_step(
        self, answers: Sequence[Mapping[str, Any]], folders: Sequence[str], *, goes_back: bool
    ) -> tuple[KeptStep | None, str]:
        """Resumes the last step in memory, unless a checkpoint on disk is of a later step.

        Args:
            answers: of all ranks, see `_report_memory`.
            folders: the paths of the folder of the checkpoints, see `choose_step`.
            goes_back: True if the run has resumed before, so that memory is not looked at.

        Returns:
            The step that was resumed, or None. If none was, also the end of a sentence that says
            why; empty where nothing could be expected in memory.
        """
        reports = []
        for answer in answers:
            reports += [PartReport(**part) for part in answer["parts"]]
        chosen = choose_step(reports, folders)
        if chosen is None:
            is_first_start = self._collectives.topology.restarts == 0
            if goes_back or (is_first_start and not reports):
                return None, ""
            return None, f"; {describe_incomplete(reports, folders)}"
        step_on_disk, epoch_on_disk = answers[0]["disk"]
        # Of one step there may be two states: before and after what a loop does after an epoch.
        if (step_on_disk, epoch_on_disk) > (chosen.step, chosen.epoch):
            return None, f"; it is newer than step {chosen.step} in memory"
        where = f"step {chosen.step} in memory"
        with ExitStack() as received:
            try:
                loaded = fetch_step(self._collectives, chosen, self._module_names(), received)
            except CheckpointError as error:
                return None, f"; {where} cannot be read: {error.found}"

            def load() -> str:
                """Loads the states if they fit; returns a sentence for the user."""
                check_virtual_ranks(where, loaded["manifest"], self._settings)
                check_fits(where, self._state, loaded)
                return self._load_states(where, loaded)

            note = run_on_all_ranks(self._collectives, RESUMING_FROM_MEMORY, load)
        if step_on_disk < 0:
            note += "; there is no checkpoint on disk"
        else:
            note += f"; the last checkpoint on disk is of step {step_on_disk}"
        self._announce_resumed(note)
        return chosen, ""

    def _report_memory(self, kept: KeptSteps) -> dict[str, Any]:
        """Returns what this rank tells the others before they choose a step in memory.

        Returns:
            "parts" has the parts that it has looked at (`PartReport`), "folder" the path of the
            folder here, "disk" step and epoch of the latest checkpoint in it, -1 if there is none,
            "attempt" a random number.
        """
        latest = layout.latest(self.folder)
        kept.open()
        # Once the training goes on, memory has nothing that it would go back to.
        is_first = not self._has_resumed
        self._has_resumed = True
        return {
            "parts": kept.report() if is_first else [],
            "folder": kept.folder,
            "disk": [-1, -1] if latest is None else self._step_and_epoch(latest),
            "attempt": secrets.randbits(63),
        }

    def _step_and_epoch(self, path: Path) -> list[int]:
        """Returns the step and the epoch of a checkpoint; epoch -1 if its manifest is damaged."""
        try:
            epoch = int(layout.read_manifest(path)["epoch"])
        except (CheckpointError, KeyError, TypeError, ValueError):
            epoch = -1
        return [layout.step_of(path), epoch]

    def _attach(self, kept: KeptSteps) -> None:
        """Has the run notify `kept`. Of several checkpoints the last that was resumed keeps steps.

        Args:
            kept: of this checkpoint.
        """
        others = self._extensions.of_type(KeptSteps)
        if others is kept:
            return
        if others is not None:
            self._extensions.remove(others)
            others.stop()
        self._extensions.add(kept, Place.OBSERVER)

    def _take_state(self) -> TakenState:
        """Returns what `save` would save now, without a copy of it."""
        self._extensions.saving_begins()
        try:
            objects = self._objects()
            states: dict[str, Any] = {"world": self._unsettled_world_state()}
            for name, value in objects.items():
                if isinstance(value, nn.Module):
                    if name not in self._plain_states:
                        self._plain_states[name] = PlainState(value)
                    states[name] = self._plain_states[name].take()
                elif self._virtual_ranks is not None and value is self._virtual_ranks:
                    # What all virtual ranks share is kept on every machine.
                    is_first_of_machine = self._collectives.topology.local_rank == 0
                    states[name] = self._virtual_ranks.state_dict(shared=is_first_of_machine)
                else:
                    states[name] = value.state_dict()
            partial_names = list(keys_of_partial_states(states, objects))
            facts = {
                "step": int(states["world"]["step"]),
                "epoch": self._epoch(states),
                "strategy": self._world.strategy,
                **self._facts_about_bits(),
            }
            for name in self._module_names():
                if name in partial_names:
                    states[name] = without_meta(states[name])
            sections = sections_of(
                states,
                module_names=self._module_names(),
                optimizer_names=[n for n, value in objects.items() if isinstance(value, Optimizer)],
                partial_names=partial_names,
            )
            sections.append(Section(RANDOM, ("state",), self._random_states.state(), True, False))
            return TakenState(facts, sections)
        finally:
            self._extensions.saving_ended()

    def _steady_ids(self) -> set[int]:
        """Returns the ids of the tensors that only a prepared optimizer changes, in its step."""
        ids: set[int] = set()
        for value in self._state.values():
            is_prepared = isinstance(value, Optimizer) and hasattr(value, "load_saved_state")
            if not is_prepared:
                continue
            for group in value.param_groups:
                ids.update(id(parameter) for parameter in group["params"])
            for entry in value.state.values():
                ids.update(id(item) for item in entry.values())
        return ids

    def _facts_about_bits(self) -> dict[str, Any]:
        """Returns what the manifest says about bits."""
        if self._bits is None:
            self._bits = facts_about_bits(self._settings, self._collectives.device)
        return self._bits

    # Reading and loading a checkpoint

    def _read_states(self, path: Path, checkpoint_id: str | None) -> dict[str, Any]:
        """Returns the states of a checkpoint by name, and its `manifest`; checks that they fit.

        Args:
            path: the path of the checkpoint.
            checkpoint_id: the id in the manifest that rank 0 has read.

        Raises:
            CheckpointError: it cannot be read, or something in it does not fit this run.
        """
        manifest = read_manifest_of(path, checkpoint_id)
        check_virtual_ranks(path, manifest, self._settings)
        modules = {name: read_stored(path, manifest, name) for name in manifest["modules"]}
        training = read_stored(path, manifest, layout.TRAINING)
        if not isinstance(training, dict):
            training = {}  # a damaged tree: `check_fits` says what is missing
        saved = {"manifest": manifest, **training, **modules}
        check_fits(path, self._state, saved)
        if self._virtual_ranks is not None and "replicas" in saved:
            self._virtual_ranks.check(saved["replicas"])
        return saved

    def _load_states(self, path: Path | str, saved: Mapping[str, Any]) -> str:
        """Loads what `_read_states` returned into the objects of this run.

        Args:
            path: the path of the checkpoint, or a description of where the states were.
            saved: the states by name, with the `manifest`; `random` has the random state of each
                rank, or is None.

        Returns:
            A sentence that says what was resumed, and what is not as it was saved.
        """
        notes = ""
        modules = {
            name: value for name, value in self._state.items() if isinstance(value, nn.Module)
        }
        with shapes_are_enough():
            saved_dtypes = saved_parameter_dtypes(modules, saved)
        for name, target in {**self._state, "world": self._world}.items():
            notes += _note_about_length(name, target, saved[name])
            with _explain_misfit(f"resuming {name} from {path}", BUILD_AS_SAVED.format(name)):
                _load_state(target, saved[name], saved_dtypes)
        if self._virtual_ranks is not None:
            with _explain_misfit(
                f"resuming the replicas from {path}", BUILD_AS_SAVED.format("the model")
            ):
                self._virtual_ranks.load_state_dict(saved.get("replicas"))
        elif "replicas" in saved:
            notes += "; its replicas are left out, the training goes on from their shared weights"
        manifest = saved["manifest"]
        rng_note = self._restore_rng(path, saved)
        bits_note = restore_threads(
            manifest, self._settings.virtual_ranks, self._collectives.device
        )
        return self._describe(path, manifest) + rng_note + notes + bits_note

    def _describe(self, path: Path | str, manifest: Mapping[str, Any]) -> str:
        """Returns what was resumed: where it was, epoch, step, strategy and number of ranks."""
        where = f"from {path}" if isinstance(path, str) else path
        return (
            f"resumed {where} (epoch {manifest['epoch']}, step {manifest['step']}, "
            f"strategy {manifest['strategy']}, {count_noun(manifest['world_size'], 'rank')})"
        )

    def _restore_rng(self, path: Path | str, saved: Mapping[str, Any]) -> str:
        """Restores this rank's random state, if the checkpoint has it.

        Returns:
            "" if it was restored. Otherwise the end of a sentence that says why not.
        """
        with _explain_misfit(
            f"resuming the random streams from {path}",
            "resume with the versions of Python and torch that saved them",
        ):
            return self._random_states.restore(saved)

    def _announce_resumed(self, note: str) -> None:
        """Prints what was resumed, on rank 0, and keeps it as `last_resume_note`."""
        self.last_resume_note = note
        if not is_quiet(os.environ):
            self._world.print(note)
        self._last_step_called = self._progress.number  # so `step` does not save what was resumed

    # What is saved

    def _objects(self) -> dict[str, Any]:
        """Returns all objects that are saved, except the world, by name."""
        if self._virtual_ranks is None:
            return dict(self._state)
        return {**self._state, "replicas": self._virtual_ranks}

    def _states_of(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the states of these objects, and the run's own under "world"."""
        states: dict[str, Any] = {"world": self._world.state_dict()}
        for name, value in objects.items():
            if isinstance(value, nn.Module):
                states[name] = plain_state_dict(value)
            else:
                states[name] = value.state_dict()
        return states

    def _module_names(self) -> list[str]:
        return [name for name, value in self._state.items() if isinstance(value, nn.Module)]

    def _manifest(
        self, states: Mapping[str, Any], metric: float | None, trees: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns the manifest of this save, except the list of files, which is not known yet.

        Args:
            states: the states of this rank, by name.
            metric: what `save` was given.
            trees: the trees of the modules and of the training, from `copy_rank_part`.
        """
        from lockstep import __version__  # the package itself imports this module

        if metric is not None and not math.isfinite(metric):
            metric = None  # JSON has no NaN, and such a checkpoint is not the best one
        return {
            "step": int(states["world"]["step"]),
            # Distinguishes two checkpoints of one name, on machines that share no file system.
            "id": secrets.token_hex(8),
            "lockstep": __version__,
            "torch": torch.__version__,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "epoch": self._epoch(states),
            "world_size": self._collectives.topology.size,
            "strategy": self._world.strategy,
            **facts_about_bits(self._settings, self._collectives.device),
            "metric": metric,
            "best": self._policy.best,
            "modules": {name: trees[name] for name in self._module_names()},
            "training": trees[layout.TRAINING],
        }

    def _epoch(self, states: Mapping[str, Any]) -> int:
        """Returns the epoch of the run.

        The world counts epochs only in a loop over `world.epochs`. In any other loop, the loaders
        count them. If several loaders have begun an epoch, the smallest number is returned.
        """
        epoch = states["world"]["epoch"]
        if epoch:
            return int(epoch)
        loader_epochs = []
        for name, value in self._state.items():
            # A loader that is only evaluated over has epoch 0.
            if isinstance(value, Loader) and states[name]["epoch"]:
                loader_epochs.append(int(states[name]["epoch"]))
        return min(loader_epochs, default=0)


def _note_about_length(name: str, target: Any, saved: Any) -> str:
    """Returns a note if a scheduler was built for another number of steps than when it was saved.

    Loading its state gives it the saved number.

    Args:
        name: the name under which the user saves the object.
        target: the object of this run, a scheduler or any other.
        saved: its saved state.

    Returns:
        The end of a sentence; "" if nothing has changed, or if the object is no scheduler.
    """
    note = ""
    if isinstance(target, LRScheduler):
        for length in changed_lengths(target, saved):
            note += (
                f"; {name} keeps {length.place}={length.saved} as saved, "
                f"not {length.built} as built"
            )
    return note


def _load_state(target: Any, saved: Any, saved_dtypes: Mapping[Tensor, torch.dtype]) -> None:
    """Loads a saved state into a module, an optimizer or any other object.

    Args:
        target: the object of this run.
        saved: its state, whose tensors may be in shards, or mapped from a file.
        saved_dtypes: the dtypes that parameters had when the state was saved.
    """
    if isinstance(target, nn.Module):
        load_plain(target, saved)
    elif isinstance(target, Optimizer):
        state = sharding.reshard_optimizer(saved, target)
        if hasattr(target, "load_saved_state"):
            # A prepared optimizer, which may have a part of the parameters only.
            target.load_saved_state(state, saved_dtypes)
        else:
            load_saved_state(target, state, saved_dtypes)
    else:
        target.load_state_dict(sharding.copy_to_memory(saved))


@contextmanager
def _explain_misfit(action: str, advice: str) -> Iterator[None]:
    """Turns any error that is raised while a state is loaded into a `CheckpointError`."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(action, f"{type(error).__name__}: {error}", advice) from error


def _write_and_report(
    temporary: Path,
    part: RankPart,
    reports: RankReports,
    rank: int,
    check: Callable[[], object],
) -> None:
    """Writes the part of a rank other than 0, and tells rank 0 how it went.

    Args:
        temporary: the hidden folder of the checkpoint.
        part: what the rank stores.
        reports: sends the report to rank 0.
        rank: the rank that writes.
        check: is called many times while it writes, and may raise an error to end the writing.
    """
    report = None  # sent if an error is raised
    try:
        with plain_errors("saving the checkpoint", temporary):
            report = part.write(temporary, check)
    finally:
        reports.send(rank, report)
