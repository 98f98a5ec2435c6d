"""Records hashes of what a script that uses Lockstep trains, so that runs are compared bit by bit.

Nothing that the script computes is changed: it draws its dropout masks, and computes in its own
precision, with *virtual ranks* (parts of every global batch that are computed each by itself). The
`BitRecorder` only listens to the events of Lockstep's steps. Of each optimizer step it hashes the
samples, the loss and the gradients of each virtual rank, the gradients that the optimizer gets, and
the weights, the optimizer's state and the buffers that the step leaves.

On one process the values of the first steps are kept too, to find gradients that are only rounding
(`lockstep.verify.rounding_noise`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.batch.pytree import tensors
from lockstep.checkpoint.modules import unwrap
from lockstep.distributed.torch_compat import is_sharded
from lockstep.session.extension import DeliveredBatch, Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.settings import Settings
from lockstep.strategies.base import PreparedModule, parameters_of
from lockstep.verify.rank_files import UpdateWriter
from lockstep.verify.recording.function_mode import FunctionMode
from lockstep.verify.recording.state import Finished, RecorderState, guarded
from lockstep.verify.recording.tensor_values import copy_arrays
from lockstep.verify.run_config import MIN_STEPS, RunConfig
from lockstep.verify.training_record import Batch

# In what the model computes, by the setting `precision`.
DTYPE_OF_PRECISION = {
    "fp64": "torch.float64",
    "fp32": "torch.float32",
    "bf16": "torch.bfloat16",
    "fp16": "torch.float16",
}


class BitRecorder(Extension):
    """Records hashes in one rank.

    Args:
        writer: writes the updates of this rank.
        config: how the script is run, and after how many steps it ends.
        mode: only part of the state; it is not entered, so that no call of torch is changed.
    """

    def __init__(self, writer: UpdateWriter, config: RunConfig, mode: FunctionMode) -> None:
        self.state = RecorderState(writer, config, mode)
        self._keeps_values = config.nproc == 1
        self._loaders: list[Any] = []
        self._samples: dict[str, str] = {}
        """A hash of the samples of each virtual rank of this process, in the present step."""
        self._losses: dict[str, str] = {}
        """The loss of each virtual rank of this process, in the present step."""
        self._gradients_of_parts: dict[str, dict[str, str]] = {}
        """Hashes of the gradients of each virtual rank of this process, in the present step: by the
        parameter, and then by a name that has the virtual rank too."""
        self._settings: Settings | None = None
        self.own_process_line = ""
        """The line that started the first process of the script's own; empty if none was."""

    def note_own_process(self, line: str) -> None:
        """Notes the line at which the script has started a process; the first one is kept."""
        self.own_process_line = self.own_process_line or line

    def note_settings(self, settings: Settings) -> None:
        """Notes the settings of a run that the script has joined."""
        self._settings = settings

    def end_script_without_lockstep(self, optimizer: Optimizer, *_: Any) -> None:
        """Ends a script that trains without Lockstep; torch calls it before each optimizer step.

        Raises:
            Finished: no module was prepared, so nothing can be compared bit by bit.
        """
        if not self.state.models.prepared_ids:
            raise Finished(0)

    # Events

    @guarded
    def module_prepared(self, wrapped: PreparedModule) -> None:
        """Adds a module that `World.prepare` has wrapped to the models that are recorded."""
        self.state.models.prepared_ids.add(id(unwrap(wrapped.module)))
        self.state.models.add(wrapped.module)

    @guarded
    def delivered(self, batch: DeliveredBatch) -> None:
        """Records the samples of a micro-batch that a loader hands out."""
        state = self.state
        state.micro_batch = batch.micro_batch
        if batch.micro_batch.first:  # the global batch before may have been broken off
            self._samples = {}
            self._losses = {}
            self._gradients_of_parts = {}

        if batch.loader not in self._loaders:
            self._loaders.append(batch.loader)

        state.last_batch_text = f", global batch {batch.position + 1} of epoch {batch.epoch + 1}"
        ids = batch.samples.tolist()
        loader_number = self._loaders.index(batch.loader)

        # It also says that a global batch has begun, in which the script is not ended.
        state.update.batches.append(Batch(loader=loader_number, epoch=batch.epoch, ids=ids))

        if not _is_padding(batch.micro_batch):
            hashed = hashlib.blake2b(repr(ids).encode(), digest_size=8)
            for tensor in tensors(batch.batch):
                hashed.update(hash_of(tensor).encode())
            _append(self._samples, batch.micro_batch, hashed.hexdigest())

    @guarded
    def backward_begins(self, weighted_loss: Tensor, micro_batch: MicroBatch) -> None:
        """Records the loss of a micro-batch."""
        if not _is_padding(micro_batch):
            loss = float(weighted_loss.detach())
            self.state.update.losses.append(loss)
            _append(self._losses, micro_batch, loss.hex())

    @guarded
    def leaf_gradient(
        self,
        micro_batch: MicroBatch,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
    ) -> None:
        """Records gradients of a virtual rank, before they are added to those of others."""
        name_of_id = {id(parameter): name for name, parameter in self.state.models.parameters()}
        for parameter, gradient in zip(parameters, gradients, strict=True):
            name = name_of_id.get(id(parameter))
            # Strategies differ in whether a parameter that was not used has no gradient or zeros.
            if name is None or gradient is None or not gradient.any():
                continue
            hashes = self._gradients_of_parts.setdefault(name, {})
            name_of_part = f"{name} of virtual rank {micro_batch.virtual_rank_number}"
            hashes[name_of_part] = hash_of(gradient.detach().reshape(-1))

    @guarded
    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Records what an optimizer's step starts from."""
        state = self.state
        update = state.update
        parameters = self._parameters_of(optimizer)

        if optimizer not in state.steps_of:
            state.steps_of[optimizer] = 0

        update.optimizer = list(state.steps_of).index(optimizer)
        update.optimizer_class = type(optimizer).__name__
        update.step = state.steps_of[optimizer]
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        update.learning_rates = rates
        gradients = {}

        for name, parameter in parameters.items():
            if parameter.grad is not None:
                gradients[name] = parameter.grad

        gradients_of_parts: dict[str, str] = {}
        for name in parameters:
            gradients_of_parts |= self._gradients_of_parts.pop(name, {})

        bits: dict[str, Mapping[str, str]] = {
            "before": _hashes(parameters.items()),
            "samples": self._samples,
            "loss": self._losses,
            "parts": gradients_of_parts,
            "gradients": _hashes(gradients.items()),
            "rates": {f"group {number}": rate.hex() for number, rate in enumerate(rates)},
        }
        update.bits = bits
        self._samples = {}
        self._losses = {}

        if self._keeps_values and update.step < MIN_STEPS:
            update.gradients = copy_arrays(gradients.items())
            update.parameters_before = copy_arrays(parameters.items())

    @guarded
    def after_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Records what the step has left, and writes the update."""
        state = self.state
        update = state.update
        parameters = self._parameters_of(optimizer)
        optimizer_state = []

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

        if update.parameters_before:
            update.parameters = copy_arrays(parameters.items())

        update.dtype = self._dtype()
        state.finish_update(update, [])
        state.steps_of[optimizer] += 1

    # What is known of the run

    def end(self) -> dict[str, Any]:
        """Returns what is known when the script has ended: fields of `RankEnd`."""
        known: dict[str, Any] = {
            "uses_lockstep": bool(self.state.models.prepared_ids),
            "stopped_at": self.state.stopped_at,
            "own_process_line": self.own_process_line,
            "internal_error": self.state.internal_error,
            "backward_passes": len(self.state.update.losses),
        }

        if self._settings is not None:
            known["virtual_ranks"] = self._settings.virtual_ranks
            known["virtual_ranks_are_own"] = self._settings.virtual_ranks_of_verify is None

        return known

    def _parameters_of(self, optimizer: Optimizer) -> dict[str, nn.Parameter]:
        """Returns the parameters of an optimizer, by name."""
        ids = {id(parameter) for parameter in parameters_of(optimizer)}
        return {name: p for name, p in self.state.models.parameters() if id(p) in ids}

    def _dtype(self) -> str:
        """Returns the dtype in which the model computes, such as "torch.bfloat16"."""
        precision = "fp32" if self._settings is None else self._settings.precision
        return DTYPE_OF_PRECISION[precision]


def _is_padding(micro_batch: MicroBatch) -> bool:
    """Returns whether a micro-batch only keeps this process in step with others."""
    return micro_batch.virtual_rank is not None and micro_batch.virtual_rank.is_padding


def _append(hashes: dict[str, str], micro_batch: MicroBatch, text: str) -> None:
    """Adds a text to those of the micro-batch's virtual rank, which may have several of them."""
    name = f"virtual rank {micro_batch.virtual_rank_number}"
    hashes[name] = f"{hashes[name]}.{text}" if name in hashes else text


def _hashes(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Returns a hash of all bits of each tensor. All ranks call it together: shards are gathered.

    Args:
        named: pairs of a name and a tensor.
    """
    return {name: hash_of(tensor) for name, tensor in named}


def hash_of(tensor: Tensor) -> str:
    """Returns a hash of the dtype, the shape and all bits of a tensor; shards are gathered."""
    whole = tensor.detach()
    if is_sharded(whole):
        whole = whole.full_tensor()  # type: ignore[attr-defined]

    if whole.layout is not torch.strided:
        whole = whole.to_dense()

    # The values are copied: memory that numpy looks at cannot be freed, and FSDP frees its own.
    values = whole.cpu().clone(memory_format=torch.contiguous_format)
    hashed = hashlib.blake2b(f"{values.dtype} {tuple(values.shape)}".encode(), digest_size=8)
    hashed.update(np.ascontiguousarray(values.reshape(-1).view(torch.uint8).numpy()).data)

    return hashed.hexdigest()
