"""The present optimizer step, as the parts that take turns in it see it.

The loader says which micro-batch it hands out, `World.backward` and the prepared optimizers say
what they did with it. There is one `Step` a run; it is plain state, and all decisions are made by
those who read it.

A training loop may fetch batches before it has trained the ones before: it prefetches by hand,
keeps an epoch with `list(loader)` or `itertools.cycle(loader)`, or overfits one batch. The factor
of a loss belongs to the batch that the loss came from, not to the one that was fetched last. So
each batch that is handed out is remembered, as a `Delivery`, by the storages of its tensors. As
soon as a loop has fetched one before its time, the forward passes of the prepared modules are
looked at: the storages of their inputs say which delivery is trained. Where nothing says it, and
the deliveries in question do not weigh the same, `of_loss` raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from lockstep.errors import UsageError, warn

if TYPE_CHECKING:
    from torch import Tensor, nn

CHECK_EVERY = 200
"""Global batches from one comparison of the ranks to the next, by default."""
_EARLY = frozenset({1, 2, 3, 10})


def check_due(number: int, every: int = CHECK_EVERY) -> bool:
    """Whether to compare the ranks at this global batch: in the first ones, and now and then."""
    return number in _EARLY or number % every == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """What one rank computes at a time."""

    count: int = 0
    """Samples of the whole global batch, over all ranks and micro-batches."""
    local: int = 0
    """Rows of this rank's part of this micro-batch: its samples, unless a collate function leaves
    some out or adds others; 0 is possible."""
    left_out: int = 0
    """Samples of this rank's part that the collate function left out."""
    first: bool = True
    last: bool = True
    """Whether this micro-batch opens and closes its global batch."""
    num_micro_batches: int = 1
    """Micro-batches of the global batch."""
    scale: float = 1.0
    """What the loss is multiplied by, so that the average over ranks of the accumulated gradients
    is the gradient of the mean over the global batch; over the part of one replica, where there are
    several that train apart."""
    plain: bool = True
    """The scale is 1 on every rank and there is one micro-batch: `loss.backward()` is right too."""
    replica: int | None = None
    """Which of the replicas that train apart computes it; None: there are none."""
    turns: int = 1
    """How many of these this process computes, one after the other."""
    mean_turns: float = 1.0
    """How many a process computes in the mean over all."""
    begins_turn: bool = False
    ends_turn: bool = False
    """Whether it is the first and the last of its replica in the global batch."""

    def of_all(self) -> MicroBatch:
        """The same, where the replicas train as one: each counts alike."""
        own = {
            "replica": None,
            "turns": 1,
            "mean_turns": 1.0,
            "begins_turn": False,
            "ends_turn": False,
        }
        return replace(self, scale=self.scale / self.mean_turns, **own)  # type: ignore[arg-type]

    @property
    def opens(self) -> bool:
        """No gradients of the same step come before it."""
        return self.first or self.begins_turn

    @property
    def closes(self) -> bool:
        """The optimizer steps after it."""
        return self.last or self.ends_turn


_role = attrgetter("opens", "closes", "replica")
"""What must be alike where two loaders are trained on at a time: when the optimizer steps."""
_weight = attrgetter("scale", "opens", "closes", "plain", "replica")
"""Micro-batches for which these are alike can be taken for one another in a backward pass."""


class StorageReference(Protocol):
    """A weak reference to the storage of a tensor; two to the same storage are equal."""

    def __hash__(self) -> int: ...

    def __eq__(self, other: object, /) -> bool: ...

    def expired(self) -> bool:
        """True when the storage is freed."""


class Delivery:
    """A micro-batch that a loader has handed out to be trained on.

    Args:
        running: the pass that it belongs to.
        micro_batch: how it weighs.
        storages: of its tensors.
        begins: called with `micro_batch`, or with what it becomes where replicas train together,
            each time that training on it begins.
    """

    def __init__(
        self,
        running: Pass,
        micro_batch: MicroBatch,
        storages: Iterable[StorageReference] = (),
        begins: Callable[[MicroBatch], None] = lambda micro_batch: None,
    ) -> None:
        self.running = running
        self.micro_batch = micro_batch
        self.storages = tuple(storages)
        self.begins = begins
        running.delivered += 1
        self.place = running.delivered
        """Which delivery of its pass it is."""
        if micro_batch.first:
            running.global_batches += 1
        self.global_batch = running.global_batches
        """Which global batch of its pass it is a part of."""

    @property
    def held(self) -> bool:
        """True while the script, or what it computes, holds a tensor of the batch."""
        return not all(storage.expired() for storage in self.storages)


class BatchEvent(NamedTuple):
    """A micro-batch that a loader delivers to be trained on, on this rank."""

    loader: Any
    epoch: int
    position: int
    """Which global batch of the epoch it is part of, from 0."""
    samples: npt.NDArray[np.int64]
    """The indices of its samples in the dataset."""
    micro_batch: MicroBatch
    batch: Any
    """What the training loop gets."""
    counts: bool
    """Whether this rank's part is counted: under a pipeline other ranks get the same one."""


class Callback:
    """Looks on at a training, on its rank, and changes nothing; here every method does nothing."""

    def prepared(self, module: nn.Module) -> None:
        """`World.prepare` has wrapped a module."""

    def delivered(self, event: BatchEvent) -> None:
        """A training loop is about to get a micro-batch."""

    def backward(self, loss: Tensor) -> None:
        """`World.backward` was given a loss; here it is weighted, so that the mean over ranks of
        its sums over the micro-batches is the loss of the global batch.
        """

    def stepped(self, number: int) -> None:
        """The first of the optimizers has stepped for the global batch of this number, from 0."""

    def logged(self, description: str, means: Mapping[str, float], *, complete: bool) -> None:
        """There are new means over all ranks of what was given to `World.log` in a pass; of the
        whole pass, where it is complete.
        """

    def announced(self, choices: Sequence[tuple[str, str, str]]) -> None:
        """Something was chosen: names, values and reasons."""


class Pass:
    """One running iteration of a training loader."""

    def __init__(self) -> None:
        self.micro_batch = MicroBatch()
        self.number = 0
        """Global batches begun."""
        self.turns = 0
        """Likewise; where replicas take turns, each of these counts."""
        self.backwards = 0
        """Calls of `World.backward` for the present micro-batch."""
        self.loss: Tensor | float = 0.0
        """What `World.backward` was given of the present global batch, weighted and summed up."""
        self.accumulated = False
        """Whether the present global batch has gradients of micro-batches before this one."""
        self.stepped = False
        """Whether an optimizer has stepped for the present global batch."""
        self.trained = False
        """Whether one has stepped at all: a pass with gradients may be an evaluation."""
        self.unstepped = False
        """Whether no optimizer had stepped for the micro-batch before when this one began."""
        self.delivered = 0
        """Micro-batches handed out."""
        self.global_batches = 0
        """Global batches of which a micro-batch was handed out."""
        self.active: Delivery | None = None
        """The one that `micro_batch` is of."""
        self.untrained: list[Delivery] = []
        """Those handed out that no backward pass is known to have followed, in order."""
        self.ended = False
        """Whether the loader has left it; batches of it that are kept may still be trained on."""
        self.known = True
        """False: the next loss may come from any of `untrained`, not from `active` alone."""


Turn = tuple[Pass, int, int]
"""A pass, which of its global batches, and which of its turns."""

PHASES = (
    "data", "forward", "backward", "communication", "optimizer", "checkpoint", "evaluation", "other"
)  # fmt: skip
"""What a rank spends the time of a step on. `communication` is waiting for other ranks, whatever it
is for; `forward` ends where `World.backward` begins, or the optimizer's step; `other` is what
follows that step, up to the next batch."""

_of_every_run: list[Callback] = []


def add_callback(callback: Callback) -> None:
    """Lets a callback look on at every run that this process joins from now on."""
    _of_every_run.append(callback)


class Step:
    """The state of the present optimizer step."""

    def __init__(self) -> None:
        self.seen = self.latest = MicroBatch()
        """The micro-batch last handed out by any loader, evaluation included; for averages. When a
        pass is over, `seen` is again what it was before, `latest` is not."""
        self.number = 0
        """Global batches finished by an optimizer step since the start of the training."""
        self.devices = 1
        """Of this process, which divide each of its micro-batches."""
        self.samples = 0
        """Samples, over all ranks, that this process has seen trained on."""
        self.clear_gradients: list[Callable[[], None]] = []
        """Of the prepared optimizers."""
        self.batch_begins: list[Callable[[], None]] = []
        """Called before the first micro-batch of a global batch, or of a replica's part of it."""
        self.micro_batch_begins: list[Callable[[], None]] = []
        """Called when a micro-batch is about to be handed out, and is the current one."""
        self.empty_part_begins: list[Callable[[], None]] = []
        """Called once, when this rank is about to be handed a micro-batch without samples."""
        self.placeholder: Any = None
        """A batch of one sample, like the one without samples that was handed out last."""
        self.pass_ends: list[Callable[[], None]] = []
        """Called when a training loop is left."""
        self.replica: int | None = None
        """Whose part the present micro-batch is of, also as long as they train together."""
        self.together = 0
        """Global batches, from the first, in which replicas do not train apart yet."""
        self.callbacks: list[Callback] = [*_of_every_run]
        self.watch_forward: list[Callable[[], None]] = []
        """Called when batches were fetched before they are trained: from then on `saw_forward`
        needs to be told of forward passes."""
        self._deliveries: dict[StorageReference, Delivery | None] = {}
        """By their storages; None: of several deliveries."""
        self._prune_at = 64
        """So many entries in `_deliveries`, those of freed storages are removed."""
        self._forwarded: list[Delivery] = []
        """Those that forward passes were seen of since the last backward pass."""
        self._kept: list[Delivery] = []
        """Of a pass that is over, those that the script may still train on."""
        self._kept_beside: list[Delivery] = []
        """Likewise, of passes that ended while another one was trained on: a loop over
        `zip(itertools.cycle(one), other)` trains on both."""
        self._forward_of_unknown = False
        """Whether a module was called, since the last backward pass, with nothing that a loader
        gave."""
        self._warned_of_unknown = False
        self.of_backward = MicroBatch()
        """The micro-batch that the latest loss given to `World.backward` came from."""
        self.enter_phase: Callable[[str], str] = lambda phase: "other"
        """Called with one of `PHASES` where it begins; gives the one before. Set by a recorder."""
        self._outside = self.running = Pass()
        """The pass whose micro-batch is worked on; outside of any loader one that never ends."""
        self._passes: list[Pass] = []
        self._since: float | None = None
        self._until = 0.0

    @property
    def inside(self) -> bool:
        """A prepared loader is being trained on."""
        return bool(self._passes)

    @property
    def current(self) -> MicroBatch:
        """The micro-batch that a training loop works on."""
        return self.running.micro_batch

    @property
    def batch(self) -> Turn:
        """Tells what the present optimizer step is made of from all others."""
        return self.running, self.running.number, self.running.turns

    def hand_out(self, delivery: Delivery) -> None:
        """A pass hands out a micro-batch to train on.

        Training on it begins, unless one before it was not trained yet and weighs differently:
        then a forward pass has to show which of them is trained first.

        Raises:
            UsageError: another loader is being trained on, and the optimizer steps at other times.
        """
        running = delivery.running
        for other in [*self._passes]:
            if other.ended:
                self.end(other)
        self._remember(delivery)
        running.untrained.append(delivery)
        running.known = len(running.untrained) == 1
        if running.known:
            self._use(delivery)
            return
        self._watch()
        whole = delivery.micro_batch.opens and delivery.micro_batch.closes
        if whole and running.active is not None and _alike([running.active, *running.untrained]):
            self._use(delivery)

    def saw_forward(self, storages: Iterable[StorageReference], *, derived: bool = False) -> None:
        """A prepared module is called, with tensors of these storages and gradients enabled.

        Args:
            storages: of the tensors.
            derived: one of them has a gradient: it comes from another forward pass.

        Raises:
            UsageError: they are of micro-batches in another order than they were handed out in.
        """
        found = [self._deliveries.get(storage) for storage in storages]
        if not derived and all(delivery is None for delivery in found):
            self._forward_of_unknown = True
        for delivery in dict.fromkeys(found):
            if delivery is None:
                continue
            if delivery not in self._forwarded:
                self._forwarded.append(delivery)
            if delivery is not delivery.running.active:
                self._check_order(delivery)
                self._use(delivery)
            elif self.running is self._outside:
                self.running = delivery.running
            delivery.running.known = True

    def of_loss(self) -> MicroBatch:
        """The micro-batch that a loss came from; asked once before each backward pass.

        Raises:
            UsageError: it may have come from several, which do not weigh the same.
        """
        trained = self._forwarded
        if trained and not _alike(trained):
            raise _mixed(trained)
        if not trained:
            self._check_known()
            trained = [each for running in self._passes for each in _oldest(running)]
        elif self._forward_of_unknown and not self._warned_of_unknown:
            self._warn_if_unlike(trained)
        self._forward_of_unknown = False
        for delivery in trained:
            running = delivery.running
            if delivery in running.untrained:
                running.untrained.remove(delivery)
            # The tensors of this one were seen in a forward pass. So those of an earlier one would
            # have been, and a loop that holds them no longer has left it out.
            if self._forwarded:
                running.untrained = [
                    each for each in running.untrained if each.held or each.place > delivery.place
                ]
        seen, self._forwarded = self._forwarded, []
        self.of_backward = self.running.micro_batch
        if seen and seen[0].running is not self.running:
            self.of_backward = seen[0].micro_batch
        return self.of_backward

    def _check_known(self) -> None:
        """Raises UsageError where no forward pass shows what a loss came from, and it matters."""
        if self.running is self._outside:
            kept = [each for each in self._kept if each.held and not each.micro_batch.plain]
            if kept:
                raise _not_known(kept, "of a loader that has ended")
            return
        possible = []
        for running in self._passes:
            if running.active is not None:
                possible.append(running.active)
            if not running.known:
                possible += running.untrained
        kept_beside = [each for each in self._kept_beside if each.held]
        if _alike([*possible, *kept_beside]):
            return
        if _alike(possible):
            raise _not_known(
                [*possible, *kept_beside],
                "of two loaders, one of which has ended",
                "begin another pass over the loader that ends first instead of itertools.cycle, "
                "which keeps its batches; " + APART,
            )
        if len({each.running for each in possible}) > 1:
            raise _mixed(possible)
        raise _not_known(possible, "that no backward pass has followed yet")

    def _warn_if_unlike(self, seen: Sequence[Delivery]) -> None:
        """Warns where a loss may come from a batch of another loader too, which weighs differently.

        Args:
            seen: the batches that forward passes were seen of; they weigh the same.
        """
        others = [each for running in self._passes for each in running.untrained]
        others += [each for each in self._kept_beside if each.held]
        others = [each for each in others if each.running is not seen[0].running]
        unlike = [each for each in others if not _alike([seen[0], each])]
        if not unlike:
            return
        self._warned_of_unknown = True
        warn(
            "one world.backward(loss) while two loaders are trained on",
            "the prepared model was called with a batch of one loader, and with tensors that no "
            f"loader gave. Of the two loaders' batches this rank has {_parts([seen[0], *unlike])} "
            "samples, which count differently; the loss is taken to come from the first alone, so "
            "its weight is wrong if these tensors were made of the other batch",
            APART,
        )

    def _check_order(self, delivery: Delivery) -> None:
        """Raises UsageError where the micro-batches of a global batch are not trained in order."""
        running, active = delivery.running, delivery.running.active
        if active is None:
            return
        if delivery.micro_batch.first:
            fits = running.micro_batch.last or not running.backwards
        else:
            follows = delivery.place > active.place
            fits = follows and delivery.global_batch == active.global_batch
        if not fits:
            raise UsageError(
                "training on batches in another order than the loader gave them",
                f"each global batch is computed in {delivery.micro_batch.num_micro_batches} "
                "micro-batches, and those of one global batch do not follow each other",
                "train on the batches in their order, or leave micro_batch_size out",
            )

    def _remember(self, delivery: Delivery) -> None:
        """Remembers the storages of a delivery, and forgets those that are freed."""
        for storage in delivery.storages:
            known = self._deliveries.get(storage, delivery)
            self._deliveries[storage] = delivery if known is delivery else None
        if len(self._deliveries) >= self._prune_at:
            living = {s: found for s, found in self._deliveries.items() if not s.expired()}
            self._deliveries = living
            self._prune_at = max(64, 2 * len(living))

    def _watch(self) -> None:
        """Has forward passes told to `saw_forward` from now on."""
        for watch in self.watch_forward:
            watch()
        self.watch_forward.clear()

    def _use(self, delivery: Delivery) -> None:
        """Training on a delivery begins."""
        delivery.running.active = delivery
        delivery.begins(self.begin(delivery.running, delivery.micro_batch))

    def begin(self, running: Pass, micro_batch: MicroBatch) -> MicroBatch:
        """Training on a micro-batch of a pass begins.

        Returns:
            The same; one of all replicas, where they train together.

        Raises:
            UsageError: another loader is being trained on, and the optimizer steps at other times.
        """
        self.replica = micro_batch.replica
        if self.replica is not None and self.number < self.together:
            micro_batch = micro_batch.of_all()
        self._check_alike(running, micro_batch)
        if running in self._passes:
            self._passes.remove(running)
        self._passes.append(running)
        self.running = running
        if self._since is None:
            self._since = time.perf_counter()
        running.unstepped = running.backwards > 0 and not running.stepped
        if micro_batch.first:
            running.number += 1
            running.stepped = running.accumulated = False
            running.loss = 0.0
        elif running.backwards:
            running.accumulated = True
        if micro_batch.opens:
            running.turns += 1
            for begins in self.batch_begins:
                begins()
        running.micro_batch = self.seen = micro_batch
        running.backwards = 0
        for begins in self.micro_batch_begins:
            begins()
        return micro_batch

    def _check_alike(self, running: Pass, micro_batch: MicroBatch) -> None:
        for other in self._passes:
            if other is running:
                continue
            if _role(other.micro_batch) != _role(micro_batch):
                raise UsageError(
                    "training on two prepared loaders at a time",
                    "their global batches are computed in different numbers of micro-batches, so "
                    "the optimizer would step in the middle of one of them",
                    "evaluate under torch.no_grad(); to train on two datasets use one loader over "
                    "both, or leave micro_batch_size out",
                )
            if _weight(other.micro_batch) != _weight(micro_batch):
                self._watch()

    def end(self, running: Pass, *, exhausted: bool = False) -> None:
        """The pass is over; gradients of a global batch broken off in its middle are dropped.

        Args:
            running: the pass.
            exhausted: the loader has nothing more; False: the loop was left before.
        """
        if running not in self._passes:
            return
        self._passes.remove(running)
        running.ended = True
        self.running = self._passes[-1] if self._passes else self._outside
        self.replica = self.replica if self._passes else None
        fetched_ahead = exhausted and running.untrained
        unfinished = not running.micro_batch.last and (running.accumulated or running.backwards)
        if unfinished and not fetched_ahead:
            for clear in self.clear_gradients:
                clear()
        self._keep(running)
        kept_beside = [*self._kept_beside, *self._kept] if self._passes else []
        self._kept_beside = [each for each in kept_beside if each.held]
        for ends in self.pass_ends:
            ends()

    def _keep(self, running: Pass) -> None:
        """Notes which batches of a pass that is over may still be trained on.

        These are all that the script holds and has not trained. Those that it has trained count
        where it holds several: `itertools.cycle` does. After most loops it holds the last one.
        """
        of_pass = [
            each
            for each in dict.fromkeys(self._deliveries.values())
            if each is not None and each.running is running and each.held
        ]
        several = len(of_pass) > 1
        self._kept = [each for each in of_pass if several or each in running.untrained]
        if not all(each.micro_batch.plain for each in self._kept):
            self._watch()

    def weighted(self, loss: Tensor) -> Tensor:
        """The loss of the present micro-batch, as much as it counts in that of the global batch."""
        running = self.running
        scale = self.of_backward.scale
        weighted = loss if scale == 1.0 else loss * scale
        # The mean over no samples is NaN, and does not count.
        counted = weighted if scale else weighted.new_zeros(())
        for callback in self.callbacks:
            callback.backward(counted)
        # No loader says what a global batch is: each step of the optimizer ends one.
        of_no_loader = running is self._outside or (running.ended and not running.untrained)
        if of_no_loader and running.stepped:
            running.loss = 0.0
            running.stepped = False
        turns, part = running.micro_batch.mean_turns, counted.detach()
        running.loss = (part if turns == 1 else part / turns) + running.loss
        return weighted

    def mark_stepped(self) -> None:
        """A prepared optimizer has stepped; several of them make one step together."""
        running = self.running
        if not running.stepped or running is self._outside:
            for callback in self.callbacks:
                callback.stepped(self.number)
            self.number += 1
            self.samples += running.micro_batch.count
            self._until = time.perf_counter()
        running.stepped = running.trained = True

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Steps that are taken inside do not count: they are put back, and nobody watches."""
        before = self.number, self.samples, self._since, self._until
        callbacks, self.callbacks = self.callbacks, []
        try:
            yield
        finally:
            self.number, self.samples, self._since, self._until = before
            self.callbacks = callbacks

    @property
    def seconds(self) -> float:
        """From the first micro-batch handed out to the last optimizer step."""
        return 0.0 if self._since is None else max(0.0, self._until - self._since)


APART = (
    "call the prepared model and world.backward for each batch by itself, one after the other, "
    "then optimizer.step() once; or use one loader over both datasets, or batch sizes that the "
    "number of ranks divides, with drop_last=True"
)
"""What to do where batches of two loaders weigh differently."""


def _alike(deliveries: Sequence[Delivery]) -> bool:
    """Whether they all count the same in a backward pass."""
    return len({_weight(each.micro_batch) for each in deliveries}) <= 1


def _oldest(running: Pass) -> list[Delivery]:
    """What a loss of this pass trains: the active delivery, or one of those that are alike."""
    if running.known or not running.untrained:
        return [] if running.active is None else [running.active]
    return running.untrained[:1]


def _parts(deliveries: Sequence[Delivery]) -> str:
    """This rank's parts of several deliveries, in words."""
    parts = dict.fromkeys((each.micro_batch.local, each.micro_batch.count) for each in deliveries)
    return " and ".join(f"{local} of {count}" for local, count in list(parts)[:4])


FETCH_LATER = (
    "fetch a batch when the one before is trained (num_workers= and prefetch_factor= of the loader "
    "read ahead without a change to the loop)"
)


def _not_known(possible: Sequence[Delivery], which: str, instead: str = FETCH_LATER) -> UsageError:
    """The error of a loss that may have come from any of several batches.

    Args:
        possible: the batches.
        which: what they are, in words after "several batches".
        instead: what to do.
    """
    many = "several batches" if len(possible) > 1 else "a batch"
    return UsageError(
        "world.backward(loss) in a loop that holds batches which it fetched before",
        f"it is not known which batch the loss comes from: the loop holds {many} {which}, of which "
        f"this rank has {_parts(possible)} samples, so its loss counts differently for each. The "
        "prepared model was not called with a tensor that the loader gave, or a view of one",
        f"{instead}; or call the model with the tensors that the loader gave and convert them "
        "inside of it",
    )


def _mixed(deliveries: Sequence[Delivery]) -> UsageError:
    """The error of a loss that came from several batches of different weight."""
    return UsageError(
        "one world.backward(loss) for batches that weigh differently",
        f"the loss comes from {len(deliveries)} batches, of which this rank has "
        f"{_parts(deliveries)} samples: no single factor is exact for all of them on these ranks",
        APART,
    )
