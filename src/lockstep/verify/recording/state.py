"""The state that the parts of the recorder share, besides the progress of the run.

An *update* is one step of one optimizer, with everything that led to it since the last step; it is
recorded as a `RankUpdate`. Each part of the recorder (`inputs`, `forwards`, `losses`, `gradients`,
`optimizers`, `calls`, `foreign_steps`) fills in the fields of its subject. `UpdateNotes` holds what
a part must remember until the update is complete, but which is not recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from lockstep.verify.rank_files import UpdateWriter
from lockstep.verify.recording.branches import Branches
from lockstep.verify.recording.function_mode import FunctionMode
from lockstep.verify.recording.marks import BATCH_NORM, MODEL_CALL, STATISTIC
from lockstep.verify.recording.progress import RunProgress
from lockstep.verify.recording.running_steps import RunningSteps
from lockstep.verify.recording.step_draws import StepDraws
from lockstep.verify.recording.tensor_values import storage_address
from lockstep.verify.run_config import RunConfig
from lockstep.verify.tolerance import Array
from lockstep.verify.training_record import Batch, Forward, RankUpdate


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


class SummarizedParameter(NamedTuple):
    """A parameter, which is kept so that no other tensor can get its id, and its summary."""

    parameter: Tensor
    summary: Array


@dataclass
class UpdateNotes:
    """What the recorder remembers about the current update until the update is complete."""

    # Inputs
    num_batches_at_last_backward: int = 0
    """Number of batches that were handed out before the last backward pass ended."""

    # Forward passes
    num_draws_before_forward: int = 0
    """Number of draws of random numbers before the first forward pass of the update."""
    forward_passes: list[ForwardPass] = field(default_factory=list)
    """The latest forward passes since the last backward pass."""
    model_calls: int = 0
    """Number of calls of models since the last backward pass."""
    running_pass: ForwardPass | None = None
    """The forward pass of the model that is being called, also while it calls its own modules."""
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
    summaries_without_name: dict[tuple[int, int], Array] = field(default_factory=dict)
    """The same for parameters that have no name yet: no model has them, and their optimizer has not
    stepped. The key is the number of the optimizer, and the index of the parameter in it."""
    summaries_of_loss: dict[int, SummarizedParameter] = field(default_factory=dict)
    """On a rank without models, the parameters that the last loss was computed from, by id."""

    # The optimizer's step
    step_inputs_recorded: bool = False
    """True once everything that the step starts from is recorded."""


class RecorderState(RunProgress):
    """The state of the recorder in one process.

    Args:
        writer: writer for the updates of this rank.
        config: settings of the run, including the number of steps after which it ends.
        mode: function mode, which sees every call of torch's functions.
    """

    def __init__(self, writer: UpdateWriter, config: RunConfig, mode: FunctionMode) -> None:
        super().__init__(writer, config)
        self.mode = mode
        self.branches = Branches()
        self.step_draws = StepDraws(mode)
        self.running_steps = RunningSteps()

        self.notes = UpdateNotes()
        self.last_update_without_results = self.update
        """The last update that had an optimizer step. It is a copy from before the step's results
        were added, such as the new parameters."""
        self.loss_is_recorded_by_world = False
        """True after `World.backward` has recorded its loss, until the next batch or update."""
        self.first_update_of_next_step: dict[Optimizer, int] = {}
        """For each optimizer, the number of the update that began after its last step."""
        self.has_joined = False
        """True after the other ranks have made a step without this rank (`Join`)."""

    @property
    def has_optimizer(self) -> bool:
        """True if an optimizer was constructed or has stepped on this rank."""
        return bool(self.models.built_optimizers or self.steps_of)

    def finish_update(
        self, update: RankUpdate, later_batches: list[Batch], replica: int | None = None
    ) -> int:
        """Writes a complete update, and begins the next one with empty notes."""
        number_of_next_update = super().finish_update(update, later_batches, replica)
        self.notes = UpdateNotes()
        self.loss_is_recorded_by_world = False
        return number_of_next_update

    def record_marks(self, marks: Mapping[str, Any], num_ignored_draws: int) -> None:
        """Records the marks of a tensor that goes into the loss, in the update and its notes.

        The marks tell what the tensor was computed from. These kinds are recorded:

            Kind and value                           Value
            "statistic train.py:12: x.mean()": 0.5   a number that stands for the statistic
            "model 3": "train.py:9: model(x)"        the line of a call while update 3 was recorded
            "norm 140": 140                          the id of a BatchNorm layer
            "draw": (8, "train.py:7: ...", "5f2a")   draw 8 of random numbers, its line and a digest

        Args:
            marks: marks of the tensor, by kind. The module `marks` describes all kinds.
            num_ignored_draws: number of random draws that belong to no loss of this step. Draws are
                numbered from 1, so with 7 of them, draw 8 is the first one that is recorded.
        """
        for kind, value in marks.items():
            if kind.startswith(STATISTIC):
                line_of_statistic = kind.removeprefix(STATISTIC)
                self.update.batch_statistics[line_of_statistic] = value
            elif kind.startswith(MODEL_CALL):
                update_number = int(kind.removeprefix(MODEL_CALL))
                self.notes.model_calls_behind_loss[update_number] = value
            elif kind.startswith(BATCH_NORM):
                self.notes.local_batch_norms.add(value)
            elif kind == "draw":
                number_of_draw, line_of_draw, digest = value
                if number_of_draw > num_ignored_draws:
                    self.update.loss_draws.append((line_of_draw, digest))

    def forget_draws_so_far(self) -> None:
        """Forgets random numbers that were drawn so far: the next ones belong to the next step."""
        self.mode.draws.restart()  # what was drawn while the batch was read
        self.step_draws.forget_draws_so_far()  # what was drawn for the step before

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
        self.mode.writes.watched_addresses = frozenset(addresses.values()) - {0}
        return addresses

    def frozen_parameters(self) -> list[str]:
        """Returns the names of parameters that do not require gradients."""
        return [name for name, p in self.models.parameters() if not p.requires_grad]
