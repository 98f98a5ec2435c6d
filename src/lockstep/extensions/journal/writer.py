"""Writes the journal: hashes of what this rank computed in each step.

What is written is described in `file_format`, and a hash in `hashing`. With virtual ranks there is
a hash of each gradient, before it is added to others; always there are hashes of weights and of
optimizer state after the step. Of steps between those that are hashed there are the losses, which
cost nearly nothing and say in which step two runs have parted. No rank sends anything for the
journal, and none waits for its GPU: numbers that are on their way to the host are written a step
later.
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
from lockstep.errors import SettingError
from lockstep.extensions.journal.file_format import (
    FORMAT_VERSION,
    JOURNAL_SUFFIX,
    RANK_INFIX,
    TensorTable,
    json_record,
    loss_content,
    step_head,
    table_record,
)
from lockstep.extensions.journal.hashing import TensorHasher, TensorPart, copy_to_device
from lockstep.extensions.journal.manifest import run_manifest
from lockstep.extensions.journal.tensors import (
    HashedTensors,
    NamedParameters,
    collect_tensors,
    owners_by_size,
    state_tensors,
)
from lockstep.extensions.ledger.file_format import record_bytes
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch

WRITE_INTERVAL_S = 0.2
"""A process that is killed loses the steps of at most this time."""
STRATEGIES_WITH_OTHER_WEIGHTS = {
    "pipeline": "each rank has the parameters of its own stage",
    "diloco": "replicas train weights of their own",
}
"""Strategies under which ranks have other weights, with the reason."""


def check_strategy(name: str) -> None:
    """Raises SettingError for a strategy under which there is no journal."""
    if name in STRATEGIES_WITH_OTHER_WEIGHTS:
        raise SettingError(
            f"journal with strategy={name!r}",
            f"{STRATEGIES_WITH_OTHER_WEIGHTS[name]}, and a journal is of one model on all ranks",
            "leave the journal out, or use strategy='ddp', 'fsdp' or 'hsdp'",
        )


class _LeafHasher(NamedTuple):
    """Hashes the gradients of some parameters."""

    hasher: TensorHasher
    places: list[int]
    """Which of the gradients are hashed: those of parameters that are trained."""
    columns: Any
    """The numbers of their parameters, on the device."""


class _PendingRecord(NamedTuple):
    """A record whose numbers may still be on their way from the GPU."""

    head: bytes
    numbers: Tensor
    copied: Any
    """A CUDA event that tells when they have arrived."""


class Journal(Extension):
    """Writes down hashes of what this rank computes.

    Args:
        folder: where the file is written; made if it does not exist.
        every: steps from one that is hashed to the next. Of all others the losses are written down.
        run: of this process.
        strategy: its name.

    Raises:
        SettingError: some rank cannot write there; raised on all ranks.
    """

    def __init__(self, folder: str, every: int, run: Run, strategy: str) -> None:
        self._folder = folder
        self._every = every
        self._run = run
        self._step = run.step
        self._strategy = strategy
        self._device = run.device
        rank = run.topology.rank
        self._modules: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self._has_virtual_ranks = run.settings.virtual_ranks is not None
        # What is known of the tensors, from the beginning of a pass.
        self._tensors = NamedParameters({}, {}, {})
        self._are_tensors_known = False
        self._parameters: list[nn.Parameter] = []
        self._names: tuple[str, ...] = ()
        """Of the parameters that are trained, then of the buffers."""
        self._owners: list[int] = []
        self._column: dict[int, int] = {}
        """The number of each parameter, by its id."""
        self._leaf_hashers: dict[tuple[int, ...], _LeafHasher] = {}
        self._weights = HashedTensors(rank, run.device)
        self._state = HashedTensors(rank, run.device)
        # What is known of the present step.
        self._gradients: dict[int, Any] = {}
        """By the number of the virtual rank, a hash of the gradient of each parameter. Those of all
        global batches are added up that the optimizer steps for."""
        self._losses: dict[int, Any] = {}
        self._finished_step: int | None = None
        """The number of a step that is over and not written yet."""
        self._stepped: set[int] = set()
        """The ids of the optimizers that have made it."""
        self._written_table: TensorTable | None = None
        self._has_begun = False
        self._pending: list[_PendingRecord] = []
        self._unwritten: list[bytes] = []
        """Records that were not written yet."""
        self._written_at_s = 0.0
        name = f"{RANK_INFIX}{rank}{JOURNAL_SUFFIX}"
        self._file: io.FileIO | None = open_rank_file(folder, run.collectives, name, "journal")
        header = {
            "journal": FORMAT_VERSION,
            "rank": rank,
            "ranks": run.topology.size,
            "virtual_ranks": run.settings.virtual_ranks,
            "every": every,
            "time": time.time(),
        }
        self._write(json_record(header))

    # Events

    def module_prepared(self, wrapped: Any) -> None:
        """Notes a module whose tensors are hashed."""
        self._modules.append(wrapped.module)
        self._are_tensors_known = False

    def optimizer_prepared(self, optimizer: Any, modules: Sequence[nn.Module]) -> None:
        """Notes an optimizer whose state is hashed."""
        self._optimizers.append(optimizer.inner)

    def begin(self, micro_batch: MicroBatch) -> None:
        """Writes down what the step before has left, and begins a new one."""
        if not micro_batch.first:
            return
        self._finish_step()
        self._find_tensors()

    def leaf_gradient(
        self,
        micro_batch: MicroBatch,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
    ) -> None:
        """Hashes gradients of a virtual rank."""
        if not self._is_hashed(self._step.number):
            return
        assert micro_batch.virtual_rank is not None
        key = tuple([id(parameter) for parameter in parameters])
        if key not in self._leaf_hashers:
            self._leaf_hashers[key] = self._make_leaf_hasher(parameters)
        hasher, places, columns = self._leaf_hashers[key]
        number = micro_batch.virtual_rank.number
        if number not in self._gradients:
            self._gradients[number] = self._zeros(len(self._parameters))
        self._gradients[number][columns] += hasher.hashes([gradients[place] for place in places])

    def clear_gradients(self) -> None:
        """Forgets the gradients of a global batch that was broken off."""
        self._gradients.clear()

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Writes down the step before, if this optimizer has made it: another one begins."""
        if id(optimizer) in self._stepped:
            self._finish_step()
        self._find_tensors()  # unless a loader has begun a micro-batch

    def step_finished(self, number: int) -> None:
        """Notes the losses of the step, before another one replaces them."""
        training_pass = self._step.training_pass
        if self._has_virtual_ranks:
            losses: dict[int, Any] = dict(training_pass.loss_of_virtual_rank)
        else:
            losses = {self._run.topology.rank: training_pass.loss}
        if not self._is_hashed(number):
            self._write_losses(number, losses)
            return
        self._finished_step = number
        self._stepped.clear()
        self._losses = losses

    def after_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Writes down the step after the last optimizer's, if all of them make it."""
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self._optimizers):
            self._finish_step()

    def pass_ended(self) -> None:
        """Writes down the last step of a pass, if not all optimizers have made it."""
        self._finish_step()
        self._are_tensors_known = False

    def settle(self) -> None:
        """Writes everything to the file, before a checkpoint is saved.

        So a run that is killed and resumed from the checkpoint lacks no step.
        """
        self._finish_step()
        self._write_pending(wait=True)
        self._flush()

    def close(self, failed: bool) -> None:
        """Writes down what is there, and closes the file."""
        # After a failure a GPU may never finish its work, so it is not waited for.
        device_may_hang = failed and self._device.type == "cuda"
        if not device_may_hang:
            self._finish_step()
        self._write_pending(wait=not device_may_hang)
        self._flush()
        close_rank_file(self._file)

    def _is_hashed(self, number: int) -> bool:
        """Returns True if hashes of the step of this number are written down."""
        return number % self._every == 0

    # Tensors

    def _find_tensors(self) -> None:
        """Finds out which tensors there are, at the beginning of a pass, and which rank hashes
        which. For the first time it writes down what the training begins with.
        """
        if self._are_tensors_known:
            return
        self._are_tensors_known = True
        self._tensors = collect_tensors(self._modules)
        if len(self._tensors.trained) != len(self._parameters):
            self._gradients.clear()
        self._parameters = list(self._tensors.trained.values())
        self._names = (*self._tensors.trained, *self._tensors.buffers)
        sizes = [parameter.nbytes for parameter in self._parameters]
        for module, name in self._tensors.buffers.values():
            sizes.append(getattr(module, name).nbytes)
        self._owners = owners_by_size(sizes, self._run.topology.size)
        self._column = {id(parameter): n for n, parameter in enumerate(self._parameters)}
        self._leaf_hashers.clear()
        if not self._has_begun:
            self._has_begun = True
            self._write_beginning()

    def _make_leaf_hasher(self, parameters: Sequence[Tensor]) -> _LeafHasher:
        """Returns what hashes the gradients of parameters."""
        parts: list[TensorPart] = []
        places: list[int] = []
        columns: list[int] = []
        for place, parameter in enumerate(parameters):
            column = self._column.get(id(parameter))
            if column is not None:  # None: it is not trained
                parts.append(TensorPart(tuple(parameter.shape), parameter.dtype, len(parts)))
                places.append(place)
                columns.append(column)
        columns_on_device: Any = columns
        if self._device.type != "cpu":
            columns_on_device = copy_to_device(torch.tensor(columns), self._device)
        hasher = TensorHasher(parts, len(parts), self._device)
        return _LeafHasher(hasher, places, columns_on_device)

    # Records

    def _write_beginning(self) -> None:
        """Writes down the manifest, and hashes of all weights that the run begins with."""
        self._write(json_record({"manifest": run_manifest(self._run, self._strategy)}))
        tensors: dict[str, Tensor] = {**self._tensors.trained, **self._tensors.frozen}
        for name, (module, name_in_module) in self._tensors.buffers.items():
            tensors[name] = getattr(module, name_in_module)
        names = list(tensors)
        owners = owners_by_size([t.nbytes for t in tensors.values()], self._run.topology.size)
        hasher = HashedTensors(self._run.topology.rank, self._device)
        hashes = hasher.hashes(list(tensors.values()), range(len(names)), owners, [])
        weights = {}
        for result, number in zip(hasher.results, hashes.tolist(), strict=True):
            weights[names[result]] = number % 2**64
        self._write(json_record({"begins_at": self._step.number, "weights": weights}))

    def _finish_step(self) -> None:
        """Writes down the step that is over, if there is one."""
        if self._finished_step is None:
            return
        number = self._finished_step
        self._finished_step = None
        tensors: list[Tensor] = [*self._parameters]
        for module, name in self._tensors.buffers.values():
            tensors.append(getattr(module, name))
        weights = self._weights.hashes(tensors, range(len(tensors)), self._owners, [])
        state, parameters, keys = state_tensors(self._optimizers, self._parameters)
        owners = [self._owners[parameter] for parameter in parameters]
        hashes_of_state = self._state.hashes(state, parameters, owners, keys)
        self._write_table()
        parts = sorted(self._losses)
        numbers = [self._as_numbers([self._losses[part] for part in parts])]
        if self._has_virtual_ranks:
            no_gradients = self._zeros(len(self._parameters))
            numbers += [self._gradients.get(part, no_gradients) for part in parts]
        numbers += [weights, hashes_of_state]
        self._gradients.clear()
        self._losses = {}
        self._write_numbers(step_head(number, parts), numbers)

    def _write_losses(self, number: int, losses: Mapping[int, Any]) -> None:
        """Writes down a step of which only the losses are kept, by the numbers of its parts."""
        parts = sorted(losses)
        if self._device.type == "cpu":  # without numpy, whose calls would be noticed in short steps
            values = [float(losses[part]) for part in parts]
            self._write(loss_content(number, parts, values), wait=True)
            return
        head = loss_content(number, parts, [])
        self._write_numbers(head, [self._as_numbers([losses[part] for part in parts])])

    def _write_table(self) -> None:
        """Writes down which tensors the hashes of a step belong to, if that has changed."""
        table = TensorTable(
            self._names, len(self._parameters), self._weights.results, self._state.results
        )
        if table != self._written_table:
            self._write_pending(wait=True)
            self._written_table = table
            self._write(table_record(table))

    def _zeros(self, count: int) -> Any:
        """Returns as many hashes of zeros."""
        if self._device.type == "cpu":
            return np.zeros(count, np.int64)
        return torch.zeros(count, dtype=torch.int64, device=self._device)

    def _as_numbers(self, losses: Sequence[Any]) -> Any:
        """Returns the bits of losses in float64, as integers."""
        if self._device.type == "cpu":
            return np.array([float(loss) for loss in losses], np.float64).view(np.int64)
        tensors = [torch.as_tensor(loss, device=self._device).double() for loss in losses]
        if not tensors:
            return torch.zeros(0, dtype=torch.int64, device=self._device)
        return torch.stack([tensor.reshape(()) for tensor in tensors]).view(torch.int64)

    # The file

    def _write_numbers(self, head: bytes, numbers: Sequence[Any]) -> None:
        """Writes a record of 64-bit integers, on a GPU when they have arrived on the host."""
        if self._device.type == "cpu":
            self._write(head + np.concatenate(numbers).tobytes(), wait=True)
            return
        joined = torch.cat(list(numbers))
        on_host = torch.empty(joined.shape, dtype=torch.int64, pin_memory=True)
        on_host.copy_(joined, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(self._device))
        self._pending.append(_PendingRecord(head, on_host, copied))
        self._write_pending(wait=False)

    def _write_pending(self, *, wait: bool) -> None:
        """Writes the records whose numbers have arrived.

        Args:
            wait: wait for those that have not.
        """
        while self._pending:
            record = self._pending[0]
            if not wait and not record.copied.query():
                return
            record.copied.synchronize()
            self._pending.pop(0)
            self._write(record.head + record.numbers.numpy().tobytes(), wait=True)

    def _write(self, content: bytes, *, wait: bool = False) -> None:
        """Appends a record.

        Args:
            content: of the record.
            wait: write it with later ones, if the last ones were written just now. A system call
                for each step would be noticed if steps are short.
        """
        self._unwritten.append(record_bytes(content))
        now_s = time.monotonic()
        if not wait or now_s - self._written_at_s >= WRITE_INTERVAL_S:
            self._written_at_s = now_s
            self._flush()

    def _flush(self) -> None:
        """Writes the records that were appended, by one system call.

        So whatever ends the process, only the last record can be incomplete. If writing fails the
        journal ends here with a warning, and the training goes on.
        """
        records = b"".join(self._unwritten)
        self._unwritten.clear()
        append_or_end(
            self._file, records, setting="journal", folder=self._folder, content="journal"
        )
