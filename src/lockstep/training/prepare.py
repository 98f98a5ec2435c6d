"""Prepares the user's modules, optimizers, schedulers and loaders for a run (`world.prepare`).

Modules are wrapped by the strategy, optimizers are made to step once per global batch, and loaders
deliver this rank's part of the data.

Modules are prepared first, whatever the order of the arguments, because the parameters of an
optimizer must belong to prepared modules.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import MutableMapping, Sequence
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
from lockstep.distributed.determinism import (
    add_determinism_note,
)
from lockstep.distributed.device import add_memory_advice_at_end
from lockstep.distributed.process_group import Run
from lockstep.errors import SettingError, UsageError
from lockstep.optim.precision import ForwardsSetLater, Precision
from lockstep.session.extension import Place
from lockstep.settings import Choice, check_micro_batches, is_auto
from lockstep.strategies import sync_batchnorm, virtual_rank_batchnorm
from lockstep.strategies.base import PreparedModule, Strategy, StrategyPlan, parameters_of
from lockstep.strategies.deferred_model import DeferredModel
from lockstep.strategies.earlier_gradients import EarlierGradients
from lockstep.strategies.empty_part import note_empty_part
from lockstep.strategies.micro_batch_buffers import MicroBatchBuffers
from lockstep.strategies.placeholder import Placeholders
from lockstep.strategies.virtual_ranks import note_single_sample
from lockstep.torch_compat import BatchNorm, let_compile_again, without_compile
from lockstep.training.agreement import check_equal_on_ranks
from lockstep.training.batchnorm_notes import BatchNormNotes
from lockstep.training.forward_watch import ForwardWatch
from lockstep.training.optimizer import GroupsOnOneDevice, PreparedOptimizer
from lockstep.training.optimizer_kinds import (
    choose_foreach,
    refuse_optimizer_with_bits_that_depend_on_shards,
    refuse_optimizer_wrong_on_shards,
)
from lockstep.training.schedule_length import ScheduleLengths
from lockstep.training.scheduler import PreparedScheduler
from lockstep.training.training_step import TrainingStep
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

    `training_step` is what the training loop then calls for their gradients.

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
        placeholders = Placeholders(run.step, self.wrapped)
        self.training_step = TrainingStep(
            run, strategy, self.precision, self.wrapped, self.optimizers, placeholders
        )
        if run.settings.virtual_ranks is not None:
            self.streams = VirtualRankStreams(run.settings.seed, run.device, run.step)
            run.extensions.add(self.streams, Place.PREPARED_OBJECT)

        self.schedule_lengths = ScheduleLengths(self.schedulers, self.loaders)
        run.extensions.add(self.schedule_lengths, Place.PREPARED_OBJECT)
        run.extensions.add(ForwardWatch(run.step, self.wrapped.keys()), Place.PREPARED_OBJECT)
        run.extensions.add(placeholders, Place.PREPARED_OBJECT)
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
                autotune_request=request,
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

        A tensor on the meta device has a shape, but neither memory nor values.

        - Memory is allocated here. A strategy that spreads the model over the ranks, such as FSDP,
          allocates the part of this rank in `wrap` instead.
        - Values come after `wrap`. A strategy that copies them in `wrap`, such as DiLoCo, needs
          them before, so they are computed here.

        Returns:
            The object that knows the values of these tensors; None if there are no such tensors.
        """
        if not any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()]):
            return None

        deferred = DeferredModel(module, self.run, self._drawn_shapes)
        deferred.fill_buffers(self.run.device)
        if not self.strategy.spreads_model(self.run):
            deferred.give_memory(self.run.device)
        if self.strategy.needs_values:
            # Reads the values that are in weight files; `fill` computes the remaining ones.
            lines_to_print = deferred.read_files_and_defer(PreparedModule(module=module))
            deferred.fill()
            self.choices += lines_to_print

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
        parameters = list(parameters_before)
        for old, new in wrapped.replaced_parameters:
            self._replacement[old] = new
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

        # Second case: virtual ranks that each have their own batch statistics. The line to print:
        # "batchnorm: statistics (of each virtual rank, as DDP has them; running ones: their mean)".
        if not virtual_rank_batchnorm.is_synchronised(module, self.run):
            reason = "of each virtual rank, as DDP has them; running ones: their mean"
            self._note_choice("batchnorm", "statistics", reason)
            return

        # Third case: virtual ranks that share statistics. A line to print is, for example,
        # "batchnorm: 2 synchronised (statistics of the global batch, as on one device)".
        self._batchnorm_notes.note_synchronised_module()
        statistics_of = "the global batch, as on one device"
        if self._may_use_micro_batches():
            statistics_of = "each micro-batch over all virtual ranks, not of the global batch"

        # The layers are changed in place.
        lines_to_print = virtual_rank_batchnorm.synchronise_batchnorm(
            module, self.run, statistics_of
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

        # A line to print is, for example, "batchnorm: 2 synchronised (statistics of the global
        # batch, as on one device)".
        trains_replicas = self._plan.virtual_ranks is not None  # with DiLoCo
        if trains_replicas:
            statistics_of = "the replica's part of the global batch"
        elif self._may_use_micro_batches():
            statistics_of = "each micro-batch over all ranks, not of the global batch"
        else:
            statistics_of = "the global batch, as on one device"
        self.choices += converted.choices(computed_by="rank", samples=statistics_of)

    def _may_use_micro_batches(self) -> bool:
        """Returns True if some loader computes, or may later compute, several micro-batches.

        The number of micro-batches of a loader is unknown if the user prepares the loader later, or
        if the micro-batch size is yet to be measured. Then the answer is True if it may be several.
        """
        settings = self.run.settings
        loaders = [*self.loaders, *self._loaders_of_this_call]
        if not loaders:
            # Only the settings are known. They give a number of micro-batches, or a size that
            # divides a loader's global batches if these are larger.
            return settings.micro_batch_size is not None or self._plan.num_micro_batches > 1

        if any(loader.micro_batches > 1 for loader in loaders):
            return True
        return is_auto(settings.micro_batch_size)  # the size is yet to be measured

    # Optimizers and schedulers

    def _prepare_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        """Makes an optimizer step once per global batch, on the prepared parameters.

        Raises:
            UsageError: the optimizer has parameters of no prepared module, or has stepped already,
                or torch computes it wrongly with shards.
        """
        modules = self._modules_of(optimizer)

        # Looked up before the parameters that are on other ranks are removed.
        groups_on_one_device = self._groups_on_one_device(optimizer)
        self._replace_parameters(optimizer)

        refuse_optimizer_wrong_on_shards(optimizer)
        if self.run.settings.virtual_ranks is not None:
            refuse_optimizer_with_bits_that_depend_on_shards(optimizer)

        reason = choose_foreach(optimizer, self.run.device)  # None if `foreach` is not changed
        if reason:
            self._note_choice("optimizer", f"{type(optimizer).__name__}, foreach", reason)

        prepared = PreparedOptimizer(
            optimizer, self.run.step, self.precision, modules, self.run.collectives
        )

        some_are_on_other_ranks = any(new is None for new in self._replacement.values())
        if some_are_on_other_ranks:
            prepared.groups_on_one_device = groups_on_one_device

        self.optimizers.append(prepared)
        for extension in prepared.extensions:
            self.run.extensions.add(extension, Place.PREPARED_OBJECT)
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

    def _groups_on_one_device(self, optimizer: Optimizer) -> GroupsOnOneDevice:
        """Describes the parameter groups of an optimizer as they are on one device.

        Called before the parameters that are on other ranks are removed.
        """
        groups_on_one_device = GroupsOnOneDevice(origins=[], numbers_here=[])
        next_number = 0
        for group in optimizer.param_groups:
            numbers_here = []
            origins = []
            for parameter in group["params"]:
                is_here = self._replacement.get(parameter, parameter) is not None
                if is_here:
                    numbers_here.append(next_number)
                next_number += 1
                module = self._module_of_parameter[parameter]
                origins.append((module, self._name_of_parameter.get(parameter, "")))

            groups_on_one_device.numbers_here.append(numbers_here)
            groups_on_one_device.origins.append(origins)
        return groups_on_one_device

    def _replace_parameters(self, optimizer: Optimizer) -> None:
        """Replaces the parameters of an optimizer by those that the strategy has made of them."""
        for group in optimizer.param_groups:
            parameters_here: list[nn.Parameter] = []
            for old in group["params"]:
                new = self._replacement.get(old, old)
                if new is not old:
                    self._move_state(optimizer, old, new)
                is_here = new is not None
                if is_here:
                    parameters_here.append(new)

            # The list is changed in place, because LBFGS keeps a reference to it.
            group["params"][:] = parameters_here

    def _move_state(
        self, optimizer: Optimizer, old: nn.Parameter, new: nn.Parameter | None
    ) -> None:
        """Moves the state of a parameter to the parameter that replaces it.

        If the new parameter is on another rank, so that `new` is None, the state is removed.
        """
        state = self._take_state(optimizer, old)
        if state and new is not None:
            # Each tensor of the state is cut into shards as the new parameter is.
            optimizer.state[new] = map_leaves(partial(reshard, own_tensor=new), state)

    def _take_state(self, optimizer: Optimizer, parameter: nn.Parameter) -> Any:
        """Removes the state of a replaced parameter, and returns it.

        Args:
            optimizer: the optimizer that has the state.
            parameter: the parameter from before the replacement.

        Returns:
            The state; None if the parameter has no state.

        Raises:
            UsageError: the optimizer has stepped already.
        """
        state = optimizer.state.get(parameter)
        if not state:
            return None

        if not _is_before_first_step(state):
            raise UsageError(
                f"world.prepare of {type(optimizer).__name__} after it has stepped",
                f"strategy {self.strategy.name!r} spreads the parameters over the ranks, "
                "and the state of the optimizer belongs to whole ones",
                "prepare the model first, then an optimizer of its new parameters; "
                "world.checkpoint takes up a training",
            )

        del optimizer.state[parameter]
        return state

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


def _check_loader_of_virtual_ranks(shares: Any, micro_batch_size: Any) -> None:
    """Raises SettingError for settings that a loader cannot have with virtual ranks."""
    # Shares decide which virtual ranks a process computes. They are the same for all loaders.
    if shares is not None:
        raise SettingError(
            f"shares={shares!r} of a loader with virtual_ranks",
            "they say which virtual ranks a process computes, which are the same for all loaders "
            "of a run",
            "set them for the run: lockstep.init(shares=...)",
        )

    # The size decides the order of sums, and so the bits of results. If the size is measured, it
    # may differ in the next run.
    if is_auto(micro_batch_size):
        raise SettingError(
            "micro_batch_size='auto' with virtual_ranks",
            "what is measured differs from run to run, and with it the bits",
            "give a number",
        )


def _is_before_first_step(state: Any) -> bool:
    """Returns True if a state was created with the optimizer, as in Adagrad, and not used yet."""
    return isinstance(state, dict) and "step" in state and float(state["step"]) == 0
