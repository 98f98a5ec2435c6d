"""Takes some training steps, measures their memory and time, and undoes them.

Only a real step shows what a step needs under any strategy: the first one makes the optimizer's
state, the buckets of DDP and the gathered parameters of FSDP, and the peak comes somewhere in the
second. The steps communicate as those of a training do, so all ranks take them.
"""

from __future__ import annotations

import statistics
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.batch.loader import Loader
from lockstep.errors import UsageError
from lockstep.extensions.memory_tensors import (
    LiveTensors,
    SavedTensors,
    around_calls,
    bytes_by_device,
    state_tensors,
    storages,
)
from lockstep.extensions.profiling import gpus_of, restored, synchronized_time
from lockstep.strategies.data_parallel.module import DataParallel
from lockstep.torch_compat import (
    compiled_code_runs_eagerly,
    is_sharded,
    members,
    outside_compiled_code,
)
from lockstep.training.optimizer import PreparedOptimizer
from lockstep.training.prepare import Preparer

NUM_TIMED_STEPS = 5
"""The time of a step is the median of this many global batches."""


def make_training_steps(
    preparer: Preparer, model: nn.Module, optimizer: Any, loader: Any, loss: Any
) -> TrainingSteps:
    """Checks the arguments of `World.memory` and returns the steps to be measured.

    Raises:
        UsageError: an argument is missing or not prepared, the loader is in use or empty, or the
            strategy is "diloco".
    """
    are_prepared = isinstance(optimizer, PreparedOptimizer) and isinstance(loader, Loader)
    if loss is None or not are_prepared:
        given = ", ".join(type(part).__name__ for part in (optimizer, loader, loss))
        raise UsageError(
            f"world.memory with {given} as optimizer, loader and loss",
            "training steps need all three, and the first two as world.prepare returned them",
            "call world.memory(model, optimizer, loader, loss) with these, or "
            "world.memory(model, optimizer) to count without a step",
        )

    why_no_batch = ""
    if loader.steps == 0:
        why_no_batch = "it is empty"
    elif _loop_is_running(loader):
        why_no_batch = "a loop over it is running"
    if why_no_batch:
        raise UsageError(
            "world.memory with a loader that has no batch to give",
            why_no_batch,
            "call it before the loop, with data for one global batch at least",
        )
    is_diloco = preparer.virtual_ranks is not None  # only there virtual ranks have own weights
    if is_diloco:
        raise UsageError(
            "world.memory with training steps under strategy='diloco'",
            "they would be steps of the replicas, which are not put back",
            "call world.memory(model, optimizer) to count without a step",
        )
    return TrainingSteps(preparer, model, optimizer, loader, loss)


def _loop_is_running(loader: Loader) -> bool:
    """Returns True if the script is in a loop over a loader."""
    # After a checkpoint of the middle of an epoch was loaded, the loader waits for the next loop,
    # which will begin with the global batch `start`.
    waits_for_next_loop = loader.start != 0
    return loader.mid_epoch and not waits_for_next_loop


class TrainingSteps:
    """Training steps that are measured and undone.

    Args:
        preparer: the preparer of the run.
        model: the prepared model.
        optimizer: the prepared optimizer.
        loader: the prepared loader.
        loss: computes the loss from the model and a batch.
    """

    def __init__(
        self,
        preparer: Preparer,
        model: nn.Module,
        optimizer: PreparedOptimizer,
        loader: Loader,
        loss: Callable[[nn.Module, Any], Tensor],
    ) -> None:
        self._preparer = preparer
        self._run = preparer.run
        self._model = model
        self._optimizer = optimizer
        self._loader = loader
        self._loss = loss
        self._gpus = gpus_of(self._run, [model])
        self.samples = 0
        """Samples of this rank's first micro-batch, with which the activations were counted."""
        self.seconds = 0.0
        """The time of a step."""
        self._saved_sizes: dict[str, dict[torch.device, int]] = {}
        """What the first micro-batch has kept for its backward pass (see `_count_saved`)."""
        self._gradient_storages: list[weakref.ref[torch.UntypedStorage]] = []
        """The storages of the gradients of the first step. Those that are alive after gradients
        were cleared belong to buckets."""

    def measure(self) -> dict[str, dict[torch.device, int]]:
        """Takes some steps and undoes them.

        In the first step, the memory that is kept for the backward pass is counted. In the second
        step, the peak is measured. The others are timed: `self.seconds` is their median.

        Returns:
            Bytes by device, for each of these attributes of `DeviceMemory`: `copies`,
            `activations`, `loss`, `state`, `peak`.
        """
        with self._undo(), closing(self._endless_batches()) as batches:
            sizes = self._step_and_count_saved(batches)

            # After the first step, the optimizer has a state.
            state = state_tensors(self._optimizer.inner)
            sizes["state"] = bytes_by_device(storages(state))

            # All devices that hold activations or a loss, and this rank's own.
            devices = {self._run.device, *sizes["activations"], *sizes["loss"]}
            sizes["peak"] = self._step_and_measure_peak(batches, devices)

            seconds_of_steps = [self._step(batches) for _ in range(NUM_TIMED_STEPS)]
            self.seconds = statistics.median(seconds_of_steps)
        return sizes

    def _step_and_count_saved(self, batches: Iterator[Any]) -> dict[str, dict[torch.device, int]]:
        """Takes the first step. Returns what its first micro-batch keeps for the backward pass.

        Returns:
            Bytes by device, for `copies`, `activations` and `loss` of `DeviceMemory`.
        """
        self._step(batches, is_first_measurement=True)
        return dict(self._saved_sizes)

    def _endless_batches(self) -> Generator[Any]:
        """Yields the batches of the loader again and again."""
        while True:
            yield from self._loader

    def _step(
        self,
        batches: Iterator[Any],
        context: AbstractContextManager[Any] | None = None,
        *,
        is_first_measurement: bool = False,
    ) -> float:
        """Takes one training step, which may consist of several micro-batches.

        Args:
            batches: the batches of the loader.
            context: a context that is entered around the computation of each micro-batch, so it
                must be one that can be entered again.
            is_first_measurement: True to count what the first micro-batch keeps for its backward
                pass (see `_count_saved`), and to note the storages of the gradients.

        Returns:
            The seconds it took, without those of the loader.
        """
        seconds = 0.0
        is_last = False
        while not is_last:
            batch = next(batches)
            micro_batch = self._loader.current  # describes the batch
            is_last = micro_batch.last
            begin = synchronized_time(self._gpus)
            with context or nullcontext():
                count_saved = is_first_measurement and micro_batch.first
                loss = self._compute_loss(batch, count_saved=count_saved)
                self._preparer.training_step.backward(loss)
                if is_first_measurement:
                    self._note_storages_of_gradients()

                # As in a user's loop: a prepared optimizer does nothing before the last
                # micro-batch.
                self._optimizer.step()
                self._optimizer.zero_grad()

            seconds += synchronized_time(self._gpus) - begin
        return seconds

    def _note_storages_of_gradients(self) -> None:
        """Sets `_gradient_storages` to the storages of the present gradients.

        DDP's gradients are views of larger buckets, which stay alive when the gradients are
        cleared. `_count_existing` finds the buckets by these storages.
        """
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        self._gradient_storages = [weakref.ref(storage) for storage in storages(gradients)]

    def _compute_loss(self, batch: Any, *, count_saved: bool) -> Any:
        """Runs the forward pass and the loss, and counts what they keep if this is asked for."""
        if not count_saved:
            return self._loss(self._model, batch)
        with self._count_saved(self._loader.current.local_rows):
            return self._loss(self._model, batch)  # it is still alive when the context is left

    @contextmanager
    def _count_saved(self, samples: int) -> Iterator[None]:
        """Counts what the forward pass and the loss, computed in this context, keep for backward.

        When the context is left, the bytes are put into `self._saved_sizes`, and the number of
        samples into `self.samples`. The loss must still be alive then, because it keeps alive what
        is counted.

        Args:
            samples: how many samples this rank has in this micro-batch.
        """
        model_storages = storages([*self._model.parameters(), *self._model.buffers()])
        saved_by_calls: list[SavedTensors] = []  # one for each call of the model, or of a replica
        saved_outside = SavedTensors()
        storages_of_used_parameters: set[torch.UntypedStorage] = set()  # filled in the context

        def watch_call(arguments: Any) -> AbstractContextManager[Any]:
            """Returns a context for a call of the model, which collects what the call saves."""
            saved = SavedTensors(arguments)
            saved_by_calls.append(saved)
            return saved.watch()

        with (
            saved_outside.watch(),
            around_calls(self._model, watch_call),
            self._collect_used_parameters(storages_of_used_parameters),
        ):
            yield

        # 1. Copies of parameters, which are kept for the backward pass too: the gathered parameters
        # of a sharded model, and the parameters of replicas on other devices.
        copies_of_parameters = storages_of_used_parameters - model_storages

        # 2. What else the calls of the model have saved. Each storage counts once.
        counted = model_storages | copies_of_parameters
        activations: Counter[torch.device] = Counter()
        for saved in saved_by_calls:
            activations.update(saved.count_and_add_to(counted))

        # 3. The rest: what no call of the model has saved.
        loss = saved_outside.count_and_add_to(counted)

        self.samples = samples
        self._saved_sizes = {
            "copies": bytes_by_device(copies_of_parameters),
            "activations": activations,
            "loss": loss,
        }

    @contextmanager
    def _collect_used_parameters(self, used: set[torch.UntypedStorage]) -> Iterator[None]:
        """Adds the parameters that layers compute with, in this context, to a set.

        They may be copies of the model's parameters if the model is sharded, or if it has replicas.
        For any other model nothing is added: the caller has the parameters of the model itself.

        Args:
            used: the storages of these parameters are added to it.
        """

        @outside_compiled_code
        def collect(module: nn.Module, args: Any) -> None:
            """Is called before the forward pass of each layer."""
            used.update(storages(module.parameters(recurse=False)))

        has_replicas = isinstance(self._model, DataParallel)
        has_copies = has_replicas or any(is_sharded(p) for p in self._model.parameters())
        with ExitStack() as hooks:
            if has_copies:
                for module in self._model.modules():
                    # The handle of a hook is a context manager, which removes the hook at the end.
                    handle = module.register_forward_pre_hook(collect)
                    hooks.enter_context(handle)
            yield

    def _step_and_measure_peak(
        self, batches: Iterator[Any], devices: Collection[torch.device]
    ) -> dict[torch.device, int]:
        """Takes a step. Returns the most memory that tensors take at one time in it, by device."""
        if self._run.device.type == "cuda":
            for device in devices:
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
            self._step(batches)
            return {device: torch.cuda.max_memory_allocated(device) for device in devices}
        return {torch.device("cpu"): self._step_and_measure_peak_on_cpu(batches)}

    def _step_and_measure_peak_on_cpu(self, batches: Iterator[Any]) -> int:
        """Takes a step. Returns the most bytes that CPU tensors take at one time in it.

        Each tensor is counted while it is alive, in all threads that compute: the main thread takes
        the step, and replicas compute in threads of their own. What is compiled runs eagerly.
        """
        # `live` is a context. A thread that has entered it counts each tensor that it makes. The
        # main thread enters it once, for the whole step, and each other thread around its calls.
        live = LiveTensors()
        self._count_existing(live)
        main_thread = threading.get_ident()

        def context_of_call(arguments: Any) -> AbstractContextManager[Any]:
            has_entered_live = threading.get_ident() == main_thread
            return nullcontext() if has_entered_live else live

        with compiled_code_runs_eagerly(), around_calls(self._model, context_of_call):
            self._step(batches, context=live)
        return live.peak

    def _count_existing(self, live: LiveTensors) -> None:
        """Counts what is alive before a step: the model, the optimizer's state, DDP's buckets."""
        live.count(storages([*self._model.parameters(), *self._model.buffers()]))
        live.count(storages(state_tensors(self._optimizer.inner)))

        # The gradients were cleared, but the buckets of DDP, whose storages they used, are alive.
        for weak_reference in self._gradient_storages:
            storage = weak_reference()
            if storage is not None:
                live.count([storage])

    @contextmanager
    def _undo(self) -> Iterator[None]:
        """Restores what steps change when the context is left.

        That is the values of parameters, buffers and optimizer state, the options of the
        optimizer's groups, the loader's position, the loss scaler, counters and random streams.
        """
        optimizer = self._optimizer.inner
        precision = self._preparer.precision

        # Tensors get their values back in place. A pipeline's other stages are on the meta device.
        tensors_to_restore: list[Tensor] = []
        for tensor in [*self._model.parameters(), *self._model.buffers()]:
            if not tensor.is_meta:
                tensors_to_restore.append(tensor)

        # Some dictionaries get the entries of a copy back, which removes entries that a step has
        # added: the optimizer's state, the state of each parameter, the options of each group of
        # parameters, and the buffers of each module.
        state: dict[Any, Any] = optimizer.state
        dictionaries_with_copies: list[tuple[dict[Any, Any], dict[Any, Any]]] = [
            (state, dict(state))
        ]
        for entries in [*optimizer.state.values(), *optimizer.param_groups]:
            dictionaries_with_copies.append((entries, _copy_entries(entries)))
            tensors_to_restore += [value for value in entries.values() if isinstance(value, Tensor)]
        for module in self._model.modules():
            buffers: dict[Any, Any] = members(module).buffers  # `module._buffers`
            dictionaries_with_copies.append((buffers, dict(buffers)))

        # The loader and the loss scaler load the state that they have now.
        scaler_state = precision.state_dict()
        loader_state = self._loader.state_dict()
        num_passes_ended = self._loader.training_passes.num_ended_in_run

        # `restored` also restores random streams, and `preserved` the counters of steps.
        with (
            restored(dictionaries_with_copies, tensors_to_restore, self._gpus),
            self._run.step.preserved(),
        ):
            try:
                yield
            finally:
                self._loader.load_state_dict(loader_state)
                self._loader.training_passes.num_ended_in_run = num_passes_ended
                self._optimizer.zero_grad()
                precision.load_state_dict(scaler_state)


def _copy_entries(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Copies the state of a parameter, or the options of a parameter group, of an optimizer.

    The copy refers to the same tensors and parameters, whose values are restored in place.
    """
    copied: dict[str, Any] = {}
    for name, value in entries.items():
        is_shared = isinstance(value, Tensor) or name == "params"
        copied[name] = value if is_shared else deepcopy(value)
    return copied
