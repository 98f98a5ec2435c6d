"""Writes the journal: losses, and hashes of gradients, weights and optimizer state, for each step.

Two runs that should compute the same bits can be compared by their journals. A *virtual rank* is a
part of the global batch that is computed separately, whatever the number of processes; with virtual
ranks, the gradient of each one is hashed before it is added to the others. Hashes are written every
few steps. For the steps between, only the losses are written: they cost almost nothing, and show in
which step two runs began to differ.

Writing the journal needs no communication between ranks. It does not wait for the GPU either:
numbers that are still being copied to the host are written one step later. `file_format` describes
the file, `hashing` the hashes.
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.distributed.process_group import Run
from lockstep.distributed.rank_files import append_or_end, close_rank_file, open_rank_file
from lockstep.distributed.streams import start_copy_to_host
from lockstep.errors import SettingError
from lockstep.extensions.framed_records import framed, json_content
from lockstep.extensions.journal.file_format import (
    FORMAT_VERSION,
    JOURNAL_SUFFIX,
    TensorTable,
    loss_content,
    step_head,
    table_content,
)
from lockstep.extensions.journal.hashing import (
    SpreadHasher,
    TensorPart,
    copy_to_device,
    zero_hashes,
)
from lockstep.extensions.journal.manifest import run_manifest
from lockstep.extensions.journal.tensors import (
    EntryHashes,
    HashedTensors,
    NamedParameters,
    collect_tensors,
    owners_by_size,
    state_tensors,
)
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.strategies.base import Strategy

WRITE_INTERVAL_S = 0.2
"""Records are written to the file at most this often, so a process that is killed loses the steps
of at most this time."""


def check_strategy(strategy: Strategy) -> None:
    """Raises SettingError if a strategy does not support the journal."""
    if strategy.why_ranks_differ:
        raise SettingError(
            f"journal with strategy={strategy.name!r}",
            f"{strategy.why_ranks_differ}, and a journal is of one model on all ranks",
            "leave the journal out, or use strategy='ddp', 'fsdp' or 'hsdp'",
        )


class _GradientHasher(NamedTuple):
    """Hashes a group of gradients that a virtual rank computes together."""

    hasher: SpreadHasher
    indices_in_group: list[int]
    """Indices, within the group, of the gradients that are hashed. Those of parameters that the
    journal does not know are left out."""
    indices_in_model: Any
    """For each hashed gradient, the index of its parameter among all trained parameters. A list, or
    a tensor on the GPU."""


class _PendingRecord(NamedTuple):
    """A record whose numbers may not have been copied from the GPU yet."""

    head: bytes
    numbers: Tensor
    copy_event: Any
    """A CUDA event that completes when the numbers have been copied to the host."""


class Journal(Extension):
    """Writes hashes of what this rank computes to a file.

    Args:
        folder: folder of the journal files; created if it does not exist.
        every: hashes are written every this many steps, and losses at all steps.
        run: the run that this process belongs to.
        strategy: name of the strategy, for the manifest.

    Raises:
        SettingError: if a rank cannot write to the folder; raised on all ranks.
    """

    def __init__(self, folder: str, every: int, run: Run, strategy: str) -> None:
        self._folder = folder
        self._every = every
        self._run = run
        self._step = run.step
        self._strategy = strategy
        self._device = run.device
        self._modules: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self._has_virtual_ranks = run.settings.virtual_ranks is not None

        # The tensors of the modules. They are looked up once at the beginning of each pass.
        self._tensors = NamedParameters(trained={}, frozen={}, buffers={})
        self._are_tensors_known = False
        self._parameters: list[nn.Parameter] = []
        """The trained parameters."""
        self._names: tuple[str, ...] = ()
        """Names of the trained parameters, then of the buffers."""
        self._owners: list[int] = []
        """For each of these tensors, the rank that hashes it if all ranks have it."""
        self._index_of_parameter: dict[int, int] = {}
        """The index of each trained parameter in `_parameters`, by its id."""
        self._hasher_of_group: dict[tuple[tuple[int, torch.device], ...], _GradientHasher] = {}
        """The hasher of each group of gradients. The key of a group has, for each gradient, the id
        of its parameter and the device."""
        rank = run.topology.rank
        self._weight_hasher = HashedTensors(rank, run.device)
        self._state_hasher = HashedTensors(rank, run.device)

        # The present step.
        self._gradient_hashes: dict[int, Any] = {}
        """By the number of the virtual rank: one hash for each trained parameter. If an optimizer
        step covers several global batches, their hashes are added up."""
        self._may_have_dropped_gradients = False
        """True at the beginning of a global batch if an earlier one has left hashes of gradients:
        the loop has either cleared its gradients, or makes one step for several global batches."""
        self._losses: dict[int, Any] = {}
        """The losses of `_finished_step`, by virtual rank, or by rank without virtual ranks."""
        self._finished_step: int | None = None
        """The number of a step that has finished and must still be written."""
        self._stepped_optimizers: set[int] = set()
        """The ids of the optimizers that have stepped in `_finished_step`."""

        # The file.
        self._written_table: TensorTable | None = None
        """The table that was written last."""
        self._num_tables = 0
        """How many tables were written; the last one has this number."""
        self._has_begun = False
        self._pending: list[_PendingRecord] = []
        self._unwritten: list[bytes] = []
        """Complete records that will be written with the next system call."""
        self._written_at_s = 0.0
        self._file: io.FileIO | None = open_rank_file(
            folder, run.collectives, rank, JOURNAL_SUFFIX, "journal"
        )
        header = {
            "journal": FORMAT_VERSION,
            "rank": rank,
            "ranks": run.topology.size,
            "virtual_ranks": run.settings.virtual_ranks,
            "every": every,
            "time": time.time(),
        }
        self._write(json_content(header))

    # Events

    def module_prepared(self, wrapped: Any) -> None:
        """Adds a module to those whose tensors are hashed."""
        self._modules.append(wrapped.module)
        self._are_tensors_known = False

    def optimizer_prepared(self, optimizer: Any, modules: Sequence[nn.Module]) -> None:
        """Adds an optimizer to those whose state is hashed."""
        self._optimizers.append(optimizer.inner)

    def begin(self, micro_batch: MicroBatch) -> None:
        """Writes the previous step if that has not been done, when a global batch begins."""
        if micro_batch.first:
            self._finish_step()
            self._find_tensors()
            self._may_have_dropped_gradients = bool(self._gradient_hashes)

    def before_backward(self, loss: Any, micro_batch: MicroBatch) -> None:
        """Discards hashes of gradients that the loop has cleared instead of making a step.

        If the loop has left out the optimizer's step, the gradients of that global batch are still
        there when the next one begins, and those of the next one are added to them. But if the loop
        has called `zero_grad()`, they are None, and their hashes must not be written.
        """
        if not self._may_have_dropped_gradients:
            return
        self._may_have_dropped_gradients = False

        are_kept = [parameter.grad is not None for parameter in self._parameters]
        if all(are_kept):
            return

        # Each virtual rank has an array with one hash for each parameter. The hash of a gradient
        # that was cleared is multiplied by 0, and others by 1.
        zeros_and_ones: Any = np.array(are_kept, np.int64)
        if self._device.type != "cpu":
            zeros_and_ones = copy_to_device(torch.from_numpy(zeros_and_ones), self._device)
        for hashes_of_parameters in self._gradient_hashes.values():
            hashes_of_parameters *= zeros_and_ones

    def leaf_gradient(
        self,
        micro_batch: MicroBatch,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
    ) -> None:
        """Hashes gradients of a virtual rank, before they are added to those of the others.

        The backward pass of one virtual rank may deliver its gradients in several groups, with one
        call for each group. For example, a model has the trained parameters a, b and c:

            group               hashes of the virtual rank after the call
            (c, frozen weight)  [0, 0, hash of c]
            (a, b)              [hash of a, hash of b, hash of c]
        """
        if not self._is_hashed(self._step.number):
            return

        # The same groups come again in every step, so their hashers are kept. A gradient is not
        # always where its parameter is: FSDP may keep shards in host memory.
        devices = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            devices.append(parameter.device if gradient is None else gradient.device)
        group = tuple(zip(map(id, parameters), devices, strict=True))
        if group not in self._hasher_of_group:
            self._hasher_of_group[group] = self._make_gradient_hasher(parameters, devices)
        hasher, indices_in_group, indices_in_model = self._hasher_of_group[group]
        # For (c, frozen weight), they are [0] and [2]: only the gradient of c is hashed.
        new_hashes = hasher.hashes([gradients[index] for index in indices_in_group])

        assert micro_batch.virtual_rank is not None
        virtual_rank = micro_batch.virtual_rank.number
        if virtual_rank not in self._gradient_hashes:
            no_hashes = zero_hashes(len(self._parameters), self._device)
            self._gradient_hashes[virtual_rank] = no_hashes
        # Added, as one optimizer step may cover several global batches.
        self._gradient_hashes[virtual_rank][indices_in_model] += new_hashes

    def clear_gradients(self) -> None:
        """Discards the hashes of the gradients of a global batch that was abandoned."""
        self._gradient_hashes.clear()

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Writes the previous step if this optimizer has already stepped in it.

        In that case the optimizer begins a new step, and the previous one was made without some
        of the other optimizers.
        """
        if id(optimizer) in self._stepped_optimizers:
            self._finish_step()
        self._find_tensors()  # needed if no loader has begun a micro-batch

    def step_finished(self, number: int) -> None:
        """Writes the losses of a step, or keeps them until its hashes are written, too.

        Called after the first optimizer of a step has stepped. The losses are read now, because the
        next global batch replaces them. The hashes of weights can only be computed when all
        optimizers have stepped. With the optimizers a and b, the calls are, in this order:

            step_finished(number)   keeps the losses
            after_step(a)
            after_step(b)           all have stepped: writes losses and hashes
        """
        training_pass = self._step.training_pass
        if self._has_virtual_ranks:
            losses: dict[int, Any] = dict(training_pass.loss_of_virtual_rank)
        else:
            losses = {self._run.topology.rank: training_pass.loss}

        if self._is_hashed(number):
            self._finished_step = number
            self._losses = losses
            self._stepped_optimizers.clear()  # `after_step` adds each of them, also the first one
        else:
            self._write_losses(number, losses)

    def after_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Writes the step once all optimizers have stepped."""
        self._stepped_optimizers.add(id(optimizer))
        if len(self._stepped_optimizers) == len(self._optimizers):
            self._finish_step()

    def pass_ended(self) -> None:
        """Writes the last step of a pass, even if not all optimizers have stepped."""
        self._finish_step()
        self._are_tensors_known = False

    def settle(self) -> None:
        """Writes everything to the file before a checkpoint is saved.

        If the run is killed and resumed from the checkpoint, its journal then has every step.
        """
        self._finish_step()
        self._write_pending(wait=True)
        self._flush()

    def close(self, failed: bool) -> None:
        """Writes what has not been written yet, and closes the file."""
        # After a failure, a GPU may never finish its work, so nothing here may wait for it.
        device_may_hang = failed and self._device.type == "cuda"
        if not device_may_hang:
            self._finish_step()
        self._write_pending(wait=not device_may_hang)
        self._flush()
        close_rank_file(self._file)

    def _is_hashed(self, step: int) -> bool:
        """Returns True if hashes are written at the step with this number."""
        return step % self._every == 0

    # Tensors

    def _find_tensors(self) -> None:
        """Looks up the tensors of all modules, if they are not known.

        They are looked up again after each pass over a loader (`pass_ended`) and after a module was
        prepared. This also decides which rank hashes which tensor. The first call writes what the
        training starts from: the manifest and the hashes of the weights.
        """
        if self._are_tensors_known:
            return
        self._are_tensors_known = True

        self._tensors = collect_tensors(self._modules)
        self._update_parameters()
        self._names = (*self._tensors.trained, *self._tensors.buffers)
        sizes = [tensor.nbytes for tensor in self._weights()]
        self._owners = owners_by_size(sizes, self._run.topology.size)

        if not self._has_begun:
            self._has_begun = True
            self._write_beginning()

    def _weights(self) -> list[Tensor]:
        """Returns the trained parameters and the present buffers, in the order of `_names`."""
        weights: list[Tensor] = [*self._parameters]
        for module, name in self._tensors.buffers.values():
            weights.append(getattr(module, name))
        return weights

    def _update_parameters(self) -> None:
        """Takes over the trained parameters, and drops hashers and hashes of the earlier ones."""
        ids_before = [id(parameter) for parameter in self._parameters]
        self._parameters = list(self._tensors.trained.values())
        ids_now = [id(parameter) for parameter in self._parameters]

        # The present step may have hashes of gradients already, in the order of the parameters.
        if ids_now != ids_before:
            self._gradient_hashes.clear()

        self._index_of_parameter = {identifier: index for index, identifier in enumerate(ids_now)}
        self._hasher_of_group.clear()  # the hashers know the old indices

    def _make_gradient_hasher(
        self, parameters: Sequence[Tensor], devices: Sequence[torch.device]
    ) -> _GradientHasher:
        """Builds the hasher for the gradients of a group of parameters.

        Example: a group has three parameters. The first and the last are the trained parameters 5
        and 7 of the model, and the second one is frozen. Then `indices_in_group` is [0, 2], and
        `indices_in_model` is [5, 7].

        Args:
            parameters: the parameters of the group.
            devices: the device of the gradient of each of them.
        """
        parts: list[TensorPart] = []
        indices_in_group: list[int] = []
        indices_in_model: list[int] = []
        for index_in_group, parameter in enumerate(parameters):
            index_in_model = self._index_of_parameter.get(id(parameter))
            if index_in_model is None:  # the parameter is not trained
                continue

            # Each gradient has a hash of its own, so there are as many hashes as parts.
            part = TensorPart(tuple(parameter.shape), parameter.dtype, hash_index=len(parts))
            parts.append(part)
            indices_in_group.append(index_in_group)
            indices_in_model.append(index_in_model)

        devices_of_hashed = [devices[index] for index in indices_in_group]
        hasher = SpreadHasher(parts, devices_of_hashed, num_hashes=len(parts), device=self._device)
        if self._device.type == "cpu":
            return _GradientHasher(hasher, indices_in_group, indices_in_model)

        # `indices_in_model` select elements of a tensor on the GPU, so they must be there, too.
        # `indices_in_group` select elements of a list in Python.
        indices_on_device = copy_to_device(torch.tensor(indices_in_model), self._device)
        return _GradientHasher(hasher, indices_in_group, indices_on_device)

    # Records

    def _write_beginning(self) -> None:
        """Writes the manifest, and hashes of all weights that the run starts from."""
        self._write(json_content({"manifest": run_manifest(self._run, self._strategy)}))

        tensors: dict[str, Tensor] = {**self._tensors.trained, **self._tensors.frozen}
        for name, (module, name_in_module) in self._tensors.buffers.items():
            tensors[name] = getattr(module, name_in_module)

        hashes = self._hashes_by_name(tensors)
        self._write(json_content({"begins_at": self._step.number, "weights": hashes}))

    def _hashes_by_name(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Returns the hashes of those tensors that this rank owns, as numbers without a sign."""
        owners = owners_by_size([t.nbytes for t in tensors.values()], self._run.topology.size)
        hasher = HashedTensors(self._run.topology.rank, self._device)
        each_has_its_own_entry = range(len(tensors))
        own = hasher.hashes(
            list(tensors.values()), entry_of_tensor=each_has_its_own_entry, owners=owners
        )

        names = list(tensors)
        unsigned_hash_of_name = {}
        for index, signed_hash in zip(own.entries, own.hashes.tolist(), strict=True):
            unsigned_hash_of_name[names[index]] = signed_hash % 2**64
        return unsigned_hash_of_name

    def _finish_step(self) -> None:
        """Writes the losses and hashes of the finished step; does nothing if it is written."""
        if self._finished_step is None:
            return
        step = self._finished_step
        self._finished_step = None

        weights = self._hash_weights()
        state = self._hash_state()
        self._write_table_if_changed(weights.entries, state.entries)

        # The order is that of `file_format`: the losses of all parts, the gradient hashes of all
        # parts, the hashes of the weights, and those of the optimizer state.
        parts = sorted(self._losses)  # virtual ranks, or this rank
        arrays = [self._bits_of_losses([self._losses[part] for part in parts])]
        if self._has_virtual_ranks:
            # A virtual rank without samples has no gradients.
            no_gradients = zero_hashes(len(self._parameters), self._device)
            arrays += [self._gradient_hashes.get(part, no_gradients) for part in parts]
        arrays += [weights.hashes, state.hashes]
        self._write_numbers(step_head(step, parts, self._num_tables), arrays)

        self._gradient_hashes.clear()
        self._losses = {}

    def _hash_weights(self) -> EntryHashes:
        """Hashes the parameters and buffers, each of which is hashed by one rank, its owner."""
        weights = self._weights()
        each_has_its_own_entry = range(len(weights))
        return self._weight_hasher.hashes(
            weights, entry_of_tensor=each_has_its_own_entry, owners=self._owners
        )

    def _hash_state(self) -> EntryHashes:
        """Hashes the state of the optimizers.

        The tensors of one parameter, such as its momentum, have one hash together, and the same
        owner as the parameter.
        """
        state = state_tensors(self._optimizers, self._parameters)
        owners_of_state = [self._owners[index] for index in state.parameter_indices]
        return self._state_hasher.hashes(
            state.tensors,
            entry_of_tensor=state.parameter_indices,
            owners=owners_of_state,
            keys=state.keys,
        )

    def _write_losses(self, number: int, losses: Mapping[int, Any]) -> None:
        """Writes a step without hashes.

        Args:
            number: number of the step.
            losses: losses by virtual rank, or by rank without virtual ranks.
        """
        parts = sorted(losses)
        if self._device.type == "cpu":
            # Without numpy, whose calls take a noticeable part of a short step.
            values = [float(losses[part]) for part in parts]
            # For the same reason, there is no system call for each record.
            self._write(loss_content(number, parts, values), may_write_later=True)
            return

        # On a GPU, the losses must first be copied to the host. A record consists of a head (the
        # step and its parts) and the losses. So the head is made now, and `_write_numbers` appends
        # the losses and writes the record once they are copied.
        head = loss_content(number, parts, losses=[])
        bits_of_losses = self._bits_of_losses([losses[part] for part in parts])
        self._write_numbers(head, [bits_of_losses])

    def _write_table_if_changed(
        self, hashed_weights: tuple[int, ...], hashed_states: tuple[int, ...]
    ) -> None:
        """Writes which tensors the hashes of the next steps belong to, if that has changed.

        Args:
            hashed_weights: the indices in `_names` of the tensors that this rank hashes.
            hashed_states: those of the parameters whose optimizer state this rank hashes.
        """
        table = TensorTable(
            names=self._names,
            num_parameters=len(self._parameters),
            hashed_weights=hashed_weights,
            hashed_states=hashed_states,
        )
        if table != self._written_table:
            self._written_table = table
            self._num_tables += 1
            self._write(table_content(table, self._num_tables))

    def _bits_of_losses(self, losses: Sequence[Any]) -> Any:
        """Returns the bits of each loss, as a float64, in an int64 array or tensor."""
        if self._device.type == "cpu":
            return np.array([float(loss) for loss in losses], np.float64).view(np.int64)
        if not losses:
            return torch.zeros(0, dtype=torch.int64, device=self._device)
        return torch.stack([self._move_loss(loss) for loss in losses]).view(torch.int64)

    def _move_loss(self, loss: Tensor | float) -> Tensor:
        """Returns a loss as a float64 on the GPU, without waiting for the GPU."""
        if isinstance(loss, Tensor):
            moved = loss.detach().to(self._device, torch.float64, non_blocking=True)
            return moved.reshape(())
        # `torch.tensor(loss, device=...)` would wait for the copy of the number.
        return torch.full((), loss, dtype=torch.float64, device=self._device)

    # The file

    def _write_numbers(self, head: bytes, arrays: Sequence[Any]) -> None:
        """Writes a record of 64-bit integers.

        On a GPU, this only starts to copy the integers to the host. The record is written by a
        later call, when they have arrived. On a CPU, the record may wait up to `WRITE_INTERVAL_S`
        (`may_write_later`), so that the records of several short steps are written at once.

        Args:
            head: the beginning of the record, before the integers.
            arrays: the integers, as arrays or tensors that are joined.
        """
        if self._device.type == "cpu":
            self._write(head + np.concatenate(arrays).tobytes(), may_write_later=True)
            return

        on_host, copy_event = start_copy_to_host(torch.cat(list(arrays)))
        self._pending.append(_PendingRecord(head, on_host, copy_event))
        self._write_pending(wait=False)

    def _write_pending(self, *, wait: bool) -> None:
        """Writes the records whose numbers have been copied from the GPU, in their order.

        Args:
            wait: True to wait for the copies that are not complete, and write these records, too.
        """
        while self._pending:
            record = self._pending[0]
            has_arrived = record.copy_event.query()
            if not has_arrived and not wait:
                return
            record.copy_event.synchronize()  # returns at once if the numbers have arrived
            self._pending.pop(0)

            # Several records may be collected for one system call.
            self._write(record.head + record.numbers.numpy().tobytes(), may_write_later=True)

    def _write(self, content: bytes, *, may_write_later: bool = False) -> None:
        """Appends a record to the file.

        Args:
            content: content of the record, without its frame.
            may_write_later: True to write the record together with later ones if the file was
                written to within the last `WRITE_INTERVAL_S`. With short steps, a system call for
                each of them would be noticeable.
        """
        self._unwritten.append(framed(content))
        now_s = time.monotonic()
        was_just_written = now_s - self._written_at_s < WRITE_INTERVAL_S
        if may_write_later and was_just_written:
            return
        self._written_at_s = now_s
        self._flush()

    def _flush(self) -> None:
        """Writes the appended records with a single system call.

        If the process is killed, only the last record can then be incomplete. If writing fails,
        the journal ends here with a warning, and the training goes on.
        """
        records = b"".join(self._unwritten)
        self._unwritten.clear()
        append_or_end(
            self._file, records, setting="journal", folder=self._folder, content="journal"
        )
