"""What the parts of the recorder share: the update that is being recorded, and how far the run is.

An *update* is one step of one optimizer, with everything that led to it since the last one; it is
recorded as a `RankUpdate`. Each part of the recorder (`inputs`, `forwards`, `losses`, `gradients`,
`optimizers`, `calls`, `foreign_steps`) fills in the fields of its subject. What it must remember
until the update is complete, and what is not recorded, is kept in `UpdateNotes`. The script ends
once the steps that are to be compared are recorded.
"""

from __future__ import annotations

import math
import re
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

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
from lockstep.verify.recording.tensor_values import storage_of
from lockstep.verify.run_config import MIN_STEPS, RunConfig
from lockstep.verify.tolerance import Array
from lockstep.verify.training_record import Batch, Forward, RankUpdate


class Finished(SystemExit):
    """Ends the script as `sys.exit(0)` would: enough steps have been recorded."""


class RecordingFailed(SystemExit):
    """Ends the script because the recorder itself has failed."""


class HasState(Protocol):
    """A part of the recorder."""

    state: RecorderState


Method = TypeVar("Method", bound=Callable[..., Any])


def guarded(method: Method) -> Method:
    """Decorates a method of the recorder: an error in it is one of the recorder, not the script's.

    It ends the script as `RecordingFailed`. The traceback is kept in `state.internal_error`.
    """

    @wraps(method)
    def call(part: HasState, *args: Any, **kwargs: Any) -> Any:
        """Calls the method on a part of the recorder, such as its `LossRecorder`."""
        try:
            return method(part, *args, **kwargs)
        except LockstepError:  # the script has used Lockstep wrongly
            raise
        except Exception as error:
            # Sharded tensors are gathered to be recorded. If that fails with a message such as
            # "Connection closed by peer", another rank has failed before and says why.
            has_lost_connection = re.search(LOST_PEER_PATTERN, str(error))
            if has_lost_connection:
                raise
            if not part.state.internal_error:  # the first error counts
                part.state.internal_error = traceback.format_exc()
            raise RecordingFailed(RecordingFailedError.exit_code) from error

    return cast(Method, call)


@dataclass
class ForwardPass:
    """A training forward pass of a model that no backward pass has used yet."""

    record: Forward
    outputs: list[Tensor] = field(default_factory=list)
    hidden: Tensor | None = None
    """The first output of a part of the model that has a row for each sample."""
    inputs: Batch | None = None
    """The record of its inputs, in the first update: another pass may be the first of the loss."""


@dataclass
class UpdateNotes:
    """What is remembered of the current update until it is complete."""

    # Inputs
    batches_at_last_backward: int = 0
    """Batches that were handed out before the last backward pass ended."""

    # Forward passes
    draws_before_forward: int = 0
    """Draws of random numbers before the update's first forward pass."""
    forward_passes: list[ForwardPass] = field(default_factory=list)
    """The latest forward passes since the last backward pass."""
    model_calls: int = 0
    """Calls of models since the last backward pass."""
    running_pass: ForwardPass | None = None
    """The forward pass of the outermost model that is being called."""
    evaluating_parameters: set[int] = field(default_factory=set)
    """Ids of the parameters of modules that were called in evaluation mode."""
    local_batch_norms: set[int] = field(default_factory=set)
    """Ids of BatchNorm layers that took their statistics from this rank's samples alone."""
    local_batch_norms_without_gradients: set[int] = field(default_factory=set)
    """The same for the outermost model, if it is being called without gradients."""

    # Losses
    earlier_model_calls: dict[int, str] = field(default_factory=dict)
    """Lines of forward passes that the loss is made from, by the number of their update."""

    # Gradients
    gradients_of_passes: list[dict[int, Tensor]] = field(default_factory=list)
    """What each backward pass added to gradients on this rank, by the ids of parameters."""
    gradients_after_backward: dict[int, Tensor] = field(default_factory=dict)
    """This rank's gradients when the last backward pass ended, by the ids of parameters."""
    gradients_before_clipping: dict[str, Array] = field(default_factory=dict)

    # Parameters
    parameters_at_start: dict[str, Array] = field(default_factory=dict)
    """Summaries of the parameters at the first forward pass."""
    parameters_without_model: dict[tuple[int, int], Array] = field(default_factory=dict)
    """See `RankUpdate.unstepped_sums`."""
    parameters_of_loss: dict[int, tuple[Tensor, Array]] = field(default_factory=dict)
    """On a rank without models, the parameters that the last loss was made from, by their ids,
    with summaries."""

    # The optimizer's step
    step_inputs_recorded: bool = False
    """True once the gradients and all else that the step starts from are recorded."""


class RecorderState:
    """The state of the recorder in one process.

    Args:
        writer: writes the updates of this rank.
        config: how the script is run, and after how many steps it ends.
        mode: sees every call of torch's functions.
    """

    internal_error = ""
    """The traceback of an error of the recorder itself."""

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
        self.last_update = self.update
        """The last complete update, as its step found it."""
        self.loss_is_weighted = False
        """True after `World.backward` was given the loss, whose backward pass follows."""

        self.steps_of: dict[Optimizer, int] = {}
        """The number of steps of each optimizer, in the order of their first ones."""
        self.updates_until_step_of: dict[Optimizer, int] = {}
        """How many updates were written when each optimizer stepped last."""
        self.running_optimizers: list[Optimizer] = []
        """Optimizers whose `step` is running; an optimizer may call another one."""
        self.foreign_steps = 0
        """Updates of a rank without an optimizer, whose parameters other ranks change."""
        self.has_joined = False
        """True after the other ranks have made a step without this one (`Join`)."""

        self.micro_batch = MicroBatch()
        """The last one that a loader of Lockstep's has handed out."""
        self.last_batch_text = ""
        """The position of the last batch, such as `, batch 3 of 4 of epoch 1`."""
        self.stopped_at = ""
        """The place at which the script was stopped; empty if it came to its end."""
        self._first_step_time = math.inf

    @property
    def update_number(self) -> int:
        """The number of the update that is being recorded, from 0."""
        return self.writer.count  # updates that were written

    @property
    def is_first_update(self) -> bool:
        """True until an update of this rank is written."""
        return self.update_number == 0

    @property
    def has_optimizer(self) -> bool:
        """True if an optimizer was built or has stepped on this rank."""
        return bool(self.models.built_optimizers or self.steps_of)

    def finish_update(
        self, update: RankUpdate, later_batches: list[Batch], replica: int | None = None
    ) -> None:
        """Writes a complete update and begins the next one, with empty notes.

        Args:
            update: what is written.
            later_batches: batches that were fetched ahead for the next update.
            replica: the virtual rank whose model was updated; None unless each has one.
        """
        self.writer.write(update, replica)
        # It is infinite until the first step, with which the time limit begins.
        self._first_step_time = min(self._first_step_time, time.monotonic())
        self.update = RankUpdate(contributes=self.update.contributes, batches=later_batches)
        self.notes = UpdateNotes()
        self.loss_is_weighted = False

    def end_script_if_enough(self) -> None:
        """Raises `Finished` when the steps to be compared are recorded.

        The optimizer with the most steps decides: the first one may have pretrained something on
        this rank alone. On a rank without optimizers, the steps of others count.
        """
        steps = max(self.steps_of.values(), default=self.foreign_steps)
        if self._is_inside_global_batch() or not self._is_enough(steps):
            return
        self.stopped_at = f"step {steps}{self.last_batch_text}"
        raise Finished(0)

    def _is_enough(self, steps: int) -> bool:
        """True if this number of steps is enough, or the time for them is over.

        At least `MIN_STEPS` are recorded, whatever time they take.
        """
        if steps >= self._config.steps:
            return True
        time_limit_s = self._config.seconds
        if time_limit_s is None or steps < MIN_STEPS:
            return False
        return time.monotonic() > self._first_step_time + time_limit_s

    def _is_inside_global_batch(self) -> bool:
        """True if virtual ranks have not all stepped for the current global batch.

        A process that computes several virtual ranks steps once for each, one after the other.
        """
        if self.micro_batch.virtual_rank is None:  # the process computes one rank only
            return False
        # A batch that was handed out and not stepped on yet belongs to it.
        has_pending_batch = bool(self.update.batches)
        return has_pending_batch or not self.micro_batch.last

    def record_marks(self, marks: Mapping[str, Any], draws_before: int) -> None:
        """Records the marks of a tensor that the loss is made from, in the update and the notes.

        Args:
            marks: by kind; they say what the tensor is made from.
            draws_before: draws of random numbers up to this one were not made for this step.
        """
        for kind, value in marks.items():
            # "statistic train.py:12: ...": the value is a number that stands for the statistic.
            if kind.startswith(STATISTIC):
                line = kind.removeprefix(STATISTIC)
                self.update.batch_statistics[line] = value
            # "model 3": the value is the line that called a model before update 3.
            elif kind.startswith(MODEL_CALL):
                update_number = int(kind.removeprefix(MODEL_CALL))
                self.notes.earlier_model_calls[update_number] = value
            # "norm 140": the value is the id of a BatchNorm layer.
            elif kind.startswith(BATCH_NORM):
                self.notes.local_batch_norms.add(value)

        if "draw" in marks:
            number, line, digest = marks["draw"]
            was_drawn_for_this_step = number > draws_before
            if was_drawn_for_this_step:
                self.update.loss_draws.append((line, digest))

    def watch_writes(self) -> dict[str, int]:
        """Watches writes to all parameters and buffers of the models from here on.

        Returns:
            The storage of each, which is the address of its values, by name.
        """
        storages = {}
        for name, parameter in self.models.parameters():
            storages[name] = storage_of(parameter)

        for name, buffer in self.models.buffers():
            storages[name] = storage_of(buffer)

        # 0 is no address: it stands for tensors without a storage of their own.
        self.mode.writes.watched = frozenset(storages.values()) - {0}
        return storages

    def frozen_parameters(self) -> list[str]:
        """Returns the names of parameters that are not trained."""
        return [name for name, p in self.models.parameters() if not p.requires_grad]
