"""Losses that cannot be trained on; tests/world/messages.py has the other messages."""

from __future__ import annotations

import pytest
import torch

import lockstep
from lockstep.errors import UsageError
from lockstep.extensions.checks.base import LateValue
from lockstep.extensions.checks.loss import LossCheck
from lockstep.optim.precision import Precision

pytestmark = pytest.mark.unit


class Copied:
    """Stands in for a CUDA event."""

    waited = False

    def synchronize(self) -> None:
        self.waited = True


@pytest.mark.parametrize("was_nan", [True, False])
def test_the_last_loss_is_waited_for(was_nan):
    """On CUDA a loss is looked at one step late; the last one when the run is saved or left."""
    world = lockstep.init(device="cpu")
    check, copied = LossCheck(world._run, Precision("fp32", world.device)), Copied()
    check.settle()
    check._is_nan._pending = torch.tensor(was_nan), copied, 7  # type: ignore[assignment]
    if was_nan:
        with pytest.raises(UsageError, match="the loss of step 7 is NaN"):
            check.settle()
    else:
        check.settle()
    assert copied.waited
    assert check._is_nan.take() is None
    world.close()


class OnItsWay(Copied):
    """Stands in for a CUDA event that is reached only when somebody waits for it."""

    def query(self) -> bool:
        return self.waited


def test_a_value_on_its_way_is_neither_waited_for_nor_replaced(monkeypatch):
    started = []

    def start_copy(tensor):
        started.append(OnItsWay())
        return tensor, started[-1]

    monkeypatch.setattr("lockstep.extensions.checks.base.start_copy_to_host", start_copy)
    late = LateValue()
    assert late.take(wait=True) is None
    late.put(torch.tensor([0.5]), 1)
    assert late.take() is None
    late.put(torch.tensor([0.25]), 2)
    assert late.take(wait=True) == (0.5, 1)
    assert late.take() is None
    late.put(torch.tensor([0.125]), 3)
    started[-1].waited = True
    assert late.take() == (0.125, 3)
    assert len(started) == 2
