"""What `lockstep verify` starts in the place of the script, on every rank: it, being recorded.

Torch's hooks, and wrappers of the functions that have none, tell a `Recorder` what happens: what
loaders deliver (torch's, and Lockstep's own), losses, forward passes, collectives and steps.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial, wraps
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

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
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lockstep import step
from lockstep.data.loader import Loader
from lockstep.distributed.seeding import seed_everything
from lockstep.distributed.torch_compat import in_backward_pass
from lockstep.errors import is_users, user_line
from lockstep.launcher.worker import run_as_main
from lockstep.training.optimizer import PreparedOptimizer
from lockstep.verify.batches import random_streams, streams_that_moved
from lockstep.verify.patches import DeterminismPatches, ParameterGroup
from lockstep.verify.record import UpdateWriter, Way, read_way, refuse_groups, refuse_own_ranks
from lockstep.verify.recorder import Recorder
from lockstep.watchdog.probe import on_start_processes

# Some have new names since torch 2.13, beside the old ones.
_GATHERS = ("all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object")
_REDUCES = (
    "all_reduce", "reduce", "broadcast",
    "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single",
)  # fmt: skip


def install(recorder: Recorder, patches: DeterminismPatches, way: Way, folder: Path) -> None:
    """For the rest of this process.

    Args:
        recorder: is told of everything.
        patches: changes what would not be comparable.
        way: how the script is run.
        folder: what the script saves goes there.
    """
    on_start_processes(refuse_own_ranks)
    _watch_own_processes(recorder, way.nproc)
    recorder.branches.install()
    step.add_callback(recorder)
    register_optimizer_step_pre_hook(recorder.before_step)
    register_optimizer_step_post_hook(recorder.after_step)
    register_module_forward_pre_hook(recorder.enters)
    register_module_forward_hook(recorder.leaves, always_call=True)
    _watch_losses(recorder)
    _watch_functions(recorder, patches)
    _watch_loaders(recorder, patches)
    if way.batch_times > 1:
        _enlarge_batches(way.batch_times)
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
        if is_users(sys._getframe(1).f_code.co_filename):
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

    for name in filter(partial(hasattr, dist), (*_GATHERS, *_REDUCES)):
        # The tensor that goes in comes first, but for the gathers, which put what comes out there.
        _tell(dist, name, partial(exchanged, name, int(name in _GATHERS)))
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
    _watch_hooks(recorder)


def _watch_ddp(recorder: Recorder, patches: DeterminismPatches) -> None:
    ddp = DistributedDataParallel
    _tell(ddp, "__init__", lambda _, module, *__, **___: patches.quiet(module))
    _tell(ddp, "__init__", after=lambda wrapper, *_, **__: recorder.wrapped(wrapper))

    def communicates(*_: Any, **__: Any) -> None:
        if not sys._getframe(2).f_globals["__name__"].startswith("lockstep."):
            recorder.models.comm_hook = user_line() or "somewhere"

    _tell(ddp, "register_comm_hook", communicates)


def _watch_hooks(recorder: Recorder) -> None:
    hook_of: Any = Tensor.register_hook

    def hooked(self: Tensor, hook: Callable[[Tensor], Any]) -> Any:
        line = (user_line() or "") * (sys._getframe(1).f_globals["__name__"][:6] != "torch.")

        def told(gradient: Tensor) -> Any:
            changed = hook(gradient)
            if line and self.is_leaf and changed is not None and not changed.equal(gradient):
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


Queues = dict[int, deque[list[int]]]
"""The indices of batches that were drawn and not handed out yet, by the id of their sampler."""


def _watch_loaders(recorder: Recorder, patches: DeterminismPatches) -> None:
    waiting: Queues = {}
    _keep_indices(waiting, patches)
    plain, pieces = DataLoader.__iter__, Loader.__iter__

    def told(
        loader: DataLoader[Any], running: Iterator[Any], queue: deque[list[int]] | None
    ) -> Iterator[Any]:
        while True:
            patches.watch_draws()
            before = random_streams()
            try:
                batch = patches.converted(next(running))
            except StopIteration:
                return
            ids = None if queue is None else queue.popleft()
            if torch.is_grad_enabled():
                drawn = patches.draws() | streams_that_moved(before)
                recorder.took(loader, ids=ids, batch=batch, drawn=drawn)
            yield batch

    def of_torch(self: DataLoader[Any]) -> Iterator[Any]:
        if _is_ours(self.dataset):
            return plain(self)
        queue: deque[list[int]] | None = None
        stream = isinstance(self.dataset, IterableDataset)
        if type(self.batch_sampler) is BatchSampler and not stream:
            queue = waiting[id(self.batch_sampler)] = deque()
        if torch.is_grad_enabled():
            recorder.begins_pass(self)
        return told(self, _wanted(recorder, plain(self)), queue)

    DataLoader.__iter__ = of_torch  # type: ignore[method-assign, assignment]
    Loader.__iter__ = lambda self: map(patches.converted, _wanted(recorder, pieces(self)))  # type: ignore[method-assign]


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


def _enlarge_batches(times: int) -> None:
    """DataLoaders of torch get so many times the batch size, once."""
    build: Any = DataLoader.__init__

    def built(
        self: DataLoader[Any], dataset: Any, batch_size: int | None = 1, *args: Any, **kwargs: Any
    ) -> None:
        whole = _is_ours(dataset) or kwargs.get("batch_sampler")
        if not (whole or batch_size is None or isinstance(batch_size, _Enlarged)):
            batch_size = _Enlarged(batch_size * times)
        build(self, dataset, batch_size, *args, **kwargs)

    DataLoader.__init__ = built  # type: ignore[method-assign]


def _is_ours(dataset: Any) -> bool:
    """The inside of one of Lockstep's loaders, not what a training loop is handed."""
    return type(dataset).__module__.startswith("lockstep.")


def _keep_indices(waiting: Queues, patches: DeterminismPatches) -> None:
    batches = BatchSampler.__iter__

    def of_sampler(self: BatchSampler) -> Iterator[list[int]]:
        queue = waiting.pop(id(self), None)
        running = batches(self)
        while True:
            with patches.unwatched():  # the order of samples is drawn, not what is in them
                batch = next(running, None)
            if batch is None:
                return
            if queue is not None:
                queue.append([int(index) for index in batch])
            yield batch

    BatchSampler.__iter__ = of_sampler  # type: ignore[method-assign]


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
    install(recorder, patches, way, folder / "saved")
    error: BaseException | None = None
    try:
        run_as_main(way.script) if program is None else program()
    except BaseException as caught:
        fine = isinstance(caught, SystemExit) and caught.code in (None, 0)
        error = None if fine else caught
        raise
    finally:
        names = ("of_lockstep", "until", "by_choice", "started")
        known = {name: getattr(recorder, name) for name in names}
        known["ways"] = [*recorder.branches.since().items()]
        writer.end(error, patches.notes(), **known)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
