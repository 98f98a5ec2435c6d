"""Which delivery a loss comes from, and which the loop has skipped, without loaders and modules."""

from __future__ import annotations

import pytest

from lockstep.errors import UsageError
from lockstep.session.delivery import Delivery, TrainingPass
from lockstep.session.micro_batch import MicroBatch
from lockstep.session.step import Step

pytestmark = pytest.mark.unit


class Storage:
    """Stands for a weak reference to the storage of a tensor, which the script holds or drops."""

    def __init__(self) -> None:
        self.is_freed = False

    def expired(self) -> bool:
        return self.is_freed


class Loop:
    """A loop over a loader, of which this rank gets parts of the given numbers of samples."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.training_pass = TrainingPass()

    def fetch(self, rows: int = 4, *, first: bool = True, last: bool = True) -> Delivery:
        micro_batch = MicroBatch(
            global_samples=8,
            local_rows=rows,
            scale=rows / 4,
            plain=rows == 4 and first and last,
            first=first,
            last=last,
            num_micro_batches=1 if first and last else 2,
        )
        delivery = Delivery(self.training_pass, micro_batch, [Storage()])
        self.step.hand_out(delivery)
        return delivery

    def train(self, delivery: Delivery) -> MicroBatch:
        self.step.module_called(delivery.storages)
        micro_batch = self.step.source_of_loss()
        self.training_pass.num_backwards += 1
        return micro_batch

    def end(self) -> None:
        self.step.end_pass(self.training_pass, exhausted=True)


def drop(*deliveries: Delivery) -> None:
    """The script no longer holds the tensors of some deliveries."""
    for delivery in deliveries:
        for storage in delivery.storages:
            storage.is_freed = True


def test_a_loss_after_the_loop_may_come_from_any_batch_that_the_script_keeps():
    step = Step()
    loop = Loop(step)
    kept = [loop.fetch(3), loop.fetch(5)]
    for delivery in kept:
        loop.train(delivery)
    loop.end()

    with pytest.raises(UsageError, match="of a loader that has ended"):
        step.source_of_loss()
    assert loop.train(kept[0]) is kept[0].micro_batch  # a forward pass has shown it

    drop(*kept)
    loop.end()
    step.source_of_loss()  # it can only come from elsewhere


def test_batches_of_an_ended_pass_count_while_the_loop_around_it_goes_on():
    step = Step()
    cycled, other = Loop(step), Loop(step)
    kept = [cycled.fetch(3), cycled.fetch(5)]
    kept.append(other.fetch(3))
    cycled.end()
    with pytest.raises(UsageError, match="of two loaders, one of which has ended"):
        step.source_of_loss()

    # The next loop does not train on what an earlier one has kept.
    other.end()
    next_loop = Loop(step)
    delivery = next_loop.fetch(5)
    assert step.source_of_loss() is delivery.micro_batch
    assert all(each.is_referenced for each in kept)


def test_a_pass_that_ends_again_keeps_each_of_its_batches_once():
    """`zip(itertools.cycle(one), other)` trains on a batch of `one` again after its pass has ended,
    which ends the pass once more."""
    step = Step()
    cycled, other = Loop(step), Loop(step)
    kept = [cycled.fetch(), cycled.fetch()]
    fetched = [other.fetch()]
    cycled.end()
    for delivery in kept * 3:
        cycled.train(delivery)
        fetched.append(other.fetch())
    assert step._loss_source._kept == kept


def test_a_global_batch_begins_with_the_micro_batch_that_the_loop_has_skipped():
    step = Step()
    loop = Loop(step)
    loop.train(loop.fetch(first=True, last=False))
    loop.train(loop.fetch(first=False, last=True))
    of_second = [loop.fetch(first=True, last=False), loop.fetch(first=False, last=True)]
    first_of_third = loop.fetch(first=True, last=False)
    drop(*of_second, first_of_third)
    last_of_third = loop.fetch(first=False, last=True)

    assert loop.training_pass.being_trained is of_second[0]
    assert loop.training_pass.skipped_first_of(last_of_third) is first_of_third
    assert loop.training_pass.skipped_first_of(first_of_third) is None

    loop.train(last_of_third)
    assert loop.training_pass.number == 3  # global batches have begun
    assert loop.training_pass.untrained == []  # what comes before was skipped


def test_batches_that_the_script_holds_were_not_skipped():
    step = Step()
    loop = Loop(step)
    deliveries = [loop.fetch(3), loop.fetch(5), loop.fetch(4)]
    drop(deliveries[0])
    loop.train(deliveries[2])
    assert loop.training_pass.untrained == [deliveries[1]]
