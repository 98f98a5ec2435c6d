"""Prepares the user's modules, optimizers, schedulers and loaders for a run (`world.prepare`).

Modules are wrapped by the strategy, optimizers are made to step once per global batch, and loaders
deliver this rank's part of the data.

Modules are prepared first, whatever the order of the arguments, because the parameters of an
optimizer must belong to prepared modules.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, MutableMapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torch.utils.weak import WeakTensorKeyDictionary

from lockstep.batch.autotune_request import AutotuneRequest
from lockstep.batch.loader import Loader
from lockstep.batch.make_loader import make_loader
from lockstep.batch.micro_batches import MicroBatchPlan
from lockstep.batch.shares import initial_shares, parse_micro_batch_size
from lockstep.batch.source import Source, make_source
from lockstep.checkpoint.modules import plain_parameter_names
from lockstep.checkpoint.sharding import map_leaves, reshard
from lockstep.communication.compressed_means import CompressedMeans
from lockstep.distributed import ordered_norm
from lockstep.distributed.determinism import (
    add_determinism_note,
    find_refused_operation,
    nondeterministic_error,
)
from lockstep.distributed.device import add_memory_advice, add_memory_advice_at_end
from lockstep.distributed.process_group import Run
from lockstep.distributed.torch_compat import BatchNorm, let_compile_again, without_compile
from lockstep.errors import SettingError, UsageError, warn
from lockstep.optim.precision import ForwardsSetLater, Precision
from lockstep.session.delivery import TrainingPass
from lockstep.session.extension import Place
from lockstep.session.micro_batch import MicroBatch
from lockstep.settings import Choice, check_micro_batches, is_auto
from lockstep.strategies import sync_batchnorm, virtual_rank_batchnorm
from lockstep.strategies.base import PreparedModule, Strategy, StrategyPlan, parameters_of
from lockstep.strategies.deferred_model import DeferredModel
from lockstep.strategies.earlier_gradients import EarlierGradients
from lockstep.strategies.empty_part import note_empty_part
from lockstep.strategies.micro_batch_buffers import MicroBatchBuffers
from lockstep.strategies.placeholder import Placeholders
from lockstep.strategies.virtual_ranks import note_single_sample
from lockstep.training.agreement import check_equal_on_ranks
from lockstep.training.batchnorm_notes import BatchNormNotes
from lockstep.training.forward_watch import ForwardWatch
from lockstep.training.optimizer import (
    PreparedOptimizer,
    PreparedScheduler,
    choose_foreach,
    refuse_optimizer_wrong_on_shards,
)
from lockstep.training.schedule_length import ScheduleLengths
from lockstep.training.unpacking import note_order
from lockstep.training.virtual_rank_states import VirtualRankStates
from lockstep.training.virtual_rank_streams import VirtualRankStreams
from lockstep.wording import describe_type, join_first


class FindsSizes(Protocol):
    """Finds the shares and micro-batch sizes that are `"auto"` (`extensions.autotune`)."""

    def request(self, shares: Any, micro_batch_size: Any) -> AutotuneRequest:
        """Returns what has to be measured for a loader with these settings."""


class Preparer:
    """Prepares the objects of one run, and remembers which of them belong together.

    Args:
        run: the run of this process.
        strategy: the strategy of the run.
        plan: how the strategy divides global batches over the ranks.
    """

    def __init__(self, run: Run, strategy: Strategy, plan: StrategyPlan) -> None:
        self.run = run
        self.strategy = strategy
        self.choices: list[Choice] = []
        """Lines about choices that are not printed yet."""
        self.loaders: list[Loader] = run.loaders
        self.optimizers: list[PreparedOptimizer] = []
        self.schedulers: list[PreparedScheduler] = []
        self.wrapped: dict[nn.Module, PreparedModule] = {}
        """What the strategy returned for each module, by the module that the user got back."""
        self.precision = Precision(run.settings.precision, run.device)
        self.sizes: FindsSizes
        """Set by `World` before anything is prepared."""
        self.virtual_ranks: VirtualRankStates | None = None

        if plan.virtual_ranks is not None and plan.virtual_ranks.train_copies:
            self.virtual_ranks = VirtualRankStates(
                plan.virtual_ranks.count, run.topology.is_main, self.wrapped, self.optimizers
            )

        self._plan = plan
        self._returned: list[list[Any]] = []
        """The results of each call of `prepare`."""
        self._loaders_of_this_call: list[Loader] = []
        self._deferred_of_this_call: list[DeferredModel] = []
        self._loader_numbers = itertools.count()
        self._module_of_parameter: MutableMapping[Tensor, nn.Module] = WeakTensorKeyDictionary()
        """The prepared module of each parameter, including parameters that a strategy has replaced.
        """
        self._replacement: MutableMapping[Tensor, nn.Parameter | None] = WeakTensorKeyDictionary()
        """The parameter that takes the place of one that a strategy has replaced; None if it is on
        other ranks."""
        self._name_of_parameter: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()
        """The name of each parameter in its module, from before the strategy has replaced it."""
        self.streams: VirtualRankStreams | None = None
        """The random streams of virtual ranks that train one model; None without virtual ranks."""
        self._drawn_shapes: list[list[tuple[int, ...]]] = []
        """The shapes of the parameters of each model that was built on the meta device without
        `deferred_init`."""
        self._batchnorm_notes = BatchNormNotes(run, plan, self.add_choice)
        self._placeholders = Placeholders(run.step, self.wrapped)
        if run.settings.virtual_ranks is not None:
            self.streams = VirtualRankStreams(run.settings.seed, run.device, run.step)
            run.extensions.add(self.streams, Place.PREPARED_OBJECT)

        self.schedule_lengths = ScheduleLengths(self.schedulers, self.loaders)
        run.extensions.add(self.schedule_lengths, Place.PREPARED_OBJECT)
        run.extensions.add(ForwardWatch(run.step, self.wrapped.keys()), Place.PREPARED_OBJECT)
        run.extensions.add(self._placeholders, Place.PREPARED_OBJECT)
        if self.precision.dtype in (torch.bfloat16, torch.float16):
            run.extensions.add(ForwardsSetLater(self.precision), Place.OBSERVER)

        self._stop_memory_advice = add_memory_advice_at_end(run.step, self.add_notes)

    def add_notes(self, error: BaseException | None) -> None:
        """Adds notes to an uncaught error, if Lockstep knows what may have led to it.

        Args:
            error: the error; None if there was none. A note is added only once.
        """
        note_empty_part(error, self.run.step.latest_micro_batch)
        note_order(error, self._returned)
        if self.run.settings.virtual_ranks is not None:
            add_determinism_note(error)
            note_single_sample(error, self.run.step.latest_micro_batch)

    def add_choice(self, choice: Choice) -> None:
        """Adds a line to the choices that rank 0 prints."""
        self.choices.append(choice)

    def prepare(self, objects: tuple[Any, ...]) -> list[Any]:
        """Prepares objects, and returns the results in the same order.

        Raises:
            UsageError: an object cannot be prepared or was prepared before, or an optimizer has
                parameters that belong to no prepared module.
            RanksDifferError: the objects differ between ranks, such as datasets of different
                lengths.
        """
        for thing in objects:
            self._check_kind(thing)

        # The result for each object, by the object's `id`; at first the object itself. An object
        # that was given twice is prepared once.
        prepared = {id(thing): thing for thing in objects}
        for thing in objects:
            if isinstance(thing, DataLoader):
                prepared[id(thing)] = self._make_loader(make_source(thing))

        loaders = [thing for thing in prepared.values() if isinstance(thing, Loader)]
        self._loaders_of_this_call = loaders
        self.run.examples[:] = [loader.example for loader in loaders]
        check_equal_on_ranks("world.prepare", list(prepared.values()), self.run)

        # Modules are prepared before the optimizers of their parameters, and optimizers before
        # their schedulers. If `prepared` has something else for an object, the object was given
        # twice and is prepared already.
        for thing in objects:
            if isinstance(thing, nn.Module) and thing is prepared[id(thing)]:
                prepared[id(thing)] = self._prepare_module(thing)

        for thing in objects:
            if isinstance(thing, Optimizer) and thing is prepared[id(thing)]:
                prepared[id(thing)] = self._prepare_optimizer(thing)

        for thing in objects:
            if isinstance(thing, LRScheduler) and thing is prepared[id(thing)]:
                prepared[id(thing)] = self._prepare_scheduler(thing)

        self.loaders += loaders

        self._loaders_of_this_call = []
        for deferred in self._deferred_of_this_call:
            deferred.watch_parameters()

        self._deferred_of_this_call = []
        results = [prepared[id(thing)] for thing in objects]
        self._returned.append(results)
        return results

    def add_loader(self, source: Source, **options: Any) -> Loader:
        """Makes the loader of a data source, with the options of `World.loader`.

        Raises:
            RanksDifferError: the ranks have different data, or the same data in a different order.
        """
        loader = self._make_loader(source, **options)
        check_equal_on_ranks("world.loader", [loader], self.run)
        self.loaders.append(loader)
        return loader

    def release(self) -> None:
        """Drops references to the process group, and ends the workers of loaders."""
        self._stop_memory_advice()
        self.run.extensions.release()
        for loader in self.loaders:
            loader.release()

    # The training step

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Runs the backward pass of a loss, weighted by its micro-batch's part of the global batch.

        The extensions are told in this order: `before_backward` with the user's loss, which a check
        may refuse; `backward_begins` with the weighted loss, for which strategies prepare;
        `backward_ended`, when strategies release memory; `after_backward`, for observers.

        Raises:
            UsageError: the loss cannot be trained on, or no optimizer was prepared under fp16.
        """
        step = self.run.step
        extensions = self.run.extensions
        micro_batch = step.source_of_loss()
        extensions.before_backward(loss, micro_batch)
        self._check_accumulation()
        self._check_optimizer_unscales()

        phase_before = step.enter_phase("backward")
        weighted_loss = step.weigh_loss(loss)
        try:
            self._run_backward(weighted_loss, micro_batch, options)
        finally:
            step.enter_phase(phase_before)

        extensions.after_backward(loss, micro_batch)
        # Counted last: for the extensions, `num_backwards` is the number of earlier passes.
        step.training_pass.num_backwards += 1

    def _check_optimizer_unscales(self) -> None:
        """Raises UsageError under fp16 if no optimizer is prepared, which would undo its scale."""
        has_only_modules = bool(self.wrapped) and not self.optimizers
        if self.precision.scaler is not None and has_only_modules:
            raise _optimizer_not_prepared(
                "under precision='fp16' gradients are multiplied by the scale of the loss; a "
                "prepared optimizer divides them again before it steps"
            )

    def _run_backward(
        self, weighted_loss: Tensor, micro_batch: MicroBatch, options: dict[str, Any]
    ) -> None:
        """Runs the backward pass of the strategy, and adds advice to its errors.

        Args:
            weighted_loss: the loss, weighted by its part of the global batch.
            micro_batch: the micro-batch that the loss is of.
            options: the options of `World.backward`.
        """
        step = self.run.step
        try:
            self.run.extensions.backward_begins(weighted_loss, micro_batch)

            # A rank without samples computes a placeholder. Activation checkpointing, which runs
            # forward passes again in here, must know that.
            with self._placeholders.in_backward():
                modules = list(self.wrapped)
                self.strategy.backward(modules, weighted_loss, self.precision, **options)
            self.run.extensions.backward_ended(micro_batch)
        except Exception as error:
            add_memory_advice(error, step.micro_batch.local_rows, step.num_devices)
            operation = find_refused_operation(error)
            if operation is not None and self.run.settings.virtual_ranks is not None:
                raise nondeterministic_error(operation) from error
            raise

    def clip(self, module: nn.Module, max_norm: float, norm_type: float) -> Tensor:
        """Clips the gradients of a module by their total norm, and returns that norm.

        Raises:
            UsageError: the argument is not a module, or `norm_type` is 0.
        """
        if not isinstance(module, nn.Module):
            raise UsageError(
                f"world.clip_grad_norm_ of {describe_type(module)}",
                "it takes a module, whose gradients may be spread over the ranks",
                "pass the prepared model: world.clip_grad_norm_(model, max_norm)",
            )
        if norm_type == 0:
            raise UsageError(
                "world.clip_grad_norm_(..., norm_type=0)",
                "there is no norm of type 0: it would divide by zero",
                "leave it out for the usual norm, 2, or pass 1 or math.inf",
            )

        parameters = list(module.parameters())
        parameters_of_module = set(parameters)
        for optimizer in self.optimizers:
            updates_module = not parameters_of_module.isdisjoint(parameters_of(optimizer))
            if updates_module:
                # Under fp16 the gradients are multiplied by the scale of the loss. The norm is to
                # be that of the gradients themselves, so they are divided by it now.
                self.precision.unscale([optimizer.inner])
                optimizer.note_clipping()

        # With virtual ranks the norm has the same bits on any number of processes, so it is
        # computed in a fixed order. Otherwise the strategy knows the fastest way.
        if self.run.settings.virtual_ranks is not None:
            gradients = [p.grad for p in parameters if p.grad is not None]
            norm = ordered_norm.total_norm(gradients, norm_type)
        else:
            norm = self.strategy.total_norm(parameters, norm_type)

        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def loss(self) -> float:
        """Returns the loss of the present global batch or, after the loop, of the last one.

        All ranks call this together. A *pass* is one iteration of a training loop over a loader.

        Raises:
            UsageError: the loss is not known, or only a part of it.
        """
        training_pass, local_loss = self._pass_and_local_loss()
        if local_loss is None:
            raise UsageError(
                "world.loss()",
                "world.backward was not given a loss of this micro-batch",
                "call it after world.backward(loss)",
            )

        num_virtual_ranks = self.run.settings.virtual_ranks
        if num_virtual_ranks is not None:
            return self._loss_over_virtual_ranks(training_pass, num_virtual_ranks)

        # The losses are weighted so that their mean over the ranks is that of the global batch.
        mean: float = self.run.collectives.mean(float(local_loss))
        return mean

    def _pass_and_local_loss(self) -> tuple[TrainingPass, Tensor | float | None]:
        """Returns a pass, and this rank's loss of its latest global batch; None if not known.

        In a loop it is the pass of this loop, and the loss so far of the present global batch.
        After the loop it is the pass to which the latest loss belonged.
        """
        step = self.run.step
        loop_has_ended = not step.in_training_loop
        if loop_has_ended and step.pass_of_loss is not None:
            return step.pass_of_loss, _last_loss(step.pass_of_loss)

        # The present pass. It is also that of a script that loops over no prepared loader.
        called_world_backward = step.training_pass.num_backwards > 0
        if not called_world_backward:
            return step.training_pass, None
        return step.training_pass, step.training_pass.loss

    def _loss_over_virtual_ranks(
        self, training_pass: TrainingPass, num_virtual_ranks: int
    ) -> float:
        """Returns the loss of the global batch, with the same bits on any number of processes."""
        # The losses of the virtual ranks on this process; 0 for all others.
        losses_here = torch.zeros(num_virtual_ranks, dtype=torch.float64)
        for number, loss in training_pass.loss_of_virtual_rank.items():
            losses_here[number] = float(loss)

        # Each virtual rank is computed by one process, so for each virtual rank this adds one loss
        # and zeros, which is exact.
        losses = self.run.collectives.sum(losses_here)

        # The losses are added in the order of the virtual ranks, so the bits are always the same.
        total: float = sum(losses.tolist())
        return total / num_virtual_ranks

    def _check_accumulation(self) -> None:
        """Checks that a backward pass may add to the gradients of earlier micro-batches.

        Raises:
            UsageError: gradients of earlier micro-batches were cleared, or a second backward pass
                for another optimizer would mix its gradients with them.
        """
        training_pass = self.run.step.training_pass
        micro_batch = training_pass.micro_batch

        if micro_batch.is_only_of_step:
            return  # nothing accumulates

        # First check: several backward passes in one micro-batch, for several optimizers. In a GAN,
        # for example, the loss of the generator also leaves gradients in the discriminator. On one
        # device, the loop clears them before the backward pass of the discriminator's own loss.
        # Here nothing is cleared until all micro-batches are computed, so the discriminator would
        # step with the sum of both.
        is_repeated_backward = training_pass.num_backwards > 0
        if is_repeated_backward and len(self.optimizers) > 1:
            raise UsageError(
                "several backward passes a micro-batch, for several optimizers",
                "what one leaves in the parameters of another is cleared once per global batch, "
                "not between the micro-batches, so it would be counted",
                "leave micro_batch_size out, or add the losses up and call world.backward once",
            )

        # Second check: the gradients of earlier micro-batches must still be there. It is made once
        # in each micro-batch, except in the first one, where nothing has accumulated yet.
        nothing_accumulated_yet = micro_batch.begins_gradients
        if nothing_accumulated_yet or is_repeated_backward:
            return

        # Some strategies accumulate gradients elsewhere than in `parameter.grad`, where the user's
        # `zero_grad` does not clear them.
        if any(wrapped.zero_grad_misses_gradients for wrapped in self.wrapped.values()):
            return

        has_only_modules = bool(self.wrapped) and not self.optimizers
        if has_only_modules and not self._has_gradients():
            raise _optimizer_not_prepared(
                "the gradients of the micro-batches before are gone: it steps and clears them "
                "in each micro-batch, not once in a global batch"
            )

        for optimizer in self.optimizers:
            optimizer.check_gradients_are_there()

    def _has_gradients(self) -> bool:
        """Returns True if any parameter of a prepared module has a gradient."""
        for module in self.wrapped:
            for parameter in module.parameters():
                if parameter.grad is not None:
                    return True
        return False

    # Loaders

    def _make_loader(
        self,
        source: Source,
        shares: Any = None,
        micro_batch_size: Any = None,
        num_micro_batches: int | None = None,
        **options: Any,
    ) -> Loader:
        """Makes the loader of a data source.

        Args:
            source: the data and its order.
            shares: see `World.loader`. For this and the next two arguments, None means the run's
                setting.
            micro_batch_size: see `World.loader`.
            num_micro_batches: see `World.loader`.
            **options: other options of `Loader`.
        """
        plan = self._plan
        settings = self.run.settings
        if settings.virtual_ranks is not None:
            _check_loader_of_virtual_ranks(shares, micro_batch_size)

        check_micro_batches(num_micro_batches, micro_batch_size)
        min_micro_batches = plan.num_micro_batches
        if num_micro_batches is not None:
            min_micro_batches = max(num_micro_batches, settings.min_micro_batches)
        elif micro_batch_size is None:
            micro_batch_size = settings.micro_batch_size
        elif settings.num_micro_batches is not None:
            # This loader has its own micro-batch size, so the run's number does not apply to it.
            min_micro_batches = settings.min_micro_batches

        request = self.sizes.request(shares, micro_batch_size)
        shares_until_found = plan.shares
        if shares is not None:
            shares_until_found = initial_shares(shares, len(plan.shares))

        check_devices = settings.check_devices
        if self.run.collectives.single_process:  # there is no other process to compare with
            check_devices = None

        loader = make_loader(
            source,
            plan=MicroBatchPlan(
                request=request,
                batch_size=source.batch_size,
                sizes_vary=source.batch_sampler is not None,
                data_parallel=self.run.collectives.data_parallel,
                initial_shares=shares_until_found,
                initial_micro_batch_size=parse_micro_batch_size(
                    plan.micro_batch_size(micro_batch_size)
                ),
                min_micro_batches=min_micro_batches,
                virtual_ranks=plan.virtual_ranks,
                check_devices=check_devices,
            ),
            seed=settings.seed,
            collectives=self.run.collectives,
            step=self.run.step,
            evaluates_together=plan.evaluation_is_collective,
            **options,
        )
        number = next(self._loader_numbers)
        loader.number = number
        self.choices.append(loader.choice(number))
        if loader.micro_batches > 1 or is_auto(micro_batch_size):
            self._batchnorm_notes.loader_divides_batches(
                number, loader.micro_batches, micro_batch_size
            )

        return loader

    # Modules

    def _prepare_module(self, module: nn.Module) -> nn.Module:
        """Wraps a module by the strategy, and returns the module that the user is to call.

        Raises:
            UsageError: another prepared module shares some of its parameters.
        """
        deferred = self._allocate_deferred(module)
        if any(isinstance(part, BatchNorm) for part in module.modules()):
            self._prepare_batchnorm(module)

        autocast = not self.strategy.computes_in_half(module, self.run)
        self.precision.attach(module, autocast=autocast)
        if self.precision.name == "fp64":
            self._note_choice("precision", "fp64", "the model is in float64, and so are its inputs")
        elif self.precision.dtype is not None and autocast:
            name = type(without_compile(module)).__name__
            self._note_choice("autocast", name, "outputs come back in fp32")

        let_compile_again(module)
        parameters_before = list(module.parameters())
        names_before = plain_parameter_names(module)
        shared_parameters = self._find_shared_parameters(module)
        wrapped = self.strategy.wrap(module, self.run)

        # Checked after the strategy, which may have a more fundamental reason to refuse the module.
        if shared_parameters and not self.run.collectives.single_process:
            raise UsageError(
                "world.prepare of two modules with the same parameters",
                f"{join_first(shared_parameters)} of the {type(module).__name__} belong to another "
                "prepared module too, and each would average their gradients",
                "prepare one module that holds both, and call them in its forward",
            )

        self.choices += wrapped.choices
        if deferred is not None and not self.strategy.needs_values:
            self.run.extensions.add(deferred, Place.PREPARED_OBJECT)
            self.choices += deferred.read_files_and_defer(wrapped)
            self._deferred_of_this_call.append(deferred)

        self.wrapped[wrapped.module] = wrapped
        # Only now: torch refuses to convert a parameter that somebody has a weak reference to.
        self._name_of_parameter.update(names_before)
        self._remember_parameters(parameters_before, wrapped)
        self.run.prepared.append(weakref.ref(wrapped.module))
        for extension in wrapped.extensions:
            self.run.extensions.add(extension, Place.STRATEGY)

        if self.run.settings.virtual_ranks is not None:
            earlier_gradients = EarlierGradients(list(wrapped.module.parameters()))
            self.run.extensions.add(earlier_gradients, Place.STRATEGY)

        # One rank watches for buffers that change in each micro-batch. Under a pipeline the plan
        # has rank 0 for all of its stages, each of which has different buffers.
        watches_buffers = self.run.settings.virtual_ranks is None
        if watches_buffers and self._plan.rank.rank == 0:
            watch = MicroBatchBuffers(
                module, self.run.step, pipelined=wrapped.gradients_after_backward
            )
            self.run.extensions.add(watch, Place.STRATEGY)

        self.run.extensions.module_prepared(wrapped)
        return wrapped.module

    def _allocate_deferred(self, module: nn.Module) -> DeferredModel | None:
        """Allocates the tensors of a module that are on the meta device, or leaves it to `wrap`.

        A tensor on the meta device has a shape, but neither memory nor values. It gets them:

            memory   here; in `strategy.wrap` if it spreads the model over the ranks, as FSDP does,
                     which allocates only this rank's shards
            values   after `wrap`, by its caller; here if `wrap` needs them, as that of DiLoCo does,
                     which copies them

        Returns:
            The object that knows their values; None if nothing is on the meta device.
        """
        if not any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()]):
            return None

        deferred = DeferredModel(module, self.run, self._drawn_shapes)
        deferred.fill_buffers(self.run.device)
        if not self.strategy.spreads_model(self.run):
            deferred.give_memory(self.run.device)
        if self.strategy.needs_values:
            lines_to_print = deferred.read_files_and_defer(PreparedModule(module=module))
            self.choices += lines_to_print
            deferred.fill()  # computes the values that are not in weight files

        return deferred

    def _remember_parameters(
        self, parameters_before: Sequence[nn.Parameter], wrapped: PreparedModule
    ) -> None:
        """Records the prepared module of each parameter, also of those that were replaced.

        If a strategy has replaced a by b, and later b by c, `replaced_parameters` are (a, b) and
        (b, c). Then the module of all three is recorded.

        Args:
            parameters_before: the parameters of the module before it was wrapped.
            wrapped: what the strategy returned.
        """
        for old, new in wrapped.replaced_parameters:
            self._replacement[old] = new

        parameters = list(parameters_before)
        for old, new in wrapped.replaced_parameters:
            parameters.append(old)
            if new is not None:  # None: the new parameter is on other ranks, e.g. in another stage
                parameters.append(new)
        for parameter in parameters:
            self._module_of_parameter[parameter] = wrapped.module

    def _find_shared_parameters(self, module: nn.Module) -> list[str]:
        """Returns the names of trainable parameters that another prepared module has, too."""
        shared = []
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and self._is_prepared(parameter):
                shared.append(name)
        return shared

    def _is_prepared(self, parameter: nn.Parameter) -> bool:
        """Returns True if a prepared module has a parameter, or has its replacement.

        The strategy may have replaced the parameter, e.g. by its shard.
        """
        module = self._module_of_parameter.get(parameter)
        if module is None:
            return False

        was_replaced = parameter in self._replacement
        if was_replaced:
            return True

        # False if the user has put another parameter in its place after `prepare`, for example to
        # move this one to a new module.
        return any(parameter is present for present in module.parameters())

    def _prepare_batchnorm(self, module: nn.Module) -> None:
        """Makes BatchNorm layers take their statistics from the samples that the settings ask for.

        Raises:
            SettingError: virtual ranks are to share statistics, and cannot.
        """
        # If the module was prepared in an earlier run of this process, with virtual ranks, its
        # layers still have a plan of that run: the order in which to add up the virtual ranks' sums
        # (a tree). Remove this plan.
        sync_batchnorm.forget_tree_sums(module)

        # First case: no virtual ranks.
        if self.run.settings.virtual_ranks is None:
            if self.run.settings.synchronises_batchnorm:
                self._batchnorm_notes.note_synchronised_module()
            if self.run.collectives.data_parallel.size > 1:
                self._synchronize_batchnorm(module)
            return

        # Second case: virtual ranks that each have their own batch statistics.
        if not virtual_rank_batchnorm.is_synchronised(module, self.run):
            reason = "of each virtual rank, as DDP has them; running ones: their mean"
            self._note_choice("batchnorm", "statistics", reason)
            return

        # Third case: virtual ranks that share statistics.
        self._batchnorm_notes.note_synchronised_module()
        samples_text = "the global batch, as on one device"
        if self._may_use_micro_batches():
            samples_text = "each micro-batch over all virtual ranks, not of the global batch"

        # The layers are changed in place; the text appears in the lines to print about them.
        lines_to_print = virtual_rank_batchnorm.synchronise_batchnorm(
            module, self.run, samples_text
        )
        self.choices += lines_to_print

    def _synchronize_batchnorm(self, module: nn.Module) -> None:
        """Makes BatchNorm layers take their statistics over all ranks, if that is switched on."""
        if not self.run.settings.synchronises_batchnorm:
            reason = "sync_batchnorm=False; differs from one device (LS306)"
            self._note_choice("batchnorm", "per rank", reason)
            return

        group = self.run.groups.get(self._plan.statistics_group)
        converted = sync_batchnorm.convert(module, group)

        # Virtual ranks of a strategy are replicas that train copies of the model (DiLoCo).
        if self._plan.virtual_ranks is not None:
            samples_text = "the replica's part of the global batch"
        elif self._may_use_micro_batches():
            samples_text = "each micro-batch over all ranks, not of the global batch"
        else:
            samples_text = "the global batch, as on one device"

        # Lines to print, such as "statistics of the global batch, as on one device".
        self.choices += converted.choices(computed_by="rank", samples=samples_text)

    def _may_use_micro_batches(self) -> bool:
        """Returns True if some loader computes, or may later compute, several micro-batches.

        The number of micro-batches of a loader is unknown if the user prepares the loader later, or
        if the micro-batch size is yet to be measured. Then the answer is True if it may be several.
        """
        settings = self.run.settings
        loaders = [*self.loaders, *self._loaders_of_this_call]
        if not loaders:
            # A `micro_batch_size=` divides the global batches of a loader if they are larger.
            return settings.micro_batch_size is not None or self._plan.num_micro_batches > 1

        if any(loader.micro_batches > 1 for loader in loaders):
            return True
        return is_auto(settings.micro_batch_size)  # it is yet to be measured

    # Optimizers and schedulers

    def _prepare_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        """Makes an optimizer step once per global batch, on the prepared parameters.

        Raises:
            UsageError: the optimizer has parameters of no prepared module, or has stepped already,
                or torch computes it wrongly with shards.
        """
        modules = self._modules_of(optimizer)

        # Looked up before `_replace_parameters` removes the parameters that are on other ranks.
        num_parameters_of_groups = [len(group["params"]) for group in optimizer.param_groups]
        origins_of_groups = self._origins_of_parameters(optimizer)

        parameter_numbers_here = self._replace_parameters(optimizer)
        refuse_optimizer_wrong_on_shards(optimizer)

        reason = choose_foreach(optimizer, self.run.device)  # None if it stays as it is
        if reason:
            self._note_choice("optimizer", f"{type(optimizer).__name__}, foreach", reason)

        prepared = PreparedOptimizer(
            optimizer, self.run.step, self.precision, modules, self.run.collectives
        )

        # A saved state numbers the parameters as on one device, e.g. 0 to 9. To save and load it,
        # the optimizer must know which of these numbers the parameters on this rank have, e.g. 5
        # to 9 in the second stage of a pipeline.
        some_are_on_other_ranks = any(new is None for new in self._replacement.values())
        if some_are_on_other_ranks:
            prepared.numbers_on_one_device = parameter_numbers_here
            prepared.num_parameters_of_groups = num_parameters_of_groups
            prepared.origins_on_one_device = origins_of_groups

        self.optimizers.append(prepared)
        self.run.extensions.add(prepared.as_extension, Place.PREPARED_OBJECT)
        self.run.extensions.optimizer_prepared(prepared, modules)
        return prepared

    def _modules_of(self, optimizer: Optimizer) -> list[nn.Module]:
        """Returns the prepared modules that have the parameters of an optimizer.

        Raises:
            UsageError: some parameters belong to no prepared module.
        """
        parameters = parameters_of(optimizer)
        modules: list[nn.Module] = []
        num_unknown = 0
        for parameter in parameters:
            module = self._module_of_parameter.get(parameter)
            if module is None:
                num_unknown += 1
            elif module not in modules:
                modules.append(module)

        if num_unknown:
            raise UsageError(
                f"world.prepare of {type(optimizer).__name__}",
                f"{num_unknown} of its {len(parameters)} parameters belong to no prepared module",
                "build the optimizer from model.parameters() of the very model you prepare, and "
                "give both to world.prepare(model, optimizer)",
            )

        return modules

    def _origins_of_parameters(self, optimizer: Optimizer) -> list[list[tuple[nn.Module, str]]]:
        """Returns, for each group, the prepared module of each parameter and its name in it.

        The name is "" if it is not known. This is called before the parameters that are on other
        ranks are removed.
        """
        origins_of_groups = []
        for group in optimizer.param_groups:
            origins = []
            for parameter in group["params"]:
                module = self._module_of_parameter[parameter]
                name_in_module = self._name_of_parameter.get(parameter, "")
                origins.append((module, name_in_module))
            origins_of_groups.append(origins)
        return origins_of_groups

    def _replace_parameters(self, optimizer: Optimizer) -> list[list[int]]:
        """Replaces the parameters of an optimizer by those that the strategy has made of them.

        Returns:
            For each group, which of its parameters are on this rank. They are numbered over all
            groups, as on one device.
        """
        numbers_here_of_groups: list[list[int]] = []
        global_numbers = itertools.count()
        for group in optimizer.param_groups:
            parameters_here: list[nn.Parameter] = []
            numbers_here: list[int] = []
            for old in group["params"]:
                global_number = next(global_numbers)
                new = self._replacement.get(old, old)
                is_on_other_ranks = new is None
                is_replaced = new is not old
                has_state = bool(optimizer.state.get(old))
                if is_replaced and has_state:
                    self._move_state(optimizer, old, new)
                if not is_on_other_ranks:
                    parameters_here.append(new)
                    numbers_here.append(global_number)

            numbers_here_of_groups.append(numbers_here)

            # The list is changed in place, because LBFGS keeps a reference to it.
            group["params"][:] = parameters_here

        return numbers_here_of_groups

    def _move_state(
        self, optimizer: Optimizer, old: nn.Parameter, new: nn.Parameter | None
    ) -> None:
        """Moves the optimizer state of a parameter to the parameter that replaces it.

        If that is on other ranks (None), the state is not needed here and is removed.

        Raises:
            UsageError: the optimizer has stepped already.
        """
        state = optimizer.state[old]  # it exists: the caller has checked this
        if not _is_before_first_step(state):
            raise UsageError(
                f"world.prepare of {type(optimizer).__name__} after it has stepped",
                f"strategy {self.strategy.name!r} spreads the parameters over the ranks, "
                "and the state of the optimizer belongs to whole ones",
                "prepare the model first, then an optimizer of its new parameters; "
                "world.checkpoint takes up a training",
            )

        del optimizer.state[old]
        if new is not None:
            optimizer.state[new] = map_leaves(partial(reshard, own_tensor=new), state)

    def _prepare_scheduler(self, scheduler: LRScheduler) -> PreparedScheduler:
        """Makes a scheduler step when its prepared optimizer does.

        Raises:
            UsageError: the optimizer of the scheduler is not prepared.
        """
        for optimizer in self.optimizers:
            if scheduler.optimizer in (optimizer, optimizer.inner):
                prepared = PreparedScheduler(
                    scheduler, optimizer, self.run.step, self.run.collectives
                )
                self.schedulers.append(prepared)
                self.schedule_lengths.note_prepared(prepared)
                return prepared

        raise UsageError(
            f"world.prepare of {type(scheduler).__name__}",
            "the optimizer it drives is not prepared",
            "give both to world.prepare(model, optimizer, scheduler)",
        )

    # Compressed gradients, of which checkpoints save what is not sent yet

    def unsent_gradients(self) -> dict[str, Tensor]:
        """Returns the part of this rank's gradients that compression has not sent yet."""
        unsent: dict[str, Tensor] = {}
        for number, compressed in enumerate(self._compressed_means()):
            for name, tensor in compressed.state_dict().items():
                unsent[f"{number}.{name}"] = tensor
        return unsent

    def load_unsent_gradients(self, unsent_by_rank: dict[int, dict[str, Tensor]]) -> None:
        """Loads the parts of gradients that compression had not sent yet when it was saved.

        Warns if they do not fit this run, which may have other ranks or another compression.

        Args:
            unsent_by_rank: what `unsent_gradients` returned on each rank.
        """
        everything_fits = True
        for number, compressed in enumerate(self._compressed_means()):
            state_by_rank = _unsent_of_module(unsent_by_rank, number)

            # A rank continues with its own state. If the number of ranks has changed, some kinds of
            # compression can divide the states of all ranks anew; for the others,
            # `load_state_dict` loads nothing and returns False.
            own_state = state_by_rank.get(self.run.topology.rank, {})
            states_of_all_ranks = list(state_by_rank.values())
            was_loaded = compressed.load_state_dict(own_state, states_of_all_ranks)
            if not was_loaded:
                everything_fits = False

        if unsent_by_rank and not everything_fits:
            warn(
                "resuming with DDP(compress=...)",
                "the checkpoint is of a run with other ranks or machines, or another compression: "
                "what they had left to send, a part of one gradient, does not fit",
                "nothing; this run begins without it",
            )

    def _compressed_means(self) -> Iterator[CompressedMeans]:
        """Yields the compressor of each prepared module whose gradients are compressed."""
        for wrapped in self.wrapped.values():
            if wrapped.compressed is not None:
                yield wrapped.compressed

    # Checks of the user's objects

    def _check_kind(self, thing: Any) -> None:
        """Raises UsageError if an object cannot be prepared, or was prepared already."""
        if not isinstance(thing, nn.Module | Optimizer | LRScheduler | DataLoader | Loader):
            raise UsageError(
                f"world.prepare of {describe_type(thing)}",
                "it takes modules, optimizers, learning-rate schedulers and DataLoaders",
                "give a dataset to world.loader(dataset, batch_size=...); leave the rest out",
            )

        # Collect all objects that are prepared already. First the modules that the user got back,
        # then the user's own modules. A wrapper such as DistributedDataParallel has the user's
        # module in its attribute `module`; without a wrapper both are the same module.
        known: list[Any] = list(self.wrapped)
        known += [getattr(module, "module", module) for module in self.wrapped]

        # Then the user's own optimizers.
        known += [optimizer.inner for optimizer in self.optimizers]

        is_known = any(thing is other for other in known)
        is_result_of_prepare = isinstance(thing, PreparedOptimizer | PreparedScheduler | Loader)
        if is_known or is_result_of_prepare:
            raise UsageError(
                f"world.prepare of {describe_type(thing)} that is prepared already",
                "preparing it again would cut, average or step twice",
                "call world.prepare once for each object and use what it returns",
            )

        if isinstance(thing, nn.Module):
            check_model(thing, self.run.topology.size)

    def _note_choice(self, name: str, value: str, reason: str) -> None:
        self.choices.append(Choice(name, value, reason))


def check_model(module: nn.Module, num_processes: int) -> None:
    """Raises UsageError if a module communicates or uses several GPUs itself, or has lazy layers.

    Args:
        module: the module that the user wants to prepare.
        num_processes: the number of processes in the run.
    """
    for name, part in module.named_modules():
        if isinstance(part, DistributedDataParallel):
            raise UsageError(
                "world.prepare of a model in DistributedDataParallel",
                f"{name or 'the model'} averages its gradients itself; here they would be averaged "
                "twice, and not weighted",
                "leave DistributedDataParallel out: world.prepare wraps the plain model",
            )

        is_on_several_gpus = isinstance(part, nn.DataParallel) and len(part.device_ids) > 1
        if is_on_several_gpus and num_processes > 1:
            raise UsageError(
                f"world.prepare of a model in {type(part).__name__} on {num_processes} processes",
                f"each process would compute on {len(part.device_ids)} GPUs, which are those of "
                "other processes as well",
                "leave it out: world.prepare wraps the plain model for one GPU per process; "
                "one process for several GPUs is lockstep run --strategy dp",
            )

    lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise UsageError(
            f"world.prepare of {describe_type(module)} with lazy layers",
            f"{join_first(lazy)} have no shape before the first input",
            "run one forward pass of the model on a sample batch first, then build the optimizer",
        )


def _last_loss(training_pass: TrainingPass) -> Tensor | float | None:
    """Returns this rank's loss of the last global batch of a pass that has ended.

    Returns:
        The loss, or None if the loop was left in the middle of the global batch, so that only a
        part of its loss is known.
    """
    if training_pass.num_backwards == 0:  # the loop was left before it trained its latest batch
        return training_pass.loss_of_previous_global_batch
    return training_pass.loss if training_pass.micro_batch.last else None


def _unsent_of_module(
    unsent_by_rank: dict[int, dict[str, Tensor]], module_number: int
) -> dict[int, dict[str, Tensor]]:
    """Returns what each rank had not sent of one module, whose names begin with its number."""
    prefix = f"{module_number}."
    unsent_of_module: dict[int, dict[str, Tensor]] = {}
    for rank, unsent in unsent_by_rank.items():
        unsent_of_module[rank] = {}
        for name, tensor in unsent.items():
            if name.startswith(prefix):
                unsent_of_module[rank][name.removeprefix(prefix)] = tensor
    return unsent_of_module


def _check_loader_of_virtual_ranks(shares: Any, micro_batch_size: Any) -> None:
    """Raises SettingError for settings that a loader cannot have with virtual ranks."""
    # Shares decide which virtual ranks a process computes, and a process computes the same virtual
    # ranks for all loaders.
    if shares is not None:
        raise SettingError(
            f"shares={shares!r} of a loader with virtual_ranks",
            "they say which virtual ranks a process computes, and that is one thing in a run",
            "set them for the run: lockstep.init(shares=...)",
        )

    # The size decides the order of sums, and so the bits of results. A measured size may be another
    # one in the next run.
    if is_auto(micro_batch_size):
        raise SettingError(
            "micro_batch_size='auto' with virtual_ranks",
            "what is measured differs from run to run, and with it the bits",
            "give a number",
        )


def _is_before_first_step(state: Any) -> bool:
    """Returns True if a state was created with the optimizer, as in Adagrad, and not used yet."""
    return isinstance(state, dict) and "step" in state and float(state["step"]) == 0


def _optimizer_not_prepared(found: str) -> UsageError:
    return UsageError(
        "a training loop whose optimizer is not prepared",
        found,
        "prepare it with the model: model, optimizer = world.prepare(model, optimizer)",
    )
