"""A loop that prepares its loader anew in each epoch repeats one order, and is told so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import mlp, tensors
from torch.utils.data import DataLoader, Subset
from warned import warnings_of

import lockstep

pytestmark = pytest.mark.unit

EPOCHS = 4


class Training:
    """A model and its optimizer."""

    def __init__(self, world: lockstep.World) -> None:
        self.world = world
        model = mlp()
        self.model, self.optimizer = world.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1)
        )

    def epoch(self, loader: Any) -> None:
        for x, y in loader:
            self.world.backward(F.cross_entropy(self.model(x), y))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def evaluate(self, loader: Any) -> None:
        with torch.no_grad():
            for x, _ in loader:
                self.model(x)


def another_data_loader(world: lockstep.World) -> None:
    training, data = Training(world), tensors(16)
    for _ in range(EPOCHS):
        training.epoch(world.prepare(DataLoader(data, batch_size=8, shuffle=True)))


def the_same_data_loader(world: lockstep.World) -> None:
    training, loader = Training(world), DataLoader(tensors(16), batch_size=8, shuffle=True)
    for _ in range(EPOCHS):
        training.epoch(world.prepare(loader))


def loader_of_world(world: lockstep.World) -> None:
    training, data = Training(world), tensors(16)
    for _ in range(EPOCHS):
        training.epoch(world.loader(data, 8, shuffle=True))


def prepared_once(world: lockstep.World) -> None:
    training, loader = Training(world), world.loader(tensors(16), 8, shuffle=True)
    for _ in range(EPOCHS):
        training.epoch(loader)


def not_shuffled(world: lockstep.World) -> None:
    training, data = Training(world), tensors(16)
    for _ in range(EPOCHS):
        training.epoch(world.loader(data, 8))


def evaluated_anew(world: lockstep.World) -> None:
    training, data = Training(world), tensors(16)
    loader = world.loader(data, 8, shuffle=True)
    for _ in range(EPOCHS):
        training.epoch(loader)
        training.evaluate(world.loader(data, 8, shuffle=True))


def folds(world: lockstep.World) -> None:
    training, data = Training(world), tensors(32)
    for fold in range(EPOCHS):
        part = Subset(data, range(fold, 32, EPOCHS))
        training.epoch(world.loader(part, 4, shuffle=True))


def trials(world: lockstep.World) -> None:
    data = tensors(16)
    for _ in range(EPOCHS):
        Training(world).epoch(world.loader(data, 8, shuffle=True))


def two_phases(world: lockstep.World) -> None:
    training, data = Training(world), tensors(16)
    for _ in range(2):
        training.epoch(world.loader(data, 8, shuffle=True))


def told_the_epoch(world: lockstep.World) -> None:
    training, data = Training(world), tensors(16)
    for epoch in range(EPOCHS):
        loader = world.loader(data, 8, shuffle=True)
        loader.set_epoch(epoch)
        training.epoch(loader)


def several_in_each_epoch(world: lockstep.World) -> None:
    training, data = Training(world), tensors(16)
    loaders = [world.loader(data, 8, shuffle=True) for _ in range(3)]
    for _ in range(2):
        for loader in loaders:
            training.epoch(loader)


def larger_batches(world: lockstep.World) -> None:
    training, data = Training(world), tensors(16)
    for batch_size in (2, 4, 8, 16):
        training.epoch(world.loader(data, batch_size, shuffle=True))


@pytest.mark.parametrize("use", [another_data_loader, the_same_data_loader, loader_of_world])
def test_a_loader_that_is_prepared_in_each_epoch_is_told_once(use):
    [(message, line)] = warnings_of(use)
    assert message.startswith("a loader that is prepared anew in each epoch\n  found: 3 loaders ")
    assert "LS103" in message
    assert line == "for x, y in loader:"


@pytest.mark.parametrize(
    "use",
    [
        prepared_once,
        not_shuffled,
        evaluated_anew,
        folds,
        trials,
        two_phases,
        told_the_epoch,
        several_in_each_epoch,
        larger_batches,
    ],
)
def test_loaders_that_are_meant_to_be_several_are_not_warned_of(use):
    assert warnings_of(use) == []
