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

from lockstep.verify.tolerance import FLOAT64, Array, Tolerance, largest_of_all

# In the arrays of `RankUpdate.optimizer_state`, the index of the largest absolute value, and the
# index of the number of values.
LARGEST = 1
SIZE = 2

# An `if` or `while` statement in the script: its file, its first line, and its last line.
Place = tuple[str, int, int]

# A sample that was trained on: its loader, its epoch, and its index or a digest of its contents.
Sample = tuple[int, int, int | str]

# Outcomes of tests, as recorded in `RankUpdate.branch_outcomes`.
WAS_TRUE = 1
WAS_FALSE = 2


@dataclass(kw_only=True)
class Batch:
    """A batch that was handed out to a training loop, or the arguments that a model was called
    with.
    """

    # Number of the loader, in the order of first use.
    loader: int = 0
    epoch: int = 0
    # Indices of the samples in the dataset; None if they are not known, as for a stream.
    ids: Sequence[int] | None = None
    # One text for each sample, with the digests of its tensors joined by dots. Empty if the batch
    # could not be split into samples.
    contents: Sequence[str] = ()
    # Shape of one sample. Only digests of samples of the same shape can be compared.
    shape: str = ""
    # Numbers that a mean over the batch may be divided by, such as its number of samples, or the
    # number of values in a tensor that are not padding.
    weights: Mapping[str, float] = field(default_factory=dict)
    # Random generators that this process used while the batch was read, with a digest of each.
    random_draws: Mapping[str, str] = field(default_factory=dict)
    # Whether worker processes read the batch. Their random draws are not recorded.
    workers: bool = False
    # Whether the dataset is an IterableDataset.
    iterable: bool = False
    # Whether a DistributedSampler shuffles the samples, but its `set_epoch` was never called.
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
    # Name of the parameter whose gradient is the input; empty if the input is not a gradient.
    gradient_of: str = ""
    # Whether that gradient was changed after the backward passes.
    gradient_changed: bool = False
    # Number of backward passes of this update before the call.
    num_passes_before: int = 0
    # Whether clipping changed a gradient.
    has_clipped: bool = False
    # Whether the call was made in the forward pass of an autograd function of the script.
    in_autograd_function: bool = False
    # Whether the call was made inside `optimizer.step()`.
    in_step: bool = False
    # The metric that a scheduler was called with.
    value: float | None = None


@dataclass(kw_only=True)
class Forward:
    """A training forward pass, with two numbers for each sample that change with its values.

    Arrays have the shape (samples, 2). They are empty if a tensor has no row for each sample.
    """

    # The class of the model, and the number of the pass since the last backward pass.
    model: str
    # Shape of the input for one sample. Only samples of the same shape are compared.
    shape: str
    # Computed from the first input tensor.
    inputs: Array
    # Computed from all other input tensors, such as a hidden state.
    other_inputs: Array
    outputs: Array = field(default_factory=lambda: np.zeros((0, 2)))
    # Computed from the gradient of the loss with respect to the outputs.
    output_gradients: Array = field(default_factory=lambda: np.zeros((0, 2)))
    # All values of the first input, one row for each sample; empty if there are too many.
    input_values: Array = field(default_factory=lambda: np.zeros((0, 0)))
    # Computed from the targets that torch's loss functions compared with the outputs.
    targets: Array = field(default_factory=lambda: np.zeros((0, 2)))
    # Whether each row is known to be a sample.
    rows_are_samples: bool = True


@dataclass(kw_only=True)
class StepRecord:
    """Which step of which optimizer the update is, and on which rank."""

    # Set when the records of all ranks are aligned.
    rank: int = 0
    # Number of the optimizer, in the order of first steps.
    optimizer: int = 0
    optimizer_class: str = ""
    # Number of this optimizer's step, from 0.
    step: int = 0
    # False if no optimizer of this rank stepped: the rank had joined (`Join`), has no optimizer, or
    # leaves this step to other ranks. Then the values of the step are not known.
    stepped: bool = True
    # Number of the optimizer, in the order in which this rank constructed its optimizers; -1 if not
    # known.
    construction_index: int = -1
    # Names of the optimizer's parameters, in its own order.
    optimizer_parameters: Sequence[str] = ()
    # The dtype with the lowest precision of all losses and gradients so far.
    dtype: str = "torch.float64"


@dataclass(kw_only=True)
class InputRecord:
    """The batches of the update, and the forward passes of the models."""

    # Batches that were handed out to the training loop since the last update.
    batches: list[Batch] = field(default_factory=list)
    # Arguments of the first model that was called before each backward pass.
    model_inputs: list[Batch] = field(default_factory=list)
    # Forward passes of all models before the last backward pass.
    forwards: list[Forward] = field(default_factory=list)
    # Whether there was a training forward pass between the last update and this one.
    began_with_forward: bool = False


@dataclass(kw_only=True)
class LossRecord:
    """The losses of the update, and what they were computed from."""

    # The weighted loss of each backward pass since the last update.
    losses: list[float] = field(default_factory=list)
    # False if the losses and samples of this rank do not count, as on all pipeline stages but one.
    contributes: bool = True
    # The line that computed the last loss.
    loss_line: str = ""
    # The terms that were added up to each loss, if they are known.
    loss_terms: list[list[float]] = field(default_factory=list)
    # Numbers that each loss may have been divided by, by description.
    loss_divisors: list[dict[str, float]] = field(default_factory=list)
    # Arguments of torch's loss functions except outputs and targets, by argument and line.
    loss_options: dict[str, Array] = field(default_factory=dict)
    # Whether the gradient of one sample depends on the output of another, as in contrastive losses.
    loss_compares_samples: bool = False
    # A model in which the output for one sample depends on other samples of the batch.
    model_with_coupled_samples: str = ""
    # Statistics over the samples of a batch that the loss was computed from, by line.
    batch_statistics: dict[str, float] = field(default_factory=dict)
    # Statistics over the samples of a batch that became Python numbers before the loss, by line.
    scalar_statistics: dict[str, float] = field(default_factory=dict)
    # The line of a forward pass of an earlier step whose outputs this loss was computed from.
    earlier_outputs_line: str = ""
    # The line of an all-gather that the loss was computed from, but that passes no gradient on.
    gather_line: str = ""
    # The same for tensors that were detached before the all-gather, which may be intended.
    detached_gather_line: str = ""


@dataclass(kw_only=True)
class DrawRecord:
    """The random numbers that were drawn for the update."""

    # Random generators other than torch's that were used before the loss, with a digest of each.
    random_streams: dict[str, str] = field(default_factory=dict)
    # The last random numbers that each loss was computed from, as their line and a digest.
    loss_draws: list[tuple[str, str]] = field(default_factory=list)
    # Digests of all random numbers that were drawn before the loss.
    drawn_digests: frozenset[str] = frozenset()
    # The line that drew random numbers which the gradients were computed from.
    gradient_draw_line: str = ""
    # The seeds that torch was given before the first update, by line.
    seeds: dict[str, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class GradientRecord:
    """Gradients by parameter name, at several points of the update."""

    # The gradients that each backward pass added on this rank, before averaging. May be empty.
    local_gradients: list[dict[str, Any]] = field(default_factory=list)
    # For each backward pass, whether its gradients stayed on this rank and were not averaged.
    local_passes: list[bool] = field(default_factory=list)
    # The gradients after all backward passes, before the script clipped them.
    unclipped: Mapping[str, Array] = field(default_factory=dict)
    # The gradients at the beginning of `optimizer.step()`.
    gradients: Mapping[str, Array] = field(default_factory=dict)
    # The gradients after collectives inside `optimizer.step()`.
    reduced_in_step: Mapping[str, Array] = field(default_factory=dict)
    # The number that all gradients were multiplied by after the last backward pass; NaN if they
    # were not all multiplied by the same number.
    gradient_factor: float = 1.0
    # The line that registered a hook which changed a gradient during a backward pass.
    gradient_hook_line: str = ""


@dataclass(kw_only=True)
class OptimizerRecord:
    """The options and the state of the optimizer."""

    # The learning rate of each parameter group.
    learning_rates: Sequence[float] = ()
    # The line that last set each learning rate; empty if it is not known.
    learning_rate_lines: Sequence[str] = ()
    # The numeric options of each parameter group, without its learning rate.
    group_options: Sequence[Mapping[str, Any]] = ()
    # Three numbers for each tensor of the optimizer's state before the step: a sum, the largest
    # absolute value, and the number of values. Names are such as "Net/weight/exp_avg".
    optimizer_state: Mapping[str, Array] = field(default_factory=dict)
    # Whether Lockstep has prepared the model, but not the optimizer of its parameters.
    optimizer_unprepared: bool = False
    # The line of `optimizer.step()` if it was called inside a backward pass, as in a hook.
    step_line_in_backward: str = ""


@dataclass(kw_only=True)
class ModelRecord:
    """Parameters, buffers and other tensors of the models, by name."""

    # Parameters before the first update; empty at later ones.
    initial: Mapping[str, Array] = field(default_factory=dict)
    # Sums over the parameters before the update, for parameters that are whole on this rank.
    parameter_sums: Mapping[str, Array] = field(default_factory=dict)
    # The optimizer's parameters after the update.
    parameters: Mapping[str, Array] = field(default_factory=dict)
    # Parameters that were changed after the last update, before the first forward pass of this
    # update.
    rewritten_parameters: Mapping[str, Array] = field(default_factory=dict)
    # Sums over parameters that were changed between the backward passes of this update.
    changed_between_passes: Mapping[str, Array] = field(default_factory=dict)
    # Sums over parameters that belong to no known model, and to an optimizer that has not stepped
    # on this rank, before the first forward pass. The key is the optimizer's `construction_index`
    # and the parameter's index in the optimizer.
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
    # BatchNorm layers whose statistics cover only this rank's samples.
    local_norm_layers: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class WrapperRecord:
    """How the models are wrapped with DDP or prepared by Lockstep."""

    # Trained parameters of models that are neither wrapped nor prepared.
    unwrapped_parameters: Sequence[str] = ()
    # The line of a training forward pass of such a model.
    unwrapped_line: str = ""
    # The line of a training forward pass that bypassed the model's DDP wrapper.
    line_that_bypassed_wrapper: str = ""
    # Number of training forward passes through DDP.
    wrapped_passes: int = 0
    # Trained parameters that DDP does not know.
    unknown_to_ddp: Sequence[str] = ()
    # The ranks of DDP's process group; empty if these are all ranks.
    ranks_of_incomplete_ddp_group: Sequence[int] = ()
    # The line at which the script registered a communication hook with DDP.
    comm_hook_line: str = ""


@dataclass(kw_only=True)
class LineRecord:
    """What the script's own lines did since the last update."""

    calls: list[ScriptCall] = field(default_factory=list)
    # Frames of the script, as (file, line), at the last write to each parameter or buffer.
    write_stacks: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    # Outcomes of tests in the script: WAS_TRUE, WAS_FALSE, or both combined as bits.
    branch_outcomes: Mapping[Place, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class BitRecord:
    """Hashes, recorded in a run that is compared bit by bit. Most other fields are then empty."""

    # Hashes by kind (`lockstep.verify.bit_verdict.KINDS`), and then by the name of a parameter, or
    # by that of a virtual rank ("virtual rank 3").
    bits: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # The optimizer's parameters before the update, recorded for the first updates on one process.
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
    """Everything that one rank recorded of one update. It is filled in while the update happens."""

    @property
    def batches_are_model_inputs(self) -> bool:
        """Whether the script uses no loader, so that `model_inputs` was copied to `batches`.

        Also true if both are empty.
        """
        return self.batches == self.model_inputs


class Update(tuple[RankUpdate, ...]):
    """One update on all ranks."""

    __slots__ = ()

    def first_on_any_rank(self, field_name: str) -> str:
        """Returns a text field, such as a line, from the first rank where it is not empty.

        The result is empty if the field is empty on all ranks.
        """
        for record in self:
            text: str = getattr(record, field_name)
            if text:
                return text
        return ""

    def merged(self, field_name: str) -> dict[str, Any]:
        """Returns a field that holds arrays by name, merged over all ranks.

        If several ranks have an array of the same name, that of the lowest rank is returned.
        """
        arrays: dict[str, Any] = {}
        for record in reversed(self):  # arrays of lower ranks replace those of higher ranks
            arrays.update(getattr(record, field_name))
        return arrays

    @property
    def calls(self) -> list[ScriptCall]:
        """The recorded calls of all ranks."""
        return [call for record in self for call in record.calls]

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
        return [sum(record.losses) for record in self if record.contributes and record.losses]

    @property
    def loss(self) -> float | None:
        """The mean over all ranks of their sum of losses; None if no rank had a loss."""
        sums_of_ranks = self.losses
        if not sums_of_ranks:
            return None
        return sum(sums_of_ranks) / len(sums_of_ranks)

    @property
    def num_backward_passes(self) -> int:
        """Number of backward passes on the rank with the most."""
        return max((len(record.losses) for record in self), default=0)

    @property
    def batches(self) -> list[Batch]:
        """The batches of all ranks that contribute, in the order of ranks."""
        return [batch for record in self if record.contributes for batch in record.batches]

    @property
    def samples(self) -> int:
        """Number of samples in the update."""
        total = 0
        for record in self:
            if record.contributes:
                total += _count_samples(record)
        return total

    def samples_by_index(self) -> list[Sample] | None:
        """Returns a list of all samples, identified by their indices in the dataset.

        Samples are listed in the order of ranks. The result is None if some index is not known.
        """
        samples: list[Sample] = []
        for batch in self.batches:
            if batch.ids is None:
                return None
            for index in batch.ids:
                samples.append((batch.loader, batch.epoch, index))
        return samples

    def samples_by_contents(self) -> list[Sample] | None:
        """Returns a list of all samples, identified by digests of their contents.

        Samples are listed in the order of ranks. The result is None if they cannot be recognized by
        their contents.
        """
        samples: list[Sample] = []
        for batch in self.batches:
            # With random augmentation, the same sample has other contents in every process.
            if batch.random_draws:
                return None

            # There must be one digest for each sample. The number of samples is that of their
            # indices (`ids`), if these are known.
            has_digest_per_sample = batch.ids is None or len(batch.ids) == len(batch.contents)
            if not has_digest_per_sample:
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
        # `merged` returns the array of the first rank that has one.
        first_arrays = self.merged(field_name)
        # The tolerance depends on the largest value of all arrays.
        largest_value = max(largest_of_all(getattr(record, field_name)) for record in self)
        ranks_by_name: dict[str, list[int]] = defaultdict(list)
        for rank, record in enumerate(self):
            for name, array in getattr(record, field_name).items():
                if tolerance.differ(first_arrays[name], array, scale=largest_value):
                    ranks_by_name[name].append(rank)

        return ranks_by_name

    def replicas_that_differ(self) -> dict[str, list[int]]:
        """Returns the ranks whose parameters before the update differ from rank 0, by name.

        Copies of a parameter must agree in any precision, so the tolerance of float64 is used.
        """
        return self.ranks_that_differ("parameter_sums", FLOAT64)


def _count_samples(record: RankUpdate) -> int:
    """Returns the number of samples of one rank.

    Without a loader, the inputs of the models are counted instead.
    """
    contents_are_known = all(batch.contents for batch in record.batches)
    if record.batches_are_model_inputs and contents_are_known:
        return _count_samples_of_passes(record.batches)
    return _count_samples_of_loaders(record.batches)


def _count_samples_of_passes(inputs_of_passes: Sequence[Batch]) -> int:
    """Returns the number of samples of several forward passes, some of which may repeat samples.

    Each sample counts as often as it occurs in a single pass: for passes with the samples (a, b),
    (a, b) and (c, c), the number is 4.
    """
    largest_counts: Counter[str] = Counter()
    for batch in inputs_of_passes:
        # The union of two counters has the larger count of each sample.
        largest_counts |= Counter(batch.contents)
    return largest_counts.total()


def _count_samples_of_loaders(batches: Sequence[Batch]) -> int:
    """Returns the number of samples in several batches, counted again if they are repeated."""
    total = 0
    for batch in batches:
        index_or_digest_of_each_sample = batch.ids or batch.contents
        total += len(index_or_digest_of_each_sample)
    return total
