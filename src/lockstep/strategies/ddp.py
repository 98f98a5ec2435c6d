"""The strategy `ddp`: torch's DistributedDataParallel with Lockstep's exact weighting and checks.

Every rank has a copy of the model. DDP collects gradients in *buckets*. In the last micro-batch of
a global batch it averages each bucket over the ranks as soon as it is complete, while the backward
pass is still running (Li et al., VLDB 2020). The other micro-batches send nothing: their gradients
accumulate on each rank.

The parameters of rank 0 are broadcast once, when the model is prepared. Forward passes send
nothing, so one rank may evaluate alone. Buffers that forward passes change are taken from rank 0
after each step (`moving_buffers`).

Several mistakes would give wrong gradients without an error: a forward pass that bypasses the
wrapper, parameters without a gradient, a second DDP around the model. They raise errors here.
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
from lockstep.errors import SettingError, UsageError, unknown_choice_error
from lockstep.keyword_arguments import check_keywords_of_constructor
from lockstep.optim.precision import Precision
from lockstep.session.check_schedule import CHECK_EVERY
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.settings import Choice, check_whole_number
from lockstep.strategies import base
from lockstep.strategies.empty_part import note_empty_part
from lockstep.strategies.module_hook import RunHook
from lockstep.strategies.moving_buffers import MovingBuffers
from lockstep.strategies.pending_buckets import PendingBuckets
from lockstep.strategies.replication import broadcast_from_first_rank
from lockstep.strategies.single import on_one_process
from lockstep.strategies.virtual_rank_buffers import VirtualRankBuffers
from lockstep.strategies.virtual_ranks import (
    BucketTreeSum,
    VirtualRankGradients,
    make_virtual_rank_tree,
)
from lockstep.torch_compat import (
    accepted,
    await_another_backward,
    enclosing_ddp,
    never_compiled,
    outside_compiled_code,
)
from lockstep.units import format_bytes
from lockstep.wording import join_first

_TORCH_BUCKET_MIB = 25
"""The size of a bucket if `bucket_cap_mb` is None. Torch then also makes the first bucket small, so
that the first message is sent early."""


@check_keywords_of_constructor("lockstep.strategies.DDP")
@dataclass(frozen=True, kw_only=True)
class DDP(base.Strategy):
    """The strategy `ddp` and its options.

    Raises:
        SettingError: an option has a value out of range.
    """

    name: ClassVar[str] = "ddp"
    averages_whole_gradient: ClassVar[bool] = True

    bucket_cap_mb: float | None = None
    """Size of a gradient bucket in MiB; None for torch's default."""
    find_unused_parameters: bool = False
    """Look for parameters without a gradient in every step, by traversing the autograd graph."""
    static_graph: bool = False
    """Promise that every step uses the same parameters, which allows torch to optimise more."""
    average_buffers: str | Sequence[str] = ()
    """Names, or patterns of names, of buffers that are averaged over the ranks after each step,
    weighted by samples, instead of being taken from rank 0. This is right for running means over
    samples, such as the statistics of InstanceNorm, but not for sums, counts and codebooks."""
    check_every: int = CHECK_EVERY
    """How many global batches pass between two comparisons of the ranks' models, besides those in
    steps 1, 2, 3 and 10; 0 for no comparisons."""
    compress: Compression | None = None
    """How gradients are compressed when they are sent to other machines, or, in a run on a single
    machine, to other ranks."""
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
        """Plans a run in which every rank computes its own part of each global batch.

        Under this strategy `micro_batch_size="auto"` and `shares="auto"` may be used
        (`can_autotune`).

        Raises:
            SettingError: an option is not supported with virtual ranks.
        """
        # The sum over virtual ranks expects a gradient of each parameter from each virtual rank.
        if self.find_unused_parameters:
            base.refuse_virtual_ranks(
                run,
                f"{self.name}:find_unused_parameters=true",
                "every virtual rank has to use all parameters, so that its gradient has its place "
                "in the sum",
                f"leave find_unused_parameters out, and {base.USE_ALL_IN_EVERY_VIRTUAL_RANK}",
            )
        if self.compress is not None and not run.settings.uncompressed:
            base.refuse_virtual_ranks(
                run,
                f"{self.name}:compress={self.compress}",
                "what compression loses depends on the ranks",
                "leave compress out, or leave virtual_ranks out",
            )
        return replace(super().plan(run), can_autotune=True, static_graph=self.static_graph)

    def wrap(self, module: nn.Module, run: Run) -> base.PreparedModule:
        """Wraps a module in DDP, with rank 0's parameters and buffers on all ranks.

        A module is not wrapped if there is one process, or if it has no trainable parameters, since
        there is nothing to average then. A module that the user has spread over several GPUs stays
        on them.

        Raises:
            UsageError: the module is partly on GPUs and partly on the CPU.
        """
        # If the user has spread the module over several GPUs, it stays there.
        choices = base.move_to_device(module, run.device)
        is_on_several_gpus = len(base.gpus_of(module)) > 1
        if is_on_several_gpus and any(p.device.type != "cuda" for p in module.parameters()):
            raise UsageError(
                "world.prepare of a module on several GPUs and on the CPU",
                "DDP averages gradients on devices of one type",
                "move all its parameters to GPUs",
            )

        if run.topology.size == 1:
            return replace(on_one_process(module, run), choices=choices)

        broadcast_from_first_rank([*module.parameters(), *module.buffers()])
        if not any(p.requires_grad for p in module.parameters()):
            choices.append(Choice("ddp", "not wrapped", "no parameter to train"))
            return base.PreparedModule(module=module, choices=choices)

        compress = self._compression(module, run)
        wrapped = self._make_wrapper(module, run, compress, is_on_several_gpus=is_on_several_gpus)
        return base.PreparedModule(
            module=wrapped,
            choices=choices + self._gradient_choices(module, run, compress),
            chosen_difference=self._chosen_difference(run),
            equal_tensors=lambda: [base.EqualTensors.of(module)],
            check_every=self.check_every,
            extensions=self._extensions(module, wrapped, run),
            compressed=wrapped.compressed,
        )

    def _chosen_difference(self, run: Run) -> str:
        """Returns which option `lockstep verify` has switched off in this run; "" if none.

        `verify` compares runs without compression, and then says that this option of the user makes
        the results differ from those of one device.
        """
        if self.compress is not None and run.settings.uncompressed:
            return f"gradients are sent as {self.compress}"
        return ""

    def _make_wrapper(
        self,
        module: nn.Module,
        run: Run,
        compress: Compression | None,
        *,
        is_on_several_gpus: bool,
    ) -> ExactDDP:
        """Wraps a module, whose parameters are equal on all ranks already, in DDP.

        Args:
            module: the user's module.
            run: the run of this process.
            compress: how gradients are compressed; None for no compression.
            is_on_several_gpus: True if the user has spread the module over several GPUs.
        """
        # Torch requires None for a module on the CPU or on several GPUs.
        device_ids = None
        if run.device.type == "cuda" and not is_on_several_gpus:
            device_ids = [run.device.index]

        return ExactDDP(
            module,
            run,
            self,
            compress,
            device_ids=device_ids,
            bucket_cap_mb=self.bucket_cap_mb,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            gradient_as_bucket_view=True,
            # Keeps torch from broadcasting the parameters once more. Torch 2.6 lacks this option.
            **accepted(DistributedDataParallel, init_sync=False),
        )

    def _gradient_choices(
        self, module: nn.Module, run: Run, compress: Compression | None
    ) -> list[Choice]:
        """Returns the printed lines about how gradients are averaged.

        A line has a name, a value and a reason, for example
        "compression: int8 (gradients between 2 machines; not the numbers of one device)".
        """
        num_bytes = _gradient_bytes(module)
        reason = "averaged in buckets during backward, in place"
        choices = [
            Choice("gradients", format_bytes(num_bytes), reason),
            self._bucket_choice(num_bytes),
        ]

        if compress is not None:
            # Compressed gradients are rounded, which changes the results.
            reason = f"gradients {describe_peers(run.device)}; not the numbers of one device"
            choices.append(Choice("compression", compress, reason))

        return choices

    def _extensions(self, module: nn.Module, wrapped: ExactDDP, run: Run) -> list[Extension]:
        """Returns the extensions that handle the events of each step, in the order of their calls.

        Without virtual ranks, there is only `_StepsUnderDDP`, which also makes buffers equal. With
        virtual ranks, the first extension sums gradients over the virtual ranks, and the second
        makes buffers equal, so `_StepsUnderDDP` does not (None).

        Args:
            module: the user's module.
            wrapped: the same module in its DDP wrapper.
            run: the run of this process.
        """
        virtual_ranks = wrapped.virtual_ranks
        if virtual_ranks is None:
            moving_buffers = MovingBuffers(
                module,
                run.step,
                average=self.average_buffers,
                left_out=(),
                strategy=type(self).__name__,
            )
            return [_StepsUnderDDP(wrapped, moving_buffers)]

        buffers = VirtualRankBuffers(
            module, virtual_ranks.tree, run.step, self.average_buffers, prepared=wrapped
        )
        # The buffers that `VirtualRankBuffers` does not average get the values of rank 0.
        buffers.moving_buffers = MovingBuffers(
            module,
            run.step,
            average=(),
            left_out=buffers.combined_names,
            strategy=type(self).__name__,
        )
        return [virtual_ranks, buffers, _StepsUnderDDP(wrapped, moving_buffers=None)]

    def backward(
        self, modules: Sequence[nn.Module], loss: Tensor, precision: Precision, **options: Any
    ) -> None:
        """Runs the backward pass of a loss that is already multiplied by its weight.

        Raises:
            UsageError: an embedding with sparse gradients was not used, which torch does not
                support.
        """
        try:
            super().backward(modules, loss, precision, **options)
        except RuntimeError as error:
            if "Expected sparse gradient to be defined" not in str(error):
                raise

            sparse: list[str] = []
            for module in modules:
                user_module = getattr(module, "module", module)  # without the DDP wrapper
                sparse += sparse_weights(user_module)

            raise UsageError(
                "a backward pass that does not use every embedding with sparse gradients",
                f"on this rank the loss does not use all of {join_first(sparse)}, and torch cannot "
                "average a sparse gradient that is not there, not even with find_unused_parameters",
                "build them without sparse=True, use them in every step on every rank, or freeze "
                "them with requires_grad_(False) before world.prepare",
                code="LS301",
            ) from error

    def _compression(self, module: nn.Module, run: Run) -> Compression | None:
        """Returns how the gradients of a module are compressed; None for no compression.

        Raises:
            SettingError: compression does not work with this module or with the run's precision.
        """
        # `lockstep verify` compares runs without compression (`uncompressed`), whatever was chosen.
        if self.compress is None or run.settings.uncompressed:
            return None

        # All compressions except bf16 add the rounding error of a step to the gradients of the next
        # step. Under fp16 the loss, and so its gradients, may have another scale in the next step.
        if self.compress != "bf16" and run.settings.precision == "fp16":
            raise SettingError(
                f"compress={self.compress!r} with precision='fp16'",
                "what is lost in one step is sent in the next, where the loss may be scaled "
                "otherwise",
                "use precision='bf16', or compress='bf16'",
            )

        # One layer with sparse gradients is enough, even if all other gradients are dense.
        if any(getattr(part, "sparse", False) for part in module.modules()):
            raise SettingError(
                f"compress={self.compress!r} of a model with sparse gradients",
                "sparse gradients cannot be compressed",
                "make its embeddings without sparse=True, or leave compress out",
            )

        return self.compress

    def _bucket_choice(self, num_bytes: int) -> Choice:
        """Returns the printed line about the bucket size.

        Args:
            num_bytes: the size of all gradients of the model.
        """
        if self.bucket_cap_mb is not None:
            return Choice("bucket", f"{self.bucket_cap_mb:g} MiB", "as set")
        reason = "torch's default: large enough to fill a link, small enough to overlap"
        if num_bytes <= 2**20 * _TORCH_BUCKET_MIB:
            reason = "torch's default; one holds all"
        return Choice("bucket", f"{_TORCH_BUCKET_MIB} MiB", reason)


class _BucketAverager:
    """A communication hook of DDP that averages a bucket of gradients over the ranks, in place.

    The ranks of one machine average through shared memory. Between machines, this hook only starts
    the exchange of a bucket, so that several buckets can be under way (`pending_buckets`).

    Args:
        shared: the shared memory of this machine's ranks; None if it is not used.
    """

    def __init__(self, shared: SharedMemory | None) -> None:
        self._shared = shared
        self._scale = 1.0 / dist.get_world_size()
        self._pending = PendingBuckets()

    def __call__(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Averages a bucket; called by torch in the backward pass.

        Returns:
            A future that is completed with the averaged gradients.
        """
        gradients = bucket.buffer()
        if gradients.layout is not torch.strided:  # sparse, from `Embedding(sparse=True)`
            work = dist.all_reduce(gradients.mul_(self._scale), async_op=True)
            future = cast(dist.Work, work).get_future()
            return future.then(lambda reduced: reduced.value()[0])

        if self._shared is None:
            wait = routing.start_all_reduce(gradients.mul_(self._scale))
            return self._pending.add(bucket, wait)

        all_ranks_share_memory = self._shared.is_only_machine
        if all_ranks_share_memory:
            self._shared.all_reduce(gradients, scale=self._scale)
            averages = torch.futures.Future[Tensor]()
            averages.set_result(gradients)
            return averages

        wait = self._shared.start_all_reduce(gradients, scale=self._scale)
        return self._pending.add(bucket, wait)


class _ForwardGuard(RunHook):
    """A forward pre-hook of the user's module that rejects training calls bypassing the wrapper.

    It also counts the wrapper's forward passes. The counts are kept here because setting an
    attribute of a plain object is much faster than setting one of a module.

    Args:
        module: the user's module; None for a guard that allows every call, since a copied module
            has no wrapper.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._module = (lambda: None) if module is None else weakref.ref(module)
        self.wrapper_is_running = False
        """True while the wrapper runs its forward pass, which calls the module."""
        self.num_forwards = 0
        """How many forward passes with gradients the wrapper has run."""
        self.num_forwards_at_backward = 0
        """The value of `num_forwards` at the latest backward pass."""

    def begin_backward(self) -> int:
        """Records that a backward pass begins.

        Returns:
            The number of forward passes since the previous backward pass.
        """
        forwards_since_backward = self.num_forwards - self.num_forwards_at_backward
        self.num_forwards_at_backward = self.num_forwards
        return forwards_since_backward

    @outside_compiled_code
    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Raises UsageError for a training forward pass that did not go through the wrapper."""
        if self.wrapper_is_running or module is not self._module():
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
    """A DDP wrapper that communicates only in the last micro-batch of a global batch.

    Args:
        module: the user's module.
        run: the run of this process.
        options: the options of the strategy.
        compress: how gradients are compressed; None for no compression.
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
        """The number of forward passes before the latest step of each optimizer, by its `id`."""
        self._trainable_parameters: list[tuple[str, nn.Parameter]] = []
        """The names and the trainable parameters of the module."""
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                self._trainable_parameters.append((name, parameter))

        self._trainable_of_optimizer: dict[int, list[tuple[str, nn.Parameter]]] = {}
        """The trainable parameters that an optimizer holds, by the `id` of the optimizer."""
        self.compressed: CompressedMeans | None = None
        self.virtual_ranks: VirtualRankGradients | None = None
        """Keeps the gradients of virtual ranks apart, if the run has virtual ranks."""
        if run.settings.virtual_ranks is not None:
            self.virtual_ranks = VirtualRankGradients(
                list(module.parameters()), make_virtual_rank_tree(run), run.step
            )

        self._averager_to_register: _BucketAverager | BucketTreeSum | CompressedMeans | None = None
        """Registered as DDP's communication hook in the first forward pass, unless the user has
        registered another hook by then."""
        if compress is not None:
            parameters = [parameter for _, parameter in self._trainable_parameters]
            self.compressed = CompressedMeans(
                parameters, compress, options.powersgd_rank, options.powersgd_start
            )
            self._averager_to_register = self.compressed
        elif self.virtual_ranks is not None:
            self._averager_to_register = BucketTreeSum(self.virtual_ranks)
        elif run.device.type == "cpu":
            shared = routing.shared_memory()
            # This hook also measures how long the rank waits for other ranks.
            is_measured = run.link is not None or run.settings.report is not None
            if shared is not None or is_measured:
                self._averager_to_register = _BucketAverager(shared)

        self._bytes_to_count = 0
        """How many bytes torch's own all-reduce sends in a backward pass; 0 with a hook of ours,
        which counts the bytes that it sends."""
        if self._averager_to_register is None:
            self._bytes_to_count = all_reduce_bytes(_gradient_bytes(module), run.topology.size)

        self._is_initialized = True

    @never_compiled  # compiled code would keep the process group alive after the run
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the forward pass of the module. Without gradients, it does not communicate."""
        if not torch.is_grad_enabled():
            return self.module(*inputs, **kwargs)

        # If the module calls its own wrapper, the wrapper is still running after the inner call.
        was_running = self._guard.wrapper_is_running
        self._begin_forward()
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except Exception as error:
            self._add_notes(error)
            raise
        finally:
            self._guard.wrapper_is_running = was_running

    @outside_compiled_code
    def _begin_forward(self) -> None:
        """Prepares torch's DDP for the current micro-batch, and tells the guard that it runs.

        The guard rejects training calls of the user's module that bypass this wrapper.

        Raises:
            UsageError: the run is closed, or the gradients would be averaged twice.
            SettingError: `static_graph` was set and the global batch is computed in micro-batches.
        """
        micro_batch = self.run.step.micro_batch
        self._check_can_average(micro_batch)

        # Only the first forward pass has something to register.
        if self._averager_to_register is not None:
            self._register_averager(self._averager_to_register)

        # Only set if it differs, because setting an attribute of a module is slow.
        if self.require_backward_grad_sync is not micro_batch.last:
            self.require_backward_grad_sync = micro_batch.last

        self._guard.num_forwards += 1
        self._guard.wrapper_is_running = True

    def _check_can_average(self, micro_batch: MicroBatch) -> None:
        """Raises an error if DDP could not average the gradients of a forward pass correctly.

        Args:
            micro_batch: the micro-batch of the forward pass.

        Raises:
            UsageError: the run is closed, or the gradients would be averaged twice.
            SettingError: `static_graph` was set and the global batch is computed in micro-batches.
        """
        if self.reducer is None:  # `release` has removed it
            raise UsageError(
                "a training forward pass after world.close()",
                "the process group is closed, so gradients cannot be averaged",
                "close at the very end, or evaluate under torch.no_grad()",
            )

        # Another DDP class around this wrapper would average these gradients a second time. An
        # ExactDDP does no harm: it has other parameters, or it is this wrapper, called by its own
        # module.
        outer = enclosing_ddp()
        is_inside_other_class = outer is not None and not isinstance(outer, ExactDDP)
        if is_inside_other_class:
            raise UsageError(
                "a prepared model in DistributedDataParallel",
                "both average the gradients, so they would come out too small",
                "leave DistributedDataParallel out: call the object that world.prepare returned",
            )

        if self.options.static_graph and not micro_batch.last:
            raise SettingError(
                "DDP(static_graph=True) with micro-batches",
                "torch then needs to communicate in every backward pass",
                "leave static_graph or micro_batch_size out",
            )

    def _register_averager(
        self, averager: _BucketAverager | BucketTreeSum | CompressedMeans
    ) -> None:
        """Registers Lockstep's communication hook, in the first forward pass.

        `register_comm_hook` sets `_averager_to_register` to None, so that this happens only once.
        """
        # torch rejects hooks whose annotations are strings, and `from __future__ import
        # annotations` makes all annotations of this file strings. A lambda has none.
        self.register_comm_hook(averager, lambda state, bucket: state(bucket))

    @outside_compiled_code
    def _add_notes(self, error: Exception) -> None:
        """Adds a note to an error of the forward pass if it ran out of memory or had no samples."""
        micro_batch = self.run.step.micro_batch
        add_memory_advice(error, micro_batch.local_rows)
        note_empty_part(error, micro_batch)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the user's module in place, with the arguments of `torch.compile`.

        Torch would compile the call of this wrapper instead, where the graph breaks at once,
        because the wrapper's code around the forward pass cannot be compiled.
        """
        self.module.compile(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Looks up an attribute of the wrapper and then of the user's module.

        Scripts rely on the module's attributes because `World.prepare` returns the user's module
        itself if there is one process.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not set yet, so `self.module` below would recurse forever
                raise
        # Outside the `except` block, so that an error here is not chained to the wrapper's error.
        return getattr(self.module, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Copies only the user's module, because the gradients of a copy are not averaged."""
        module: nn.Module = copy.deepcopy(self.module, memo)
        return module

    def __copy__(self) -> nn.Module:
        """Returns a shallow copy of the user's module, which has the same parameters."""
        module: nn.Module = copy.copy(self.module)
        return module

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Callable[..., nn.Module], Any]:
        """Pickles only the user's module.

        So `torch.save(model)` writes the same file as in one process, and the file can be loaded
        without a process group.
        """
        return _user_module, (self.module,)

    def expect_backward(self, loss: Tensor) -> None:
        """Prepares torch for the backward pass that is about to run.

        Each forward pass prepares torch's reducer, which sends the gradients, for one backward pass
        through the outputs of this forward pass. For other backward passes, the reducer is prepared
        here.

        Args:
            loss: the tensor on which `backward` is about to be called.
        """
        forwards_since_backward = self._guard.begin_backward()
        sends_gradients = self.require_backward_grad_sync
        if not sends_gradients:
            return

        traffic.sent += self._bytes_to_count  # by torch's own all-reduce in this backward pass

        # Without any forward pass of the module, the loss does not depend on the module.
        has_ever_run_forward = self._guard.num_forwards > 0
        if not has_ever_run_forward:
            return

        # 1 forward pass, as in most loops: the reducer is prepared.
        # 0: the loop calls `backward` twice, so the reducer must be prepared again.
        # 2 or more: it is only prepared for the outputs of the last forward pass.
        reducer_is_prepared = forwards_since_backward == 1
        if reducer_is_prepared:
            return

        await_another_backward(self, self._roots_for_unused_parameters(loss))

    def _roots_for_unused_parameters(self, loss: Tensor) -> list[Tensor]:
        """Returns the tensors in whose graph torch looks for unused parameters.

        The graph of the loss contains the outputs of all forward passes that it depends on. An
        empty list means that torch expects a gradient of every parameter.
        """
        looks_for_unused = self.options.find_unused_parameters and not self.options.static_graph
        return [loss] if looks_for_unused else []

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Registers a communication hook of the user, which replaces the hook of Lockstep.

        Lockstep registers its own hook by this method too. Its own hook is an object that is passed
        as `state`, so a hook with another `state` is one of the user.

        Raises:
            UsageError: Lockstep's hook cannot be replaced, because it compresses gradients or sums
                over virtual ranks.
        """
        is_own_hook = state is self._averager_to_register and state is not None
        if not is_own_hook:
            self._check_own_hook_may_be_replaced()

        # The given hook replaces torch's own averaging, whose bytes this class counts. (A hook of
        # Lockstep counts its bytes itself, and those of a user's hook are not counted.)
        self._averager_to_register = None
        self._bytes_to_count = 0
        super().register_comm_hook(state, hook)

    def _check_own_hook_may_be_replaced(self) -> None:
        """Raises UsageError if Lockstep's hook cannot be replaced by one of the user's."""
        if self.compressed is not None:
            raise UsageError(
                "register_comm_hook of a model that was prepared with DDP(compress=...)",
                "both decide how the gradients are sent",
                "leave one of them out",
            )

        if self.virtual_ranks is not None:
            raise UsageError(
                "register_comm_hook of a model that is prepared with virtual_ranks",
                "the sum over virtual ranks is such a hook, and another one would give "
                "different bits",
                "leave one of them out",
            )

    def release(self) -> None:
        """Drops all references to the process group, so that its threads end with the run.

        If a thread of Gloo outlives the run, it may need the interpreter's lock to free a tensor
        while the interpreter shuts down. Python then ends the thread in the middle of C++ code, and
        the process aborts ("terminate called without an active exception").
        """
        self.reducer = None  # type: ignore[assignment]
        self.logger = None
        self.process_group = None  # type: ignore[assignment]
        self._averager_to_register = None
        self.compressed = None

    def will_sync_module_buffers(self) -> bool:
        """Keeps torch from broadcasting buffers in forward passes; Lockstep does so after steps."""
        return False

    def check_gradients(self, optimizer: Optimizer) -> None:
        """Checks before a step that the optimizer's gradients were averaged over the ranks.

        The gradients were averaged if they come from a forward pass of this wrapper. So the wrapper
        must have run one since the latest step of this optimizer, or at all before its first step.

        Raises:
            UsageError: gradients were not averaged, or some parameters have no gradient.
        """
        # Called in each step, because it looks for forward passes since its last call.
        has_run_forward = self._has_run_forward_since_last_step(optimizer)

        trained = self._trainable_parameters_of(optimizer)
        missing = [name for name, parameter in trained if parameter.grad is None]

        loss_did_not_use_module = len(missing) == len(trained)
        if loss_did_not_use_module:  # so there was nothing to average
            return

        if not has_run_forward:
            raise UsageError(
                "a backward pass whose forward pass did not go through the prepared model",
                "its gradients stayed on this rank: they were not averaged",
                "call the object that world.prepare returned, not its .module or a method of it",
                code="LS302",
            )

        if missing:
            self._check_not_replaced(trained)
            self._check_may_be_missing(trained, missing)

    def _has_run_forward_since_last_step(self, optimizer: Optimizer) -> bool:
        """Returns True if the wrapper has run forward since the optimizer's previous step.

        Called once in each step: the next call counts the forward passes from this one on.
        """
        num_forwards_before = self._forwards_at_last_step.get(id(optimizer), 0)
        self._forwards_at_last_step[id(optimizer)] = self._guard.num_forwards
        return self._guard.num_forwards > num_forwards_before

    def _trainable_parameters_of(self, optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
        """Returns the names and trainable parameters of this module that an optimizer holds."""
        key = id(optimizer)  # the list is computed once for each optimizer
        if key not in self._trainable_of_optimizer:
            ids = {id(parameter) for parameter in base.parameters_of(optimizer)}
            self._trainable_of_optimizer[key] = [
                (name, parameter)
                for name, parameter in self._trainable_parameters
                if id(parameter) in ids
            ]
        return self._trainable_of_optimizer[key]

    def _check_not_replaced(self, trained: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Raises UsageError if the user has replaced parameters of the module since it was wrapped.

        The optimizer still holds the old parameter, which is no longer in the module and so has no
        gradient. The new parameter has a gradient, but DDP does not average it. An old parameter
        that does have a gradient is still used, say in an attribute, which is allowed.

        Args:
            trained: the names and the parameters that the optimizer holds, as the module had them
                when it was wrapped.
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

    def _check_may_be_missing(
        self, trained: Sequence[tuple[str, nn.Parameter]], missing: Sequence[str]
    ) -> None:
        """Raises UsageError unless the options allow parameters without a gradient.

        With `find_unused_parameters` torch looks for such parameters in each step. With
        `static_graph` torch has found them in the first step. Without these options torch waits for
        the missing gradients, and never averages the buckets that these belong to.

        Args:
            trained: the names and the parameters of this module that the optimizer holds.
            missing: the names of the parameters that have no gradient.
        """
        if self.options.find_unused_parameters or self.options.static_graph:
            return

        if self.virtual_ranks is not None:
            advice = base.USE_ALL_IN_EVERY_VIRTUAL_RANK
        else:
            # For weights with sparse gradients, `find_unused_parameters` alone does not help. If
            # some of the missing parameters are such weights, the advice names them.
            missing_sparse = [name for name in sparse_weights(self.module) if name in missing]
            advice = _advice_on_unused(missing_sparse)
        raise UsageError(
            "an optimizer step while some parameters have no gradient",
            f"{len(missing)} of {len(trained)} were not used for the loss: "
            f"{join_first(missing)}; DDP waits for them, so others may not be averaged either",
            advice,
            code="LS301",
        )


# In messages of Python and torch, and in `print(model)`, the class has the name that users know.
ExactDDP.__name__ = DistributedDataParallel.__name__
ExactDDP.__qualname__ = DistributedDataParallel.__qualname__


class _StepsUnderDDP(Extension):
    """Tells a module under DDP, and its buffers, about the events of each step.

    Args:
        module: the module in its DDP wrapper.
        moving_buffers: makes the buffers that forward passes change equal on all ranks; None if
            another extension does that.
    """

    def __init__(self, module: ExactDDP, moving_buffers: MovingBuffers | None) -> None:
        self._module = module
        self.moving_buffers = moving_buffers

    def backward_begins(self, weighted_loss: Tensor, micro_batch: MicroBatch) -> None:
        """Prepares torch for this backward pass."""
        self._module.expect_backward(weighted_loss)

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Raises UsageError if the gradients were not averaged over the ranks."""
        if self._module in modules:
            self._module.check_gradients(optimizer)

    def after_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Makes the buffers that forward passes change equal on all ranks."""
        if self.moving_buffers is not None and self._module in modules:
            self.moving_buffers.make_equal()

    def release(self) -> None:
        """Drops references to the process group."""
        self._module.release()


def _user_module(module: nn.Module) -> nn.Module:
    """Returns its argument. A pickled `ExactDDP` calls this function with the user's module."""
    return module


def _gradient_bytes(module: nn.Module) -> int:
    """Returns the size of all gradients of a module, in bytes."""
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)


def sparse_weights(module: nn.Module) -> list[str]:
    """Returns the names of the parameters with sparse gradients: weights of embeddings."""
    names: list[str] = []
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            names.append(f"{name}.weight" if name else "weight")
    return names


def _advice_on_unused(sparse: Sequence[str]) -> str:
    """Returns the advice on parameters that the loss does not use: `find_unused_parameters`.

    Args:
        sparse: the names of those parameters that have sparse gradients; the advice for them comes
            in addition.
    """
    advice = (
        "use them, freeze them with requires_grad_(False) before world.prepare, or pass "
        "strategy=lockstep.strategies.DDP(find_unused_parameters=True)"
    )
    if sparse:
        advice += f" and build {join_first(sparse)} without sparse=True"
    return advice
