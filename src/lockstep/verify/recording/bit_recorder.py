"""Records hashes of all that a script using Lockstep trains, to compare runs bit by bit.

The `BitRecorder` only listens to the events of Lockstep's steps and changes nothing that the script
computes. For each optimizer step it hashes the samples, the loss and the gradients of each *virtual
rank* (a part of the global batch that is computed by itself, on any number of processes), the
gradients that the optimizer gets, and the weights, buffers and optimizer state after the step.

In a run on one process, the values of the first steps are recorded too, to find gradients that are
only rounding (`lockstep.verify.rounding_noise`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.batch.pytree import tensors
from lockstep.checkpoint.modules import unwrap
from lockstep.session.extension import DeliveredBatch, Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.settings import Settings
from lockstep.strategies.base import PreparedModule, parameters_of
from lockstep.torch_compat import is_sharded
from lockstep.verify.rank_files import RankEnd, UpdateWriter
from lockstep.verify.recording.guard import guarded
from lockstep.verify.recording.progress import Finished, RunProgress
from lockstep.verify.recording.tensor_values import copy_arrays
from lockstep.verify.run_config import MIN_STEPS, RunConfig
from lockstep.verify.training_record import Batch, RankUpdate

# The dtype in which the model computes, by the setting `precision`.
DTYPE_OF_PRECISION = {
    "fp64": "torch.float64",
    "fp32": "torch.float32",
    "bf16": "torch.bfloat16",
    "fp16": "torch.float16",
}


class BitRecorder(Extension):
    """Records the hashes of one rank.

    Args:
        writer: writer for the updates of this rank.
        config: settings of the run, including the number of steps after which it ends.
    """

    def __init__(self, writer: UpdateWriter, config: RunConfig) -> None:
        self.state = RunProgress(writer, config)
        self._is_on_one_process = config.nproc == 1
        self._loaders: list[Any] = []
        self._samples: dict[str, str] = {}
        """Hash of the samples of each virtual rank of this process, in the current step."""
        self._losses: dict[str, str] = {}
        """Loss of each virtual rank of this process, in the current step."""
        self._virtual_rank_hashes: dict[str, dict[str, str]] = {}
        """Hashes of the gradients of each virtual rank of this process, in the current step: by
        parameter name, then by a name such as "Net/weight of virtual rank 2"."""
        self._settings: Settings | None = None
        self.own_process_line = ""
        """The line of the script that started the first process of its own; empty if none did."""

    def note_own_process(self, line: str) -> None:
        """Records the line at which the script first started a process of its own."""
        self.own_process_line = self.own_process_line or line

    def note_settings(self, settings: Settings) -> None:
        """Records the settings of the run, once the script has called `lockstep.init`."""
        self._settings = settings

    def end_script_without_lockstep(self, optimizer: Optimizer, *_: Any) -> None:
        """Ends a script that trains without Lockstep. Torch calls this before each optimizer step.

        Raises:
            Finished: No module was prepared with Lockstep, so nothing can be compared bit by bit.
        """
        if not self.state.models.prepared_ids:
            raise Finished(0)

    # Events

    @guarded
    def module_prepared(self, wrapped: PreparedModule) -> None:
        """Adds a module that `World.prepare` has wrapped to the recorded models."""
        self.state.models.prepared_ids.add(id(unwrap(wrapped.module)))
        self.state.models.add(wrapped.module)

    @guarded
    def delivered(self, batch: DeliveredBatch) -> None:
        """Records the samples of a micro-batch that a loader hands out."""
        state = self.state
        state.micro_batch = batch.micro_batch

        # A new global batch begins. The script may have left the one before unfinished.
        if batch.micro_batch.first:
            self._samples = {}
            self._losses = {}
            self._virtual_rank_hashes = {}

        if batch.loader not in self._loaders:
            self._loaders.append(batch.loader)
        loader_number = self._loaders.index(batch.loader)

        # The user reads this behind the number of the step: "step 3, global batch 3 of epoch 1".
        state.last_batch_text = f", global batch {batch.position + 1} of epoch {batch.epoch + 1}"

        ids = batch.samples.tolist()
        record = Batch(loader=loader_number, epoch=batch.epoch, ids=ids)
        state.add_pending_batch(record)

        if not _is_padding(batch.micro_batch):
            hash_of_samples = _hash_of_samples(ids, batch.batch)
            _add_to_virtual_rank(self._samples, batch.micro_batch, hash_of_samples)

    @guarded
    def backward_begins(self, weighted_loss: Tensor, micro_batch: MicroBatch) -> None:
        """Records the weighted loss of a micro-batch, before its backward pass."""
        if not _is_padding(micro_batch):
            loss = float(weighted_loss.detach())
            self.state.update.losses.append(loss)
            _add_to_virtual_rank(self._losses, micro_batch, loss.hex())

    @guarded
    def leaf_gradient(
        self,
        micro_batch: MicroBatch,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
    ) -> None:
        """Records the gradients of one virtual rank, before those of others are added.

        Lockstep adds up the gradients of virtual ranks in a tree. This event reports a leaf of the
        tree.

        Args:
            micro_batch: last micro-batch of the virtual rank.
            parameters: parameters of the model.
            gradients: gradient of each parameter; None for a parameter without one.
        """
        name_of_id = {id(parameter): name for name, parameter in self.state.models.parameters()}
        for parameter, gradient in zip(parameters, gradients, strict=True):
            name = name_of_id.get(id(parameter))
            if name is None or gradient is None:
                continue
            # An unused parameter has no gradient with some strategies, and zeros with others.
            if not gradient.any():
                continue

            # The name that the verdict shows: "Net/weight of virtual rank 2".
            displayed_name = f"{name} of virtual rank {micro_batch.virtual_rank_number}"
            hashes_of_parameter = self._virtual_rank_hashes.setdefault(name, {})
            hashes_of_parameter[displayed_name] = hash_of(gradient.detach().reshape(-1))

    @guarded
    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Records what an optimizer's step starts from: gradients, parameters and options."""
        update = self.state.update
        self._record_identity(optimizer)
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        update.learning_rates = rates

        parameters = self._parameters_of(optimizer)
        gradients = {}
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                gradients[name] = parameter.grad

        # By the kinds that `lockstep.verify.bit_verdict.KINDS` describes.
        update.bits = {
            "before": _hashes(parameters.items()),
            "samples": self._samples,
            "loss": self._losses,
            "parts": self._take_virtual_rank_hashes(parameters),
            "gradients": _hashes(gradients.items()),
            "rates": {f"parameter group {number}": rate.hex() for number, rate in enumerate(rates)},
        }
        self._samples = {}
        self._losses = {}

        if self._keeps_values(update):
            update.gradients = copy_arrays(gradients.items())
            update.parameters_before = copy_arrays(parameters.items())

    def _take_virtual_rank_hashes(self, names: Iterable[str]) -> dict[str, str]:
        """Returns and removes the hashes of the gradients of virtual ranks, of some parameters.

        They are named like "Net/weight of virtual rank 2". Other optimizers will take the rest.

        Args:
            names: names of the parameters, such as "Net/weight".
        """
        taken: dict[str, str] = {}
        for name in names:
            taken |= self._virtual_rank_hashes.pop(name, {})
        return taken

    def _keeps_values(self, update: RankUpdate) -> bool:
        """True if the values of an update are recorded too, and not only hashes of them.

        `find_rounding_noise` looks at them, in the first steps on one process.
        """
        return self._is_on_one_process and update.step < MIN_STEPS

    def _record_identity(self, optimizer: Optimizer) -> None:
        """Records which optimizer steps, and the number of its step."""
        update = self.state.update
        steps_of = self.state.steps_of
        steps_of.setdefault(optimizer, 0)
        update.optimizer = list(steps_of).index(optimizer)  # in the order of first steps
        update.optimizer_class = type(optimizer).__name__
        update.step = steps_of[optimizer]

    @guarded
    def after_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Records parameters, buffers and optimizer state after a step, and writes the update."""
        state = self.state
        update = state.update
        parameters = self._parameters_of(optimizer)

        optimizer_state = []  # pairs such as ("Net/weight/exp_avg", tensor)
        for name, parameter in parameters.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    optimizer_state.append((f"{name}/{key}", value))

        update.bits = {
            **update.bits,
            "parameters": _hashes(parameters.items()),
            "state": _hashes(optimizer_state),
            "buffers": _hashes(state.models.buffers()),
        }

        if self._keeps_values(update):
            update.parameters = copy_arrays(parameters.items())

        update.dtype = self._dtype()
        # All batches so far belong to this step, and none to a later one.
        state.finish_update(update, later_batches=[])
        state.steps_of[optimizer] += 1

    # The end of the run

    def end(self, script_failed: bool) -> RankEnd:
        """Returns what is only known at the end of the script.

        Args:
            script_failed: not used; `Recorder.end` has this argument too.
        """
        del script_failed
        virtual_ranks: int | None = None
        script_sets_virtual_ranks = False
        if self._settings is not None:
            virtual_ranks = self._settings.virtual_ranks
            # `lockstep verify` chooses a number of virtual ranks only if the script sets none.
            number_chosen_by_verify = self._settings.virtual_ranks_of_verify
            script_sets_virtual_ranks = number_chosen_by_verify is None

        return RankEnd(
            uses_lockstep=bool(self.state.models.prepared_ids),
            stopped_at=self.state.stopped_at,
            own_process_line=self.own_process_line,
            internal_error=self.state.internal_error,
            num_backward_passes=len(self.state.update.losses),
            virtual_ranks=virtual_ranks,
            script_sets_virtual_ranks=script_sets_virtual_ranks,
        )

    def _parameters_of(self, optimizer: Optimizer) -> dict[str, nn.Parameter]:
        """Returns the parameters that an optimizer trains, by name."""
        ids = {id(parameter) for parameter in parameters_of(optimizer)}
        return {name: p for name, p in self.state.models.parameters() if id(p) in ids}

    def _dtype(self) -> str:
        """Returns the dtype in which the model computes, such as "torch.bfloat16"."""
        precision = "fp32" if self._settings is None else self._settings.precision
        return DTYPE_OF_PRECISION[precision]


def _hash_of_samples(indices: Sequence[int], batch: Any) -> str:
    """Returns a hash of the indices of the samples in a batch, and of the batch's tensors."""
    hasher = hashlib.blake2b(repr(indices).encode(), digest_size=8)
    for tensor in tensors(batch):
        hasher.update(hash_of(tensor).encode())
    return hasher.hexdigest()


def _is_padding(micro_batch: MicroBatch) -> bool:
    """True for a micro-batch without samples, which only keeps this process in step with others."""
    return micro_batch.virtual_rank is not None and micro_batch.virtual_rank.is_padding


def _add_to_virtual_rank(hashes: dict[str, str], micro_batch: MicroBatch, text: str) -> None:
    """Adds a text to the entry of the micro-batch's virtual rank: "a" and "b" become "a.b".

    A virtual rank has several texts if its part of the global batch is split into micro-batches.

    Args:
        hashes: texts by virtual rank; the entry is changed in place.
        micro_batch: micro-batch that the text belongs to.
        text: hash of the micro-batch's samples, or its loss.
    """
    name = f"virtual rank {micro_batch.virtual_rank_number}"
    hashes[name] = f"{hashes[name]}.{text}" if name in hashes else text


def _hashes(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Returns a hash of each tensor, by name. Shards are gathered, so all ranks must call this.

    Args:
        named: pairs of a name and a tensor.
    """
    return {name: hash_of(tensor) for name, tensor in named}


def hash_of(tensor: Tensor) -> str:
    """Returns a hash of a tensor's dtype, shape and bits. A sharded tensor is gathered first."""
    whole = tensor.detach()
    if is_sharded(whole):
        whole = whole.full_tensor()  # type: ignore[attr-defined]

    if whole.layout is not torch.strided:
        whole = whole.to_dense()

    # FSDP cannot free memory that numpy refers to, so numpy gets a copy. (`.cpu()` does not copy a
    # tensor that is already on the CPU.)
    values = whole.cpu().clone(memory_format=torch.contiguous_format)
    bytes_of_values = values.reshape(-1).view(torch.uint8).numpy()

    hasher = hashlib.blake2b(f"{values.dtype} {tuple(values.shape)}".encode(), digest_size=8)
    hasher.update(bytes_of_values.data)  # the bytes, without a copy
    return hasher.hexdigest()
