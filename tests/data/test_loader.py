from __future__ import annotations

import itertools
import sys
import tracemalloc
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from plans import plan_of
from problems import Augmented, tensors
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from lockstep.batch.data_identity import bring_sampler_to_epoch
from lockstep.batch.fetch import Fetch
from lockstep.batch.loader import Loader
from lockstep.batch.plan import plan_epoch
from lockstep.batch.source import Source, make_source
from lockstep.distributed.collectives import Collectives
from lockstep.errors import CheckpointError, DataError, LockstepWarning, UsageError
from lockstep.machine.topology import Topology
from lockstep.session.micro_batch import MicroBatch
from lockstep.session.step import Step

pytestmark = pytest.mark.unit


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def make(source: Source, rank: int = 0, size: int = 1, **options: Any) -> Loader:
    """The loader of one rank, without processes: reading needs no other rank."""
    collectives = Collectives(Topology(rank=rank, size=size, local_size=size, local_rank=rank),
                              torch.device("cpu"))  # fmt: skip
    plan = plan_of(source, collectives, options)
    return Loader(source, plan=plan, collectives=collectives, step=Step(), **{"seed": 3, **options})


def numbers(length: int, batch_size: int, **options: Any) -> Source:
    return make_source(Numbers(length), batch_size, **{"shuffle": True, **options})


def read(loader: Loader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_ranks_together_see_every_sample_once_in_the_planned_order(size):
    source = numbers(23, 6)
    expected = read(make(source))
    assert sorted(sum(expected, [])) == list(range(23))
    ranks = [read(make(source, rank, size)) for rank in range(size)]
    assert [sum(parts, []) for parts in zip(*ranks, strict=True)] == expected


def test_epochs_follow_each_other_without_set_epoch():
    loader = make(numbers(30, 10))
    epochs = [sum(read(loader), []) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(sorted(epoch) == list(range(30)) for epoch in epochs)


def test_set_epoch_as_scripts_for_ddp_and_accelerate_call_it():
    """`train.sampler.set_epoch(epoch)` is DDP's way, `loader.set_epoch(epoch)` Accelerate's."""
    untouched = make(numbers(30, 10))
    orders = [read(untouched) for _ in range(4)]
    told = make(numbers(30, 10))
    for epoch in range(2):  # the loader's own count: nothing changes
        told.sampler.set_epoch(epoch)
        assert read(told) == orders[epoch]
    told.batch_sampler.set_epoch(3)  # a script that has resumed by itself, or counts from 1
    assert told.epoch == 3
    assert read(told) == orders[3]
    iterator = iter(told)
    next(iterator)
    told.set_epoch(4)
    told.set_epoch(5)  # the next one
    with pytest.raises(UsageError, match="a loop over the loader is in epoch 4"):
        told.set_epoch(2)
    with pytest.raises(UsageError, match="whole number"):
        told.set_epoch(1.5)
    assert not hasattr(told.sampler, "num_replicas")


def test_set_epoch_does_not_go_back_behind_a_checkpoint():
    loader = make(numbers(30, 10))
    first, second = read(loader), read(loader)
    resumed = make(numbers(30, 10))
    resumed.load_state_dict({**loader.state_dict(), "epoch": 1})
    with pytest.raises(UsageError, match=r"(?s)the loader is in epoch 1.*world\.epochs"):
        resumed.sampler.set_epoch(0)
    resumed.sampler.set_epoch(1)
    assert read(resumed) == second
    resumed.set_epoch(0)  # what was resumed is done, so this is the script's own decision
    assert read(resumed) == first


def test_set_epoch_reaches_a_sampler_of_the_users():
    class Own(Sampler[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return 4

        def __iter__(self):
            return iter((torch.arange(4) + self.epoch).remainder(4).tolist())

    own = Own()
    loader = make(make_source(DataLoader(Numbers(4), batch_size=2, sampler=own)))
    assert loader.sampler is own
    loader.set_epoch(2)
    assert read(loader) == [[2, 3], [0, 1]]
    batches = BatchSampler(own, 2, drop_last=False)
    loader = make(make_source(DataLoader(Numbers(4), batch_sampler=Groups(batches))))
    assert isinstance(loader.batch_sampler, Groups)


class Groups:
    """A batch sampler of the user's own."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


def test_an_empty_part_is_an_empty_batch_when_training_and_skipped_when_not():
    data = tensors(1, torch.float32)
    source = make_source(DataLoader(data, batch_size=4))
    loader = make(source, rank=2, size=3)
    ((x, y),) = list(loader)
    assert x.shape == (0, 6)
    assert y.shape == (0,)
    assert x.dtype == torch.float32
    with torch.no_grad():
        assert list(loader) == []


def test_micro_batches_are_marked():
    loader = make(numbers(10, 8), micro_batch_size=3)
    seen = []
    for batch in loader:
        now = loader.current
        seen.append(
            (len(batch), now.global_samples, now.local_rows, now.first, now.last, now.plain)
        )
    assert seen == [
        (3, 8, 3, True, False, False),
        (3, 8, 3, False, False, False),
        (2, 8, 2, False, True, False),
        (2, 2, 2, True, True, True),  # as large as the others, not as many
    ]
    assert len(loader) == 4
    assert loader.steps == 2


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_scales_of_a_global_batch_make_the_exact_mean(size):
    for shares, micro in (((1,) * size, None), (tuple(range(1, size + 1)), 3)):
        loaders = [
            make(numbers(11, 8), r, size, shares=shares, micro_batch_size=micro)
            for r in range(size)
        ]
        weights = np.zeros(11)
        for loader in loaders:
            for batch in loader:
                now = loader.current
                for index in batch.tolist():
                    # What one sample's loss counts after the mean over its part and over ranks.
                    weights[index] = now.scale / now.local_rows / size * now.global_samples
        assert np.allclose(weights, 1)


def test_position_and_resume_on_another_number_of_ranks():
    source = numbers(23, 6)
    whole = make(source)
    read(whole)
    expected = read(whole)
    two = [make(source, rank, 2) for rank in range(2)]
    for loader in two:
        read(loader)
        iterator = iter(loader)
        for _ in range(2):
            next(iterator)
            loader._step.mark_stepped()
        state = loader.state_dict()
        iterator.close()
    assert (state["epoch"], state["step"]) == (1, 2)
    three = [make(source, rank, 3) for rank in range(3)]
    for loader in three:
        loader.load_state_dict(state)
    rest = [sum(parts, []) for parts in zip(*(read(loader) for loader in three), strict=True)]
    assert rest == expected[2:]


def test_a_position_inside_a_global_batch_is_that_before_it():
    loader = make(numbers(20, 8), micro_batch_size=4)
    iterator = iter(loader)
    next(iterator)
    assert loader.state_dict()["step"] == 0
    loader._step.source_of_loss()
    next(iterator)
    assert loader.state_dict()["step"] == 0  # not stepped yet
    loader._step.mark_stepped()
    assert loader.state_dict()["step"] == 1
    next(iterator)
    assert loader.state_dict()["step"] == 1
    iterator.close()
    assert not loader.mid_epoch
    assert loader.state_dict() | {"epoch": 1, "step": 0} == loader.state_dict()


def evaluated(loader: Loader) -> list[int]:
    with torch.no_grad():
        return sum(read(loader), [])


def test_evaluating_over_a_loader_that_is_trained_on_leaves_its_position():
    source = numbers(23, 6)
    whole = make(source)
    expected = [read(whole) for _ in range(3)]
    loader = make(source)
    assert evaluated(loader) != evaluated(loader)  # an order of its own each time
    assert read(loader) == expected[0]
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
        loader._step.mark_stepped()
    assert sorted(evaluated(loader)) == list(range(23))
    state = loader.state_dict()
    assert (state["epoch"], state["step"], loader.epoch) == (1, 2, 1)
    assert list(iterator)[-1].tolist() == expected[1][-1]
    assert read(loader) == expected[2]

    resumed = make(source)
    resumed.load_state_dict(state)
    with torch.no_grad():
        assert next(iter(resumed)).tolist() != expected[1][2]  # evaluated from the beginning
    assert resumed.mid_epoch
    assert resumed.state_dict() == state | {"evaluations": 4}
    assert [read(resumed), read(resumed)] == [expected[1][2:], expected[2]]


@pytest.mark.parametrize(("changed", "name"), [((24, 6), "length"), ((23, 7), "batch size")])
def test_a_position_in_other_data_is_refused(changed, name):
    state = make(numbers(23, 6)).state_dict()
    with pytest.raises(CheckpointError, match=name):
        make(numbers(*changed)).load_state_dict(state)


@pytest.mark.parametrize("length", [10**12, sys.maxsize])
def test_a_dataset_of_any_length_begins_at_once_in_bounded_memory(length):
    source = numbers(length, 1000)
    expected = plan_epoch(length, 1000, seed=3)
    steps = -(-length // 1000)
    tracemalloc.start()
    try:
        loaders = [make(source, rank, 2, sample_rng=False) for rank in range(2)]
        assert len(loaders[0]) == loaders[0].steps == steps
        passes = [iter(loader) for loader in loaders]
        for step, parts in enumerate(islice(zip(*passes, strict=True), 40)):
            assert torch.cat(parts).tolist() == expected[step].tolist()
            for loader in loaders:
                loader._step.mark_stepped()
        state = loaders[1].state_dict()
        assert (state["epoch"], state["step"]) == (0, 40)
        three = [make(source, rank, 3, sample_rng=False) for rank in range(3)]
        for loader in three:
            loader.load_state_dict(state | {"step": steps - 2})
        rest = [torch.cat(parts).tolist() for parts in zip(*three, strict=True)]
        assert rest == [expected[step].tolist() for step in (steps - 2, steps - 1)]
        with torch.no_grad():
            assert next(iter(make(source, 1, 2))).tolist() == expected[0][500:].tolist()
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.ranks  # workers of loaders
def test_workers_read_a_dataset_of_any_length():
    loader = make(numbers(10**12, 10, options={"num_workers": 2}))
    expected = plan_epoch(10**12, 10, seed=3)
    for step, batch in enumerate(islice(loader, 5)):
        assert batch.tolist() == expected[step].tolist()


def test_a_position_in_an_order_that_was_drawn_whole_is_refused():
    loader = make(numbers(20_000, 10))
    state = loader.state_dict()
    loader.load_state_dict(state)
    del state["version of the order"]
    with pytest.raises(CheckpointError, match="version of the order is 1"):
        loader.load_state_dict(state)
    for unchanged in (numbers(16_384, 10), numbers(20_000, 10, shuffle=False)):
        assert "version of the order" not in make(unchanged).state_dict()


def test_the_state_is_left_as_it_was():
    loader = make(numbers(8, 4))
    for _ in loader:
        assert loader._step.micro_batch.global_samples == 4
        assert loader._step.in_training_loop
    assert not loader._step.in_training_loop
    assert loader._step.micro_batch == MicroBatch()
    for _ in loader:
        with torch.no_grad():
            list(loader)
        assert (
            loader._step.micro_batch.global_samples
            == loader._step.micro_batch_in_use.global_samples
            == 4
        )
        break
    assert not loader._step.in_training_loop


@pytest.mark.ranks  # workers of loaders
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("size", [1, 2])
def test_augmentation_depends_on_the_sample_alone(workers, size):
    """Not on the rank, the number of loader workers, or where the epoch was taken up."""
    expected = by_sample(make(source_of(0)), 0)
    found: dict[float, list[float]] = {}
    for rank in range(size):
        found |= by_sample(make(source_of(workers), rank, size), 0)
    assert found == expected
    resumed = make(source_of(workers))
    resumed.load_state_dict(resumed.state_dict() | {"step": 2})
    part = by_sample(resumed, 0)
    assert 0 < len(part) < len(expected)
    assert all(expected[key] == value for key, value in part.items())


def source_of(workers: int) -> Source:
    return make_source(DataLoader(Augmented(20), batch_size=6, shuffle=True, num_workers=workers))


def by_sample(loader: Loader, epoch: int) -> dict[Any, Any]:
    data = Augmented(20).data
    plan = loader.source.plan(3, epoch)
    found = {}
    start, rank = loader.start, loader._collectives.topology.rank
    for step, (x, _) in enumerate(loader, start):
        order = plan[step]
        size = len(loader.shares)
        half = -(-len(order) * rank // size)
        for row, index in zip(x, order[half:], strict=False):
            found[int(index)] = (row - data[int(index)][0]).tolist()
    return found


def test_epochs_have_their_own_augmentation_and_the_outer_streams_are_untouched():
    loader = make(source_of(0))
    torch.manual_seed(0)
    np.random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    first, second = by_sample(loader, 0), by_sample(loader, 1)
    assert all(first[index] != second[index] for index in first)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]


def test_rows_of_tensors_are_what_reading_each_sample_gives():
    data = tensors(30)
    for dataset in (data, Subset(data, [5, 3, 8, 1, 0]), Subset(Subset(data, range(9)), [2, 7])):
        source = make_source(DataLoader(dataset, batch_size=4, shuffle=True))
        fast = make(source)
        assert fast._fetch.tensor_rows is not None
        slow = make(source)
        slow._fetch.tensor_rows = None
        for a, b in zip(fast, slow, strict=True):
            assert [t.tolist() for t in a] == [t.tolist() for t in b]
            assert type(a) is type(b)


def test_a_subclass_of_tensordataset_is_read_sample_by_sample():
    class Noisy(torch.utils.data.TensorDataset):
        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            return tuple(t + 1 for t in super().__getitem__(index))

    data = Noisy(torch.zeros(4, 1))
    source = make_source(DataLoader(data, batch_size=2))
    assert make(source)._fetch.tensor_rows is None
    assert next(iter(make(source)))[0].tolist() == [[1.0], [1.0]]


def test_without_sample_rng_a_dataset_is_read_in_whole_batches():
    class Batched(Numbers):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [index + 100 for index in indices]

    source = make_source(Batched(6), 3)
    assert read(make(source, sample_rng=False)) == [[100, 101, 102], [103, 104, 105]]
    assert read(make(source)) == [[0, 1, 2], [3, 4, 5]]
    assert isinstance(make(source)._fetch, Fetch)


def test_rows_of_tensors_may_be_counted_from_the_end():
    data = TensorDataset(torch.arange(6), torch.zeros(6, 0))
    for indices in ([-1, 2, -6], [5, 2, 0]):
        wide, empty = Fetch(data, default_collate, 0, True)[0, np.array(indices)]
        assert wide.tolist() == [5, 2, 0]
        assert empty.shape == (3, 0)
    for index in (6, -7):
        with pytest.raises((IndexError, RuntimeError)):
            Fetch(data, default_collate, 0, True)[0, np.array([index])]


def test_a_sampler_of_the_users_is_the_global_order():
    sampler = WeightedRandomSampler([1.0] * 10 + [0.0] * 10, 12)
    source = make_source(DataLoader(Numbers(20), batch_size=5, sampler=sampler))
    one = read(make(source))
    assert [len(batch) for batch in one] == [5, 5, 2]
    assert max(sum(one, [])) < 10
    two = [read(make(source, rank, 2)) for rank in range(2)]
    assert [sum(parts, []) for parts in zip(*two, strict=True)] == one


RNG_OF_THE_PROCESS = np.random.default_rng(1)


class Moving(Sampler[int]):
    """Its order depends on how often any of its kind was asked, and no attribute says so."""

    def draw(self) -> list[int]:
        return RNG_OF_THE_PROCESS.permutation(12).tolist()  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return 12

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self.draw())


class MovingBatches(Moving):
    """The same in global batches of 1 to 4 samples."""

    def __len__(self) -> int:
        return 5

    def __iter__(self):  # type: ignore[no-untyped-def]
        order = self.draw()
        return (order[begin:end] for begin, end in ((0, 4), (4, 7), (7, 10), (10, 11), (11, 12)))


@pytest.mark.parametrize("batches", [False, True])
def test_an_order_that_cannot_be_had_again_is_in_the_position(batches):
    def source() -> Source:
        if batches:
            return make_source(DataLoader(Numbers(12), batch_sampler=MovingBatches()))
        return make_source(DataLoader(Numbers(12), batch_size=3, sampler=Moving()))

    loader = make(source())
    read(loader)
    assert "order" not in loader.state_dict()
    begun, handed = iter(loader), []
    for _ in range(2):
        handed += next(begun).tolist()
        len(loader)  # as a progress bar asks on one rank alone
        loader._step.mark_stepped()
    state = loader.state_dict()
    begun.close()
    two = [make(source(), rank, 2) for rank in range(2)]
    for each in two:
        with pytest.warns(LockstepWarning, match="it gives epoch 1 another order"):
            each.load_state_dict(state)
        assert torch.equal(each.state_dict()["order"], state["order"])  # saved again at once
    handed += sum(sum((read(each) for each in two), []), [])
    assert sorted(handed) == list(range(12))
    assert [each.epoch for each in two] == [2, 2]
    assert len(read(two[0])) == (5 if batches else 4)  # the next epoch is whole


def test_a_batch_sampler_of_the_users_makes_the_global_batches():
    class Growing(BatchSampler):
        def __iter__(self):  # type: ignore[no-untyped-def]
            yield from ([0], [1, 2], [3, 4, 5])

        def __len__(self) -> int:
            return 3

    batches = Growing(SequentialSampler(Numbers(6)), 2, False)
    source = make_source(DataLoader(Numbers(6), batch_sampler=batches))
    assert read(make(source)) == [[0], [1, 2], [3, 4, 5]]
    assert make(source).steps == 3


class Endless(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("error", "text", "loader"),
    [
        (DataError, "without a length", lambda: DataLoader(Endless(), batch_size=2,
                                                           sampler=range(3))),
        (DataError, "batch_size=None", lambda: DataLoader(Numbers(3), batch_size=None)),
        (UsageError, "DistributedSampler", lambda: DataLoader(
            Numbers(4), batch_size=2, sampler=DistributedSampler(Numbers(4), 2, 0))),
    ],
)  # fmt: skip
def test_loaders_that_cannot_be_cut(error, text, loader):
    with pytest.raises(error, match=text):
        make_source(loader())


class ByEpoch(Sampler[int]):
    """Its order is that of the epoch that it was told last."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 12

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(np.random.default_rng(self.epoch).permutation(12).tolist())


@pytest.mark.parametrize(
    "make_sampler",
    [
        lambda: RandomSampler(Numbers(12), replacement=True),
        lambda: SubsetRandomSampler(range(12), torch.Generator()),
        ByEpoch,
    ],
)
def test_an_order_that_can_be_had_again_is_no_reason_to_warn(make_sampler):
    def source() -> Source:
        return make_source(DataLoader(Numbers(12), batch_size=3, sampler=make_sampler()))

    loader = make(source())
    for epoch in range(2):
        loader.set_epoch(epoch)
        read(loader)
    resumed = make(source())
    resumed.load_state_dict(loader.state_dict())  # warnings are errors here
    for each in (loader, resumed):
        each.set_epoch(2)
    assert read(resumed) == read(loader)


class Counting(Sampler[int]):
    """Has another order in each epoch, and counts the epochs itself."""

    epoch = 0

    def __len__(self) -> int:
        return 12

    def __iter__(self):  # type: ignore[no-untyped-def]
        self.epoch += 1
        return iter(np.random.default_rng(self.epoch).permutation(12).tolist())


@pytest.mark.parametrize("num_epochs", [0, 1, 3])
@pytest.mark.parametrize("num_batches", [0, 2])
def test_a_sampler_that_counts_epochs_counts_on_when_it_is_resumed(num_epochs, num_batches):
    def counting() -> Loader:
        return make(make_source(DataLoader(Numbers(12), batch_size=3, sampler=Counting())))

    whole = counting()
    expected = [read(whole) for _ in range(num_epochs + 3)]

    stopped = counting()
    for _ in range(num_epochs):
        read(stopped)
    begun = iter(stopped) if num_batches else iter(())
    for _ in range(num_batches):
        next(begun)
        stopped._step.mark_stepped()
    state = stopped.state_dict()
    del begun

    resumed = counting()
    resumed.load_state_dict(state)
    rest = [read(resumed) for _ in range(3)]
    assert rest == [expected[num_epochs][num_batches:], *expected[num_epochs + 1 :]]


class Alternating(Sampler[int]):
    """Takes one half of the data in turn with the other, for `in_a_row` epochs each."""

    def __init__(self, in_a_row: int) -> None:
        self.in_a_row = in_a_row
        self.count = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self):  # type: ignore[no-untyped-def]
        begin = 6 * (self.count // self.in_a_row % 2)
        self.count += 1
        return iter(range(begin, begin + 6))


class Rotating(Sampler[int]):
    """Moves the indices of its list on by one place in every epoch."""

    def __init__(self) -> None:
        self.indices = list(range(3))

    def __len__(self) -> int:
        return 3

    def __iter__(self):  # type: ignore[no-untyped-def]
        self.indices.append(self.indices.pop(0))
        return iter(list(self.indices))


class Running(Sampler[int]):
    """Takes each epoch from a generator that is begun once."""

    def __init__(self) -> None:
        self.endless = itertools.cycle(range(5))

    def __len__(self) -> int:
        return 3

    def __iter__(self):  # type: ignore[no-untyped-def]
        return itertools.islice(self.endless, 3)


class RotatingVector(Rotating):
    """The same with a tensor, which it changes in place."""

    def __init__(self) -> None:
        self.indices = torch.arange(3)  # type: ignore[assignment]

    def __iter__(self):  # type: ignore[no-untyped-def]
        self.indices.copy_(self.indices.roll(1))  # type: ignore[attr-defined]
        return iter(self.indices.tolist())  # type: ignore[attr-defined]


class Uncopied(Rotating):
    def __copy__(self) -> Any:
        raise TypeError("there is one of it")


@pytest.mark.parametrize(
    "make_sampler",
    [lambda: Alternating(1), lambda: Alternating(2), Rotating, RotatingVector, Running, Uncopied],
)
@pytest.mark.parametrize("num_epochs", range(1, 6))
def test_a_sampler_whose_orders_come_back_goes_on_when_it_is_resumed(make_sampler, num_epochs):
    def looping() -> Loader:
        source = make_source(DataLoader(Numbers(12), batch_size=3, sampler=make_sampler()))
        assert source.fingerprint  # which `prepare` compares between the ranks
        return make(source)

    whole = looping()
    expected = [read(whole) for _ in range(num_epochs + 3)]
    stopped = looping()
    for _ in range(num_epochs):
        read(stopped)
    resumed = looping()
    resumed.load_state_dict(stopped.state_dict())
    assert [read(resumed) for _ in range(3)] == expected[num_epochs:]


def test_a_sampler_without_a_state_is_asked_for_one_epoch_of_many():
    asked = []

    class Drawing(SubsetRandomSampler):
        def __iter__(self):  # type: ignore[no-untyped-def]
            asked.append(1)
            return super().__iter__()

    source = make_source(DataLoader(Numbers(12), batch_size=3, sampler=Drawing(range(12))))
    crc = source.plan(0, 500).crc_of_order
    asked.clear()
    bring_sampler_to_epoch(source, 0, 500, crc)
    assert len(asked) == 1


def test_a_sampler_whose_state_is_out_of_sight_is_told_between_two_epochs():
    loader = make(make_source(DataLoader(Numbers(12), batch_size=3, sampler=Moving())))
    read(loader)
    read(loader)
    resumed = make(make_source(DataLoader(Numbers(12), batch_size=3, sampler=Moving())))
    with pytest.warns(LockstepWarning, match=r"the order of a Moving\n.*it gives epoch 1 another"):
        resumed.load_state_dict(loader.state_dict())


@pytest.mark.parametrize("as_sampler", [np.asarray, torch.tensor])
def test_an_array_of_indices_that_is_another_one_when_resumed_is_told(as_sampler):
    def make_with(indices: range) -> Loader:
        return make(make_source(DataLoader(Numbers(12), batch_size=3, sampler=as_sampler(indices))))

    loader = make_with(range(12))
    read(loader)
    with pytest.warns(LockstepWarning, match=r"resuming with the order of an? \w+\n"):
        make_with(range(11, -1, -1)).load_state_dict(loader.state_dict())
