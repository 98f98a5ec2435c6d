"""What `world.prepare` does: modules are spread, optimizers follow the global batch, loaders shard.

Modules come first, whatever the order of the arguments, because optimizers are checked against
their parameters.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torch.utils.weak import WeakTensorKeyDictionary

from lockstep.batch.consistency import DRAW_BEFORE_PREPARE, check_samples
from lockstep.batch.loader import Loader
from lockstep.batch.micro_batches import MicroBatchPlan
from lockstep.batch.pytree import storages, tensors
from lockstep.batch.shares import first_shares, parse_micro_batch
from lockstep.batch.source import Source, make_source
from lockstep.batch.stream import make_loader
from lockstep.checkpoint.sharding import in_memory, map_leaves, resharded
from lockstep.communication.compression import CompressedMeans
from lockstep.distributed.device import add_memory_advice, add_memory_advice_at_end
from lockstep.distributed.process_group import Run
from lockstep.distributed.torch_compat import BatchNorm, let_compile_again
from lockstep.errors import CheckpointError, RanksDifferError, UsageError, warn
from lockstep.extensions.checks import Guards
from lockstep.optim.precision import ForwardsSetLater, Precision
from lockstep.settings import Choice, check_micro_batches, is_auto
from lockstep.step import Step
from lockstep.strategies import sync_batchnorm
from lockstep.strategies.base import (
    ApartState,
    Strategy,
    StrategyPlan,
    Wrapped,
    note_empty_part,
    parameters_of,
)
from lockstep.strategies.micro_batch_buffers import MicroBatchBuffers
from lockstep.strategies.placeholder import Placeholders
from lockstep.training.autotune import Autotune
from lockstep.training.optimizer import PreparedOptimizer, PreparedScheduler, choose_foreach
from lockstep.wording import join_first


class Preparer:
    """Prepares the objects of one run and remembers which belong together."""

    def __init__(self, run: Run, strategy: Strategy, plan: StrategyPlan) -> None:
        self.run = run
        self.strategy = strategy
        self.choices: list[Choice] = []
        self.loaders: list[Loader] = run.loaders
        self._new_loaders: list[Loader] = []
        """Those of the present call of `prepare`."""
        self._numbers = itertools.count()
        self.precision = Precision(run.settings.precision, run.device)
        if self.precision.dtype in (torch.bfloat16, torch.float16):
            run.step.callbacks.append(ForwardsSetLater(self.precision))
        self._plan = plan
        self._wrapped: dict[nn.Module, Wrapped] = {}
        """By the prepared modules."""
        self.guards = Guards(run, self.precision, self._wrapped.values())
        self._owners: MutableMapping[Tensor, nn.Module] = WeakTensorKeyDictionary()
        """The prepared module of each parameter, also of those that a strategy has replaced."""
        self._replaced: MutableMapping[Tensor, nn.Parameter | None] = WeakTensorKeyDictionary()
        """What an optimizer holds in the place of such a one; None: it lives on other ranks."""
        self.optimizers: list[PreparedOptimizer] = []
        self.schedulers: list[PreparedScheduler] = []
        self._autotune = Autotune(run, strategy, plan, self._wrapped.keys(), self.optimizers)
        self._normalised = False
        """Whether a prepared module has BatchNorm layers."""
        self._cut_by_size: tuple[int | str, int] | None = None
        """A micro_batch_size that cuts a global batch, and into how many micro-batches."""
        self._warned_of_batchnorm = False
        self._watches_forward = False
        run.step.watch_forward.append(self._watch_forward)
        self._placeholders: Placeholders | None = None
        run.step.empty_part_begins.append(self._use_placeholders)
        self._end_advice = add_memory_advice_at_end(
            run.step, lambda error: note_empty_part(error, run.step.latest)
        )
        self.replicas: ReplicaStates | None = None
        if plan.replicas is not None:
            self.replicas = ReplicaStates(
                plan.replicas, run.topology.is_main, self._wrapped, self.optimizers
            )

    def prepare(self, objects: tuple[Any, ...]) -> list[Any]:
        """The prepared objects in the order given.

        Raises:
            UsageError: something of another kind, prepared before, or an optimizer with
                parameters of no prepared module.
            RanksDifferError: other objects on other ranks, such as datasets of different lengths.
        """
        for thing in objects:
            self._check(thing)
        prepared = {id(thing): thing for thing in objects}
        for thing in objects:
            if isinstance(thing, DataLoader):
                prepared[id(thing)] = self._make_loader(make_source(thing))
        loaders = [thing for thing in prepared.values() if isinstance(thing, Loader)]
        self._new_loaders = loaders
        self.run.examples[:] = [loader.example for loader in loaders]
        self._agree("world.prepare", list(prepared.values()))
        steps: tuple[tuple[type, Callable[[Any], Any]], ...] = (
            (nn.Module, self._module),
            (Optimizer, self._optimizer),
            (LRScheduler, self._scheduler),
        )
        for kind, prepare in steps:
            for thing in objects:
                if isinstance(thing, kind) and thing is prepared[id(thing)]:
                    prepared[id(thing)] = prepare(thing)
        self.loaders += loaders
        self._new_loaders = []
        return [prepared[id(thing)] for thing in objects]

    def add_loader(self, source: Source, **options: Any) -> Loader:
        """The loader of a source, with the options of `World.loader`.

        Raises:
            RanksDifferError: the ranks have other data, or the same in another order.
        """
        loader = self._make_loader(source, **options)
        self._agree("world.loader", [loader])
        self.loaders.append(loader)
        return loader

    def _make_loader(
        self,
        source: Source,
        shares: Any = None,
        micro_batch_size: Any = None,
        num_micro_batches: int | None = None,
        **options: Any,
    ) -> Loader:
        plan = self._plan
        settings = self.run.settings
        check_micro_batches(num_micro_batches, micro_batch_size)
        fewest = plan.num_micro_batches
        if num_micro_batches is not None:
            fewest = max(num_micro_batches, settings.min_micro_batches)
        elif micro_batch_size is None:
            micro_batch_size = settings.micro_batch_size
        elif settings.num_micro_batches is not None:  # which is for the other loaders
            fewest = settings.min_micro_batches
        division = MicroBatchPlan(
            request=self._autotune.request(shares, micro_batch_size),
            batch_size=source.batch_size,
            varying=source.batch_sampler is not None,
            data_parallel=self.run.collectives.data_parallel,
            first_shares=plan.shares if shares is None else first_shares(shares, len(plan.shares)),
            first_micro_batch_size=parse_micro_batch(plan.micro_batch_size(micro_batch_size)),
            min_micro_batches=fewest,
            replicas=plan.replicas,
        )
        made = make_loader(
            source,
            plan=division,
            seed=settings.seed,
            collectives=self.run.collectives,
            step=self.run.step,
            evaluates_together=plan.evaluates_together,
            **options,
        )
        number = next(self._numbers)
        self.choices.append(made.choice(number))
        if made.micro_batches > 1 or is_auto(micro_batch_size):
            self._note_cut(number, made.micro_batches, micro_batch_size)
        return made

    def _note_cut(self, number: int, micro_batches: int, size: int | str | None) -> None:
        """Notes that a loader cuts its global batches, which BatchNorm depends on.

        Args:
            number: of the loader.
            micro_batches: of its global batches.
            size: the micro_batch_size that asks for them; None: their number is set.
        """
        if size is not None and self._cut_by_size is None:
            self._cut_by_size = (size, micro_batches)
        if self._normalised and self.run.settings.sync_batchnorm:
            how = f"of each micro-batch of loader {number}, over all ranks; not of the global batch"
            self._choose("batchnorm", "statistics", how)
        self._warn_of_batchnorm()

    def _warn_of_batchnorm(self) -> None:
        """Says once that statistics of micro-batches depend on the number of ranks."""
        if not self._normalised or self._cut_by_size is None or self._warned_of_batchnorm:
            return
        one_part = self._plan.rank.size == 1 and not self.run.collectives.alone  # a pipeline
        if one_part or not self.run.settings.sync_batchnorm:
            return
        self._warned_of_batchnorm = True
        size, number = self._cut_by_size
        now = f" (now {number})"
        instead = f"num_micro_batches={number} instead gives these numbers everywhere"
        if is_auto(size):
            now = ""
            instead = "num_micro_batches=... holds on any number of ranks"
        warn(
            f"micro_batch_size={size!r} and a model with BatchNorm",
            "BatchNorm takes its statistics from one micro-batch over all ranks. micro_batch_size= "
            f"is what one rank computes at a time, so the number of micro-batches{now} depends on "
            "the number of ranks, and with it the result",
            f"say into how many micro-batches a global batch is cut: {instead}",
        )

    def _agree(self, what: str, things: list[Any]) -> None:
        """Raises RanksDifferError on all ranks unless all have brought the same, in this order."""
        mine = [describe(thing) for thing in things]
        brought: list[list[str]] = self.run.collectives.exchange(mine)
        if any(other != mine for other in brought):
            code = _code_of(brought)
            advice = "build the same on every rank: same code, arguments, seed and data"
            if code is not None:  # it is data that differs
                advice += f"; {DRAW_BEFORE_PREPARE}"
            raise RanksDifferError(
                what,
                "; ".join(f"rank {rank}: {'; '.join(each)}" for rank, each in enumerate(brought)),
                advice,
                code=code,
            )
        for loader in things:
            if isinstance(loader, Loader):
                check_samples(loader.source, loader.seed, self.run.collectives)
                if self.run.settings.ledger is not None:
                    _ = loader.fingerprint  # the ledger holds it; it is read before the training

    def unsent(self) -> dict[str, Tensor]:
        """What this rank has to remember of how it sends gradients; empty: nothing."""
        return {
            f"{number}.{name}": tensor
            for number, each in enumerate(self._compressed())
            for name, tensor in each.state_dict().items()
        }

    def load_unsent(self, ranks: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Takes up what all ranks had to remember; warns where that does not fit."""
        lost = False
        for number, each in enumerate(self._compressed()):
            begin = f"{number}."
            states = {
                rank: {k.removeprefix(begin): t for k, t in state.items() if k.startswith(begin)}
                for rank, state in ranks.items()
            }
            own = states.get(self.run.topology.rank, {})
            lost |= not each.load_state_dict(own, [*states.values()])
        if lost and ranks:  # else nothing was left to send
            warn(
                "resuming with DDP(compress=...)",
                "the checkpoint is of a run with other ranks or machines, or another compression: "
                "what they had left to send, a part of one gradient, does not fit",
                "nothing; this run begins without it",
            )

    def _compressed(self) -> list[CompressedMeans]:
        return [each.compressed for each in self._wrapped.values() if each.compressed is not None]

    def release(self) -> None:
        """Lets go of the process group."""
        self._end_advice()
        for wrapped in self._wrapped.values():
            wrapped.release()
        for loader in self.loaders:
            loader.release()

    def backward(self, loss: Tensor, **options: Any) -> None:
        """The backward pass of a loss, as much as it counts in that of the global batch.

        Raises:
            UsageError: a loss that cannot be trained on; under fp16, no optimizer was prepared.
        """
        step = self.run.step
        step.of_loss()
        self.guards.before_backward(loss)
        self._check_accumulation()
        if self.precision.scaler is not None and self._wrapped and not self.optimizers:
            raise _not_prepared(
                "under precision='fp16' gradients are multiplied by the scale of the loss; a "
                "prepared optimizer divides them again before it steps"
            )
        before = step.enter_phase("backward")
        weighted = step.weighted(loss)
        try:
            for wrapped in self._wrapped.values():
                wrapped.before_backward(weighted)
            with nullcontext() if self._placeholders is None else self._placeholders.in_backward():
                self.strategy.backward([*self._wrapped], weighted, self.precision, **options)
            for wrapped in self._wrapped.values():
                wrapped.after_backward()
        except Exception as error:
            add_memory_advice(error, step.current.local, step.devices)
            raise
        finally:
            step.enter_phase(before)
        self._autotune.after_backward()
        step.running.backwards += 1
        self.guards.after_backward(loss)

    def clip(self, module: nn.Module, max_norm: float, norm_type: float) -> Tensor:
        """Clips the gradients of a module by the norm of all of them; returns that norm."""
        if not isinstance(module, nn.Module):
            raise UsageError(
                f"world.clip_grad_norm_ of a {type(module).__name__}",
                "it takes a module, whose gradients may be spread over the ranks",
                "pass the prepared model: world.clip_grad_norm_(model, max_norm)",
            )
        parameters = list(module.parameters())
        own = set(parameters)
        of_module = (o.inner for o in self.optimizers if not own.isdisjoint(parameters_of(o)))
        self.precision.unscale(of_module)
        norm = self.strategy.total_norm(parameters, norm_type)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def loss(self) -> float:
        """That of the present global batch; all ranks call it together.

        Raises:
            UsageError: it is not known, or not all of it.
        """
        running = self.run.step.running
        if not running.backwards:
            raise UsageError(
                "world.loss()",
                "world.backward was not given a loss of this micro-batch",
                "call it in the training loop, after world.backward(loss)",
            )
        mean: float = self.run.collectives.mean(float(running.loss))
        return mean

    def _check_accumulation(self) -> None:
        """Before the backward pass of one of several micro-batches.

        Raises:
            UsageError: gradients of earlier micro-batches were cleared, or a second backward pass
                for another optimizer would mix with them.
        """
        running = self.run.step.running
        present = running.micro_batch
        if present.opens and present.closes:
            return
        if running.backwards and len(self.optimizers) > 1:
            raise UsageError(
                "several backward passes a micro-batch, for several optimizers",
                "what one leaves in the parameters of another is cleared once per global batch, "
                "not between the micro-batches, so it would be counted",
                "leave micro_batch_size out, or add the losses up and call world.backward once",
            )
        apart = any(wrapped.gradients_apart for wrapped in self._wrapped.values())
        if present.opens or running.backwards or apart:
            return
        parameters = (p for module in self._wrapped for p in module.parameters())
        if self._wrapped and not self.optimizers and all(p.grad is None for p in parameters):
            raise _not_prepared(
                "the gradients of the micro-batches before are gone: it steps and clears them "
                "in each micro-batch, not once in a global batch"
            )
        for optimizer in self.optimizers:
            optimizer.check_kept()

    def _has(self, parameter: nn.Parameter) -> bool:
        """Whether it belongs to a prepared module, from which it may have been taken away."""
        owner = self._owners.get(parameter)
        if owner is None:
            return False
        return parameter in self._replaced or any(parameter is p for p in owner.parameters())

    def _check(self, thing: Any) -> None:
        if not isinstance(thing, nn.Module | Optimizer | LRScheduler | DataLoader | Loader):
            raise UsageError(
                f"world.prepare of a {type(thing).__name__}",
                "it takes modules, optimizers, learning-rate schedulers and DataLoaders",
                "give a dataset to world.loader(dataset, batch_size=...); leave the rest out",
            )
        inner = [getattr(module, "module", module) for module in self._wrapped]
        inner += [optimizer.inner for optimizer in self.optimizers]
        known = any(thing is each for each in (*self._wrapped, *inner))
        if known or isinstance(thing, PreparedOptimizer | PreparedScheduler | Loader):
            raise UsageError(
                f"world.prepare of a {type(thing).__name__} that is prepared already",
                "preparing it again would cut, average or step twice",
                "call world.prepare once for each object and use what it returns",
            )
        if isinstance(thing, nn.Module):
            check_model(thing)

    def _module(self, module: nn.Module) -> nn.Module:
        run = self.run
        if any(isinstance(m, BatchNorm) for m in module.modules()):
            self._normalised = True
            self._warn_of_batchnorm()
        if run.collectives.data_parallel.size > 1:
            self._convert(module)
        self.precision.attach(module)
        if self.precision.name == "fp64":
            self._choose("precision", "fp64", "the model is in float64, and so are its inputs")
        elif self.precision.dtype is not None:
            self._choose("autocast", type(module).__name__, "outputs come back in fp32")
        let_compile_again(module)
        own = list(module.parameters())
        shared = [n for n, p in module.named_parameters() if p.requires_grad and self._has(p)]
        wrapped = self.strategy.wrap(module, run)
        if shared and not run.collectives.alone:
            raise UsageError(
                "world.prepare of two modules with the same parameters",
                f"{join_first(shared)} of the {type(module).__name__} belong to another prepared "
                "module too, and each would average their gradients",
                "prepare one module that holds both, and call them in its forward",
            )
        made = wrapped.module
        self.choices += wrapped.choices
        self._wrapped[made] = wrapped
        if self._plan.rank.rank == 0:  # of all stages of a pipeline, as each has other buffers
            MicroBatchBuffers(module, run.step, pipelined=wrapped.gradients_later)
        if self._watches_forward:
            self._watch(made)
        if self._placeholders is not None:
            self._placeholders.attach(made)
        run.prepared.append(weakref.ref(made))
        self.guards.prepared(wrapped)
        for callback in run.step.callbacks:
            callback.prepared(made)
        for old, new in wrapped.replaced:
            self._replaced[old] = new
            own += [old] if new is None else [old, new]
        for parameter in own:
            self._owners[parameter] = made
        return made

    def _watch_forward(self) -> None:
        """Has the step told which batches the prepared modules are called with."""
        self._watches_forward = True
        for module in self._wrapped:
            self._watch(module)

    def _watch(self, module: nn.Module) -> None:
        watch = _ForwardWatch(self.run.step)
        module.register_forward_pre_hook(watch, prepend=True, with_kwargs=True)

    def _use_placeholders(self) -> None:
        """Has the prepared modules compute a placeholder sample where this rank has none."""
        self._placeholders = Placeholders(self.run.step)
        for module in self._wrapped:
            self._placeholders.attach(module)

    def _convert(self, module: nn.Module) -> None:
        if not any(isinstance(m, BatchNorm) for m in module.modules()):
            return
        if self.run.settings.sync_batchnorm:
            names = sync_batchnorm.convert(module, self.run.groups.get(self._plan.statistics_group))
            of = "the global batch, as on one device"
            if self._plan.replicas is not None:
                of = "the replica's part of the global batch"
            elif self._may_be_cut:
                of = "each micro-batch over all ranks, not of the global batch"
            self.choices += names.choices(each="rank", of=of)
        else:
            reason = "sync_batchnorm=False; differs from one device (LS306)"
            self._choose("batchnorm", "per rank", reason)

    @property
    def _may_be_cut(self) -> bool:
        """Whether global batches are computed in micro-batches, as far as is known."""
        several = [loader.micro_batches > 1 for loader in (*self.loaders, *self._new_loaders)]
        if several:
            return any(several) or is_auto(self.run.settings.micro_batch_size)
        settings = self.run.settings
        return settings.micro_batch_size is not None or self._plan.num_micro_batches > 1

    def _optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        modules = self._modules_of(optimizer)
        counts = [len(group["params"]) for group in optimizer.param_groups]
        places = self._replace_parameters(optimizer)
        reason = choose_foreach(optimizer, self.run.device)
        if reason:
            self._choose("optimizer", f"{type(optimizer).__name__}, foreach", reason)

        def before() -> None:
            for module in modules:
                self._wrapped[module].before_step(optimizer)
            self.guards.before_step(optimizer, modules)

        def after() -> None:
            for module in modules:
                self._wrapped[module].after_step()
            if self.run.step.current.last:
                self.guards.after_step()

        prepared = PreparedOptimizer(
            optimizer, self.run.step, self.precision, before, after, self._whole_loss
        )
        if any(new is None for new in self._replaced.values()):
            prepared.places, prepared.counts = places, counts
        self.optimizers.append(prepared)
        self.guards.optimizer_prepared(prepared)
        for module in modules:
            self._wrapped[module].optimizer_prepared(optimizer)
        return prepared

    def _whole_loss(self, loss: Any) -> Any:
        """What a closure returned, as that of the global batch: optimizers decide by it."""
        collectives, scale = self.run.collectives, self.run.step.of_backward.scale
        if collectives.alone or not isinstance(loss, Tensor | float):
            return loss
        return collectives.mean(loss * scale if scale else 0.0)

    def _modules_of(self, optimizer: Optimizer) -> list[nn.Module]:
        parameters = parameters_of(optimizer)
        strange = sum(p not in self._owners for p in parameters)
        if strange:
            raise UsageError(
                f"world.prepare of {type(optimizer).__name__}",
                f"{strange} of its {len(parameters)} parameters belong to no prepared module",
                "build the optimizer from model.parameters() of the very model you prepare, and "
                "give both to world.prepare(model, optimizer)",
            )
        return list(dict.fromkeys(self._owners[p] for p in parameters))

    def _replace_parameters(self, optimizer: Optimizer) -> list[list[int]]:
        """Gives the optimizer what the strategy has put in the place of its parameters.

        Returns:
            For each group where, among all its parameters, those stand that are on this rank.
        """
        places: list[list[int]] = []
        numbers = itertools.count()
        for group in optimizer.param_groups:
            replaced = [(p, self._replaced.get(p, p), next(numbers)) for p in group["params"]]
            for old, new, _ in replaced:
                state = optimizer.state.get(old)
                if new is old or not state:
                    continue
                if not _before_first_step(state):
                    raise UsageError(
                        f"world.prepare of {type(optimizer).__name__} after it has stepped",
                        f"strategy {self.strategy.name!r} spreads the parameters over the ranks, "
                        "and the state of the optimizer belongs to whole ones",
                        "prepare the model first, then an optimizer of its new parameters; "
                        "world.checkpoint takes up a training",
                    )
                del optimizer.state[old]
                if new is not None:
                    optimizer.state[new] = map_leaves(partial(resharded, own=new), state)
            here = [(new, number) for _, new, number in replaced if new is not None]
            places.append([number for _, number in here])
            group["params"][:] = [new for new, _ in here]  # LBFGS holds this very list
        return places

    def _scheduler(self, scheduler: LRScheduler) -> PreparedScheduler:
        driven = [o for o in self.optimizers if scheduler.optimizer in (o, o.inner)]
        if not driven:
            raise UsageError(
                f"world.prepare of {type(scheduler).__name__}",
                "the optimizer it drives is not prepared",
                "give both to world.prepare(model, optimizer, scheduler)",
            )
        prepared = PreparedScheduler(scheduler, driven[0], self.run.step, self.run.collectives)
        self.schedulers.append(prepared)
        return prepared

    def _choose(self, name: str, value: str, reason: str) -> None:
        self.choices.append(Choice(name, value, reason))


class _ForwardWatch:
    """A pre-hook of a prepared module: tells the step what the module is called with."""

    def __init__(self, step: Step | None = None) -> None:
        self._step = step

    def __reduce__(self) -> tuple[type[_ForwardWatch], tuple[()]]:
        """Copies of the module, and pickled ones, tell nobody."""
        return _ForwardWatch, ()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # Compiled code is left as it is: a look at storages would break its graph.
        if torch.compiler.is_compiling() or self._step is None:
            return
        if torch.is_grad_enabled():
            derived = any(tensor.requires_grad for tensor in tensors((args, kwargs)))
            self._step.saw_forward(storages((args, kwargs)), derived=derived)


class ReplicaStates:
    """What replicas that train apart have each of its own: weights, buffers, optimizer states.

    Of each the first rank that computes it stores it; `state_dict` has what this rank has.

    Args:
        count: of the replicas.
        stores_shared: this rank stores what all have alike.
        wrapped: all modules; it grows.
        optimizers: likewise.
    """

    partial = True

    def __init__(
        self,
        count: int,
        stores_shared: bool,
        wrapped: Mapping[nn.Module, Wrapped],
        optimizers: Sequence[PreparedOptimizer],
    ) -> None:
        self.count = count
        self._stores_shared = stores_shared
        self._wrapped, self.optimizers = wrapped, optimizers

    @property
    def own(self) -> list[int]:
        """The replicas that this rank computes."""
        modules = self._modules()
        return list(modules[0].own) if modules else []

    @property
    def round_is_over(self) -> bool:
        """Whether replicas have nothing of their own just now but the state of an optimizer."""
        return any(module.round_is_over() for module in self._modules())

    def state_dict(self, shared: bool | None = None) -> dict[str, Any]:
        """Entries for each of this rank's replicas, and what all ranks have alike.

        Args:
            shared: whether that is in it; None: on one rank.
        """
        modules = self._modules()
        alike = [module.shared_state() for module in modules]
        entries = {
            replica: {
                "modules": [module.replica_state(replica) for module in modules],
                "optimizers": [each.replica_state(replica) for each in self.optimizers],
            }
            for replica in self.own
        }
        return {
            "replicas": self.count,
            "shared": alike if (self._stores_shared if shared is None else shared) else None,
            "state": entries,
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError where what was saved is not of such replicas."""
        if state["replicas"] != self.count:
            raise CheckpointError(
                f"resuming with DiLoCo(replicas={self.count})",
                f"the checkpoint has {state['replicas']} replicas, each with weights and optimizer "
                "states of its own",
                "continue with as many, on any number of devices; or begin anew from the shared "
                "weights: lockstep.load_weights(model, folder)",
            )
        for module, shared in zip(self._modules(), state["shared"], strict=True):
            module.check(shared)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Takes up this rank's part; None: all replicas begin with what the run has now."""
        modules = self._modules()
        if state is None:
            return
        saved = state["state"]
        own = {r: in_memory(saved[r]) for r in self.own}
        for number, module in enumerate(modules):
            of_module = {replica: entry["modules"][number] for replica, entry in own.items()}
            module.load(in_memory(state["shared"][number]), of_module)
        for number, optimizer in enumerate(self.optimizers):
            for replica, entry in own.items():
                optimizer.load_replica_state(replica, entry["optimizers"][number])

    def _modules(self) -> list[ApartState]:
        return [w.apart for w in self._wrapped.values() if w.apart is not None]


def _before_first_step(state: Any) -> bool:
    """Whether the state was made with the optimizer, as Adagrad does, and not used since."""
    return isinstance(state, dict) and "step" in state and float(state["step"]) == 0


def _not_prepared(found: str) -> UsageError:
    return UsageError(
        "a training loop whose optimizer is not prepared",
        found,
        "prepare it with the model: model, optimizer = world.prepare(model, optimizer)",
    )


def _code_of(brought: list[list[str]]) -> str | None:
    """Of the catalogue, where it is nothing but data that differs."""
    differing = [set(of_all) for of_all in zip(*brought, strict=False) if len(set(of_all)) > 1]
    data = all(text.startswith(_LOADER) for texts in differing for text in texts)
    if len(set(map(len, brought))) > 1 or not data:
        return None
    sizes = [{text.partition(" (checksum")[0] for text in texts} for texts in differing]
    return "LS105" if all(len(each) == 1 for each in sizes) else "LS104"


_LOADER = "a loader over "


def describe(thing: Any) -> str:
    """What must be equal on all ranks of an object given to `prepare`, or of a loader."""
    if isinstance(thing, nn.Module):
        shapes = [
            [name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad]
            for named in (thing.named_parameters(), thing.named_buffers())
            for name, tensor in named
        ]
        digest = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:12]
        numbers = sum(p.numel() for p in thing.parameters())
        return f"{type(thing).__name__} of {numbers:,} parameters (shapes {digest})"
    if isinstance(thing, Loader):
        return thing.source.description
    return type(thing).__name__


def check_model(module: nn.Module) -> None:
    """Raises UsageError where a module averages gradients itself, or its shapes are not known."""
    for name, part in module.named_modules():
        if isinstance(part, DistributedDataParallel):
            raise UsageError(
                "world.prepare of a model in DistributedDataParallel",
                f"{name or 'it'} averages its gradients itself; here they would be averaged twice, "
                "and not weighted",
                "leave DistributedDataParallel out: world.prepare wraps the plain model",
            )
    lazy = [name for name, p in module.named_parameters() if is_lazy(p)]
    if lazy:
        raise UsageError(
            f"world.prepare of a {type(module).__name__} with lazy layers",
            f"{join_first(lazy)} have no shape before the first input",
            "run one forward pass of the model on a sample batch first, then build the optimizer",
        )
