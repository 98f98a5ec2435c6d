"""What `lockstep verify` starts in the place of the script, on every rank: it, being recorded.

Torch's hooks, and wrappers of the functions that have none, tell a `Recorder` what happens: what
loaders deliver (torch's, and Lockstep's own), losses, forward passes, collectives and steps.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from itertools import count, islice
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader, DistributedSampler

from lockstep.batch.loader import Loader
from lockstep.batch.pytree import tensors
from lockstep.distributed.seeding import seed_everything
from lockstep.distributed.torch_compat import (
    in_backward_pass,
    on_shadowed_iteration,
    watch_indices,
)
from lockstep.run.start.worker import run_as_main
from lockstep.run.watch.script_processes import replace_start_processes
from lockstep.session.extension import add_to_every_run
from lockstep.training.optimizer import PreparedOptimizer
from lockstep.user_code import is_user_file, user_line
from lockstep.verify.batches import random_streams, streams_that_moved
from lockstep.verify.feed import BatchReader, BatchWriter, Fed
from lockstep.verify.patches import DeterminismPatches, ParameterGroup
from lockstep.verify.record import UpdateWriter, Way, read_way, refuse_groups, refuse_own_ranks
from lockstep.verify.recorder import Recorder
from lockstep.world import World

# Some have new names since torch 2.13, beside the old ones.
_GATHERS = ("all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object")
_REDUCES = (
    "all_reduce", "all_reduce_coalesced", "reduce", "broadcast",
    "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single",
)  # fmt: skip
_MOVES = (
    "send", "recv", "isend", "irecv", "scatter", "gather", "all_to_all", "all_to_all_single",
)  # fmt: skip


def install(
    recorder: Recorder,
    patches: DeterminismPatches,
    way: Way,
    folder: Path,
    kept: BatchWriter | BatchReader | None = None,
) -> None:
    """For the rest of this process.

    Args:
        recorder: is told of everything.
        patches: changes what would not be comparable.
        way: how the script is run.
        folder: what the script saves goes there.
        kept: batches are written there, or read from there.
    """
    replace_start_processes(refuse_own_ranks)
    _watch_own_processes(recorder, way.nproc)
    recorder.branches.install()
    add_to_every_run(recorder)
    register_optimizer_step_pre_hook(recorder.before_optimizer_step)
    register_optimizer_step_post_hook(recorder.after_optimizer_step)
    register_module_forward_pre_hook(recorder.enters)
    register_module_forward_hook(recorder.leaves, always_call=True)
    _watch_losses(recorder)
    _watch_functions(recorder, patches)
    _watch_loaders(recorder, patches, kept)
    if way.batch_times > 1:
        _enlarge_batches(recorder, way.batch_times)
    if patches.double:
        patches.keep_double()
    patches.no_compile()
    patches.no_files(folder)
    mode: Any = patches
    mode.__enter__()


def _watch_own_processes(recorder: Recorder, nproc: int) -> None:
    """What the script starts may be a helper, or a rank, which it is when it opens a group."""
    plain = BaseProcess.start

    def start(process: BaseProcess) -> None:
        if is_user_file(sys._getframe(1).f_code.co_filename):
            recorder.started = recorder.started or user_line() or ""
            run = partial(refuse_groups, nproc, process.run)
            process.run = run  # type: ignore[method-assign]
        plain(process)
        vars(process).pop("run", None)  # it holds the process, which would outlive its use

    BaseProcess.start = start  # type: ignore
    refuse_groups(nproc)


def _watch_losses(recorder: Recorder) -> None:
    """Of `torch.autograd.backward`, which `Tensor.backward` calls too, and that may call it."""

    def begins(tensors: Any, *_: Any, **__: Any) -> None:
        single = tensors[0] if isinstance(tensors, list | tuple) and len(tensors) == 1 else tensors
        if not in_backward_pass() and isinstance(single, Tensor) and single.numel() == 1:
            recorder.lost(single)

    def returns(*_: Any, **__: Any) -> None:
        if not in_backward_pass():
            recorder.returns()

    _tell(torch.autograd, "backward", begins, returns)


def _watch_functions(recorder: Recorder, patches: DeterminismPatches) -> None:
    def exchanged(name: str, place: int, *args: Any, **kwargs: Any) -> None:
        # What Lockstep exchanges itself is not of the script's making.
        if not sys._getframe(2).f_globals["__name__"].startswith("lockstep."):
            tensor = kwargs.get("tensor", kwargs.get("input_tensor"))
            tensor = args[place] if len(args) > place else tensor
            into = args[0] if args else kwargs.get("tensor_list", kwargs.get("output_tensor"))
            recorder.called(name, tensor, into if place else None)

    def reduced(name: str, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("async_op"):
            recorder.reduced(args[0] if args else kwargs.get("tensor"))

    for name in filter(partial(hasattr, dist), (*_GATHERS, *_REDUCES, *_MOVES)):
        # The tensor that goes in comes first, but for the gathers, which put what comes out there.
        after = partial(reduced, name) if name == "all_reduce" else _nothing
        _tell(dist, name, partial(exchanged, name, int(name in _GATHERS)), after)
    on_shadowed_iteration(recorder.shadows)
    _tell(LRScheduler, "step", lambda *_, **__: recorder.called("schedule", None))

    def follows(_: Any, metrics: Any, *__: Any) -> None:
        recorder.called("schedule", None, value=float(metrics))

    _tell(ReduceLROnPlateau, "step", follows)  # it has a step of its own
    utils: Any = torch.nn.utils
    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
        setattr(utils, name, partial(recorder.clips, getattr(utils, name)))
        setattr(utils.clip_grad, name, getattr(utils, name))

    def added(optimizer: Optimizer, *_: Any, **__: Any) -> None:
        recorder.begins_anew()
        optimizer.param_groups[-1] = ParameterGroup(optimizer.param_groups[-1])
        if optimizer not in recorder.models.built:
            recorder.models.built.append(optimizer)

    _tell(Optimizer, "add_param_group", after=added)
    _tell(torch, "manual_seed", recorder.seeded)
    _tell(DistributedSampler, "set_epoch", lambda sampler, *_, **__: recorder.told.add(sampler))
    _tell(PreparedOptimizer, "__init__", lambda _, inner, *__, **___: recorder.known.add(inner))
    _watch_ddp(recorder, patches)
    _watch_world(recorder)
    _watch_hooks(recorder)


def _watch_ddp(recorder: Recorder, patches: DeterminismPatches) -> None:
    ddp = DistributedDataParallel
    _tell(ddp, "__init__", lambda _, module, *__, **___: patches.quiet(module))
    _tell(ddp, "__init__", after=lambda wrapper, *_, **__: recorder.wrapped(wrapper))

    def communicates(*_: Any, **__: Any) -> None:
        if not sys._getframe(2).f_globals["__name__"].startswith("lockstep."):
            recorder.models.comm_hook = user_line() or "somewhere"

    _tell(ddp, "register_comm_hook", communicates)


def _watch_world(recorder: Recorder) -> None:
    """Of Lockstep's collectives, whatever way their data takes."""
    for name in ("sum", "mean", "max", "min", "broadcast", "gather"):
        _watch_collective(recorder, name, getattr(World, name))


def _watch_collective(recorder: Recorder, name: str, plain: Callable[..., Any]) -> None:
    @wraps(plain)
    def told(world: World, value: Any, *args: Any, **kwargs: Any) -> Any:
        calls = [recorder.called(f"world.{name}", tensor) for tensor in tensors(value)]
        result = plain(world, value, *args, **kwargs)
        if world.size > 1:
            loses = name == "gather" and not kwargs.get("gradient")
            recorder.exchanged(calls, result, loses_gradient=loses)
        return result

    setattr(World, name, told)


def _watch_hooks(recorder: Recorder) -> None:
    hook_of: Any = Tensor.register_hook

    def hooked(self: Tensor, hook: Callable[[Tensor], Any]) -> Any:
        line = (user_line() or "") * (sys._getframe(1).f_globals["__name__"][:6] != "torch.")

        def told(gradient: Tensor) -> Any:
            changed = hook(gradient)
            both = isinstance(changed, Tensor) and isinstance(gradient, Tensor)
            if line and self.is_leaf and both and not changed.equal(gradient):
                recorder.changed_by_hook(line)
            return changed

        return hook_of(self, told)

    Tensor.register_hook = hooked  # type: ignore[method-assign]


_Told = Callable[..., Any]


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _tell(owner: Any, name: str, before: _Told = _nothing, after: _Told = _nothing) -> None:
    """Calls something before and after a function, with the same arguments."""
    function = getattr(owner, name)

    @wraps(function)  # `patches` knows it by its name
    def told(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        result = function(*args, **kwargs)
        after(*args, **kwargs)
        return result

    setattr(owner, name, told)


_QUEUE = "_lockstep_indices"
"""Attribute of a DataLoader's iterator: the indices of batches that were not handed out yet."""


def _watch_loaders(
    recorder: Recorder, patches: DeterminismPatches, kept: BatchWriter | BatchReader | None
) -> None:
    _keep_indices(patches)
    if kept is not None:
        _number_loaders(kept)
    plain, pieces = DataLoader.__iter__, Loader.__iter__

    def fed(loader: DataLoader[Any], reader: BatchReader) -> Iterator[Any]:
        for batch, ids in _wanted(recorder, reader.batches(reader.begin(loader))):
            recorder.took(loader, ids=ids, batch=batch, random_draws={})
            yield batch

    def told(loader: DataLoader[Any], running: Iterator[Any]) -> Iterator[Any]:
        queue: deque[Any] = vars(running).setdefault(_QUEUE, deque())
        wanted = _wanted(recorder, running)
        keeps = isinstance(kept, BatchWriter) and torch.is_grad_enabled()
        place = kept.begin(loader) if kept is not None and keeps else ""
        for number in count():
            patches.watch_draws()
            before = random_streams()
            try:
                batch = patches.converted(next(wanted))
            except StopIteration:
                return
            ids = _numbers(queue.popleft()) if queue else None
            if torch.is_grad_enabled():
                drawn = patches.draws() | streams_that_moved(before)
                recorder.took(loader, ids=ids, batch=batch, random_draws=drawn)
            if isinstance(kept, BatchWriter) and keeps:
                kept.keep(place, number, Fed(batch, ids))
            yield batch

    def of_torch(self: DataLoader[Any]) -> Iterator[Any]:
        if _is_ours(self.dataset):
            return plain(self)
        if torch.is_grad_enabled():
            recorder.begins_pass(self)
            if isinstance(kept, BatchReader):
                return fed(self, kept)
        return told(self, plain(self))

    DataLoader.__iter__ = of_torch  # type: ignore[method-assign, assignment]
    Loader.__iter__ = lambda self: map(patches.converted, _wanted(recorder, pieces(self)))  # type: ignore[method-assign]


def _number_loaders(kept: BatchWriter | BatchReader) -> None:
    """Numbers DataLoaders as they are built, on one process with the lengths of those of a rank."""

    def built(loader: DataLoader[Any], dataset: Any, *_: Any, **__: Any) -> None:
        if not _is_ours(dataset):
            kept.build(loader)

    _tell(DataLoader, "__init__", after=built)
    plain: Any = DataLoader.__len__

    def length(self: DataLoader[Any]) -> int:
        known = kept.length(self) if isinstance(kept, BatchReader) else None
        found: int = plain(self) if known is None else known
        return found

    if isinstance(kept, BatchReader):
        DataLoader.__len__ = length  # type: ignore[method-assign]


def _keep_indices(patches: DeterminismPatches) -> None:
    """Iterators of DataLoaders keep the indices that they draw, until the batch is handed out."""

    def drawn(running: Any, draw: Callable[[], Any]) -> Any:
        with patches.unwatched():  # the order of samples is drawn, not what is in them
            indices = draw()
        vars(running).setdefault(_QUEUE, deque()).append(indices)
        return indices

    watch_indices(drawn, lambda running: vars(running).pop(_QUEUE, None))


def _numbers(indices: Any) -> list[int] | None:
    """The indices of a batch as numbers; None: they are something else, as those of a stream."""
    if not isinstance(indices, list | tuple) or not indices:
        return None
    if not all(isinstance(index, int | np.integer | Tensor) for index in indices):
        return None
    return [int(index) for index in indices]


def _wanted(recorder: Recorder, running: Iterator[Any]) -> Iterator[Any]:
    """Nothing is read to train on that is not compared: it may take longer than all else."""
    while True:
        if torch.is_grad_enabled():
            recorder.end_if_enough()
        try:
            yield next(running)
        except StopIteration:
            return


class _Enlarged(int):
    """A batch size; a library that builds the loader anew brings it along."""


_MERGED = "_lockstep_merged"
"""Attribute of a batch sampler whose batches are joined."""


def _enlarge_batches(recorder: Recorder, times: int) -> None:
    """DataLoaders of torch get so many times the batch size, once."""
    build: Any = DataLoader.__init__
    signature = inspect.signature(build)

    def built(self: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        if not _is_ours(given["dataset"]):
            size = given.get("batch_size", 1)
            if given.get("batch_sampler") is not None:
                try:
                    given["batch_sampler"] = _merged(given["batch_sampler"], times)
                except TypeError:  # as of a generator, whose class cannot be changed
                    recorder.kept_batches = recorder.kept_batches or user_line() or "somewhere"
            elif isinstance(size, int) and not isinstance(size, _Enlarged):
                given["batch_size"] = _Enlarged(size * times)
            elif size is None:
                recorder.kept_batches = recorder.kept_batches or user_line() or "somewhere"
        build(**given)

    DataLoader.__init__ = built  # type: ignore[method-assign]


def _merged(sampler: Any, times: int) -> Any:
    """A batch sampler each of whose batches is so many of those that it had, one after the other.

    It stays the same object, of a class that is made from its own, so that it can still be told an
    epoch; only a list of batches becomes another one.
    """
    parts = [sampler, *vars(sampler).values()] if hasattr(sampler, "__dict__") else [sampler]
    sizes = [getattr(part, "batch_size", None) for part in parts]
    if any(hasattr(part, _MERGED) for part in parts):
        return sampler
    if any(isinstance(size, _Enlarged) for size in sizes):
        return sampler
    if isinstance(sampler, list | tuple):
        return _Batches(_joined(sampler, times))

    own: Any = type(sampler)

    def iterate(self: Any) -> Iterator[list[Any]]:
        return _joined(own.__iter__(self), times)

    def length(self: Any) -> int:
        batches: int = own.__len__(self)
        return -(-batches // times)

    methods: dict[str, Any] = {"__iter__": iterate, _MERGED: True, "__module__": own.__module__}
    if hasattr(own, "__len__"):
        methods["__len__"] = length
    sampler.__class__ = type(own.__name__, (own,), methods)
    return sampler


class _Batches(list[list[Any]]):
    """Batches that are joined already."""

    _lockstep_merged = True


def _joined(batches: Iterable[Any], times: int) -> Iterator[list[Any]]:
    running = iter(batches)
    while several := list(islice(running, times)):
        yield [index for batch in several for index in batch]


def _is_ours(dataset: Any) -> bool:
    """The inside of one of Lockstep's loaders, not what a training loop is handed."""
    return type(dataset).__module__.startswith("lockstep.")


def main(folder: Path, program: Callable[[], object] | None = None) -> None:
    """Runs the script as the folder says and records it there, until it ends or has made its steps.

    Args:
        folder: of the run.
        program: runs in the place of the script.

    Raises:
        BaseException: what the script raises.
    """
    way = read_way(folder)
    rank = int(os.environ.get("RANK", "0"))
    writer = UpdateWriter(folder, rank)
    patches = DeterminismPatches(double=way.precision == "fp64")
    # A script that seeds nothing draws other numbers on every process, but the same each time.
    seed_everything(rank)
    recorder = Recorder(writer, way, patches)
    kept: BatchWriter | BatchReader | None = None
    if way.batches is not None:
        kept = BatchReader(way.batches) if way.nproc == 1 else BatchWriter(way.batches, rank)
    install(recorder, patches, way, folder / "saved", kept)
    error: BaseException | None = None
    try:
        run_as_main(way.script) if program is None else program()
    except BaseException as caught:
        fine = isinstance(caught, SystemExit) and caught.code in (None, 0)
        error = None if fine else caught
        raise
    finally:
        names = (
            *("of_lockstep", "until", "by_choice", "started", "internal"),
            *("kept_batches", "loaders", "passes_without_step", "passes"),
        )
        known = {name: getattr(recorder, name) for name in names}
        known["ways"] = [*recorder.branches.since().items()]
        known["final"] = {n: array.tolist() for n, array in recorder.final().items()}
        if isinstance(kept, BatchWriter):
            kept.close()
        writer.end(error, patches.notes(), **known)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
