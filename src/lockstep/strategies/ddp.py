"""torch's DistributedDataParallel with exact weighting, and with its silent traps made loud.

Communication: the parameters of rank 0 are broadcast once; every backward pass that closes a
global batch averages the gradients bucket by bucket while it still runs (Li et al., VLDB 2020).
Nothing is sent for the other micro-batches, and nothing in a forward pass, so one rank may evaluate
alone. Buffers that move are taken from rank 0 after each step (`replication`).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, SupportsIndex, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lockstep.communication import compression, routing
from lockstep.communication.compression import CompressedMeans, Compression
from lockstep.communication.link import all_reduce_bytes, traffic
from lockstep.communication.shared_memory import SharedMemory
from lockstep.distributed.device import add_memory_advice
from lockstep.distributed.process_group import Run
from lockstep.distributed.torch_compat import (
    await_another_backward,
    enclosing_ddp,
    never_compiled,
    outside_compiled_code,
)
from lockstep.errors import SettingError, UsageError, unknown_choice_error
from lockstep.optim.precision import Precision
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.session.step import CHECK_EVERY
from lockstep.settings import Choice, check_whole_number
from lockstep.strategies import base
from lockstep.strategies.replication import MovingBuffers, take_from_first
from lockstep.units import format_bytes
from lockstep.wording import join_first

_TORCH_BUCKET_MIB = 25
"""Of `bucket_cap_mb=None`, which also makes the first bucket small: sending begins early."""


@dataclass(frozen=True, kw_only=True)
class DDP(base.Strategy):
    """Options of DDP.

    Raises:
        SettingError: a value out of range.
    """

    name: ClassVar[str] = "ddp"

    bucket_cap_mb: float | None = None
    """Size of a gradient bucket in MiB; None: torch's default."""
    find_unused_parameters: bool = False
    """Look for parameters without gradient in every step; costs a walk over the graph."""
    static_graph: bool = False
    """The same parameters are used in every step: torch may then reorder more freely."""
    average_buffers: str | Sequence[str] = ()
    """Names, or patterns of names, of buffers that are averaged over the ranks after each step,
    weighted by samples, instead of taken from rank 0. Right for running means over samples, such as
    the statistics of InstanceNorm; not for sums, counts and codebooks."""
    check_every: int = CHECK_EVERY
    """Global batches between comparisons of the replicas (besides steps 1, 2, 3, 10); 0: never."""
    compress: Compression | None = None
    """How gradients are sent to other machines, or to other ranks where there is one machine."""
    powersgd_rank: int = 1
    """Columns of the matrices that stand for a gradient."""
    powersgd_start: int = 100
    """Global batches before that begins, as in the code of its authors."""

    def __post_init__(self) -> None:
        if self.compress is not None and self.compress not in get_args(Compression):
            known = get_args(Compression)
            raise unknown_choice_error(
                f"compress={self.compress!r}", self.compress, "compressions", known
            )
        check_whole_number(f"powersgd_rank={self.powersgd_rank}", self.powersgd_rank)
        check_whole_number(f"powersgd_start={self.powersgd_start}", self.powersgd_start, 0)
        if self.bucket_cap_mb is not None and self.bucket_cap_mb <= 0:
            raise SettingError(
                f"bucket_cap_mb={self.bucket_cap_mb}",
                "a bucket holds something",
                "give MiB above 0",
            )
        check_whole_number(f"check_every={self.check_every}", self.check_every, 0)

    def plan(self, run: Run) -> base.StrategyPlan:
        """A part of the batch for every rank."""
        return replace(super().plan(run), can_autotune=True, static_graph=self.static_graph)

    def wrap(self, module: nn.Module, run: Run) -> base.PreparedModule:
        """The module in DDP, with rank 0's parameters and buffers on all ranks.

        On one process it is the module itself. One that is spread over several GPUs by hand stays
        where it is, and its gradients are averaged there. One without parameters to train is not
        wrapped, because there is nothing to average, but made equal.

        Raises:
            UsageError: the module is partly on GPUs and partly on the CPU.
            SettingError: `static_graph` with micro-batches, when that shows.
        """
        choices = base.move_to_device(module, run.device)
        spread = bool(choices)
        if spread and any(p.device.type != "cuda" for p in module.parameters()):
            raise UsageError(
                "world.prepare of a module on several GPUs and on the CPU",
                "DDP averages gradients on devices of one type",
                "move all its parameters to GPUs",
            )
        if run.topology.size == 1:
            return base.PreparedModule(module=module, choices=choices)
        take_from_first([*module.parameters(), *module.buffers()])
        if not any(p.requires_grad for p in module.parameters()):
            choices.append(Choice("ddp", "not wrapped", "no parameter to train"))
            return base.PreparedModule(module=module, choices=choices)
        compress = self._compression(module, run)
        wrapped = ExactDDP(
            module,
            run,
            self,
            compress,
            device_ids=[run.device.index] if run.device.type == "cuda" and not spread else None,
            bucket_cap_mb=self.bucket_cap_mb,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            gradient_as_bucket_view=True,
            init_sync=False,
        )
        size = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        in_place = Choice(
            "gradients", format_bytes(size), "averaged in buckets during backward, in place"
        )
        choices += [in_place, self._bucket_choice(size)]
        if compress is not None:
            told = (
                f"gradients {compression.sent_between(run.device)}; not the numbers of one device"
            )
            choices.append(Choice("compression", compress, told))
        moving_buffers = MovingBuffers(
            module, run.step, average=self.average_buffers, strategy=type(self).__name__
        )
        return base.PreparedModule(
            module=wrapped,
            choices=choices,
            equal_tensors=lambda: [base.EqualTensors.of(module)],
            check_every=self.check_every,
            extensions=[_StepsUnderDDP(wrapped, moving_buffers)],
            compressed=wrapped.compressed,
        )

    def backward(
        self, modules: Sequence[nn.Module], loss: Tensor, precision: Precision, **options: Any
    ) -> None:
        """The backward pass.

        Raises:
            UsageError: a sparse table was not used, and torch cannot leave it out.
        """
        try:
            super().backward(modules, loss, precision, **options)
        except RuntimeError as error:
            if "Expected sparse gradient to be defined" not in str(error):
                raise
            wrapped = [getattr(module, "module", module) for module in modules]
            sparse = [name for module in wrapped for name in sparse_weights(module)]
            raise UsageError(
                "a backward pass that does not use every embedding with sparse gradients",
                f"on this rank the loss does not use all of {join_first(sparse)}, and torch cannot "
                "average a sparse gradient that is not there, under find_unused_parameters either",
                "build them without sparse=True, use them in every step on every rank, or freeze "
                "them with requires_grad_(False) before world.prepare",
                code="LS301",
            ) from error

    def _compression(self, module: nn.Module, run: Run) -> Compression | None:
        """How the gradients of a module are sent.

        Raises:
            SettingError: they cannot be sent so.
        """
        if self.compress is None or run.settings.uncompressed:
            return None
        if self.compress != "bf16" and run.settings.precision == "fp16":
            raise SettingError(
                f"compress={self.compress!r} with precision='fp16'",
                "what is lost in one step is sent in the next, where the loss may be scaled "
                "otherwise",
                "use precision='bf16', or compress='bf16'",
            )
        if any(getattr(part, "sparse", False) for part in module.modules()):
            raise SettingError(
                f"compress={self.compress!r} of a model with sparse gradients",
                "they are sent as they are, and others are not there to be compressed",
                "make its embeddings without sparse=True, or leave compress out",
            )
        return self.compress

    def _bucket_choice(self, size: int) -> Choice:
        if self.bucket_cap_mb is not None:
            return Choice("bucket", f"{self.bucket_cap_mb:g} MiB", "as set")
        reason = "torch's default: large enough to fill a link, small enough to overlap"
        if size <= 2**20 * _TORCH_BUCKET_MIB:
            reason = "torch's default; one holds all"
        return Choice("bucket", f"{_TORCH_BUCKET_MIB} MiB", reason)


class _BucketMeans:
    """What a communication hook of DDP does: the mean over the ranks, in the bucket itself.

    Between machines the buckets are on their way together, until the last one is there.
    """

    def __init__(self, shared: SharedMemory | None) -> None:
        self._shared = shared
        self._scale = 1.0 / dist.get_world_size()
        self._under_way: list[Callable[[], None]] = []

    def __call__(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        gradients, means = bucket.buffer(), torch.futures.Future[Tensor]()
        if gradients.layout is not torch.strided:  # those of `Embedding(sparse=True)`
            work = dist.all_reduce(gradients.mul_(self._scale), async_op=True)
            future = cast(dist.Work, work).get_future()
            return future.then(lambda reduced: reduced.value()[0])
        if bucket.index() == 0:
            self._under_way.clear()  # of a backward pass that has raised
        if self._shared is not None and self._shared.across is None:
            self._shared.all_reduce(gradients, scale=self._scale)
            means.set_result(gradients)
            return means
        if self._shared is None:
            end = routing.start_all_reduce(gradients.mul_(self._scale))
        else:
            end = self._shared.start_all_reduce(gradients, scale=self._scale)
        self._under_way += [end, partial(means.set_result, gradients)]
        if bucket.is_last():
            for each in self._under_way:
                each()
            self._under_way.clear()
        return means


class _AroundWrapper:
    """A pre-hook of the wrapped module: refuses forward passes that go around the wrapper.

    It counts those that do not.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._module = (lambda: None) if module is None else weakref.ref(module)
        self.allowed = False
        # Counted here, as the attributes of a module are slow to set.
        self.forwards = 0
        """Forward passes with gradients."""
        self.at_backward = 0
        """How many there were at the last backward pass."""

    def __reduce__(self) -> tuple[type[_AroundWrapper], tuple[()]]:
        """Copies of the module may be called; nor is the process group part of them."""
        return _AroundWrapper, ()

    @outside_compiled_code
    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if self.allowed or module is not self._module():
            return
        if torch.is_grad_enabled() and module.training:
            raise UsageError(
                "a training forward pass through .module",
                "DDP averages the gradients of its own forward passes only; these would stay here",
                "call the object that world.prepare returned; .module is for reading and for "
                "evaluation under torch.no_grad()",
                code="LS302",
            )


class ExactDDP(base.ModuleWrapper, DistributedDataParallel):
    """DDP that follows the global batch: it communicates on its last micro-batch alone."""

    def __init__(
        self,
        module: nn.Module,
        run: Run,
        options: DDP,
        compress: Compression | None,
        **torch_options: Any,
    ) -> None:
        super().__init__(module, **torch_options)
        self.run = run
        self.options = options
        self._around = _AroundWrapper(module)
        module.register_forward_pre_hook(self._around)
        self._seen: dict[int, int] = {}
        """Forward passes at the last step of each optimizer, by its id."""
        shared = routing.shared_memory() if run.device.type == "cpu" else None
        self._means: _BucketMeans | CompressedMeans | None = None
        timed = run.link is not None or run.settings.report is not None
        if shared is not None or (timed and run.device.type == "cpu"):
            # to know how long is waited for others
            self._means = _BucketMeans(shared)
        """What averages the gradients from the first step on, where the user registers nothing."""
        self.compressed: CompressedMeans | None = None
        self.by_choice = ""
        """What the user has chosen although it gives other numbers, and `verify` has left out."""
        if options.compress is not None and run.settings.uncompressed:
            self.by_choice = f"gradients are sent as {options.compress}"
        self._trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if compress is not None:
            parameters = [parameter for _, parameter in self._trained]
            options_of = options.powersgd_rank, options.powersgd_start
            self._means = self.compressed = CompressedMeans(parameters, compress, *options_of)
        size = sum(p.numel() * p.element_size() for _, p in self._trained)
        self._sent = 0 if self._means else all_reduce_bytes(size, run.topology.size)
        """Bytes that torch's own reduction sends in a backward pass."""
        self._owned: dict[int, list[tuple[str, nn.Parameter]]] = {}
        """Those of `_trained` that an optimizer holds, by its id."""
        self._is_initialized = True

    @never_compiled  # compiled code would keep the process group after the run
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward pass; without gradients it involves no other rank."""
        if not torch.is_grad_enabled():
            return self.module(*inputs, **kwargs)
        allowed_before = self._begin_forward()
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except Exception as error:
            self._note_where(error)
            raise
        finally:
            self._around.allowed = allowed_before

    @outside_compiled_code
    def _begin_forward(self) -> bool:
        """Sets torch to what the micro-batch needs, and allows the pass through the wrapped module.

        Returns:
            Whether such a pass was allowed before; the caller restores that.

        Raises:
            UsageError: the run is closed, or the gradients would be averaged twice.
            SettingError: `static_graph` with micro-batches.
        """
        if self.reducer is None:
            raise UsageError(
                "a training forward pass after world.close()",
                "the process group is closed, so gradients cannot be averaged",
                "close at the very end, or evaluate under torch.no_grad()",
            )
        outer = enclosing_ddp()
        if outer is not None and not isinstance(outer, ExactDDP):
            raise UsageError(
                "a prepared model in DistributedDataParallel",
                "both average the gradients, so they would come out too small",
                "leave DistributedDataParallel out: call the object that world.prepare returned",
            )
        if self._means is not None:
            # A lambda: torch refuses annotations that are text, as those of this file are.
            self.register_comm_hook(self._means, lambda means, bucket: means(bucket))
        present = self.run.step.micro_batch
        if self.options.static_graph and not present.last:
            raise SettingError(
                "DDP(static_graph=True) with micro-batches",
                "torch then needs to communicate in every backward pass",
                "leave static_graph or micro_batch_size out",
            )
        if self.require_backward_grad_sync is not present.last:
            self.require_backward_grad_sync = present.last
        self._around.forwards += 1
        allowed_before = self._around.allowed
        self._around.allowed = True
        return allowed_before

    @outside_compiled_code
    def _note_where(self, error: Exception) -> None:
        """Adds to an error of the forward pass what is known of this rank's part of the batch."""
        present = self.run.step.micro_batch
        add_memory_advice(error, present.local_rows)
        base.note_empty_part(error, present)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the user's module in place, with the arguments of `torch.compile`.

        Torch would compile the call of this wrapper, which only breaks the graph: what the wrapper
        does around the module's forward pass is not for a graph.
        """
        self.module.compile(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """What the user's module has, as on one process, where it is what `prepare` returns."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not there yet
                raise
            return getattr(self.module, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy of the user's module alone: nobody averages the gradients of copies."""
        made: nn.Module = copy.deepcopy(self.module, memo)
        return made

    def __copy__(self) -> nn.Module:
        """A shallow copy of the user's module, which has the same parameters."""
        made: nn.Module = copy.copy(self.module)
        return made

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Callable[..., nn.Module], Any]:
        """Pickles the user's module alone, as `__deepcopy__` copies it.

        So `torch.save(model)` writes what it writes on one process, and no process group is needed
        to load it.
        """
        return _user_module, (self.module,)

    def expect_backward(self, loss: Tensor) -> None:
        """Before a backward pass: lets torch await it where the last forward pass did not.

        Torch awaits one backward pass, that of the last forward pass. The gradients of a second one
        would stay on this rank.
        """
        around = self._around
        fresh = around.forwards - around.at_backward
        around.at_backward = around.forwards
        if self.require_backward_grad_sync:
            traffic.sent += self._sent
        if fresh == 1 or not around.forwards or not self.require_backward_grad_sync:
            return
        used = self.options.find_unused_parameters and not self.options.static_graph
        await_another_backward(self, [loss] if used else [])

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Torch's; the user's own takes the place of shared memory."""
        if self.compressed is not None and state is not self.compressed:
            raise UsageError(
                "register_comm_hook of a model that was prepared with DDP(compress=...)",
                "either sends the gradients in a way of its own",
                "leave one of them out",
            )
        self._means, self._sent = None, 0
        super().register_comm_hook(state, hook)

    def release(self) -> None:
        """Drops what keeps the process group, and so its threads, alive.

        A Gloo thread that outlives the group may still want the interpreter's lock, to drop a
        tensor, while the interpreter is shutting down; Python then ends the thread in the middle
        of C++, and the process aborts ("terminate called without an active exception").
        """
        self.reducer = self.logger = self.process_group = None  # type: ignore[assignment]
        self._means = self.compressed = None

    def will_sync_module_buffers(self) -> bool:
        """Never before a forward pass, which torch asks about: they are shared after each step."""
        return False

    def check_gradients(self, optimizer: Optimizer) -> None:
        """Raises UsageError where a step would use gradients that are not the global batch's."""
        key = id(optimizer)
        if key not in self._owned:
            held = set(map(id, base.parameters_of(optimizer)))
            self._owned[key] = [(name, p) for name, p in self._trained if id(p) in held]
        owned = self._owned[key]
        missing = [name for name, parameter in owned if parameter.grad is None]
        fresh = self._around.forwards > self._seen.get(key, 0)
        self._seen[key] = self._around.forwards
        if len(missing) == len(owned):
            return
        if not fresh:
            raise UsageError(
                "a backward pass whose forward pass did not go through the prepared model",
                "its gradients stayed on this rank: they were not averaged",
                "call the object that world.prepare returned, not its .module or a method of it",
                code="LS302",
            )
        if not missing:
            return
        here = set(map(id, self.module.parameters()))
        if gone := [name for name, p in owned if p.grad is None and id(p) not in here]:
            raise base.changed_parameters_error(
                f"{join_first(gone)} replaced; their gradients are not averaged over the ranks"
            )
        if not (self.options.find_unused_parameters or self.options.static_graph):
            sparse = [name for name in sparse_weights(self.module) if name in missing]
            raise UsageError(
                "an optimizer step while some parameters have no gradient",
                f"{len(missing)} of {len(owned)} were not used for the loss: "
                f"{join_first(missing)}; DDP waits for them, so others may not be averaged either",
                _advice_on_unused(sparse),
                code="LS301",
            )


class _StepsUnderDDP(Extension):
    """What happens in a step with one module under DDP.

    Args:
        module: the wrapped module.
        moving_buffers: its buffers that forward passes change.
    """

    def __init__(self, module: ExactDDP, moving_buffers: MovingBuffers) -> None:
        self._module = module
        self.moving_buffers = moving_buffers

    def backward_begins(self, weighted_loss: Tensor, micro_batch: MicroBatch) -> None:
        """Lets torch await this backward pass."""
        self._module.expect_backward(weighted_loss)

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Raises UsageError if the gradients are not those of the global batch."""
        if self._module in modules:
            self._module.check_gradients(optimizer)

    def after_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Makes buffers that forward passes change equal on all ranks."""
        if self._module in modules:
            self.moving_buffers.follow()

    def release(self) -> None:
        """Drops references to the process group."""
        self._module.release()


def _user_module(module: nn.Module) -> nn.Module:
    """What a pickled `ExactDDP` is loaded as."""
    return module


def sparse_weights(module: nn.Module) -> list[str]:
    """The names of the parameters whose gradients are sparse: weights of embeddings."""
    return [
        f"{name}.weight" if name else "weight"
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
    ]


def _advice_on_unused(sparse: Sequence[str]) -> str:
    """What to do about parameters that the loss does not use, some of them sparse."""
    advice = (
        "use them, freeze them with requires_grad_(False) before world.prepare, or pass "
        "strategy=lockstep.strategies.DDP(find_unused_parameters=True)"
    )
    if sparse:
        advice += f" and build {join_first(sparse)} without sparse=True"
    return advice
