"""`lockstep.init` makes a process part of a run and returns its `World`, the script's view of it.

A `World` is a thin facade: its methods pass their arguments on to the parts of Lockstep that do the
work. A *global batch* holds the samples of one optimizer step, over all ranks; each rank
computes its part of it in one or more *micro-batches*.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, overload

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from lockstep import __version__
from lockstep.batch.epochs import Epochs
from lockstep.batch.loader import Loader
from lockstep.batch.source import Shard, make_source
from lockstep.batch.weighing import Weight
from lockstep.communication.traffic import traffic
from lockstep.distributed import process_group
from lockstep.distributed.determinism import Determinism
from lockstep.distributed.device import add_memory_advice
from lockstep.distributed.process_group import main_process_first
from lockstep.distributed.seeding import seed_everything, seed_rank
from lockstep.errors import UsageError, warn
from lockstep.extensions import add_extensions
from lockstep.extensions.report.closing import print_closing
from lockstep.extensions.report.console import (
    print_choices,
    print_line,
    print_note,
    title_of,
)
from lockstep.extensions.report.logged import log, means_over_ranks
from lockstep.extensions.report.progress import check_loader, progress as show_progress
from lockstep.familiar_names import ARGUMENT_OF_WORD, error_of_world_name
from lockstep.keyword_arguments import (
    check_keywords,
    check_keywords_of_methods,
    frame_of_caller,
)
from lockstep.language import translate
from lockstep.session.extension import Place
from lockstep.settings import DECLARATIONS, Choice, choices_from_file, resolve_settings
from lockstep.strategies.base import Strategy, StrategyPlan
from lockstep.strategies.find import find_strategy
from lockstep.training.prepare import Preparer
from lockstep.training.unpacking import check_unpacking
from lockstep.training.unsent_gradients import load_unsent_gradients, unsent_gradients

if TYPE_CHECKING:
    from lockstep.checkpoint.checkpointer import Checkpoint
    from lockstep.extensions.memory_table import Memory


Data: TypeAlias = DataLoader[Any]
Preparable: TypeAlias = nn.Module | Optimizer | LRScheduler
A = TypeVar("A", bound=Preparable)
B = TypeVar("B", bound=Preparable)
C = TypeVar("C", bound=Preparable)
D = TypeVar("D", bound=Preparable)
T = TypeVar("T")
ScalarT = TypeVar("ScalarT", int, float, str)

_open_worlds: set[World] = set()
_steps_at_close: int | None = None
"""`World.step` of the world that was closed last; None if none was closed."""


def close_current() -> None:
    """Closes the world of this process if it is still open."""
    for world in list(_open_worlds):
        world.close()


def trained_steps() -> int | None:
    """Returns `World.step` of this process, even after its world was closed; None without one."""
    for world in _open_worlds:
        return world.step
    return _steps_at_close


@check_keywords_of_methods("world")
class World:
    """One process's view of the run, made by `lockstep.init`.

    Attributes:
        rank: the number of this process, `0 <= rank < size`.
        size: the number of processes of the run.
        local_rank: the number of this process on its machine.
        local_size: the number of processes on its machine.
        node_rank: the number of its machine.
        device: where this process computes.
        is_main: True on rank 0.
        strategy: the name of the strategy.
    """

    def __init__(
        self, run: process_group.Run, strategy: Strategy, plan: StrategyPlan, choices: list[Choice]
    ) -> None:
        self.rank = run.topology.rank
        self.size = run.topology.size
        self.local_rank = run.topology.local_rank
        self.local_size = run.topology.local_size
        self.node_rank = run.topology.node_rank
        self.is_main = run.topology.is_main
        self.device = run.device
        self.strategy = strategy.name
        self._plan = plan
        self._run = run
        self._preparer = Preparer(run, strategy, plan)
        self._preparer.choices += choices
        add_extensions(run, strategy, plan, self._preparer, __version__)
        self._ranks_have_own_seeds = False
        self._closed = False
        self._num_calls_of_main_process_first = 0
        self._epochs = Epochs(self._preparer.loaders, run.step)
        self._resumed_step: int | None = None
        """The step of the checkpoint that was resumed last; None if none was."""
        _open_worlds.add(self)
        atexit.register(process_group.close_at_exit, self._close)

    @property
    def epoch(self) -> int:
        """The current epoch of `epochs`, counted from 0."""
        return self._epochs.present

    @property
    def step(self) -> int:
        """The number of optimizer steps, one for each global batch, since the training began."""
        return self._run.step.number

    @property
    def is_last_micro_batch(self) -> bool:
        """True if the current micro-batch is the last of its global batch: the optimizer steps."""
        return self._run.step.micro_batch_of_loop.last

    @property
    def is_repeated_micro_batch(self) -> bool:
        """True if the current micro-batch is computed only to check a device (`check_devices`).

        Its gradient and loss count for nothing; leave it out of sums and counts of your own.
        """
        return self._run.step.micro_batch_in_use.is_repeat

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, size={self.size}, device='{self.device}')"

    if not TYPE_CHECKING:  # a type checker would take it that a World has every attribute

        def __getattr__(self, name: str) -> Any:
            """Raises a helpful error for the name of another library; see `familiar_names`.

            Python calls this method if an attribute was not found.
            """
            known_error = error_of_world_name(name)
            if known_error is not None:
                raise known_error

            # Raise Python's own error, or the AttributeError that a property has raised.
            return self.__getattribute__(name)

    def __enter__(self) -> World:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        step = self._run.step
        add_memory_advice(error, step.latest_micro_batch.local_rows, step.num_devices)
        self._preparer.add_notes(error)
        self._close(failed=error is not None)

    # Preparing

    # A type checker knows what `prepare` returns if DataLoaders come last. A prepared module,
    # optimizer or scheduler is used like the one that was given, and has its type.
    @overload
    def prepare(self, x: Data, /) -> Loader: ...
    @overload
    def prepare(self, x: Data, y: Data, /) -> tuple[Loader, Loader]: ...
    @overload
    def prepare(self, x: Data, y: Data, z: Data, /) -> tuple[Loader, Loader, Loader]: ...
    @overload
    def prepare(self, a: A, /) -> A: ...
    @overload
    def prepare(self, a: A, x: Data, /) -> tuple[A, Loader]: ...
    @overload
    def prepare(self, a: A, x: Data, y: Data, /) -> tuple[A, Loader, Loader]: ...
    @overload
    def prepare(self, a: A, x: Data, y: Data, z: Data, /) -> tuple[A, Loader, Loader, Loader]: ...
    @overload
    def prepare(self, a: A, b: B, /) -> tuple[A, B]: ...
    @overload
    def prepare(self, a: A, b: B, x: Data, /) -> tuple[A, B, Loader]: ...
    @overload
    def prepare(self, a: A, b: B, x: Data, y: Data, /) -> tuple[A, B, Loader, Loader]: ...
    @overload
    def prepare(
        self, a: A, b: B, x: Data, y: Data, z: Data, /
    ) -> tuple[A, B, Loader, Loader, Loader]: ...
    @overload
    def prepare(self, a: A, b: B, c: C, /) -> tuple[A, B, C]: ...
    @overload
    def prepare(self, a: A, b: B, c: C, x: Data, /) -> tuple[A, B, C, Loader]: ...
    @overload
    def prepare(self, a: A, b: B, c: C, x: Data, y: Data, /) -> tuple[A, B, C, Loader, Loader]: ...
    @overload
    def prepare(
        self, a: A, b: B, c: C, x: Data, y: Data, z: Data, /
    ) -> tuple[A, B, C, Loader, Loader, Loader]: ...
    @overload
    def prepare(self, a: A, b: B, c: C, d: D, /) -> tuple[A, B, C, D]: ...
    @overload
    def prepare(self, a: A, b: B, c: C, d: D, x: Data, /) -> tuple[A, B, C, D, Loader]: ...
    @overload
    def prepare(
        self, a: A, b: B, c: C, d: D, x: Data, y: Data, /
    ) -> tuple[A, B, C, D, Loader, Loader]: ...
    @overload
    def prepare(self, *objects: Any) -> Any: ...
    def prepare(self, *objects: Any) -> Any:
        """Places and wraps modules, optimizers, schedulers and DataLoaders, given in any order.

        A DataLoader's `batch_size` is that of the global batch, of which each rank gets its part.
        Optimizers and schedulers step once per global batch. On more than one process a module's
        BatchNorm layers are synchronised, with two exceptions: `sync_batchnorm=False` turns this
        off, and under `virtual_ranks` only `sync_batchnorm=True` turns it on.

        Returns:
            The prepared objects in the order given; for a single object, that object.

        Raises:
            UsageError: an object of another kind, one that is prepared already, or an optimizer
                with parameters of no prepared module; or results that are unpacked into variables
                in another order than the objects were given.
            DataError: a DataLoader without batch size or length.
            RanksDifferError: the ranks have different models or data.
        """
        self._check_open("prepare")
        if not objects:
            raise UsageError("world.prepare()", "nothing was given", "pass the model, ...")

        # Raises if the caller's code assigns the results to variables in another order.
        check_unpacking(objects, frame_of_caller())
        prepared = self._preparer.prepare(objects)

        # So far all ranks have drawn the same random numbers, and so have built the same model.
        # From now on each rank draws its own numbers, for dropout for example. If there are virtual
        # ranks, each of these has its own numbers instead.
        has_module = any(isinstance(thing, nn.Module) for thing in objects)
        has_virtual_ranks = self._run.settings.virtual_ranks is not None
        if has_module and not has_virtual_ranks and not self._ranks_have_own_seeds:
            seed_rank(self._run.settings.seed, self._run.collectives.data_parallel.rank)
            self._ranks_have_own_seeds = True

        self._print_choices()
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def loader(  # noqa: PLR0913 - one place for all options of a loader
        self,
        data: Dataset[Any] | Iterable[Any] | DataLoader[Any],
        batch_size: int | None = None,
        *,
        batch_size_per_device: int | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        micro_batch_size: int | str | None = None,
        num_micro_batches: int | None = None,
        shares: Any = None,
        weight: Weight | None = None,
        sample_rng: bool = True,
        collate_fn: Callable[[Any], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        shard: Shard = None,
        **options: Any,
    ) -> Loader:
        """Returns a prepared loader, with options that a DataLoader does not have.

        Args:
            data: a map-style dataset or a stream (an IterableDataset, or another object that can be
                iterated again and again), or a DataLoader, which already has `batch_size`,
                `shuffle`, `drop_last`, `collate_fn` and `options`.
            batch_size: the number of samples of the global batch.
            batch_size_per_device: the number of samples of each device, instead of `batch_size`.
            shuffle: True for a new order in every epoch, the same on any number of devices.
            drop_last: True to leave out a last batch that is not full.
            micro_batch_size: the most samples that a rank computes at a time, or `"auto"`.
            num_micro_batches: the number of micro-batches of a global batch, instead of
                `micro_batch_size`. It is the same on any number of ranks, and so are the statistics
                of BatchNorm then.
            shares: how the batch is divided, `"1:2"` or `"auto"`; None: as set by `init`.
            weight: a function that returns a batch's weight in the mean, such as its number of
                tokens: then every token counts the same, whatever batch it is in. It gets the batch
                on the CPU.
            sample_rng: True to give every sample random numbers of its own, the same on any number
                of devices; False for datasets that draw none, which are then read in whole batches.
            collate_fn: joins samples into a batch.
            transform: for a stream: applied to each sample of this rank.
            shard: for a stream: how a rank gets its part. If it is left out, every rank reads the
                whole stream and keeps its part; a function `shard(start, step)` returns the
                samples start, start + step, ...; False: the stream splits itself over the ranks.
            **options: of `torch.utils.data.DataLoader`: `num_workers`, `prefetch_factor`, ...

        Raises:
            DataError, SettingError: data or sizes that make no global batch.
            RanksDifferError: the ranks have data of different lengths.
        """
        self._check_open("loader")
        source = make_source(
            data,
            batch_size,
            per_device=batch_size_per_device,
            devices=self._plan.num_devices,
            shuffle=shuffle,
            drop_last=drop_last,
            collate=collate_fn,
            transform=transform,
            shard=shard,
            options=options,
        )
        return self._preparer.add_loader(
            source,
            micro_batch_size=micro_batch_size,
            num_micro_batches=num_micro_batches,
            shares=shares,
            weight=weight,
            sample_rng=sample_rng,
        )

    # The training step

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Runs the backward pass, weighted so that the step has the gradient of the global mean.

        Args:
            loss: one element: the mean over this rank's samples of the micro-batch, or with
                `weight=` the mean over their weights.
            **options: of `torch.autograd.backward`, such as `retain_graph`.

        Raises:
            UsageError: the loss is not a scalar tensor with a gradient, or is NaN; or gradients of
                earlier micro-batches are gone, or would be mixed with another optimizer's.
        """
        self._preparer.training_step.backward(loss, **options)

    def loss(self, *losses: object) -> float | None:
        """Returns the loss of the global batch, from all losses that `backward` got on all ranks.

        After the training loop it is the loss of the last global batch that was trained. All ranks
        call it together; it waits for the device.

        Args:
            losses: nothing may be given. `world.loss(loss)` is an error that says what to call.

        Returns:
            The loss; None for a micro-batch that is not the last of its global batch.

        Raises:
            UsageError: called before the first `backward` of a loop, or with a loss.
        """
        if losses:
            raise UsageError(
                "world.loss(loss)",
                "it takes no argument: it returns the loss of the global batch, which it knows "
                "from world.backward",
                "call world.backward(loss), and then world.loss()",
            )
        if not self.is_last_micro_batch:
            return None
        return self._preparer.training_step.loss()

    def clip_grad_norm_(
        self, model: nn.Module, max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Clips the gradient of the global batch by the norm of the whole gradient.

        Returns:
            The norm before clipping; None for a micro-batch after which no optimizer steps.
        """
        if not self._run.step.micro_batch.closes_step:
            return None
        return self._preparer.training_step.clip(model, max_norm, norm_type)

    # Communication between ranks

    @overload
    def sum(self, value: Tensor) -> Tensor: ...
    @overload
    def sum(self, value: int) -> int: ...
    @overload
    def sum(self, value: float) -> float: ...
    @overload
    def sum(self, value: Any) -> Any: ...
    def sum(self, value: Any) -> Any:
        """Returns on every rank the sum over all ranks.

        Args:
            value: a tensor, a number, or a nested container of them.
        """
        total = self._run.collectives.sum(value)
        self._run.extensions.summed(value, total)
        return total

    @overload
    def mean(self, value: Tensor) -> Tensor: ...
    @overload
    def mean(self, value: float) -> float: ...
    @overload
    def mean(self, value: Any) -> Any: ...
    def mean(self, value: Any) -> Any:
        """Returns the mean over ranks. For a mean over samples divide two sums."""
        return self._run.collectives.mean(value)

    def max(self, value: T) -> T:
        """Returns the largest value of all ranks; NaN if any rank has NaN."""
        result: T = self._run.collectives.max(value)
        return result

    def min(self, value: T) -> T:
        """Returns the smallest value of all ranks; NaN if any rank has NaN."""
        result: T = self._run.collectives.min(value)
        return result

    @overload
    def gather(self, value: Tensor, *, gradient: bool = False) -> Tensor: ...
    @overload
    def gather(self, value: ScalarT, *, gradient: bool = False) -> list[ScalarT]: ...
    @overload
    def gather(self, value: Any, *, gradient: bool = False) -> Any: ...
    def gather(self, value: Any, *, gradient: bool = False) -> Any:
        """Returns all ranks' values: tensors joined along the first dimension, numbers as lists.

        Args:
            value: a tensor, a number, or a nested container of them.
            gradient: True if gradients are to flow back to the tensors of all ranks, as a
                contrastive loss over the whole batch needs. With `world.backward` they are exact
                for parts of any sizes. For metrics no gradients are needed.

        Raises:
            UsageError: `gradient` is True while a batch is not on all ranks at once: with
                micro-batches or virtual ranks, or under `pipeline` and `diloco`.
        """
        if gradient:
            self._check_gathers_whole_batch()
        return self._run.collectives.gather(value, gradient=gradient)

    def _check_gathers_whole_batch(self) -> None:
        """Raises UsageError if the ranks do not hold the whole global batch at the same time."""
        num_micro_batches = self._run.step.micro_batch.num_micro_batches
        if self._run.settings.virtual_ranks is not None:
            found = "with virtual_ranks a process computes one part of the batch after the other"
        elif not self._preparer.strategy.computes_batch_side_by_side:
            found = f"under {self.strategy} the ranks do not compute one batch side by side"
        elif num_micro_batches > 1:
            found = (
                f"it would gather one of {num_micro_batches} micro-batches, not the global batch"
            )
        else:
            return

        raise UsageError(
            "world.gather(..., gradient=True)",
            found,
            "compute such a loss without micro-batches, under single, ddp or fsdp",
        )

    def broadcast(self, value: T | None, source: int = 0) -> T:
        """Returns the value of rank `source` on every rank; the other ranks may pass None."""
        result: T = self._run.collectives.broadcast(value, source)
        return result

    def barrier(self) -> None:
        """Waits until every rank has called it."""
        self._run.collectives.barrier()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Returns a context: rank 0 runs its block first, the others when rank 0 is done."""
        self._num_calls_of_main_process_first += 1
        return main_process_first(self._run, str(self._num_calls_of_main_process_first))

    # Output

    def print(self, *values: object, sep: str = " ") -> None:
        """Prints on rank 0 only, above a running progress bar."""
        if self.is_main:
            print_line(sep.join(str(value) for value in values))

    def log(self, **values: float | Tensor) -> None:
        """Logs values for the report, for trackers, and for what `progress` shows.

        In a loop over a prepared loader each value counts as the mean over the present micro-batch,
        and the means of the pass are over the samples of all ranks (`means`). Elsewhere values are
        recorded as they are; if several ranks record one, the report has the mean of the ranks.
        Nothing waits for other ranks, and what cannot be logged is left out with a warning.

        Args:
            values: by name, one real number each, or a tensor with one element. The device is not
                waited for.
        """
        log(self._run, self.epoch, values)

    def means(self) -> dict[str, float]:
        """Returns the means of what was logged, over the samples of all ranks, by name.

        They are those of the present pass over a loader, or else of the pass that ended last. All
        ranks call it together; it waits for the device.

        Raises:
            UsageError: the ranks have logged in different passes.
        """
        self._check_open("means")
        return means_over_ranks(self._run)

    def progress(self, loader: Loader, description: str | None = None) -> Iterator[Any]:
        """Iterates the loader. Rank 0 shows its progress, its speed, and what is logged."""
        check_loader(loader)
        text = f"epoch {self.epoch}" if description is None else description
        return show_progress(
            loader,
            self._run.collectives,
            self._run.step,
            text,
            done=loader.start,  # global batches that a resumed epoch leaves out
        )

    def memory(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        loader: Loader | None = None,
        loss: Callable[[nn.Module, Any], Tensor] | None = None,
    ) -> Memory:
        """Measures what each device holds for a prepared model; see `extensions.memory.measure`."""
        from lockstep.extensions.memory import measure  # few scripts call it

        self._check_open("memory")
        return measure(self._preparer, model, optimizer, loader, loss)

    # Epochs and checkpoints

    def epochs(self, total: int) -> Iterator[int]:
        """Yields the epochs from 0, or from where a checkpoint was resumed, to `total` - 1."""
        self._preparer.schedule_lengths.check_epochs(total)
        if self._resumed_step is not None and self.epoch >= total and self.is_main:
            print_note(
                translate(
                    f"nothing is left of world.epochs({total}): the run was resumed at epoch "
                    f"{self.epoch}, step {self.step}; a larger number trains on, and another "
                    "checkpoint folder begins anew"
                )
            )
        return self._epochs.run(total)

    def checkpoint(
        self,
        folder: str | Path,
        /,
        *unnamed_objects: Any,
        keep: int = 2,
        every: int | timedelta | None = None,
        best: Literal["min", "max"] | None = None,
        busy: Literal["wait", "skip"] = "wait",
        asynchronous: bool = True,
        memory: bool | None = None,
        **state: Any,
    ) -> Checkpoint:
        """Returns an object that saves and resumes: `.save()`, `.step()`, `.resume()`, `.wait()`.

        Args:
            folder: where checkpoints are saved; made if it does not exist.
            *unnamed_objects: refused, as the files are named after what is saved.
            keep: how many of the newest checkpoints are kept.
            every: the number of steps, or the time, after which `.step()` saves.
            best: keeps the checkpoint with the smallest or largest `.save(metric=...)` too.
            busy: what a save does while an earlier one is being written.
            asynchronous: False if `.save()` is to return when everything is on disk.
            memory: True to keep each step in memory of the launcher too, whatever it costs: if a
                rank fails, only the step under way is lost. False to keep none. By default, if
                `lockstep run` may start the ranks again, steps are kept as often as it costs little
                time.
            **state: what belongs to the training: `model=`, `optimizer=`, `loader=`, ...
        """
        from lockstep.checkpoint.checkpointer import Checkpoint
        from lockstep.checkpoint.checks import check_all_are_named
        from lockstep.checkpoint.schedule import Policy  # not all scripts save

        self._check_open("checkpoint")
        check_all_are_named(unnamed_objects)
        policy = Policy(keep=keep, every=every, best=best, busy=busy, asynchronous=asynchronous)
        self._run.checkpoint_folders.append(str(folder))
        self._warn_of_unsaved_schedulers(folder, state)

        return Checkpoint(
            folder,
            self._run,
            policy,
            state,
            world=self,
            replicas=self._preparer.virtual_ranks,
            # With virtual ranks, all ranks share one stream of random numbers.
            common_stream=self._preparer.streams,
            memory=memory,
            # For steps that are kept in memory: to ask the checks would take too long in each step.
            world_state_without_checks=self._state_dict_without_checks,
        )

    def _warn_of_unsaved_schedulers(self, folder: str | Path, state: dict[str, Any]) -> None:
        """Warns of a scheduler that is not saved in a checkpoint although its optimizer is.

        Args:
            folder: folder of the checkpoint, for the message.
            state: the objects to save, as passed to `checkpoint`.
        """
        # A script may save the prepared scheduler or its own one, which is inside of it.
        saved_ids = {id(value) for value in state.values()}
        for scheduler in self._preparer.schedulers:
            optimizer_is_saved = id(scheduler.prepared_optimizer) in saved_ids
            scheduler_is_saved = id(scheduler) in saved_ids or id(scheduler.inner) in saved_ids
            if optimizer_is_saved and not scheduler_is_saved:
                warn(
                    f"world.checkpoint({str(folder)!r}, ...) without a scheduler",
                    found=f"the optimizer is saved, and the {type(scheduler.inner).__name__} that "
                    "was prepared with it is not: a resumed run would begin its schedule anew",
                    do="name it too: world.checkpoint(..., scheduler=scheduler)",
                )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the run itself: epoch, step, and the loss scaler.

        If gradients are compressed, `state` has by rank the rounding errors that this rank has not
        sent yet.
        """
        self._run.extensions.settle()
        return self._state_dict_without_checks()

    def _state_dict_without_checks(self) -> dict[str, Any]:
        """Returns the same as `state_dict`, but does not raise the deferred errors of checks.

        To find such an error, a check may have to wait for the device, which would take too long in
        every step.
        """
        state: dict[str, Any] = {
            "epoch": self._epochs.epoch_to_resume,
            "step": self._run.step.number,
            "scaler": self._preparer.precision.state_dict(),
        }

        # Compression keeps a part of the gradients for later, which differs between the ranks. Each
        # rank stores its part under the key "state", and a checkpoint joins them: {0: ..., 1: ...}.
        unsent = unsent_gradients(self._preparer.wrapped.values())
        if unsent:
            state["state"] = {self.rank: unsent}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what `state_dict` returned."""
        self._epochs.present = state["epoch"]
        self._run.step.number = state["step"]
        self._resumed_step = state["step"]
        self._preparer.precision.load_state_dict(state["scaler"])
        load_unsent_gradients(self._preparer.wrapped.values(), self.rank, state.get("state", {}))

    def close(self) -> None:
        """Leaves the run. It is also called at exit; a second call does nothing."""
        self._close(failed=False)

    def _close(self, *, failed: bool) -> None:
        """Leaves the run.

        Args:
            failed: True if this process had an error.
        """
        global _steps_at_close
        if self._closed:
            return

        # What concerns this rank alone.
        self._closed = True
        _steps_at_close = self.step  # the launcher asks for it when the script has ended
        _open_worlds.discard(self)
        atexit.unregister(process_group.close_at_exit)
        self._preparer.release()
        self._run.step.logged_passes.close_all()  # the script may still hold the iterator of a loop

        process_group.leave(self._run, failed=failed)

        # An extension may have deferred an error, which is raised here. The other ranks do not wait
        # for this one any more.
        if not failed:
            self._run.extensions.settle()
        if self.is_main and not failed:
            print_closing(
                self._run.step,
                self._run.checkpoint_folders,
                network_traffic=traffic,
                strategy=self.strategy,
                resumed_step=self._resumed_step,
            )

    def _print_choices(self) -> None:
        """Prints the choices that were made since the last call, on rank 0."""
        choices = self._preparer.choices
        self._preparer.choices = []
        if not choices:
            return

        self._run.extensions.choices_made(choices)
        if self.is_main:
            # A single process has joined no other ranks.
            joined_ranks = self._run.joined
            num_hosts = 1 if joined_ranks is None else len(set(joined_ranks.hosts))
            print_choices(title_of(self.size, num_hosts, __version__), choices)

    def _check_open(self, method: str) -> None:
        """Raises UsageError if the world was closed."""
        if self._closed:
            raise UsageError(
                f"world.{method} after world.close()", "the run was left", "close at the very end"
            )


def _choice_of_device_checks(every: int, num_processes: int) -> Choice:
    """Returns the line of the startup summary about the setting `check_devices`."""
    if num_processes == 1:
        return Choice("devices", "not checked", "one process: there is nothing to compare with")
    reason = "each process computes a virtual rank of another one again, and bits are compared"
    return Choice("devices", f"checked every {every} steps", reason)


@check_keywords("lockstep.init", ARGUMENT_OF_WORD)
def init(  # noqa: PLR0913 - one place for all settings of a run
    strategy: str | Strategy | None = None,
    *,
    seed: int | None = None,
    precision: str | None = None,
    backend: str | None = None,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    shares: Any = None,
    micro_batch_size: int | str | None = None,
    num_micro_batches: int | None = None,
    virtual_ranks: int | None = None,
    check_devices: int | None = None,
    device: str | None = None,
    sync_batchnorm: bool | None = None,
    ledger: str | Path | None = None,
    report: str | Path | None = None,
    trace_step: int | None = None,
    journal: str | Path | None = None,
    journal_every: int | None = None,
    join_timeout: float | timedelta | None = None,
    collective_timeout: float | timedelta | None = None,
    measure_link: bool = True,
) -> World:
    """Joins the run, and sets its device and seeds. A script started by `python` is a run of one.

    An argument that is left out may be set outside of the script, by `lockstep run --precision
    bf16` or LOCKSTEP_PRECISION=bf16; a contradiction is an error.

    Args:
        strategy: `single`, `dp`, `ddp`, `fsdp`, `hsdp`, `pipeline`, `diloco`, or options such as
            `lockstep.strategies.DDP(...)`; left out, `single` on one process, `ddp` on several.
        seed: of all random numbers (default: 0).
        precision: `fp32` (default), `bf16`, `fp16` or `fp64`.
        backend: `nccl`, `gloo` or `mpi`; by default chosen by device.
        init_method: `env://`, `tcp://host:port` or `file:///path`.
        rank: the number of this process, with `world_size`, if no launcher sets it.
        world_size: the number of processes, if no launcher sets it.
        shares: how a global batch is divided, `"1:2"` or `(1, 2)`; `"auto"`: by the speed of the
            ranks, which is measured in the first batch; by default equally.
        micro_batch_size: the most samples that a rank computes at a time; `"auto"`: as many as fit
            into its memory; by default its whole part.
        num_micro_batches: instead of it, the number of micro-batches of a global batch, on any
            number of ranks; BatchNorm then has the same statistics everywhere.
        virtual_ranks: computes as on this number of ranks, with the same bits on any number of
            processes up to it; see docs/same_bits.md. By default the parts of a batch, and so the
            last bits of every sum, depend on the number of processes.
        check_devices: with `virtual_ranks`: after so many global batches each process computes a
            virtual rank of another process again, and the bits are compared, to find devices that
            compute wrongly; see docs/check_devices.md. By default devices are not checked.
        device: `cpu`, `cuda` or `cuda:0`; by default a GPU if there is one.
        sync_batchnorm: whether BatchNorm takes its statistics from the samples of all ranks; False
            leaves each rank its own. By default it does, but with `virtual_ranks` each virtual rank
            has its own: all of them together need as many processes.
        ledger: a folder in which every rank writes down which samples it trains in which step, for
            `lockstep ledger`; by default nothing is written.
        report: a folder in which every rank writes down how its steps go, for `lockstep report`;
            by default nothing is written.
        trace_step: with `report`: each rank traces this step, counted from 1, with `torch.profiler`
            into that folder, for ui.perfetto.dev; by default no step is traced.
        journal: a folder in which every rank writes down hashes of what each step computes, for
            `lockstep journal`; by default nothing is written.
        journal_every: how many steps there are from one whose hashes are in the journal to the next
            (default: 10). Of the others it has the losses.
        join_timeout: how many seconds the ranks wait for each other here (default: 30).
        collective_timeout: how many seconds a collective may take (default: torch's).
        measure_link: False to leave out the measurement of the network between machines, which
            takes less than a second here, and the advice that follows from it.

    Raises:
        JoinError: the ranks did not come together; the subclass says why.
        RanksDifferError: the ranks run other code, arguments, versions or settings.
        SettingError: a setting that cannot be honoured.
        UsageError: this process is already in a run.
    """
    arguments = dict(locals())  # those of this function: it has no other variables yet
    given = {each.name: arguments[each.name] for each in DECLARATIONS.values()}
    settings = resolve_settings(os.environ, **given)
    run, choices = process_group.join_run(settings, os.environ, rank=rank, world_size=world_size)
    try:
        chosen, reason = find_strategy(settings.strategy, run.topology.size)
        plan = chosen.plan(run)
        if run.topology.size > 1:
            reason = f"{reason}; ranks given by {run.topology.source}"
        run.collectives.data_parallel = plan.rank
        run.step.num_devices = len(plan.local_devices)
        choices.insert(0, Choice("strategy", chosen.name, reason))
        choices += choices_from_file(os.environ)
        seed_everything(settings.seed)

        if settings.virtual_ranks is not None:
            determinism = Determinism(run.collectives)
            run.extensions.add(determinism, Place.OBSERVER)
            choices.append(determinism.choice())
            if determinism.differences and run.topology.is_main:
                print_line(translate(f"bits are not promised: {determinism.differences}"))
            reason = "each computed by itself: the same bits on any number of processes up to it"
            if settings.synchronises_batchnorm:
                reason += "; if the model has BatchNorm, on as many (sync_batchnorm=True)"
            choices.append(Choice("virtual ranks", str(settings.virtual_ranks), reason))

        if settings.check_devices is not None:
            choices.append(_choice_of_device_checks(settings.check_devices, run.topology.size))
        return World(run, chosen, plan, choices)
    except BaseException:
        process_group.leave(run, failed=True)
        raise
