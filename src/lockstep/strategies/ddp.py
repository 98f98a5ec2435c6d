"""torch's DistributedDataParallel with the exact weighting of Lockstep, and with checks.

DDP collects gradients in *buckets*. In the last micro-batch of a global batch each bucket is
averaged over the ranks as soon as it is complete, while the backward pass still runs (Li et al.,
VLDB 2020). The other micro-batches send nothing: their gradients add up on each rank. The
parameters of rank 0 are broadcast once. Forward passes send nothing, so that one rank may evaluate
alone. Buffers that forward passes change are taken from rank 0 after each step (`moving_buffers`).

Several mistakes would give wrong gradients without an error: a forward pass that bypasses the
wrapper, parameters without gradient, a second DDP around the model. They raise errors here.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, SupportsIndex, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lockstep.communication import routing
from lockstep.communication.compressed_means import CompressedMeans, Compression
from lockstep.communication.quantized_sum import describe_peers
from lockstep.communication.shared_memory import SharedMemory
from lockstep.communication.traffic import all_reduce_bytes, traffic
from lockstep.distributed.device import add_memory_advice
from lockstep.distributed.process_group import Run
from lockstep.distributed.torch_compat import (
    accepted,
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
from lockstep.strategies.moving_buffers import MovingBuffers
from lockstep.strategies.pending_buckets import PendingBuckets
from lockstep.strategies.replication import take_from_first
from lockstep.strategies.virtual_rank_buffers import VirtualRankBuffers
from lockstep.strategies.virtual_ranks import (
    BucketTreeSum,
    VirtualRankGradients,
    make_virtual_rank_tree,
)
from lockstep.units import format_bytes
from lockstep.wording import join_first

_TORCH_BUCKET_MIB = 25
"""The size of a bucket with `bucket_cap_mb=None`. Torch then also makes the first bucket small, so
that sending begins early."""


@dataclass(frozen=True, kw_only=True)
class DDP(base.Strategy):
    """Options of DDP.

    Raises:
        SettingError: a value out of range.
    """

    name: ClassVar[str] = "ddp"

    bucket_cap_mb: float | None = None
    """Size of a gradient bucket in MiB. None for torch's default."""
    find_unused_parameters: bool = False
    """Look for parameters without gradient in every step, which takes a walk over the graph."""
    static_graph: bool = False
    """Promise that every step uses the same parameters. Torch may then reorder more freely."""
    average_buffers: str | Sequence[str] = ()
    """Names, or patterns of names, of buffers that are averaged over the ranks after each step,
    weighted by samples, instead of taken from rank 0. Right for running means over samples, such as
    the statistics of InstanceNorm; not for sums, counts and codebooks."""
    check_every: int = CHECK_EVERY
    """Global batches between comparisons of the replicas, besides steps 1, 2, 3 and 10. 0 for no
    comparison."""
    compress: Compression | None = None
    """How gradients are compressed on their way to other machines. With one machine: on their way
    to other ranks."""
    powersgd_rank: int = 1
    """PowerSGD: the number of columns of the two matrices that approximate a gradient."""
    powersgd_start: int = 100
    """PowerSGD: how many global batches are sent uncompressed first, as in its authors' code."""

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
        """Returns a plan in which every rank computes a part of each batch.

        Raises:
            SettingError: an option does not go with virtual ranks.
        """
        if self.find_unused_parameters:
            base.refuse_virtual_ranks(
                run,
                f"{self.name}:find_unused_parameters=true",
                "every virtual rank has to use all parameters, so that its gradient has its place "
                "in the sum",
            )
        return replace(super().plan(run), can_autotune=True, static_graph=self.static_graph)

    def wrap(self, module: nn.Module, run: Run) -> base.PreparedModule:
        """Wraps a module in DDP and gives it rank 0's parameters and buffers on all ranks.

        On one process the module is not wrapped. Nor is it without trainable parameters, because
        then there is nothing to average. A module that the user has spread over several GPUs stays
        there.

        Raises:
            UsageError: the module is partly on GPUs and partly on the CPU.
        """
        choices = base.move_to_device(module, run.device)
        is_on_several_gpus = bool(choices)
        if is_on_several_gpus and any(p.device.type != "cuda" for p in module.parameters()):
            raise UsageError(
                "world.prepare of a module on several GPUs and on the CPU",
                "DDP averages gradients on devices of one type",
                "move all its parameters to GPUs",
            )

        if run.topology.size == 1:
            return replace(base.on_one_process(module, run), choices=choices)

        take_from_first([*module.parameters(), *module.buffers()])
        if not any(p.requires_grad for p in module.parameters()):
            choices.append(Choice("ddp", "not wrapped", "no parameter to train"))
            return base.PreparedModule(module=module, choices=choices)

        compress = self._compression(module, run)
        device_ids = None
        if run.device.type == "cuda" and not is_on_several_gpus:
            device_ids = [run.device.index]

        wrapped = ExactDDP(
            module,
            run,
            self,
            compress,
            device_ids=device_ids,
            bucket_cap_mb=self.bucket_cap_mb,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            gradient_as_bucket_view=True,
            # Torch 2.6 does not have it, and sends once more what is equal already.
            **accepted(DistributedDataParallel, init_sync=False),
        )
        num_bytes = _gradient_bytes(module)
        reason = "averaged in buckets during backward, in place"
        choices.append(Choice("gradients", format_bytes(num_bytes), reason))
        choices.append(self._bucket_choice(num_bytes))

        if compress is not None:
            sent = f"gradients {describe_peers(run.device)}"
            choices.append(
                Choice("compression", compress, f"{sent}; not the numbers of one device")
            )

        extensions: list[Extension] = []
        average: str | Sequence[str] = self.average_buffers
        left_out: Sequence[str] = ()
        if wrapped.virtual_ranks is not None:
            buffers = VirtualRankBuffers(
                module, wrapped.virtual_ranks.tree, run.step, average, prepared=wrapped
            )
            average = ()
            left_out = buffers.combined
            # Buffers are combined before those that are left are taken from rank 0.
            extensions = [wrapped.virtual_ranks, buffers]

        moving_buffers = MovingBuffers(
            module,
            run.step,
            average=average,
            left_out=left_out,
            strategy=type(self).__name__,
        )
        extensions.append(_StepsUnderDDP(wrapped, moving_buffers))
        return base.PreparedModule(
            module=wrapped,
            choices=choices,
            equal_tensors=lambda: [base.EqualTensors.of(module)],
            check_every=self.check_every,
            extensions=extensions,
            compressed=wrapped.compressed,
        )

    def backward(
        self, modules: Sequence[nn.Module], loss: Tensor, precision: Precision, **options: Any
    ) -> None:
        """Runs the backward pass of a loss that is already weighted.

        Raises:
            UsageError: an embedding with sparse gradients was not used, and torch cannot skip it.
        """
        try:
            super().backward(modules, loss, precision, **options)
        except RuntimeError as error:
            if "Expected sparse gradient to be defined" not in str(error):
                raise

            sparse: list[str] = []
            for module in modules:
                sparse += sparse_weights(getattr(module, "module", module))

            raise UsageError(
                "a backward pass that does not use every embedding with sparse gradients",
                f"on this rank the loss does not use all of {join_first(sparse)}, and torch cannot "
                "average a sparse gradient that is not there, under find_unused_parameters either",
                "build them without sparse=True, use them in every step on every rank, or freeze "
                "them with requires_grad_(False) before world.prepare",
                code="LS301",
            ) from error

    def _compression(self, module: nn.Module, run: Run) -> Compression | None:
        """Returns how the gradients of a module are compressed, None for not at all.

        Raises:
            SettingError: the option does not work with this module or precision.
        """
        if self.compress is None or run.settings.uncompressed:
            return None

        base.refuse_virtual_ranks(
            run, f"ddp:compress={self.compress}", "what compression loses depends on the ranks"
        )
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

    def _bucket_choice(self, num_bytes: int) -> Choice:
        """Returns the line about the bucket size for a model with this many bytes of gradients."""
        if self.bucket_cap_mb is not None:
            return Choice("bucket", f"{self.bucket_cap_mb:g} MiB", "as set")
        reason = "torch's default: large enough to fill a link, small enough to overlap"
        if num_bytes <= 2**20 * _TORCH_BUCKET_MIB:
            reason = "torch's default; one holds all"
        return Choice("bucket", f"{_TORCH_BUCKET_MIB} MiB", reason)


class _BucketAverager:
    """A communication hook of DDP that averages the gradients of a bucket over the ranks, in place.

    Ranks of one machine average through shared memory. Between machines the hook only starts the
    exchange of a bucket (`pending_buckets`).

    Args:
        shared: the shared memory of the ranks of this machine, if they use it.
    """

    def __init__(self, shared: SharedMemory | None) -> None:
        self._shared = shared
        self._scale = 1.0 / dist.get_world_size()
        self._pending = PendingBuckets()

    def __call__(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Averages a bucket; torch calls this in the backward pass.

        Returns:
            A future of the averaged gradients.
        """
        gradients = bucket.buffer()
        if gradients.layout is not torch.strided:  # gradients of `Embedding(sparse=True)`
            work = dist.all_reduce(gradients.mul_(self._scale), async_op=True)
            future = cast(dist.Work, work).get_future()
            return future.then(lambda reduced: reduced.value()[0])

        if self._shared is not None and self._shared.across is None:  # a single machine
            self._shared.all_reduce(gradients, scale=self._scale)
            averages = torch.futures.Future[Tensor]()
            averages.set_result(gradients)
            return averages

        if self._shared is None:
            wait = routing.start_all_reduce(gradients.mul_(self._scale))
        else:
            wait = self._shared.start_all_reduce(gradients, scale=self._scale)

        return self._pending.add(bucket, wait)


class _ForwardGuard:
    """A forward pre-hook of the user's module, which refuses calls that bypass the DDP wrapper.

    It also counts the forward passes of the wrapper. The counts are here because attributes of a
    plain object are much faster to set than those of a module.

    Args:
        module: the user's module.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._module = (lambda: None) if module is None else weakref.ref(module)
        self.is_allowed = False
        """True while the wrapper calls the module."""
        self.num_forwards = 0
        """Forward passes of the wrapper with gradients."""
        self.num_forwards_at_backward = 0
        """What `num_forwards` was at the last backward pass."""

    def __reduce__(self) -> tuple[type[_ForwardGuard], tuple[()]]:
        """Copies and pickles it as a guard that allows everything: copied modules may be called."""
        return _ForwardGuard, ()

    @outside_compiled_code
    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Raises UsageError for a training forward pass that did not go through the wrapper."""
        if self.is_allowed or module is not self._module():
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
    """DDP that communicates only in the last micro-batch of a global batch.

    Args:
        module: the user's module.
        run: of this process.
        options: the strategy's.
        compress: how gradients are compressed, None for not at all.
        **torch_options: arguments of `DistributedDataParallel`.
    """

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
        self._guard = _ForwardGuard(module)
        module.register_forward_pre_hook(self._guard)
        self._forwards_at_last_step: dict[int, int] = {}
        """The number of forward passes at the last step of each optimizer, by its id."""
        self._trained: list[tuple[str, nn.Parameter]] = []
        """The trainable parameters, with their names."""
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                self._trained.append((name, parameter))

        self._trained_by_optimizer: dict[int, list[tuple[str, nn.Parameter]]] = {}
        """The parameters of `_trained` that an optimizer has, by the optimizer's id."""
        self.by_choice = ""
        """An option that changes results and that `verify` therefore switches off, in words."""
        if options.compress is not None and run.settings.uncompressed:
            self.by_choice = f"gradients are sent as {options.compress}"

        self.compressed: CompressedMeans | None = None
        self.virtual_ranks: VirtualRankGradients | None = None
        """Keeps the gradients of virtual ranks apart, if there are any."""
        if run.settings.virtual_ranks is not None:
            self.virtual_ranks = VirtualRankGradients(
                list(module.parameters()), make_virtual_rank_tree(run), run.step
            )

        self._averager: _BucketAverager | BucketTreeSum | CompressedMeans | None = None
        """Becomes DDP's communication hook in the first forward pass, unless the user registers
        another hook before."""
        if compress is not None:
            parameters = [parameter for _, parameter in self._trained]
            self.compressed = CompressedMeans(
                parameters, compress, options.powersgd_rank, options.powersgd_start
            )
            self._averager = self.compressed
        elif self.virtual_ranks is not None:
            self._averager = BucketTreeSum(self.virtual_ranks)
        elif run.device.type == "cpu":
            shared = routing.shared_memory()
            # Our own hook also measures how long this rank waits for others.
            is_measured = run.link is not None or run.settings.report is not None
            if shared is not None or is_measured:
                self._averager = _BucketAverager(shared)

        self._bytes_per_backward = 0
        """What torch's own reduction sends in a backward pass. Our hooks count for themselves."""
        if self._averager is None:
            self._bytes_per_backward = all_reduce_bytes(_gradient_bytes(module), run.topology.size)

        self._is_initialized = True

    @never_compiled  # compiled code would keep the process group after the run
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the forward pass of the module; without gradients it involves no other rank."""
        if not torch.is_grad_enabled():
            return self.module(*inputs, **kwargs)

        was_allowed = self._begin_forward()
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except Exception as error:
            self._explain(error)
            raise
        finally:
            self._guard.is_allowed = was_allowed

    @outside_compiled_code
    def _begin_forward(self) -> bool:
        """Prepares torch's DDP for the current micro-batch, and lets the guard allow the pass.

        Returns:
            True if the guard allowed it before already, as in a forward pass within another one.
            The caller restores that.

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

        if self._averager is not None:
            # A lambda without annotations, because torch refuses annotations that are strings, as
            # all of this file are (`from __future__ import annotations`).
            self.register_comm_hook(self._averager, lambda averager, bucket: averager(bucket))

        micro_batch = self.run.step.micro_batch
        if self.options.static_graph and not micro_batch.last:
            raise SettingError(
                "DDP(static_graph=True) with micro-batches",
                "torch then needs to communicate in every backward pass",
                "leave static_graph or micro_batch_size out",
            )

        if self.require_backward_grad_sync is not micro_batch.last:
            self.require_backward_grad_sync = micro_batch.last

        self._guard.num_forwards += 1
        was_allowed = self._guard.is_allowed
        self._guard.is_allowed = True
        return was_allowed

    @outside_compiled_code
    def _explain(self, error: Exception) -> None:
        """Adds notes to an error of the forward pass: too little memory, or no samples here."""
        micro_batch = self.run.step.micro_batch
        add_memory_advice(error, micro_batch.local_rows)
        base.note_empty_part(error, micro_batch)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the user's module in place, with the arguments of `torch.compile`.

        Torch would compile the call of this wrapper instead. That only breaks the graph, because
        what the wrapper does around the module's forward pass cannot be compiled.
        """
        self.module.compile(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Looks up an attribute of the wrapper, or else of the user's module.

        On one process `World.prepare` returns the user's module itself, so scripts use its
        attributes.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not set yet, so asking it would never end
                raise
        # Not above: an error of the module would then be told with that of the wrapper.
        return getattr(self.module, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Copies only the user's module: gradients of copies are not averaged."""
        module: nn.Module = copy.deepcopy(self.module, memo)
        return module

    def __copy__(self) -> nn.Module:
        """Returns a shallow copy of the user's module, which has the same parameters."""
        module: nn.Module = copy.copy(self.module)
        return module

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Callable[..., nn.Module], Any]:
        """Pickles only the user's module.

        `torch.save(model)` then writes the same as on one process, and the file can be loaded
        without a process group.
        """
        return _user_module, (self.module,)

    def expect_backward(self, loss: Tensor) -> None:
        """Makes torch await the backward pass that is about to run.

        Torch prepares its reducer for one backward pass in each forward pass. If a loop calls
        backward twice after one forward pass, or once after two, the reducer is prepared again
        here; otherwise the gradients would stay on this rank.

        Args:
            loss: of that backward pass.
        """
        guard = self._guard
        forwards_since_backward = guard.num_forwards - guard.num_forwards_at_backward
        guard.num_forwards_at_backward = guard.num_forwards
        if not self.require_backward_grad_sync:
            return

        traffic.sent += self._bytes_per_backward
        module_was_never_called = guard.num_forwards == 0
        reducer_is_prepared = forwards_since_backward == 1
        if module_was_never_called or reducer_is_prepared:
            return

        looks_for_unused = self.options.find_unused_parameters and not self.options.static_graph
        await_another_backward(self, [loss] if looks_for_unused else [])

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Registers a communication hook of the user, which then averages instead of ours.

        Raises:
            UsageError: gradients are compressed, which is a hook as well.
        """
        if self.compressed is not None and state is not self.compressed:
            raise UsageError(
                "register_comm_hook of a model that was prepared with DDP(compress=...)",
                "either sends the gradients in a way of its own",
                "leave one of them out",
            )

        if self.virtual_ranks is not None and not isinstance(state, BucketTreeSum):
            raise UsageError(
                "register_comm_hook of a model that is prepared with virtual_ranks",
                "the sum over virtual ranks is such a hook, and another one would give other bits",
                "leave one of them out",
            )

        self._averager = None
        self._bytes_per_backward = 0
        super().register_comm_hook(state, hook)

    def release(self) -> None:
        """Drops all references to the process group, so that its threads end with the run.

        A thread of Gloo that outlives the run may ask for the interpreter's lock, to free a tensor,
        while the interpreter shuts down. Python then ends the thread in the middle of C++, and the
        process aborts ("terminate called without an active exception").
        """
        self.reducer = None  # type: ignore[assignment]
        self.logger = None
        self.process_group = None  # type: ignore[assignment]
        self._averager = None
        self.compressed = None

    def will_sync_module_buffers(self) -> bool:
        """Tells torch not to send buffers before a forward pass: they are sent after each step."""
        return False

    def check_gradients(self, optimizer: Optimizer) -> None:
        """Raises UsageError if gradients that an optimizer would use were not averaged.

        Keeps the number of forward passes until now, for the next step of the optimizer.
        """
        key = id(optimizer)
        trained = self._trained_by(optimizer)
        missing = [name for name, parameter in trained if parameter.grad is None]
        num_forwards = self._guard.num_forwards
        has_run_forward = num_forwards > self._forwards_at_last_step.get(key, 0)
        self._forwards_at_last_step[key] = num_forwards
        has_no_gradient = len(missing) == len(trained)
        if has_no_gradient:  # the loss has not used this module, and nothing was to be averaged
            return

        if not has_run_forward:
            raise UsageError(
                "a backward pass whose forward pass did not go through the prepared model",
                "its gradients stayed on this rank: they were not averaged",
                "call the object that world.prepare returned, not its .module or a method of it",
                code="LS302",
            )

        if missing:
            self._check_missing(trained, missing)

    def _trained_by(self, optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
        """Returns the names and trainable parameters of the module that an optimizer has."""
        key = id(optimizer)
        if key not in self._trained_by_optimizer:
            ids = {id(parameter) for parameter in base.parameters_of(optimizer)}
            self._trained_by_optimizer[key] = [
                (name, parameter) for name, parameter in self._trained if id(parameter) in ids
            ]
        return self._trained_by_optimizer[key]

    def _check_missing(
        self, trained: Sequence[tuple[str, nn.Parameter]], missing: Sequence[str]
    ) -> None:
        """Raises UsageError if it is not right that some parameters have no gradient.

        Args:
            trained: the names and parameters that an optimizer has.
            missing: the names of those without gradient.
        """
        ids_in_module = {id(parameter) for parameter in self.module.parameters()}
        replaced: list[str] = []
        for name, parameter in trained:
            if parameter.grad is None and id(parameter) not in ids_in_module:
                replaced.append(name)

        if replaced:
            raise base.changed_parameters_error(
                f"{join_first(replaced)} replaced; their gradients are not averaged over the ranks"
            )

        if self.options.find_unused_parameters or self.options.static_graph:
            return

        sparse = [name for name in sparse_weights(self.module) if name in missing]
        raise UsageError(
            "an optimizer step while some parameters have no gradient",
            f"{len(missing)} of {len(trained)} were not used for the loss: "
            f"{join_first(missing)}; DDP waits for them, so others may not be averaged either",
            _advice_on_unused(sparse),
            code="LS301",
        )


# Messages of Python's and torch's, and `print(model)`, have the name that users know.
ExactDDP.__name__ = DistributedDataParallel.__name__
ExactDDP.__qualname__ = DistributedDataParallel.__qualname__


class _StepsUnderDDP(Extension):
    """Calls a module under DDP, and its buffers, at the events of a step.

    Args:
        module: the wrapped module.
        moving_buffers: keeps the buffers that forward passes change equal on all ranks.
    """

    def __init__(self, module: ExactDDP, moving_buffers: MovingBuffers) -> None:
        self._module = module
        self.moving_buffers = moving_buffers

    def backward_begins(self, weighted_loss: Tensor, micro_batch: MicroBatch) -> None:
        """Makes torch await this backward pass."""
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
    """Returns its argument. A pickled `ExactDDP` is loaded by calling this with the module."""
    return module


def _gradient_bytes(module: nn.Module) -> int:
    """Returns the size of all gradients of a module."""
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)


def sparse_weights(module: nn.Module) -> list[str]:
    """Returns the names of the parameters with sparse gradients: the weights of some embeddings."""
    names: list[str] = []
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            names.append(f"{name}.weight" if name else "weight")
    return names


def _advice_on_unused(sparse: Sequence[str]) -> str:
    """Returns what to do about parameters that the loss does not use.

    Args:
        sparse: the names of those that have sparse gradients.
    """
    advice = (
        "use them, freeze them with requires_grad_(False) before world.prepare, or pass "
        "strategy=lockstep.strategies.DDP(find_unused_parameters=True)"
    )
    if sparse:
        advice += f" and build {join_first(sparse)} without sparse=True"
    return advice
