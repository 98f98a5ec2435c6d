"""DiLoCo: replicas that train apart and meet every so many steps, whatever they are computed on.

The replicas are part of the recipe, as the global batch is: each trains on an equal part of every
global batch, with an inner optimizer of its own. Every `every` steps the outer optimizer, SGD with
Nesterov momentum, takes the mean over replicas of (shared weights - replica's weights) as gradient
of the shared weights, and all replicas start again from these (Douillard et al., "DiLoCo", arXiv
2311.08105, algorithm 1). Without momentum and at a rate of 1 this is local SGD (Stich, arXiv
1805.09767), which may begin later (post-local SGD, Lin et al., arXiv 1808.07217).

The model may be exchanged in fragments, one after the other, and what was sent be applied some
steps later, while training goes on; each replica then takes the mean of its own weights and the
shared ones ("Streaming DiLoCo", Douillard et al., arXiv 2501.18512, algorithm 2, with alpha = 0.5).

A process with several replicas computes them in turn: from a replica's first micro-batch to its
step its weights, buffers and optimizer state are in the place of the shared ones. Where a replica
is on several ranks they average its gradient. Communication between replicas: one all-reduce of a
fragment when it is due; nothing else. Where differences are compressed, one all-gather of what each
replica's is quantized to, so that the numbers still depend on the replicas alone; what that loses
is added to the replica's next one (error feedback, Karimireddy et al., arXiv 1901.09847).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.batch.plan import virtual_ranks_of
from lockstep.communication.quantize import Method
from lockstep.distributed.process_group import Run
from lockstep.distributed.torch_compat import outside_compiled_code, write_counts
from lockstep.errors import CheckpointError, SettingError, UsageError, unknown_choice_error, warn
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.settings import Choice, check_whole_number
from lockstep.strategies.base import (
    EqualTensors,
    PreparedModule,
    Strategy,
    StrategyPlan,
    move_to_device,
    open_group,
)
from lockstep.strategies.diloco_exchange import ACROSS, GROUP, Exchange, cut
from lockstep.strategies.replication import MovingBuffers, average_gradients, take_from_first
from lockstep.strategies.sync_batchnorm import SyncBatchNorm, convert
from lockstep.units import format_bytes
from lockstep.wording import count_noun

_MIXING = 0.5
"""Of a replica's own weights, where what it has sent is applied later (alpha in the paper)."""


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Strategy):
    """Options of DiLoCo. The defaults are those of the paper, which takes 500 for `every`.

    Raises:
        SettingError: a value out of range, or two that do not go together.
    """

    name: ClassVar[str] = "diloco"

    replicas: int = 2
    """Of the model; at least as many as processes, or it divides their number."""
    every: int = 50
    """Steps from one exchange to the next."""
    outer_lr: float = 0.7
    """Rate of the outer optimizer; 1 without momentum is the plain mean of the replicas."""
    outer_momentum: float = 0.9
    fragments: int = 1
    """Of nearly equal size, into which the model is cut; they are exchanged at equal intervals."""
    delay: int = 0
    """Steps after which what was sent is applied; the network has so long."""
    compress: Method | None = None
    """How differences are sent: as `bf16`, or `int8` or `int4` with a scale for every 128; None: as
    they are."""
    start: int = 0
    """Steps at the beginning in which the replicas train as one, and average every gradient."""

    def __post_init__(self) -> None:
        for name, least in (
            ("replicas", 1),
            ("every", 1),
            ("fragments", 1),
            ("delay", 0),
            ("start", 0),
        ):
            value = getattr(self, name)
            check_whole_number(f"DiLoCo({name}={value!r})", value, least)
        for name, most in (("fragments", self.every), ("delay", self.every - 1)):
            if getattr(self, name) > most:
                raise SettingError(
                    f"DiLoCo({name}={getattr(self, name)}, every={self.every})",
                    f"with every={self.every} it is at most {most}: a fragment is exchanged, and "
                    "has come, before it is sent again",
                    "choose a smaller one, or a larger every",
                )
        if self.compress not in (None, *get_args(Method)):
            was_set, known = f"DiLoCo(compress={self.compress!r})", get_args(Method)
            raise unknown_choice_error(was_set, self.compress, "compressions", known)
        if not (self.outer_lr > 0 and 0 <= self.outer_momentum < 1):
            raise SettingError(
                f"DiLoCo(outer_lr={self.outer_lr}, outer_momentum={self.outer_momentum})",
                "the rate is above 0, and the momentum from 0 to below 1",
                "choose others; outer_lr=1, outer_momentum=0 is local SGD",
            )

    def plan(self, run: Run) -> StrategyPlan:
        """A part of every global batch for each replica.

        Raises:
            SettingError: a world size that does not fit, or precision fp16.
        """
        size = run.topology.size
        if size > self.replicas and size % self.replicas:
            raise SettingError(
                f"DiLoCo(replicas={self.replicas}) on {size} processes",
                "each process computes one or more replicas, or each replica is computed by "
                "equally many processes",
                f"start at most {self.replicas} processes, or a multiple of it; the numbers depend "
                "on replicas alone",
            )
        if run.settings.precision == "fp16":
            raise SettingError(
                "strategy='diloco' with precision='fp16'",
                "its loss scaler would skip steps of one replica and not of the others",
                "use precision='bf16', which needs none",
            )
        if size > 1:
            ranks = torch.arange(size).view(-1, max(1, size // self.replicas))
            open_group(run, GROUP, ranks)
            if self.compress:
                open_group(run, ACROSS, ranks.T)
        run.step.num_common_steps = self.start
        return replace(super().plan(run), num_virtual_ranks=self.replicas, statistics_group=GROUP)

    def wrap(self, module: nn.Module, run: Run) -> PreparedModule:
        """The module itself, on its device, which replicas take turns in.

        Raises:
            SettingError: more fragments than parameters.
            UsageError: it holds a sparse tensor.
        """
        choices = move_to_device(module, run.device)
        _share_statistics(module, run)
        if run.topology.size > 1:
            take_from_first([*module.parameters(), *module.buffers()])
        if not any(p.requires_grad for p in module.parameters()):
            return PreparedModule(module=module, choices=choices)
        self._warn_of_statistics(module)
        compress = None if run.settings.uncompressed else self.compress
        turns = _Turns(module, run, replace(self, compress=compress))
        module.register_forward_pre_hook(_Hook(turns.before_forward))
        hooked: Any = module
        if compress is not self.compress:
            hooked.by_choice = f"differences of replicas are sent as {self.compress}"
        hooked.register_state_dict_pre_hook(_Hook(turns.show_shared))
        hooked.register_load_state_dict_pre_hook(_Hook(turns.forget))
        least, more = divmod(self.replicas, run.topology.size)
        where = f"each on {count_noun(run.topology.size // self.replicas, 'process')}"
        if self.replicas > run.topology.size:
            number = f"{least} or {least + 1} replicas" if more else count_noun(least, "replica")
            where = f"{number} on each process, in turn"
        size = sum(p.numel() * p.element_size() for p in turns.parameters)
        pieces = f" as {compress}" * (compress is not None)
        pieces += f" in {self.fragments} fragments" * (self.fragments > 1)
        later = f", applied {count_noun(self.delay, 'step')} later" * (self.delay > 0)
        rule = f"outer SGD, rate {self.outer_lr:g}, Nesterov momentum {self.outer_momentum:g}"
        choices += [
            Choice("replicas", str(self.replicas), f"train apart; {where}"),
            Choice(
                "exchange",
                f"every {count_noun(self.every, 'step')}",
                f"{format_bytes(size)}{pieces}{later}; {rule}",
            ),
        ]
        return PreparedModule(
            module=module,
            choices=choices,
            equal_tensors=turns.equal_tensors,
            extensions=[turns],
            virtual_rank_state=turns,
        )

    def _warn_of_statistics(self, module: nn.Module) -> None:
        """The outer optimizer moves weights further than the replicas went, but not statistics."""
        layers = [layer for layer in module.modules() if layer.training]
        kept = any(getattr(layer, "running_mean", None) is not None for layer in layers)
        if kept and (self.outer_momentum or self.outer_lr != 1.0):
            warn(
                f"DiLoCo(outer_lr={self.outer_lr:g}, outer_momentum={self.outer_momentum:g}) of a "
                "model with BatchNorm",
                "running statistics are the mean over the replicas, but the outer optimizer takes "
                "the weights further, so the two do not match when the model is evaluated or saved",
                "recompute them before you evaluate or save: update_bn(batches, model) of "
                "torch.optim.swa_utils, the same batches on every rank; or use GroupNorm, or "
                "outer_lr=1, outer_momentum=0",
            )


def _share_statistics(module: nn.Module, run: Run) -> None:
    """BatchNorm layers that the user has synchronised take the statistics of a replica's part."""
    group = run.groups.get(GROUP)
    for layer in module.modules():
        if group is not None and isinstance(layer, nn.SyncBatchNorm):
            convert(layer, group)
        if isinstance(layer, SyncBatchNorm) and layer.process_group is None:
            layer.process_group = group


class _Hook:
    """Of a module; copies of the module, and pickled ones, have one that does nothing."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()

    @outside_compiled_code
    def __call__(self, *given: Any) -> None:
        if self._call is not None:
            self._call(*given)


class _Versions:
    """Some tensors of a module, which hold the values of the replicas in turn, or shared ones.

    Args:
        tensors: gives the present ones; a module may replace its buffers.
    """

    def __init__(self, tensors: Callable[[], Sequence[Tensor]]) -> None:
        self._tensors = tensors
        self.at: int | None = None
        """Whose values are in the module; None: the shared ones."""
        self._others: dict[int | None, list[Tensor]] = {}

    def of(self, which: int | None) -> list[Tensor]:
        """The values of a replica, which begins with the shared ones; or these."""
        if which == self.at:
            return [tensor.data for tensor in self._tensors()]
        if which not in self._others:
            self._others[which] = [tensor.clone() for tensor in self.of(None)]
        return self._others[which]

    def put(self, which: int | None) -> None:
        """Puts the values of a replica, or the shared ones, into the module."""
        if which != self.at:
            values = self.of(which)
            self._others[self.at] = self.of(self.at)
            for tensor, value in zip(self._tensors(), values, strict=True):
                tensor.data = value
            self._others.pop(which, None)
            self.at = which

    def begun(self, replica: int) -> bool:
        """Whether a replica has values of its own."""
        return replica == self.at or replica in self._others

    def forget(self) -> None:
        """All replicas begin with the shared values."""
        self.put(None)
        self._others.clear()


class _Sent(NamedTuple):
    """A fragment on its way."""

    due: int
    """The step in which it is applied."""
    means: list[Tensor]
    """Over replicas, of shared - own; once `wait` was called."""
    wait: Callable[[], None]


class _Turns(Extension):
    """What the replicas of a module have, of those that this process computes."""

    def __init__(self, module: nn.Module, run: Run, options: DiLoCo) -> None:
        self._module, self._run, self._options = module, run, options
        self._step = run.step
        size, rank = run.topology.size, run.topology.rank
        each = max(1, size // options.replicas)
        self.own: Sequence[int] = virtual_ranks_of(rank, size, options.replicas)
        self._exchange = Exchange(run, options.replicas)
        self._group = run.groups.get(GROUP) if each > 1 else None
        self._names = [n for n, p in module.named_parameters() if p.requires_grad]
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        places = [name.rpartition(".")[::2] for name, _ in module.named_buffers()]
        self._buffer_names = [name for name, _ in module.named_buffers()]
        self._owners = [(module.get_submodule(path), leaf) for path, leaf in places]
        self._weights = _Versions(lambda: self.parameters)
        self._buffers = _Versions(self._present_buffers)
        self._momentum: dict[int, Tensor] = {}
        self._fragments = cut([p.numel() for p in self.parameters], options.fragments)
        self._sent: dict[int, _Sent] = {}
        self._lost: dict[int, dict[int, Tensor]] = {r: {} for r in self.own}
        """Of each replica and fragment, by quantizing; it is added the next time."""
        self._gradients: dict[int, list[Tensor | None]] = {}
        """Of replicas, but for the last one that has been in place."""
        self._last = self.own[0]
        self.optimizers: list[Optimizer] = []
        """That hold parameters of the module."""
        self._stepped: set[int] = set()
        """Those that have, in this turn, by their ids."""
        self._unfinished = self._complete = False
        """A replica has stepped in the present global batch; all of them have had their turn."""
        self._marks: list[int] = []
        """How often each parameter was written to, when the shared weights were put in place."""
        self._moving = None
        if self._group is not None:
            self._moving = MovingBuffers(module, run.step, self._group)

    # The turns

    def optimizer_prepared(self, optimizer: Any, modules: Sequence[nn.Module]) -> None:
        """Remembers the optimizers that hold parameters of the module."""
        if self._module in modules:
            self.optimizers.append(optimizer.inner)

    def begin(self, micro_batch: MicroBatch) -> None:
        """Puts the weights of a micro-batch's virtual rank in place.

        Raises:
            UsageError: some replicas have not made their step in the global batch before.
        """
        if micro_batch.first and self._unfinished:
            if not self._complete:
                raise UsageError(
                    "a training loop that was left between the replicas of a global batch",
                    "some of them have made their step, and others have not",
                    "leave the loop where world.is_last_micro_batch is true, or by what changes "
                    "once per global batch, such as world.step",
                )
            self._finish()
        self._complete = micro_batch.last
        if micro_batch.opens:
            self._stepped.clear()
        self._put_present()

    def before_forward(self, module: nn.Module, inputs: Any) -> None:
        """An evaluation inside of the training loop sees the shared weights."""
        if torch.is_grad_enabled() or module.training:
            if not self._turn_is_over:
                self._put_present()
        else:
            self.show_shared()

    def backward_begins(self, weighted_loss: Tensor, micro_batch: MicroBatch) -> None:
        """The weights have to be those of the forward pass.

        Raises:
            UsageError: no prepared loader says whose turn it is, or no optimizer is prepared.
        """
        if not (self._step.in_training_loop and self.optimizers):
            raise UsageError(
                "training under strategy='diloco' without a prepared loader and optimizer",
                "the loader says which replica a micro-batch belongs to, and the optimizer when "
                "that has made its step",
                "train on what world.prepare(model, optimizer, loader) returned",
            )
        self._put_present()

    def backward_ended(self, micro_batch: MicroBatch) -> None:
        """Averages the gradient over the ranks that compute the replica; all, as long as it is one.

        A gradient of an earlier backward pass of the step is a mean already, which stays as it is.
        """
        together = self._step.micro_batch.virtual_rank is None
        several = self._group is not None or (together and self._run.topology.size > 1)
        if several and self._step.micro_batch.closes:
            average_gradients(self.parameters, None if together else self._group)

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """The replica's weights have to be in place, whatever was evaluated in between.

        Raises:
            UsageError: a second step in one turn.
        """
        if self._module not in modules:
            return
        if id(optimizer) in self._stepped:
            raise UsageError(
                f"several steps of {type(optimizer).__name__} in a global batch",
                "under strategy='diloco' replicas meet after a number of global batches, and each "
                "makes one step in it",
                "call optimizer.step() once for each batch of the loader",
            )
        self._put_present()
        if (
            self._step.micro_batch.virtual_rank is None and not self._unfinished
        ):  # they train as one
            self._average_buffers()
            self._buffers.put(None)
        self._unfinished = True
        self._stepped.add(id(optimizer))

    def after_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """After the last optimizer of the last turn comes the exchange, where it is due."""
        if self._module in modules and self._turn_is_over:
            if self._moving is not None:
                self._moving.follow()
            if self._step.micro_batch.last:
                self._finish()

    def pass_ended(self) -> None:
        """Puts the shared weights and buffers in place."""
        self.show_shared()

    def show_shared(self, *_: Any) -> None:
        """Puts the shared weights and buffers in place."""
        self._buffers.put(None)
        if self._weights.at is not None:
            self._weights.put(None)
            self._marks = write_counts(self.parameters)

    def _put_present(self) -> None:
        """Puts what the present micro-batch is computed with in place."""
        if self._step.virtual_rank is None:
            return
        replica = self._step.virtual_rank.number
        self._buffers.put(replica)
        if self._step.micro_batch.virtual_rank is None:  # they train as one
            return
        if self._weights.at is None and self._weights.begun(replica):
            self._check_unchanged()
        self._weights.put(replica)
        if replica != self._last:
            self._gradients[self._last] = [p.grad for p in self.parameters]
            kept = self._gradients.pop(replica, [None] * len(self.parameters))
            for parameter, gradient in zip(self.parameters, kept, strict=True):
                parameter.grad = gradient
            self._last = replica

    def _check_unchanged(self) -> None:
        if self._marks and self._marks != write_counts(self.parameters):
            raise UsageError(
                "weights changed by hand under strategy='diloco'",
                "outside of a step the model holds the shared weights, and the replicas go on from "
                "their own until the next exchange",
                "change them in a hook of the optimizer: register_step_post_hook; or load a state "
                "dict, with which all replicas begin anew",
            )

    @property
    def _turn_is_over(self) -> bool:
        """Whether all optimizers have stepped since the present replica's first micro-batch."""
        return len(self._stepped) == len(self.optimizers)

    # The exchange

    @torch.no_grad()
    def _finish(self) -> None:
        """All replicas have stepped."""
        self._unfinished = False
        number = self._step.number - self._options.start
        for fragment, sent in list(self._sent.items()):
            if sent.due <= self._step.number:
                self._apply(fragment)
        for fragment in self._due(number) if number > 0 else ():
            self._send(fragment)
            if not self._options.delay:
                self._apply(fragment)
        self.show_shared()

    def _due(self, number: int) -> Iterator[int]:
        """The fragments that are sent after so many steps."""
        every, fragments = self._options.every, self._options.fragments
        for fragment in range(fragments):
            if number % every == (fragment + 1) * every // fragments % every:
                yield fragment

    def _send(self, fragment: int) -> None:
        due = self._step.number + self._options.delay
        tensors = self._fragments[fragment]
        shared, own = self._weights.of(None), [self._weights.of(r) for r in self.own]
        if self._options.compress is None:
            means = [sum((shared[i] - of[i] for of in own), torch.zeros(())) for i in tensors]
            wait = self._exchange.start_means(means)
        else:
            means = [torch.empty_like(shared[i]) for i in tensors]
            flat = [torch.cat([(shared[i] - of[i]).reshape(-1) for i in tensors]) for of in own]
            before = [self._lost[replica].get(fragment) for replica in self.own]
            lost, wait = self._exchange.start_quantized(flat, before, means, self._options.compress)
            for replica, row in zip(self.own, lost, strict=True):
                if row is not None:
                    self._lost[replica][fragment] = row
        self._sent[fragment] = _Sent(due, means, wait)

    def _apply(self, fragment: int) -> None:
        """The outer step, and what the replicas take of it."""
        sent = self._sent.pop(fragment)
        sent.wait()
        rate, momentum = self._options.outer_lr, self._options.outer_momentum
        shared = self._weights.of(None)
        for i, gradient in zip(self._fragments[fragment], sent.means, strict=True):
            if momentum:
                if i not in self._momentum:
                    self._momentum[i] = torch.zeros_like(gradient)
                velocity = self._momentum[i].mul_(momentum).add_(gradient)
                gradient = gradient.add(velocity, alpha=momentum)
            shared[i].sub_(gradient, alpha=rate)
            for replica in self.own:
                own = self._weights.of(replica)[i]
                own.lerp_(shared[i], 1.0 - _MIXING) if self._options.delay else own.copy_(shared[i])
        if fragment == self._options.fragments - 1:
            self._average_buffers()

    @torch.no_grad()
    def _average_buffers(self) -> None:
        """Shared buffers become the means of the replicas', and these begin again with them.

        Whole numbers are taken from the first replica. What does not move keeps its bits.
        """
        shared, own = self._buffers.of(None), [self._buffers.of(r) for r in self.own]
        real = [i for i, each in enumerate(shared) if each.is_floating_point()]
        sums = [
            sum((_moved(shared[i], of[i]) for of in own), torch.zeros_like(shared[i])) for i in real
        ]
        self._exchange.start_means(sums)()
        for i, mean in zip(real, sums, strict=True):
            shared[i].sub_(mean)
        others = [i for i, each in enumerate(shared) if i not in real]
        for i in others:
            shared[i].copy_(own[0][i])
        if others and self._run.topology.size > 1:
            take_from_first(shared[i] for i in others)
        for of in own:
            for i, each in enumerate(shared):
                of[i].copy_(each)

    # For guards, checkpoints and the end

    def equal_tensors(self) -> Iterable[EqualTensors]:
        """The shared weights are equal everywhere, those of a replica where it is computed."""
        if self._run.topology.size == 1:
            return
        parameters = dict(zip(self._names, self._weights.of(None), strict=True))
        buffers = dict(zip(self._buffer_names, self._buffers.of(None), strict=True))
        yield EqualTensors(parameters, buffers)
        if self._group is not None and self._weights.begun(self.own[0]):
            own = self._weights.of(self.own[0])
            yield EqualTensors(dict(zip(self._names, own, strict=True)), {}, self._group)

    def round_is_over(self) -> bool:
        """Whether the last fragment was applied in the present step; with `start`, all along."""
        number = self._step.number - self._options.start
        return number % self._options.every == self._options.delay

    def shared_state(self) -> Any:
        """The outer optimizer's momentum, and the fragments on their way, which have come then."""
        for fragment, sent in self._sent.items():
            sent.wait()
            self._sent[fragment] = sent._replace(wait=lambda: None)
        sent_state = [[f, each.due, each.means] for f, each in self._sent.items()]
        return {
            "fragments": self._options.fragments,
            "momentum": self._momentum,
            "sent": sent_state,
        }

    def check(self, shared: Any) -> None:
        """Raises CheckpointError where what `shared_state` gave was of other fragments."""
        now, saved = self._options.fragments, shared["fragments"]
        if now != saved:
            raise CheckpointError(
                f"resuming with DiLoCo(fragments={now})",
                f"the checkpoint is of a round in {count_noun(saved, 'fragment')}, and holds what "
                "is still to be exchanged of each",
                f"continue with fragments={saved}; or begin anew from the shared weights: "
                "lockstep.load_weights(model, folder)",
            )

    def virtual_rank_state(self, replica: int) -> Any:
        """Weights and buffers; without weights as long as the replicas train as one."""
        begun = self._weights.begun(replica)
        return {
            "weights": self._weights.of(replica) if begun else None,
            "buffers": self._buffers.of(replica),
            "lost": self._lost[replica],
        }

    @torch.no_grad()
    def load(self, shared: Any, replicas: Mapping[int, Any]) -> None:
        """Takes up what both gave."""
        self.forget()
        device = self._run.device
        self._momentum = {i: each.to(device) for i, each in shared["momentum"].items()}
        for fragment, due, means in shared["sent"]:
            arrived = [each.to(device) for each in means]
            self._sent[fragment] = _Sent(due, arrived, lambda: None)
        for replica, state in replicas.items():
            self._lost[replica] = {f: each.to(device) for f, each in state["lost"].items()}
            for versions, values in (
                (self._weights, state["weights"]),
                (self._buffers, state["buffers"]),
            ):
                if not values:  # it will begin with the shared ones: before `start`, or lost
                    continue
                for own, value in zip(versions.of(replica), values, strict=True):
                    own.copy_(value)

    def forget(self, *_: Any) -> None:
        """The model is given other weights: all replicas begin with them."""
        self._weights.forget()
        self._buffers.forget()
        self._marks = []
        self._momentum, self._sent, self._gradients = {}, {}, {}
        self._lost = {replica: {} for replica in self.own}

    def close(self, failed: bool) -> None:
        """Waits for what is on its way; warns where the last steps are in no exchange."""
        sent, self._sent = self._sent, {}
        options, done = self._options, self._step.number - self._options.start
        if failed:
            return
        for each in sent.values():
            each.wait()
        over = max(0, done - options.delay) // options.every * options.every
        if done - over > options.delay:
            later = f", delay={options.delay}" * (options.delay > 0)
            warn(
                f"DiLoCo(every={options.every}{later}) for {count_noun(done, 'step')}",
                f"the last {count_noun(done - over, 'step')} of the replicas are not in the shared "
                "weights, which are evaluated and saved",
                f"end after {over + options.every + options.delay} steps, when the last exchange "
                "has been applied",
            )

    def release(self) -> None:
        """Lets go of the process group."""
        group = self._run.groups.get(GROUP)
        for layer in self._module.modules():
            if isinstance(layer, SyncBatchNorm) and layer.process_group is group:
                layer.process_group = None
        self._group = self._moving = None

    def _present_buffers(self) -> list[Tensor]:
        return [getattr(owner, leaf) for owner, leaf in self._owners]


def _moved(shared: Tensor, own: Tensor) -> Tensor:
    """How far a replica's buffer is from the shared one; 0 also where both are infinite."""
    return torch.where(shared == own, torch.zeros_like(shared), shared - own)
