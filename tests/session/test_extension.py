"""The order in which the extensions of a run are told of what happens in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import lockstep
from lockstep.errors import UsageError
from lockstep.optim.precision import Precision
from lockstep.session.delivery import TrainingPass
from lockstep.session.extension import EVENTS, Extension, Extensions, Place, add_to_every_run
from lockstep.session.micro_batch import MicroBatch, VirtualRank
from lockstep.session.step import Step
from lockstep.training.optimizer import PreparedOptimizer

pytestmark = pytest.mark.unit


class Notes(Extension):
    """Writes down what it is told, under a name."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name = name
        self.notes = notes

    def begin(self, micro_batch: MicroBatch) -> None:
        self.notes.append(f"{self.name} begin")

    def before_backward(self, loss: Any, micro_batch: MicroBatch) -> None:
        self.notes.append(f"{self.name} before_backward")

    def backward_begins(self, weighted_loss: Tensor, micro_batch: MicroBatch) -> None:
        self.notes.append(f"{self.name} backward_begins")

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        self.notes.append(f"{self.name} before_step")

    def close(self, failed: bool) -> None:
        self.notes.append(f"{self.name} close {failed}")
        if self.name == "check":
            raise RuntimeError("a check failed while it was closed")


def all_places(notes: list[str]) -> Extensions:
    """One `Notes` at each place, added in the reverse of the order in which they are told."""
    extensions = Extensions()
    for place in reversed(Place):
        extensions.add(Notes(place.name.lower(), notes), place)
    return extensions


def test_extensions_are_told_in_the_order_of_their_places() -> None:
    notes: list[str] = []
    all_places(notes).begin(MicroBatch())
    assert notes == ["prepared_object begin", "strategy begin", "check begin", "observer begin"]


def test_every_extension_is_closed() -> None:
    notes: list[str] = []
    with pytest.raises(RuntimeError, match="a check failed"):
        all_places(notes).close(True)
    assert notes == [
        "prepared_object close True",
        "strategy close True",
        "check close True",
        "observer close True",
    ]


def test_an_event_that_nobody_listens_to_calls_nothing() -> None:
    extensions = Extensions()
    extensions.add(Extension(), Place.OBSERVER)
    assert {event: extensions.listeners[event] for event in EVENTS} == {
        event: [] for event in EVENTS
    }


def test_extensions_has_every_event() -> None:
    assert all(event in vars(Extensions) for event in EVENTS)


def test_observers_are_muted_and_told_again_afterwards() -> None:
    notes: list[str] = []
    extensions = all_places(notes)
    with extensions.observers_muted():
        extensions.begin(MicroBatch())
    assert "observer begin" not in notes
    extensions.begin(MicroBatch())
    assert "observer begin" in notes


def test_an_extension_that_was_removed_is_told_nothing() -> None:
    notes: list[str] = []
    extensions = Extensions()
    observer = Notes("observer", notes)
    extensions.add(observer, Place.OBSERVER)
    extensions.remove(observer)
    extensions.begin(MicroBatch())
    assert notes == []


def test_an_observer_of_every_run_is_told_in_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr("lockstep.session.extension._extensions_of_every_run", [])
    add_to_every_run(Notes("observer", notes))
    Step().begin(TrainingPass(), MicroBatch())
    assert notes == ["observer begin"]


def test_gradients_are_cleared() -> None:
    """Those of a global batch whose step was left out are cleared before a strategy changes what
    the parameters hold: it would clear the gradients of another virtual rank."""
    step = Step()
    parameter = nn.Parameter(torch.ones(2))
    optimizer = PreparedOptimizer(
        torch.optim.SGD([parameter], lr=1.0), step, Precision("fp32", torch.device("cpu"))
    )
    seen_by_strategy: list[Any] = []

    class Strategy(Extension):
        def begin(self, micro_batch: MicroBatch) -> None:
            seen_by_strategy.append(parameter.grad)

    step.extensions.add(Strategy(), Place.STRATEGY)
    for extension in optimizer.extensions:
        step.extensions.add(extension, Place.PREPARED_OBJECT)
    training_pass = TrainingPass()
    first = MicroBatch(
        global_samples=4, local_rows=2, first=True, last=False, scale=0.5, plain=False
    )
    step.begin(training_pass, first)
    parameter.sum().backward()
    training_pass.num_backwards += 1
    optimizer.step()  # asked for, and not taken yet
    optimizer.zero_grad()  # put off
    assert parameter.grad is not None
    step.begin(training_pass, first)  # the rest of the global batch was left out
    assert seen_by_strategy == [None, None]


def a_training_step(world: lockstep.World) -> tuple[nn.Module, PreparedOptimizer, Tensor]:
    model = nn.Linear(3, 1)
    model, optimizer = world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model, optimizer, model(torch.ones(2, 3)).mean()


def test_checks_see_what_the_strategy_left() -> None:
    notes: list[str] = []
    with lockstep.init() as world:
        extensions = world._run.extensions
        extensions.add(Notes("a check", notes), Place.CHECK)
        extensions.add(Notes("strategy", notes), Place.STRATEGY)
        _, optimizer, loss = a_training_step(world)
        world.backward(loss)
        notes.clear()
        optimizer.step()
        assert notes == ["strategy before_step", "a check before_step"]


def test_a_refused_loss_reaches_nobody() -> None:
    notes: list[str] = []
    with lockstep.init() as world:
        extensions = world._run.extensions
        extensions.add(Notes("strategy", notes), Place.STRATEGY)
        extensions.add(Notes("observer", notes), Place.OBSERVER)
        _, _, loss = a_training_step(world)
        with pytest.raises(UsageError, match="NaN"):
            world.backward(loss * float("nan"))
        assert "strategy backward_begins" not in notes
        assert "observer backward_begins" not in notes
        world.backward(loss)
        assert "strategy backward_begins" in notes
        assert "observer backward_begins" in notes


def test_a_micro_batch_of_a_virtual_rank_opens_and_closes_the_part_of_that_rank() -> None:
    def micro_batch(begins: bool, ends: bool) -> MicroBatch:
        virtual_rank = VirtualRank(
            number=1,
            begins=begins,
            ends=ends,
            num_on_process=2,
            virtual_ranks_per_process=2.0,
            has_own_step=True,
        )
        return MicroBatch(first=False, last=False, scale=3.0, virtual_rank=virtual_rank)

    assert micro_batch(True, False).opens_step
    assert not micro_batch(True, False).closes_step
    assert micro_batch(False, True).closes_step
    as_one = micro_batch(True, True).without_virtual_rank()
    assert not as_one.opens_step
    assert as_one.scale == 1.5
