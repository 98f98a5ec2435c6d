"""Which models are compared after which steps."""

from __future__ import annotations

import pytest
from torch import nn

from lockstep.session.check_schedule import CHECK_EVERY, DueComparisons

pytestmark = pytest.mark.unit


def test_models_are_compared_once_and_after_a_step_of_their_own_optimizer() -> None:
    critic, generator, average = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    intervals = dict.fromkeys((critic, generator, average), CHECK_EVERY)
    due = DueComparisons()
    due.optimizer_prepared([critic])
    due.optimizer_prepared([generator])  # no optimizer trains the average

    # Both optimizers step in global batch 1, and the generator's rests until global batch 5.
    assert due.take_due_modules(1, intervals, stepped=[critic]) == [critic, average]
    assert due.take_due_modules(1, intervals, stepped=[generator]) == [generator]
    assert due.take_due_modules(2, intervals, stepped=[critic]) == [critic, average]
    assert due.take_due_modules(3, intervals, stepped=[critic]) == [critic, average]
    assert due.take_due_modules(4, intervals, stepped=[critic]) == []
    assert due.take_due_modules(5, intervals, stepped=[critic]) == []
    assert due.take_due_modules(5, intervals, stepped=[generator]) == [generator]
    assert due.take_due_modules(6, intervals, stepped=[generator]) == []
