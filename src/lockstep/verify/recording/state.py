"""The state that the parts of the recorder share: the current update, and the run's progress.

An *update* is one step of one optimizer, with everything that led to it since the last step; it is
recorded as a `RankUpdate`. Each part of the recorder (`inputs`, `forwards`, `losses`, `gradients`,
`optimizers`, `calls`, `foreign_steps`) fills in the fields of its subject. `UpdateNotes` holds what
a part must remember until the update is complete, but which is not recorded. The script is ended
once enough steps are recorded.
"""

from __future__ import annotations

import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from types import FrameType
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from torch import Tensor
from torch.optim import Optimizer

from lockstep.errors import LockstepError, RecordingFailedError
from lockstep.session.micro_batch import MicroBatch
from lockstep.verify.rank_files import LOST_PEER_PATTERN, UpdateWriter
from lockstep.verify.recording.branches import Branches
from lockstep.verify.recording.function_mode import FunctionMode
from lockstep.verify.recording.marks import BATCH_NORM, MODEL_CALL, STATISTIC
from lockstep.verify.recording.models import Models
from lockstep.verify.recording.step_draws import StepDraws
from lockstep.verify.recording.tensor_values import storage_address
from lockstep.verify.run_config import MIN_STEPS, RunConfig
from lockstep.verify.tolerance import Array
from lockstep.verify.training_record import Batch, Forward, RankUpdate


class Finished(SystemExit):
    """Ends the script as `sys.exit(0)` would, because enough steps have been recorded."""


class ExitByRecorder(SystemExit):
    """Ends the script because of an error in the recorder itself.

    The process that has started the run raises a `RecordingFailedError` afterwards.
    """


class RunningStep(NamedTuple):
    """An optimizer whose `step` is running."""

    optimizer: Optimizer
    frame: FrameType
    """The frame of the call stack in which the step runs."""


class HasState(Protocol):
    """A part of the recorder, such as its `LossRecorder`."""

    state: RecorderState


Method = TypeVar("Method", bound=Callable[..., Any])


def guarded(method: Method) -> Method:
    """Decorates a method of the recorder, so that its errors are not taken for the script's errors.

    An error in the method ends the script with `ExitByRecorder`, a `SystemExit`, and its traceback
    is kept in `state.internal_error`. Two kinds of errors pass unchanged: those of a script that
    uses Lockstep incorrectly, and those that follow from the failure of another rank.
    """
    exit_code = RecordingFailedError.exit_code

    @wraps(method)
    def guarded_method(part: HasState, *args: Any, **kwargs: Any) -> Any:
        """Replaces the decorated method: an error inside of it ends the script.

        Args:
            part: part of the recorder, whose method is called.
            *args: positional arguments of the method.
            **kwargs: keyword arguments of the method.
        """
        try:
            return method(part, *args, **kwargs)
        except LockstepError:  # the script uses Lockstep incorrectly
            raise
        except Exception as error:
            # The recorder gathers sharded tensors. If that fails with a message such as "Connection
            # closed by peer", another rank has failed first, and will report the reason.
            has_lost_connection = re.search(LOST_PEER_PATTERN, str(error))
            if has_lost_connection:
                raise

            # The traceback of the first error is kept for the report.
            is_first_error = not part.state.internal_error
            if is_first_error:
                part.state.internal_error = traceback.format_exc()

            # This is a `SystemExit`, which the script's `except Exception` does not catch.
            raise ExitByRecorder(exit_code) from error

    return cast(Method, guarded_method)


@dataclass
class ForwardPass:
    """A training forward pass of a model that no backward pass has used yet."""

    record: Forward
    outputs: list[Tensor] = field(default_factory=list)
    hidden_activation: Tensor | None = None
    """The first hidden activation in the model that has a row for each sample."""
    inputs: Batch | None = None
    """The record of its inputs. It is kept in the first update only, whose first forward passes may
    turn out to be trials."""


@dataclass
class UpdateNotes:
    """What the recorder remembers about the current update until the update is complete."""

    # Inputs
    num_batches_at_last_backward: int = 0
    """Number of batches that were handed out before the last backward pass ended."""

    # Forward passes
    draws_before_forward: int = 0
    """Number of draws of random numbers before the first forward pass of the update."""
    forward_passes: list[ForwardPass] = field(default_factory=list)
    """The latest forward passes since the last backward pass."""
    model_calls: int = 0
    """Number of calls of models since the last backward pass."""
    running_pass: ForwardPass | None = None
    """The forward pass of the model that is being called."""
    evaluating_parameters: set[int] = field(default_factory=set)
    """Ids of the parameters of modules that were called in evaluation mode."""
    local_batch_norms: set[int] = field(default_factory=set)
    """Ids of BatchNorm layers whose statistics cover only this rank's samples."""
    local_batch_norms_without_gradients: set[int] = field(default_factory=set)
    """The same for layers of the running model, if it is called without gradients."""

    # Losses
    model_calls_behind_loss: dict[int, str] = field(default_factory=dict)
    """Lines of model calls that the loss was computed from, by the number of the update that was
    being recorded at the time."""

    # Gradients
    gradients_of_passes: list[dict[int, Tensor]] = field(default_factory=list)
    """The gradients that each backward pass has added on this rank, by the ids of parameters."""
    gradients_after_backward: dict[int, Tensor] = field(default_factory=dict)
    """The gradients on this rank after the last backward pass, by the ids of parameters."""
    gradients_before_clipping: dict[str, Array] = field(default_factory=dict)

    # Parameters
    summaries_at_start: dict[str, Array] = field(default_factory=dict)
    """Summaries of the parameters at the first forward pass of the update: two numbers for each."""
    summaries_of_unstepped: dict[tuple[int, int], Array] = field(default_factory=dict)
    """See `RankUpdate.unstepped_sums`."""
    parameters_and_summaries_of_loss: dict[int, tuple[Tensor, Array]] = field(default_factory=dict)
    """On a rank without models, the parameters that the last loss was computed from, with their
    summaries, by id."""

    # The optimizer's step
    step_inputs_recorded: bool = False
    """True once everything that the step starts from is recorded."""


class RecorderState:
    """The state of the recorder in one process.

    Args:
        writer: writer for the updates of this rank.
        config: settings of the run, including the number of steps after which it ends.
        mode: function mode, which sees every call of torch's functions.
    """

    internal_error = ""
    """The traceback of an error in the recorder itself; empty if there was none."""

    def __init__(self, writer: UpdateWriter, config: RunConfig, mode: FunctionMode) -> None:
        self.writer = writer
        self.mode = mode
        self.models = Models()
        self.branches = Branches()
        self.step_draws = StepDraws(mode)
        self._config = config

        self.update = RankUpdate()
        """The update that is being recorded."""
        self.notes = UpdateNotes()
        self.last_update_before_results = self.update
        """The last complete update, without the results of its step."""
        self.loss_is_recorded_by_world = False
        """True after `World.backward` has recorded its loss, until the next batch or update."""

        self.steps_of: dict[Optimizer, int] = {}
        """Number of steps of each optimizer, in the order of first steps."""
        self.next_update_after_step_of: dict[Optimizer, int] = {}
        """For each optimizer, the number of the update that began after its last step."""
        self._running_steps: list[RunningStep] = []
        self.foreign_steps = 0
        """Number of updates on a rank without an optimizer, whose parameters others change."""
        self.has_joined = False
        """True after the other ranks have made a step without this rank (`Join`)."""

        self.micro_batch = MicroBatch()
        """The last micro-batch that one of Lockstep's loaders has handed out."""
        self.last_batch_text = ""
        """The position of the last batch, such as `, batch 3 of 4 of epoch 1`."""
        self.stopped_at = ""
        """The position at which the script was stopped; empty if it ran to its end."""
        self._first_step_time: float | None = None

    # Optimizer steps that are running

    def begin_step(self, optimizer: Optimizer, frame: FrameType) -> None:
        """Records that the `step` of an optimizer begins, which may call other optimizers.

        Args:
            optimizer: optimizer that steps.
            frame: frame of the call stack in which the step runs.
        """
        self._drop_failed_steps()
        self._running_steps.append(RunningStep(optimizer, frame))

    def end_step(self, optimizer: Optimizer) -> None:
        """Records that the `step` of an optimizer has ended."""
        while self._running_steps:
            ended = self._running_steps.pop()
            if ended.optimizer is optimizer:
                return

    def num_running_steps(self) -> int:
        """Returns how many optimizers are in their `step`: 2 if one has called another one."""
        self._drop_failed_steps()
        return len(self._running_steps)

    def _drop_failed_steps(self) -> None:
        """Drops steps that have ended by an exception, which torch does not tell its hooks.

        A script may catch the exception and train on. Such a step is recognized by its frame, which
        is no longer on the call stack.
        """
        if not self._running_steps:
            return

        frames_on_stack = set()
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            frames_on_stack.add(frame)
            frame = frame.f_back

        running = [step for step in self._running_steps if step.frame in frames_on_stack]
        self._running_steps = running

    @property
    def update_number(self) -> int:
        """Number of the update that is being recorded, from 0."""
        return self.writer.count  # the number of updates written so far

    @property
    def is_first_update(self) -> bool:
        """True until this rank has written an update."""
        return self.update_number == 0

    @property
    def has_optimizer(self) -> bool:
        """True if an optimizer was constructed or has stepped on this rank."""
        return bool(self.models.built_optimizers or self.steps_of)

    @property
    def trains_replicas(self) -> bool:
        """True if this process trains several replicas of the model in turn, as with DiLoCo.

        Then each micro-batch of a replica has a step of its own.
        """
        return self.micro_batch.has_own_step

    def finish_update(
        self, update: RankUpdate, later_batches: list[Batch], replica: int | None = None
    ) -> int:
        """Writes a complete update, and begins the next one with empty notes.

        Args:
            update: the complete update.
            later_batches: batches that were fetched ahead for the next update.
            replica: number of the virtual rank whose model was updated; None unless each virtual
                rank has a model of its own.

        Returns:
            The number of the next update.
        """
        self.writer.write(update, replica)

        # The time limit of the run starts with the first step.
        if self._first_step_time is None:
            self._first_step_time = time.monotonic()

        # `contributes` says whether the losses of this rank count. It keeps its value in the next
        # update, until Lockstep tells the recorder otherwise.
        self.update = RankUpdate(contributes=self.update.contributes, batches=later_batches)
        self.notes = UpdateNotes()
        self.loss_is_recorded_by_world = False
        return self.update_number

    def end_script_if_enough(self) -> None:
        """Ends the script by raising `Finished`, once all steps to be compared are recorded.

        The number of steps is that of the optimizer with the most steps, because others may only
        have pretrained something. On a rank without optimizers, updates made by other ranks are
        counted.
        """
        steps = max(self.steps_of.values(), default=self.foreign_steps)
        if self._is_inside_global_batch() or not self._is_enough(steps):
            return

        self.stopped_at = f"step {steps}{self.last_batch_text}"
        raise Finished(0)

    def _is_enough(self, steps: int) -> bool:
        """True if the given number of steps is enough, or if the time limit is over.

        At least `MIN_STEPS` steps are recorded, no matter how long they take.
        """
        if steps >= self._config.steps:
            return True
        time_limit_s = self._config.seconds
        if time_limit_s is None or self._first_step_time is None or steps < MIN_STEPS:
            return False
        return time.monotonic() > self._first_step_time + time_limit_s

    def _is_inside_global_batch(self) -> bool:
        """True if some virtual ranks have not yet stepped for the current global batch.

        A process that computes several virtual ranks steps once for each of them, in turn.
        """
        if self.micro_batch.virtual_rank is None:
            return False

        # Batches in the current update were handed out, but no step has used them yet.
        has_pending_batch = bool(self.update.batches)
        return has_pending_batch or not self.micro_batch.last

    def record_marks(self, marks: Mapping[str, Any], draws_before: int) -> None:
        """Records the marks of a tensor that goes into the loss, in the update and its notes.

        Some kinds have a number or a line in their name, so that a tensor can have several marks of
        the same sort: "model 2" and "model 3". See `marks` for all kinds.

        Args:
            marks: marks of the tensor by kind, which tell what the tensor was computed from.
            draws_before: number of random draws before this step, which are ignored. Draws are
                numbered from 1, so with 7 of them, draw 8 is the first one of this step.
        """
        for kind, value in marks.items():
            if kind.startswith(STATISTIC):  # "statistic train.py:12: ..."
                line_of_statistic, summary = kind.removeprefix(STATISTIC), value
                self.update.batch_statistics[line_of_statistic] = summary
            elif kind.startswith(MODEL_CALL):  # "model 3": called while update 3 was recorded
                update_number, line_of_call = int(kind.removeprefix(MODEL_CALL)), value
                self.notes.model_calls_behind_loss[update_number] = line_of_call
            elif kind.startswith(BATCH_NORM):  # "norm 140": the layer with the id 140
                layer_id = value
                self.notes.local_batch_norms.add(layer_id)
            elif kind == "draw":
                number_of_draw, line_of_draw, digest = value
                was_drawn_for_this_step = number_of_draw > draws_before
                if was_drawn_for_this_step:
                    self.update.loss_draws.append((line_of_draw, digest))

    def add_pending_batch(self, batch: Batch) -> None:
        """Adds a batch to the current update. The script is not ended before a step has used it."""
        self.update.batches.append(batch)

    def restart_draws(self) -> None:
        """Forgets random numbers that were drawn so far: the next ones belong to the next step."""
        self.mode.draws.restart()  # what was drawn while the batch was read
        self.step_draws.restart()  # what was drawn for the step before

    def watch_writes_from_now(self) -> dict[str, int]:
        """Starts watching writes to all parameters and buffers of the models.

        Returns:
            The address of each tensor's values, by name. A write is recognized by this address.
        """
        addresses = {}
        for name, parameter in self.models.parameters():
            addresses[name] = storage_address(parameter)

        for name, buffer in self.models.buffers():
            addresses[name] = storage_address(buffer)

        # A tensor without a storage of its own, such as a DTensor, has the address 0.
        self.mode.writes.watched = frozenset(addresses.values()) - {0}
        return addresses

    def frozen_parameters(self) -> list[str]:
        """Returns the names of parameters that do not require gradients."""
        return [name for name, p in self.models.parameters() if not p.requires_grad]
