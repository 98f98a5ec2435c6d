"""Losses that cannot be trained on; tests/world/messages.py has the other messages."""

from __future__ import annotations

import pytest
import torch

import lockstep
from lockstep.errors import UsageError
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
    check._pending = torch.tensor(was_nan), copied, 7  # type: ignore[assignment]
    if was_nan:
        with pytest.raises(UsageError, match="the loss of step 7 is NaN"):
            check.settle()
    else:
        check.settle()
    assert copied.waited
    assert check._pending is None
    world.close()
