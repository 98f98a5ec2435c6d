"""The record of a training: one `RankUpdate` for each optimizer step on each rank.

An *update* is one step of one optimizer. A `RankUpdate` holds what one rank recorded of it, in
fields of plain values: numbers, strings, and numpy arrays by name. An `Update` is a tuple with the
`RankUpdate` of every rank. *Sums* over a tensor are two numbers that change when any of its values
does; they stand for tensors that are too large to be written at every step. A *line* is a string
such as "train.py:12: loss.backward()".
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.verify.tolerance import FLOAT64, Array, Tolerance, scale_of

# Indices of the largest absolute value and of the number of values in the arrays of
# `RankUpdate.optimizer_state`.
LARGEST = 1
SIZE = 2

# An `if` or `while` in the script: its file, its first line, and the last line of its body.
Place = tuple[str, int, int]

# A sample that was trained on: loader, epoch, and its index or a digest of its content.
Sample = tuple[int, int, int | str]

# The outcomes of a test that are recorded in `RankUpdate.branch_outcomes`.
WAS_TRUE = 1
WAS_FALSE = 2


@dataclass(kw_only=True)
class Batch:
    """A batch that a training loop was given, or the arguments with which a model was called."""

    # Number of the script's loader, in the order of their first use.
    loader: int = 0
    epoch: int = 0
    # Indices in the dataset; None if they are not known, as for a stream.
    ids: Sequence[int] | None = None
    # For each sample, the digests of its tensors joined by dots. Empty if the batch cannot be split
    # into samples.
    contents: Sequence[str] = ()
    # Shape of a sample. Digests can be compared only between samples of the same shape.
    shape: str = ""
    # What a mean over the batch may be divided by: its number of samples, and for each of its
    # tensors the number of values that are not padding.
    weights: Mapping[str, float] = field(default_factory=dict)
    # Random streams from which this process drew while the batch was read, with a digest of each.
    random_draws: Mapping[str, str] = field(default_factory=dict)
    # Read by worker processes, whose random draws are not recorded.
    workers: bool = False
    # From an IterableDataset.
    iterable: bool = False
    # From a DistributedSampler that shuffles and whose `set_epoch` was never called.
    order_fixed: bool = False


@dataclass(kw_only=True)
class ScriptCall:
    """A call in the script that can change gradients: a collective, clipping, or a scheduler."""

    # "clip", "schedule", or the name of a collective, such as "all_reduce".
    name: str
    line: str
    # Whether autograd tracks the input.
    carries_gradient: bool = False
    # Whether the input was computed from the output of a trained model, even if it was detached.
    uses_model_output: bool = False
    # The parameter whose gradient is the input; empty if it is no gradient.
    gradient_of: str = ""
    # Whether that gradient was changed after the backward passes.
    gradient_changed: bool = False
    # Number of backward passes of this update that came before the call.
    passes_before: int = 0
    # Whether clipping changed a gradient.
    has_clipped: bool = False
    # Whether it was called in the forward pass of an autograd function with its own backward pass.
    in_function: bool = False
    # Whether it was called inside of `optimizer.step()`.
    in_step: bool = False
    # The metric that a scheduler was given.
    value: float | None = None


@dataclass(kw_only=True)
class Forward:
    """A forward pass in training, with two numbers for each sample that change with its values.

    Arrays have the shape (samples, 2). They are empty if there is no row for each sample.
    """

    # The model's class, and the number of the pass since the last backward pass.
    model: str
    # Shape of a sample's input. Only samples of the same shape are compared.
    shape: str
    # From the first input tensor.
    inputs: Array
    # From all other input tensors, such as a hidden state.
    other_inputs: Array
    outputs: Array = field(default_factory=lambda: np.zeros((0, 2)))
    # From the gradient of the loss with respect to the outputs.
    output_gradients: Array = field(default_factory=lambda: np.zeros((0, 2)))
    # The values of the first input themselves, one row for each sample, if they are few.
    input_values: Array = field(default_factory=lambda: np.zeros((0, 0)))
    # From the targets that torch's loss functions were given together with the outputs.
    targets: Array = field(default_factory=lambda: np.zeros((0, 2)))
    # Whether the outputs or all inputs have the same number of rows, so that each row is a sample.
    rows_are_samples: bool = True


@dataclass(kw_only=True)
class StepRecord:
    """Which step of which optimizer it is."""

    # Number of the script's optimizer, in the order of their first steps.
    optimizer: int = 0
    optimizer_class: str = ""
    # Number of this optimizer's step, from 0.
    step: int = 0
    # False if no optimizer of this rank stepped: the rank had joined (`Join`), has no optimizer, or
    # leaves this step to other ranks. Then the values of the step are not known.
    stepped: bool = True
    # Number of the optimizer in the order in which this rank built its optimizers; -1: not known.
    construction_index: int = -1
    # Names of the optimizer's parameters, in its order.
    optimizer_parameters: Sequence[str] = ()
    # The dtype of the lowest precision that losses and gradients have had so far.
    dtype: str = "torch.float64"


@dataclass(kw_only=True)
class InputRecord:
    """The batches of the update, and what went through the models."""

    # Batches that were given to the training loop since the update before.
    batches: list[Batch] = field(default_factory=list)
    # The arguments of the first model in each backward pass.
    model_inputs: list[Batch] = field(default_factory=list)
    # The forward passes of all models, up to the last backward pass.
    forwards: list[Forward] = field(default_factory=list)
    # Whether a forward pass in training came between the update before and this one.
    began_with_forward: bool = False


@dataclass(kw_only=True)
class LossRecord:
    """The losses of the update, and what they were computed from."""

    # The weighted loss of each backward pass since the update before.
    losses: list[float] = field(default_factory=list)
    # False if this rank's losses are left out, as those of all pipeline stages except one.
    contributes: bool = True
    # The line of the last backward pass.
    loss_line: str = ""
    # For each loss the terms that it is a sum of, if they are known.
    loss_terms: list[list[float]] = field(default_factory=list)
    # For each loss what it may have been divided by, by a description of the count.
    loss_divisors: list[dict[str, float]] = field(default_factory=list)
    # Arguments of torch's loss functions except outputs and targets, by argument and line.
    loss_options: dict[str, Array] = field(default_factory=dict)
    # Whether the gradient of one sample depends on the output of another, as in contrastive losses.
    loss_compares_samples: bool = False
    # A model in which the output of one sample depends on other samples of the batch.
    coupling_model: str = ""
    # Statistics over the samples that the loss was computed from, by line.
    batch_statistics: dict[str, float] = field(default_factory=dict)
    # Statistics over the samples that became Python numbers before the loss, by line.
    scalar_statistics: dict[str, float] = field(default_factory=dict)
    # The line of an earlier step's forward pass whose outputs this loss was computed from too.
    earlier_outputs_line: str = ""
    # The line of an all-gather that the loss was computed from without its gradient.
    gather_line: str = ""
    # The same for tensors that were detached before the all-gather, which may be intended.
    detached_gather_line: str = ""


@dataclass(kw_only=True)
class DrawRecord:
    """Random numbers that were drawn for the update."""

    # Random streams except torch's that were drawn from before the loss, with a digest of each.
    random_streams: dict[str, str] = field(default_factory=dict)
    # The last random numbers that each loss was computed from: their line and a digest.
    loss_draws: list[tuple[str, str]] = field(default_factory=list)
    # Digests of all random numbers that were drawn before the loss.
    drawn_digests: frozenset[str] = frozenset()
    # The line of random numbers that the gradients were computed from.
    gradient_draw_line: str = ""
    # The seeds that torch was given before the first update, by line.
    seeds: dict[str, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class GradientRecord:
    """Gradients by parameter name, at several moments of the update."""

    # As each backward pass of this rank left them, before they were averaged. May be empty.
    local_gradients: list[dict[str, Any]] = field(default_factory=list)
    # For each backward pass, whether its gradients stayed on this rank and were not averaged.
    local_passes: list[bool] = field(default_factory=list)
    # After all backward passes, before the script clipped them.
    unclipped: Mapping[str, Array] = field(default_factory=dict)
    # As `optimizer.step()` found them.
    gradients: Mapping[str, Array] = field(default_factory=dict)
    # As collectives inside of `optimizer.step()` left them.
    reduced_in_step: Mapping[str, Array] = field(default_factory=dict)
    # The number by which all gradients were multiplied after the last backward pass; NaN if it was
    # not one number.
    gradient_factor: float = 1.0
    # The line of a hook of the script that changed a gradient during a backward pass.
    gradient_hook_line: str = ""


@dataclass(kw_only=True)
class OptimizerRecord:
    """Settings and state of the optimizer."""

    # The learning rate of each parameter group.
    learning_rates: Sequence[float] = ()
    # The line that set each of them last; empty if it is not known.
    learning_rate_lines: Sequence[str] = ()
    # The numeric options of each parameter group except its learning rate.
    group_options: Sequence[Mapping[str, Any]] = ()
    # For each tensor of the optimizer's state before the step: a sum, the largest absolute value,
    # and the number of values. Named "PARAMETER/KEY".
    optimizer_state: Mapping[str, Array] = field(default_factory=dict)
    # Whether Lockstep prepared the model, but not this optimizer of its parameters.
    optimizer_unprepared: bool = False


@dataclass(kw_only=True)
class ModelRecord:
    """Parameters, buffers and other tensors of the models, by name."""

    # Parameters before the first update; empty at later ones.
    initial: Mapping[str, Array] = field(default_factory=dict)
    # Sums over the parameters before the update, for those that are whole on this rank.
    parameter_sums: Mapping[str, Array] = field(default_factory=dict)
    # The optimizer's parameters after the update.
    parameters: Mapping[str, Array] = field(default_factory=dict)
    # Parameters that something changed between the update before and this one's first forward pass.
    rewritten_parameters: Mapping[str, Array] = field(default_factory=dict)
    # Sums over parameters that were changed between the backward passes of this update.
    changed_between_passes: Mapping[str, Array] = field(default_factory=dict)
    # Before the first forward pass: sums over parameters that are in no known model, of optimizers
    # that have not stepped on this rank. By the optimizer's `construction_index` and the
    # parameter's place in it.
    unstepped_sums: Mapping[tuple[int, int], Array] = field(default_factory=dict)
    # Buffers after the update.
    buffers: Mapping[str, Array] = field(default_factory=dict)
    # Sums over tensors of modules that are neither parameters nor buffers, and their sizes.
    module_tensors: Mapping[str, Array] = field(default_factory=dict)
    # The same before the first forward pass of the update.
    module_tensors_before: Mapping[str, Array] = field(default_factory=dict)
    # Parameters that do not require gradients.
    frozen: Sequence[str] = ()
    # Parameters of modules that were trained in evaluation mode.
    in_eval_mode: Sequence[str] = ()
    # BatchNorm layers that computed their statistics from this rank's samples alone.
    local_norm_layers: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class WrapperRecord:
    """How the models are wrapped by DDP or prepared by Lockstep."""

    # Trained parameters of models that are neither wrapped nor prepared.
    unwrapped: Sequence[str] = ()
    # The line of a training forward pass of such a model.
    unwrapped_line: str = ""
    # The line of a training forward pass that called a wrapped model without its DDP wrapper.
    past_wrapper_line: str = ""
    # Number of training forward passes through DDP.
    wrapped_passes: int = 0
    # Trained parameters that DDP does not know.
    unknown_to_ddp: Sequence[str] = ()
    # The ranks of DDP's process group, if these are not all ranks.
    ddp_ranks: Sequence[int] = ()
    # The line at which the script registered a communication hook with DDP.
    comm_hook_line: str = ""


@dataclass(kw_only=True)
class LineRecord:
    """What the script's own lines did since the update before."""

    calls: list[ScriptCall] = field(default_factory=list)
    # Frames of the script, as (file, line), in which a parameter or buffer was written to last.
    write_stacks: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    # Outcomes of tests in the script: WAS_TRUE, WAS_FALSE, or both added up.
    branch_outcomes: Mapping[Place, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class BitRecord:
    """Hashes, in a run that is compared bit by bit. Most other fields are then empty."""

    # Hashes by kind (`lockstep.verify.bits.KINDS`), then by the name of what was hashed: of a
    # parameter, or of a virtual rank ("virtual rank 3").
    bits: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # The optimizer's parameters before the update, of the first updates on one process.
    parameters_before: Mapping[str, Array] = field(default_factory=dict)


@dataclass(kw_only=True)
class RankUpdate(
    StepRecord,
    InputRecord,
    LossRecord,
    DrawRecord,
    GradientRecord,
    OptimizerRecord,
    ModelRecord,
    WrapperRecord,
    LineRecord,
    BitRecord,
):
    """All that one rank recorded of one update. It is filled in while the update happens."""


class Update(tuple[RankUpdate, ...]):
    """One update on all ranks."""

    __slots__ = ()

    def first(self, field_name: str) -> str:
        """Returns a text field, such as a line, from the first rank where it is not empty.

        The result is empty if the field is empty on all ranks.
        """
        for rank in self:
            text: str = getattr(rank, field_name)
            if text:
                return text
        return ""

    def merged(self, field_name: str) -> dict[str, Any]:
        """Returns a field that holds arrays by name, merged over all ranks.

        If several ranks have an array of the same name, that of the lowest rank is returned.
        """
        arrays: dict[str, Any] = {}
        for rank in reversed(self):  # arrays of lower ranks replace those of higher ranks
            arrays.update(getattr(rank, field_name))
        return arrays

    @property
    def calls(self) -> list[ScriptCall]:
        """The recorded calls of all ranks."""
        return [call for rank in self for call in rank.calls]

    @property
    def clips(self) -> list[ScriptCall]:
        """The calls of all ranks that clip gradients."""
        return [call for call in self.calls if call.name == "clip"]

    @property
    def in_step(self) -> list[ScriptCall]:
        """The collectives that were called inside `optimizer.step()`."""
        return [call for call in self.calls if call.in_step]

    @property
    def losses(self) -> list[float]:
        """The sum of losses of each rank, without ranks whose losses do not count."""
        return [sum(rank.losses) for rank in self if rank.contributes and rank.losses]

    @property
    def loss(self) -> float | None:
        """The mean over all ranks of their sum of losses; None if no rank had a loss."""
        sums_of_ranks = self.losses
        if not sums_of_ranks:
            return None
        return sum(sums_of_ranks) / len(sums_of_ranks)

    @property
    def backward_passes(self) -> int:
        """Number of backward passes on the rank with the most."""
        return max((len(rank.losses) for rank in self), default=0)

    @property
    def batches(self) -> list[Batch]:
        """The batches of all ranks that contribute, in the order of ranks."""
        return [batch for rank in self if rank.contributes for batch in rank.batches]

    @property
    def samples(self) -> int:
        """Number of samples in the update."""
        total = 0
        for rank in self:
            if rank.contributes:  # False if its samples are those of another rank
                total += _count_samples(rank)
        return total

    def indices(self) -> list[Sample] | None:
        """Returns all samples by index, in the order of ranks; None if some index is not known."""
        samples: list[Sample] = []
        for batch in self.batches:
            if batch.ids is None:
                return None
            for index in batch.ids:
                samples.append((batch.loader, batch.epoch, index))
        return samples

    def contents(self) -> list[Sample] | None:
        """Returns all samples by a digest of their contents, in the order of ranks.

        The result is None if samples cannot be recognized by their contents.
        """
        samples: list[Sample] = []
        for batch in self.batches:
            # With random augmentation, the same sample has other contents in every process.
            if batch.random_draws:
                return None

            # The batch has indices, but its tensors could not be split into samples.
            if batch.ids is not None and len(batch.ids) != len(batch.contents):
                return None

            for digest in batch.contents:
                samples.append((batch.loader, batch.epoch, digest))

        return samples

    def ranks_that_differ(self, field_name: str, tolerance: Tolerance) -> dict[str, list[int]]:
        """Returns the ranks whose arrays in a field, such as "gradients", differ from other ranks'.

        Each array is compared with the array of the same name on the first rank that has one.

        Args:
            field_name: name of a field of `RankUpdate` with arrays by name.
            tolerance: tolerance within which values are equal.

        Returns:
            The numbers of the ranks with a different array, by the name of the array. Arrays that
            are equal on all ranks are left out.
        """
        first = self.merged(field_name)
        # The largest value of all arrays, on which the tolerance depends.
        scale = max(scale_of(getattr(rank, field_name)) for rank in self)
        ranks_by_name: dict[str, list[int]] = defaultdict(list)
        for number, rank in enumerate(self):
            for name, array in getattr(rank, field_name).items():
                if tolerance.differ(first[name], array, scale):
                    ranks_by_name[name].append(number)

        return ranks_by_name

    def replicas_that_differ(self) -> dict[str, list[int]]:
        """Returns the ranks whose parameters before the update differ from rank 0, by name.

        Copies of a parameter must agree in any precision, so the tolerance of float64 is used.
        """
        return self.ranks_that_differ("parameter_sums", FLOAT64)


def _count_samples(rank: RankUpdate) -> int:
    """Returns the number of samples of one rank.

    Without a loader, the inputs of the models are counted instead. A rank may compute the same
    inputs in several passes. Then each sample counts as often as it occurs in a single pass.
    """
    # Without a loader, the recorder has copied the inputs of the models to `batches`.
    has_no_loader = rank.batches == rank.model_inputs
    if has_no_loader and all(batch.contents for batch in rank.batches):
        count_of_sample: Counter[str] = Counter()
        for batch in rank.batches:
            count_of_sample |= Counter(batch.contents)  # keeps the larger count of each sample
        return count_of_sample.total()
    return sum(len(batch.ids or batch.contents) for batch in rank.batches)
