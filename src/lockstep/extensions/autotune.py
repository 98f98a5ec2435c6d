"""Finds what is `"auto"`, once a run: how fast every rank is, and how many samples fit.

It happens in the first global batch that is trained on, right after the backward pass of its first
micro-batch (`data.shares.first_micro_batch`), and before any optimizer step. Every rank takes the
calls that it made of its modules and tries them at other sizes. The ranks begin each measurement
together, because devices that share a machine slow each other down; what they found they exchange
as text, so all decide from the same numbers. Times are taken again and again, because a machine
that others use as well is slow at times: what differs less than they vary is the same.

Communication: an exchange of text before and after each time that is taken, which is done 5 to 20
times for at most three divisions.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.batch.autotune_request import AutotuneRequest, AutotuneResult
from lockstep.batch.micro_batches import MicroBatchPlan
from lockstep.batch.plan import part_sizes
from lockstep.batch.pytree import map_tensors, tensors
from lockstep.batch.shares import (
    are_equally_fast,
    choose_shares_by_times,
    confirm_shares,
    largest_that_fits,
    step_seconds,
    times_are_sufficient,
)
from lockstep.distributed.collectives import exchange_on_all_ranks
from lockstep.distributed.device import is_out_of_memory
from lockstep.distributed.process_group import Run
from lockstep.distributed.seeding import preserve_rng_state
from lockstep.distributed.torch_compat import (
    BatchNorm,
    members,
    outside_compiled_code,
    own_part,
)
from lockstep.errors import LockstepError, SettingError, UsageError
from lockstep.extensions.report.console import print_line
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.settings import is_auto
from lockstep.strategies.base import Strategy, StrategyPlan, may_set_attributes
from lockstep.strategies.data_parallel.module import DataParallel
from lockstep.strategies.sync_batchnorm import SyncBatchNorm
from lockstep.training.optimizer import PreparedOptimizer
from lockstep.wording import join_first

_MOST_RUNS, _ENOUGH_S = 10, 0.03
"""A time is that of one run; where this is below 30 ms, the shortest of several, up to 10."""
_MARGIN = 0.05
"""Of a GPU's memory, kept free while sizes are tried: what is free is in pieces, later as well."""
_STATE = 2
"""Numbers that an optimizer keeps for each parameter from its first step on, as Adam does."""
_NO_COLLECTIVES = "the forward pass is tried at several sizes on each rank, to find what is 'auto'"
_DIVISIONS = 3
"""Times are taken again with the shares that the times before have led to, at most so often."""


class ForwardCall(NamedTuple):
    """A forward pass that was seen."""

    module: nn.Module
    """As it was called."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextmanager
def seen_calls(modules: Iterable[nn.Module]) -> Iterator[list[ForwardCall]]:
    """The forward passes with gradients that are made of some modules meanwhile."""
    seen: list[ForwardCall] = []

    @outside_compiled_code
    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            seen.append(ForwardCall(module, args, kwargs))

    with ExitStack() as hooks:
        for module in modules:
            handle = module.register_forward_pre_hook(note, prepend=True, with_kwargs=True)
            hooks.enter_context(handle)
        yield seen


class ProfilingRun:
    """Tries calls at other sizes, each with a backward pass; no other rank takes part.

    What comes after the model, the loss, is not known. In its place stands one that needs as much
    memory as a cross entropy does: it keeps its logarithms, and its gradient is a tensor of its
    own.

    Args:
        run: whose device it is.
        calls: the forward passes of one backward pass.
        local: the samples that they were made with.

    Raises:
        UsageError: on trying, where it cannot be seen which tensors hold the samples.
    """

    def __init__(self, run: Run, calls: Sequence[ForwardCall], local: int) -> None:
        self._run = run
        self._calls = calls
        self._local = local
        self._modules = list(dict.fromkeys(call.module for call in calls))
        self._gpus = gpus_of(run, self._modules)
        self._warm: set[tuple[int, int | None]] = set()
        """What has been computed before, and where: caches are made."""

    def fits(self, samples: int, device: int | None = None) -> bool:
        """Whether there is memory for so many samples at a time.

        Args:
            samples: to compute.
            device: of those that divide a batch in this process; None: on all of them.
        """
        with self._undisturbed():
            try:
                self._compute(samples, device, self._reserve())
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            else:
                return True
        # Not before here: the error held the frames in which the memory was asked for.
        gc.collect()
        torch.cuda.empty_cache()  # does nothing where CUDA has not been used
        return False

    def seconds(self, samples: int, device: int | None = None) -> float:
        """For each sample, where so many are computed at a time; the arguments are those above."""
        took: list[float] = []
        with self._undisturbed():
            if (samples, device) not in self._warm:
                self._compute(samples, device)
                self._warm.add((samples, device))
            while sum(took) < _ENOUGH_S and len(took) < _MOST_RUNS:
                begin = now(self._gpus)
                self._compute(samples, device)
                took.append(now(self._gpus) - begin)
        return min(took) / samples

    def _compute(self, samples: int, device: int | None, beside: Tensor | None = None) -> None:
        """A forward and a backward pass over all calls; `beside` is held meanwhile."""
        if not self._calls:
            raise UsageError(
                "world.backward(loss)",
                "no forward pass of a prepared model came before it",
                "call what world.prepare returned",
            )
        outputs, inputs = [], []
        with ExitStack() as stack:
            for module, *arguments in self._calls:
                if device is not None and isinstance(module, DataParallel):
                    stack.enter_context(module.only_on(device))
                args, kwargs = self._resized(module, arguments, samples)
                inputs += [t for t in tensors((args, kwargs)) if t.requires_grad]
                inputs += [p for p in module.parameters() if p.requires_grad]
                outputs += tensors(module(*args, **kwargs))
        losses = [_stand_in(output) for output in outputs if output.requires_grad]
        if not losses or not inputs:
            raise UsageError(
                "the output of the model",
                "no tensor with a gradient is seen in it",
                "return tensors, or tuples, dicts or dataclasses of them",
            )
        unique = list({id(tensor): tensor for tensor in inputs}.values())
        torch.autograd.grad(losses, unique, allow_unused=True)

    def _resized(self, module: nn.Module, arguments: Any, samples: int) -> Any:
        """The arguments of a call with its samples repeated."""
        found = False
        dim = module.dim if isinstance(module, nn.DataParallel) else 0

        def resized(tensor: Tensor) -> Tensor:
            nonlocal found
            plain = tensor.detach()
            if -tensor.dim() <= dim < tensor.dim() and tensor.shape[dim] == self._local:
                found = True
                rows = torch.arange(samples, device=tensor.device) % self._local
                plain = plain.index_select(dim, rows)
            return plain.requires_grad_(tensor.requires_grad)

        resized_arguments = map_tensors(arguments, resized)
        if not found:
            raise UsageError(
                f"a call of {type(module).__name__} with {self._local} samples",
                f"no tensor among its arguments has {self._local} as its "
                + (f"dimension {dim}" if dim else "first dimension"),
                "give the model tensors with one row a sample",
            )
        return resized_arguments

    def _reserve(self) -> Tensor | None:
        """Memory that is not to be had in the training either."""
        if self._run.device.type != "cuda":
            return None
        own = {id(p): p for module in self._modules for p in module.parameters() if p.requires_grad}
        state = _STATE * sum(p.numel() * p.element_size() for p in own.values())
        margin = int(_MARGIN * torch.cuda.mem_get_info(self._run.device)[1])
        return torch.empty(state + margin, dtype=torch.uint8, device=self._run.device)

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """All is put back; collectives are refused, and BatchNorm has statistics of its own."""
        collectives = self._run.collectives
        layers = list(dict.fromkeys(m for module in self._modules for m in module.modules()))
        buffers = [b for layer in layers for b in members(layer).buffers.values() if b is not None]
        synced = [m for m in layers if isinstance(m, SyncBatchNorm | nn.SyncBatchNorm)]
        # Those of replicas have a forward of their own: the devices of this rank stay together.
        alone = [layer for layer in synced if "forward" not in vars(layer)]
        # Attributes too: what is set to activations, to be looked at, would keep the largest.
        held = [vars(layer) for layer in layers if may_set_attributes(layer) or layer in alone]
        held += [members(layer).buffers for layer in layers]
        blocked = collectives.blocked
        with restored([(d, dict(d)) for d in held], buffers, self._gpus), torch.enable_grad():
            try:
                collectives.blocked = _NO_COLLECTIVES
                for layer in alone:
                    layer.forward = BatchNorm.forward.__get__(layer)  # type: ignore[method-assign]
                yield
            finally:
                collectives.blocked = blocked


@dataclass
class Autotune(Extension):
    """Finds shares and micro-batch size for all loaders of a run.

    Raises:
        SettingError: the strategy cannot find what is `"auto"`.
    """

    run: Run
    """Its settings say what is open."""
    strategy: Strategy
    """Of the modules."""
    plan: StrategyPlan
    """The strategy's."""
    modules: Collection[nn.Module]
    """As they are called; there may come more."""
    optimizers: Collection[PreparedOptimizer]
    """Prepared ones; likewise."""
    found: AutotuneResult = field(default_factory=AutotuneResult)
    _profiled: tuple[MicroBatchPlan, int, list[ForwardCall]] | None = None
    _recording: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.request(None, self.run.settings.micro_batch_size)

    def request(self, shares: Any, micro_batch_size: Any) -> AutotuneRequest:
        """What a loader leaves open, which was told this (shares None: as the run was told).

        Raises:
            SettingError: the strategy cannot find it, or has shares for the whole run only.
        """
        settings, own_devices = self.run.settings, len(self.plan.local_devices)
        if shares is not None and not is_auto(shares) and own_devices > 1:
            raise SettingError(
                f"world.loader(shares={shares!r})",
                f"strategy {self.strategy.name!r} divides a batch over the devices of this "
                "process where the model is called, whatever loader it came from",
                "give the shares to lockstep.init, or --shares; model.set_shares(...) changes them "
                "later",
            )
        open_size = is_auto(micro_batch_size)
        open_shares = is_auto(settings.shares if shares is None else shares)
        if (open_shares or open_size) and not self.plan.can_autotune:
            raise SettingError(
                "shares='auto'" if open_shares else "micro_batch_size='auto'",
                f"strategy {self.strategy.name!r} cannot try a part of the batch on its own",
                "give numbers, or use strategy='ddp'",
            )
        return AutotuneRequest(
            result=self.found,
            wants_shares=open_shares and self.plan.num_devices > 1,
            wants_micro_batch_size=open_size,
            profile=self._profile,
            must_keep_plan=self._as_planned,
        )

    def after_backward(self, loss: Any, micro_batch: MicroBatch) -> None:
        """Finds what is open in the present micro-batch, if anything; all ranks call it.

        Raises:
            UsageError: on all ranks, where one could not try its calls.
            SettingError: the memory of all ranks together does not hold the batch.
        """
        if self._profiled is None:
            return
        division, local, calls = self._profiled
        self._stop()
        search = _Search(self.run, self.plan, division, local, calls)
        shares = division.shares
        if division.request.shares_are_open:
            before, after, times = search.shares()
            kind = "rank"
            if len(self.plan.local_devices) == 1:
                shares = after
            else:  # its modules divide what the loader gives to the process as a whole
                kind = "device"
                for module in self.modules:
                    if isinstance(module, DataParallel):
                        module.set_shares(after)
            self._say(_shares_in_words(before, after, times, kind))
        if division.request.micro_batch_size_is_open:
            self.found.micro_batch_size = search.micro_batch_size(shares)
            most = max(part_sizes(division.batch_size, shares))
            self._say(_micro_batch_in_words(self.found.micro_batch_size, most))
            self.found.micro_batch_size_is_known = True
        if division.request.shares_are_open:
            self.found.shares = shares

    def _say(self, text: str) -> None:
        if self.run.topology.is_main:
            print_line(text)

    @contextmanager
    def _profile(self, division: MicroBatchPlan, local: int) -> Iterator[None]:
        """While the first micro-batch, of `local` samples, is computed.

        Raises:
            UsageError: an optimizer has stepped, and nothing was found.
        """
        calls = self._recording.enter_context(seen_calls(self.modules))
        self._profiled = present = division, local, calls
        try:
            yield
            if self._profiled is present and self.run.step.training_pass.stepped:
                raise UsageError(
                    "loss.backward() where shares or micro_batch_size are 'auto'",
                    "they are found in world.backward",
                    "call world.backward(loss)",
                )
        finally:
            if self._profiled is present:
                self._stop()

    def _stop(self) -> None:
        self._profiled = None
        self._recording.close()

    def _as_planned(self) -> bool:
        """The first micro-batch has to be one that is planned.

        BatchNorm looks at it as a whole. Several optimizers, those that want a closure, and a
        static graph under DDP take no batch in parts.
        """
        return (
            any(isinstance(m, BatchNorm) for module in self.modules for m in module.modules())
            or len(self.optimizers) > 1
            or any(isinstance(o.inner, torch.optim.LBFGS) for o in self.optimizers)
            or self.plan.static_graph
        )


class _Search(ProfilingRun):
    """The runs of one rank, in step with the others; it may compute on several devices."""

    def __init__(
        self,
        run: Run,
        plan: StrategyPlan,
        division: MicroBatchPlan,
        local: int,
        calls: Sequence[ForwardCall],
    ) -> None:
        super().__init__(run, calls, local)
        self._division, self._devices, self._own = division, plan.num_devices, plan.local_devices
        self._fitting: dict[int | None, int] = {}
        self._limits: dict[int | None, int] = {}

    def shares(self) -> tuple[tuple[int, ...], tuple[int, ...], list[tuple[float, ...]]]:
        """The devices' shares as they were and as they should be, and the times that say so."""
        batch_size, before = self._division.batch_size, self._division.shares
        if len(before) != self._devices:  # the loader knows of this process alone
            before = (1,) * self._devices
        # Where the parts may be computed in micro-batches, memory does not bound them.
        given = self._division.micro_batch_size
        bound = given is None and not self._division.request.micro_batch_size_is_open
        shares = before
        tried: dict[tuple[int, ...], float] = {}
        telling: list[tuple[float, ...]] = []
        while shares not in tried and len(tried) < _DIVISIONS:
            limits = self._everywhere(self._limit, self._own, shares)
            times = self._times(shares)
            telling = times if are_equally_fast(times) or not telling else telling
            room = limits if bound else [None] * self._devices
            tried[shares] = step_seconds(times, shares, batch_size, room)
            shares = choose_shares_by_times(times, shares, batch_size, room)
        return before, confirm_shares(tried, shares), telling

    def micro_batch_size(self, shares: tuple[int, ...]) -> int | None:
        """The most samples a process computes at a time, by the least memory of all; None: all.

        Args:
            shares: of the processes.
        """
        of_rank = part_sizes(self._division.batch_size, shares)
        # Several devices of one process are tried together: one of them holds more than the others.
        together = self._own if len(self._own) == 1 else (None,)
        limits = self._everywhere(self._limit, together, shares)
        met = [n for n, part in zip(limits, of_rank, strict=True) if n is not None and n < part]
        return min(met, default=None)

    def _times(self, shares: tuple[int, ...]) -> list[tuple[float, ...]]:
        """What a sample takes on each device, at its share, again and again."""
        rounds = [self._everywhere(self._seconds, self._own, shares)]
        while not times_are_sufficient(list(zip(*rounds, strict=True))):
            rounds.append(self._everywhere(self._seconds, self._own, shares))
        return list(zip(*rounds, strict=True))

    def _most(self, device: int | None, shares: tuple[int, ...]) -> int:
        """Samples that the device, or the process, would compute at a time."""
        of_all = part_sizes(self._division.batch_size, shares)
        part = of_all[self._run.collectives.data_parallel.rank if device is None else device]
        return min(part, self._division.micro_batch_size or part)

    def _limit(self, device: int | None, shares: tuple[int, ...]) -> int | None:
        """The most samples that fit; None: all that were tried, up to its part, do."""
        most, local = self._most(device, shares), self._local
        known = self._fitting.get(device, local)
        if local and device not in self._limits and most > known:
            known = largest_that_fits(lambda n: self.fits(n, self._within(device)), known, most)
            self._fitting[device] = known
            if known < most:
                self._limits[device] = known
        return self._limits.get(device)

    def _seconds(self, device: int | None, shares: tuple[int, ...]) -> float:
        most = self._most(device, shares)
        size = min(most, self._limits.get(device, most))
        return self.seconds(max(2, size), self._within(device))  # BatchNorm needs two

    def _within(self, device: int | None) -> int | None:
        """Its number in this process; None: the process has one, or all are tried together."""
        return None if device is None or len(self._own) == 1 else device - self._own[0]

    def _everywhere(
        self,
        find: Callable[[int | None, tuple[int, ...]], Any],
        devices: Sequence[int | None],
        shares: tuple[int, ...],
    ) -> list[Any]:
        """What every rank found for its devices, in the order of the ranks.

        They begin together, and what fails on one fails on all.
        """
        collectives = self._run.collectives
        shares_are_open = self._division.request.shares_are_open
        was_set = "shares='auto'" if shares_are_open else "micro_batch_size='auto'"

        def find_all() -> tuple[None, list[Any]]:
            try:
                return None, [find(device, shares) for device in devices]
            except Exception as error:
                plain = str(error)
                if isinstance(error, LockstepError):
                    plain = f"{error.was_set}: {error.found}"
                raise UsageError(
                    was_set,
                    "the model could not be tried at other sizes on "
                    f"rank {collectives.topology.rank}: {type(error).__name__}: {plain}",
                    "give numbers instead, such as shares='2:3' and micro_batch_size=16",
                ) from error

        collectives.exchange("begin")
        _, answers = exchange_on_all_ranks(collectives, was_set, find_all, UsageError)
        return [each for found in answers for each in found]


def _stand_in(output: Tensor) -> Tensor:
    real = torch.view_as_real(output) if output.is_complex() else output
    return real.log_softmax(-1).square().sum() if real.dim() else real


@contextmanager
def restored(
    dictionaries: Sequence[tuple[dict[Any, Any], dict[Any, Any]]],
    values: Iterable[Tensor],
    gpus: Sequence[torch.device],
) -> Iterator[None]:
    """Puts dictionaries, the values of tensors and random streams back on leaving.

    Args:
        dictionaries: each with what is to be in it.
        values: tensors, written to in place, because others hold them too. Copies are on the CPU,
            where those of a GPU do not add to what is measured.
        gpus: whose random streams are used.
    """
    before = [(tensor, own_part(tensor).to("cpu", copy=True)) for tensor in values]
    with preserve_rng_state(), torch.random.fork_rng(gpus, enabled=bool(gpus)):
        try:
            yield
        finally:
            for dictionary, old in dictionaries:
                dictionary.clear()
                dictionary.update(old)
            with torch.no_grad():
                for tensor, value in before:
                    own_part(tensor).copy_(value)


def gpus_of(run: Run, modules: Iterable[nn.Module]) -> list[torch.device]:
    """All that the modules compute on."""
    devices = {run.device: None}
    for module in modules:
        devices |= dict.fromkeys(p.device for p in module.parameters())
        if isinstance(module, DataParallel):
            devices |= dict.fromkeys(module.devices)
    return [device for device in devices if device.type == "cuda"]


def now(gpus: Iterable[torch.device]) -> float:
    """Seconds of a clock, when the GPUs have done what they were given."""
    for gpu in gpus:
        torch.cuda.synchronize(gpu)
    return time.perf_counter()


def _shares_in_words(
    before: Sequence[int], after: Sequence[int], times: Sequence[Sequence[float]], kind: str
) -> str:
    took = [f"{kind} {number} {_time(min(each))}" for number, each in enumerate(times)]
    text = f"a sample took {join_first(took)}"
    if are_equally_fast(times):
        text += f": no difference, as the times of one {kind} differ as much"
    elif tuple(before) == tuple(after):
        text += "; others do not make a step faster by 8 %"
    change = "stay" if tuple(before) == tuple(after) else f"-> {_colons(after)}"
    return f"shares auto: {_colons(before)} {change}; {text}"


def _micro_batch_in_words(found: int | None, part: int) -> str:
    if found is None:
        return f"micro_batch_size auto: {part}, the whole part of a rank fits"
    return f"micro_batch_size auto: {found} samples at a time, of a part of {part}"


def _colons(shares: Sequence[int]) -> str:
    return ":".join(str(share) for share in shares)


def _time(seconds: float) -> str:
    """A time in the unit in which it is a number that can be read."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 0.1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
