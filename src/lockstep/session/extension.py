"""Defines `Extension`, the base class of everything that takes part in a training step.

Strategies, checks and observers (the report, the ledger, `lockstep verify`) are all extensions. A
run has one ordered list of them, and calls their methods at each event of a step in this order:

1. `PREPARED_OBJECT`: the prepared optimizers;
2. `STRATEGY`: the part of a strategy that belongs to one prepared module;
3. `CHECK`: the checks, which raise an error if a training goes wrong;
4. `OBSERVER`: extensions that only observe the training.

The order matters. Each line names the test that fails if two of them change places:

- Optimizers clear gradients of a global batch that was left out before a strategy puts the weights
  of another virtual rank in place (`tests/session/test_extension.py::test_gradients_are_cleared`).
- A strategy reshards and averages before the checks look at the gradients that the optimizer will
  use (`test_checks_see_what_the_strategy_left`).
- Checks look at a loss before the strategy and the observers get it, so that no observer records a
  loss that cannot be trained on (`test_a_refused_loss_reaches_nobody`).
- Every extension is closed, whatever the others raise, observers last: the record of the run has
  what strategies and checks found at its end (`test_every_extension_is_closed`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.session.micro_batch import MicroBatch

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

PHASES = (
    "data", "forward", "backward", "communication", "optimizer", "checkpoint", "evaluation", "other"
)  # fmt: skip
"""What a rank spends the time of a step on. `communication` is any waiting for other ranks;
`forward` ends when `World.backward` or the optimizer's step begins; `other` is everything between
that step and the next batch."""


class Place(IntEnum):
    """The place of an extension in the order in which events are handled."""

    PREPARED_OBJECT = 0
    STRATEGY = 1
    CHECK = 2
    OBSERVER = 3


class DeliveredBatch(NamedTuple):
    """A micro-batch that a training loop gets from a loader on this rank."""

    loader: Any
    epoch: int
    position: int
    """Number of its global batch in the epoch, from 0."""
    samples: npt.NDArray[np.int64]
    """The indices of its samples in the dataset."""
    micro_batch: MicroBatch
    batch: Any
    """The batch as the training loop gets it."""
    counts: bool
    """True if this rank counts the samples. In a pipeline several ranks get the same micro-batch,
    and only one of them counts it. A micro-batch that is repeated to check a device is not
    counted."""


class Extension:
    """Takes part in a training. Every method handles one event, and does nothing by default.

    All ranks call the methods at the same points of a training, so they may communicate unless
    their description says otherwise.
    """

    def module_prepared(self, wrapped: Any) -> None:
        """`World.prepare` has wrapped a module; `wrapped` is a `strategies.base.PreparedModule`."""

    def optimizer_prepared(self, optimizer: Any, modules: Sequence[nn.Module]) -> None:
        """`World.prepare` has made a `PreparedOptimizer` of an optimizer of these modules."""

    def choices_made(self, choices: Sequence[tuple[str, str, str]]) -> None:
        """The run has made decisions; each has a name, a value and a reason."""

    def batches_fetched_ahead(self) -> None:
        """A loop has fetched a batch before it has trained the previous one; called once."""

    def part_is_empty(self) -> None:
        """This rank is about to get a micro-batch without samples; called once."""

    def begin(self, micro_batch: MicroBatch) -> None:
        """Training on a micro-batch begins."""

    def delivered(self, batch: DeliveredBatch) -> None:
        """Training on a micro-batch begins; called after `begin`, with the samples."""

    def before_backward(self, loss: Any, micro_batch: MicroBatch) -> None:
        """`World.backward` was called with this loss, which is not weighted yet.

        May raise UsageError if the loss cannot be trained on. Must not communicate.
        """

    def backward_begins(self, weighted_loss: Tensor, micro_batch: MicroBatch) -> None:
        """The backward pass of a loss is about to run.

        The loss of the global batch is the mean over ranks of their sums of these losses. A loss
        whose `micro_batch.scale` is 0 counts as 0, even if its value is NaN.
        """

    def backward_ended(self, micro_batch: MicroBatch) -> None:
        """The backward pass has run; strategies release the memory that it needed."""

    def after_backward(self, loss: Any, micro_batch: MicroBatch) -> None:
        """The backward pass has run and was counted. Must not communicate."""

    def leaf_gradient(
        self,
        micro_batch: MicroBatch,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
    ) -> None:
        """Some gradients of a virtual rank are complete, and not yet added to those of others.

        They are the leaves of the tree in which the gradients of all virtual ranks are added up.
        Called only if all virtual ranks train one model, and perhaps during a backward pass. The
        calls together cover each parameter once, except for those of FSDP units that the virtual
        rank has not used. Must neither communicate nor keep the gradients, which change later.

        Args:
            micro_batch: the last micro-batch of the virtual rank.
            parameters: parameters of a prepared module; under FSDP the optimizer's shards.
            gradients: the full gradient of each parameter; None or zeros if it was not used.
        """

    def before_clipping(self, module: nn.Module) -> None:
        """The gradients of a prepared module, or of a part of one, are about to be clipped."""

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """An optimizer is about to step.

        May raise UsageError if the gradients are not those of the global batch.

        Args:
            optimizer: the optimizer.
            modules: the prepared modules whose parameters it updates.
        """

    def after_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """The optimizer has stepped: for a global batch, or for one virtual rank's part of it."""

    def step_finished(self, number: int) -> None:
        """The first of the optimizers has stepped for the global batch of this number, from 0."""

    def global_batch_trained(self, modules: Sequence[nn.Module]) -> None:
        """An optimizer has stepped for a whole global batch, and `after_step` was called.

        Other optimizers may not have stepped for it yet.

        Args:
            modules: the prepared modules whose parameters it has updated.
        """

    def batch_is_done(self) -> None:
        """A training loop asks for its next micro-batch, so it is done with the previous one."""

    def pass_ended(self) -> None:
        """A training loop has left a loader."""

    def clear_gradients(self) -> None:
        """A global batch was left in the middle, and its gradients must be cleared."""

    def phase_entered(self, phase: str) -> None:
        """This rank enters another phase of its step, one of `PHASES`."""

    def values_logged(self, sums: Any, open_pass: Any) -> None:
        """Values of `World.log` are complete: their pass is over, or they belong to no loop.

        May be called while an exception propagates. Must neither communicate nor wait for a device.

        Args:
            sums: the `WeightedSums` of this rank's values.
            open_pass: the `session.logged_passes.OpenPass`; None outside of any loop.
        """

    def summed(self, value: Any, total: Any) -> None:
        """The script has called `World.sum` with this value, and gets this total."""

    def settle(self) -> None:
        """The state is about to be saved, or the run has ended without an error.

        Raises errors that were deferred until now. Must not communicate.
        """

    def saving_begins(self) -> None:
        """The state is about to be copied for a checkpoint, until `saving_ended` is called.

        In the middle of a global batch, state that the first micro-batches have changed is put
        back, because a resumed run computes the whole global batch. Must not communicate.
        """

    def saving_ended(self) -> None:
        """The state was copied, and the training goes on. Must not communicate."""

    def release(self) -> None:
        """The run ends: references to process groups must be dropped. Must not communicate."""

    def close(self, failed: bool) -> None:
        """The run ends; process groups are still open.

        Args:
            failed: True if this process had an error.
        """


EVENTS = tuple(name for name in vars(Extension) if not name.startswith("_"))

_extensions_of_every_run: list[Extension] = []


def add_to_every_run(extension: Extension) -> None:
    """Adds an observer to every run that this process joins from now on."""
    _extensions_of_every_run.append(extension)


class Extensions(Extension):
    """The extensions of a run. Calling a method calls that method of each extension, in order.

    A method that an extension does not override costs nothing.
    """

    def __init__(self) -> None:
        self._extensions: list[tuple[Place, Extension]] = []
        self.listeners: dict[str, list[Callable[..., None]]] = {}
        """The methods to call, by the name of the event."""
        self._observers_are_notified = True
        for extension in _extensions_of_every_run:
            self.add(extension, Place.OBSERVER)
        self._rebuild_listeners()

    def add(self, extension: Extension, place: Place) -> None:
        """Adds an extension after the others of the same place."""
        self._extensions.append((place, extension))
        # The sort is stable: extensions of the same place stay in the order of their addition.
        self._extensions.sort(key=lambda entry: entry[0])
        self._rebuild_listeners()

    def remove(self, extension: Extension) -> None:
        """Removes an extension, so that its methods are no longer called."""
        self._extensions = [entry for entry in self._extensions if entry[1] is not extension]
        self._rebuild_listeners()

    def of_type(self, kind: type[Any]) -> Any:
        """Returns the first extension of a type, or None."""
        for _, extension in self._extensions:
            if isinstance(extension, kind):
                return extension
        return None

    @contextmanager
    def observers_muted(self) -> Iterator[None]:
        """Returns a context in which observers are not notified of events."""
        self._observers_are_notified = False
        self._rebuild_listeners()
        try:
            yield
        finally:
            self._observers_are_notified = True
            self._rebuild_listeners()

    def _rebuild_listeners(self) -> None:
        """Collects, for each event, the methods that an extension overrides, in their order."""
        for event in EVENTS:
            default_method = getattr(Extension, event)  # does nothing
            listeners: list[Callable[..., None]] = []
            for place, extension in self._extensions:
                if place is Place.OBSERVER and not self._observers_are_notified:
                    continue
                is_overridden = getattr(type(extension), event) is not default_method
                if is_overridden:
                    listeners.append(getattr(extension, event))

            self.listeners[event] = listeners

    def module_prepared(self, wrapped: Any) -> None:
        for listener in self.listeners["module_prepared"]:
            listener(wrapped)

    def optimizer_prepared(self, optimizer: Any, modules: Sequence[nn.Module]) -> None:
        for listener in self.listeners["optimizer_prepared"]:
            listener(optimizer, modules)

    def choices_made(self, choices: Sequence[tuple[str, str, str]]) -> None:
        for listener in self.listeners["choices_made"]:
            listener(choices)

    def batches_fetched_ahead(self) -> None:
        for listener in self.listeners["batches_fetched_ahead"]:
            listener()

    def part_is_empty(self) -> None:
        for listener in self.listeners["part_is_empty"]:
            listener()

    def begin(self, micro_batch: MicroBatch) -> None:
        for listener in self.listeners["begin"]:
            listener(micro_batch)

    def delivered(self, batch: DeliveredBatch) -> None:
        for listener in self.listeners["delivered"]:
            listener(batch)

    def before_backward(self, loss: Any, micro_batch: MicroBatch) -> None:
        for listener in self.listeners["before_backward"]:
            listener(loss, micro_batch)

    def backward_begins(self, weighted_loss: Tensor, micro_batch: MicroBatch) -> None:
        for listener in self.listeners["backward_begins"]:
            listener(weighted_loss, micro_batch)

    def backward_ended(self, micro_batch: MicroBatch) -> None:
        for listener in self.listeners["backward_ended"]:
            listener(micro_batch)

    def after_backward(self, loss: Any, micro_batch: MicroBatch) -> None:
        for listener in self.listeners["after_backward"]:
            listener(loss, micro_batch)

    def leaf_gradient(
        self,
        micro_batch: MicroBatch,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
    ) -> None:
        """Passes on complete gradients of a virtual rank, before they are added to others.

        They are the leaves of the tree in which the gradients of all virtual ranks are added up:
        `(gradient of rank 0 + gradient of rank 1) + (gradient of rank 2 + ...)`.
        """
        for listener in self.listeners["leaf_gradient"]:
            listener(micro_batch, parameters, gradients)

    def before_clipping(self, module: nn.Module) -> None:
        for listener in self.listeners["before_clipping"]:
            listener(module)

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        for listener in self.listeners["before_step"]:
            listener(optimizer, modules)

    def after_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        for listener in self.listeners["after_step"]:
            listener(optimizer, modules)

    def step_finished(self, number: int) -> None:
        for listener in self.listeners["step_finished"]:
            listener(number)

    def global_batch_trained(self, modules: Sequence[nn.Module]) -> None:
        for listener in self.listeners["global_batch_trained"]:
            listener(modules)

    def batch_is_done(self) -> None:
        for listener in self.listeners["batch_is_done"]:
            listener()

    def pass_ended(self) -> None:
        for listener in self.listeners["pass_ended"]:
            listener()

    def clear_gradients(self) -> None:
        for listener in self.listeners["clear_gradients"]:
            listener()

    def phase_entered(self, phase: str) -> None:
        for listener in self.listeners["phase_entered"]:
            listener(phase)

    def values_logged(self, sums: Any, open_pass: Any) -> None:
        for listener in self.listeners["values_logged"]:
            listener(sums, open_pass)

    def summed(self, value: Any, total: Any) -> None:
        for listener in self.listeners["summed"]:
            listener(value, total)

    def settle(self) -> None:
        for listener in self.listeners["settle"]:
            listener()

    def saving_begins(self) -> None:
        for listener in self.listeners["saving_begins"]:
            listener()

    def saving_ended(self) -> None:
        for listener in self.listeners["saving_ended"]:
            listener()

    def release(self) -> None:
        for listener in self.listeners["release"]:
            listener()

    def close(self, failed: bool) -> None:
        # The stack calls all of them, the last one first, even if one raises an error.
        with ExitStack() as stack:
            for listener in reversed(self.listeners["close"]):
                stack.callback(listener, failed)
