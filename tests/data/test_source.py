from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from problems import tensors
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lockstep.batch.source import Source, make_source
from lockstep.errors import DataError

pytestmark = pytest.mark.unit

SIZE = 24
DATA = tensors(SIZE)


class Drawn(Sampler[int]):
    """An order from one of the three global streams."""

    def __init__(self, stream: str, length: int = SIZE) -> None:
        self.stream = stream
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self):  # type: ignore[no-untyped-def]
        if self.stream == "torch":
            return iter(torch.randperm(self.length).tolist())
        if self.stream == "numpy":
            return iter(np.random.permutation(self.length).tolist())
        return iter(random.sample(range(self.length), self.length))


class Wrapping(Sampler[int]):
    """Hands on another sampler's order; the cycle must not matter."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.sampler = self

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self.inner)


def source(batch_size: int = 5, dataset: Dataset[Any] = DATA, **options: Any) -> Source:
    return make_source(DataLoader(dataset, batch_size=batch_size, **options))


def batched(sampler: Any, batch_size: int = 5) -> Source:
    class Own(BatchSampler):
        pass

    return make_source(DataLoader(DATA, batch_sampler=Own(sampler, batch_size, False)))


def stir(seed: int) -> None:
    """The global streams of a rank after work of its own."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@pytest.mark.parametrize("stream", ["torch", "numpy", "random"])
@pytest.mark.parametrize("make", [lambda s: source(sampler=s), batched])
def test_a_sampler_gives_every_rank_the_same_order_whatever_it_draws_from(make, stream):
    given = make(Drawn(stream))
    orders = []
    for rank in range(2):
        stir(rank)
        orders.append(given.plan(3, 1).order.tolist())
        left = (torch.rand(()).item(), np.random.rand(), random.random())
        stir(rank)
        assert left == (torch.rand(()).item(), np.random.rand(), random.random())
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == list(range(SIZE))
    assert given.plan(3, 2).order.tolist() != orders[0]
    assert given.plan(4, 1).order.tolist() != orders[0]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


class Keeping(Sampler[int]):
    """Draws from a generator of its own, which moves on with every epoch."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def __len__(self) -> int:
        return SIZE

    def __iter__(self):  # type: ignore[no-untyped-def]
        order = list(range(SIZE))
        self.own.shuffle(order)
        return iter(order)


@pytest.mark.parametrize(
    "make",
    [
        lambda: source(sampler=Keeping(np.random.default_rng(1))),
        lambda: source(sampler=Keeping(np.random.Generator(np.random.MT19937()))),
        lambda: source(sampler=Keeping(np.random.RandomState(1))),
        lambda: source(sampler=Keeping(random.Random(1))),
        lambda: source(sampler=Wrapping(Keeping(np.random.default_rng()))),
        lambda: batched(Keeping(np.random.default_rng())),
        lambda: source(sampler=WeightedRandomSampler([1.0] * SIZE, SIZE, generator=generator())),
        lambda: source(sampler=SubsetRandomSampler(range(SIZE), generator=generator())),
        lambda: source(sampler=RandomSampler(DATA, replacement=True, generator=generator())),
        lambda: source(sampler=Wrapping(RandomSampler(DATA, generator=generator()))),
        lambda: batched(RandomSampler(DATA, generator=generator())),
        lambda: batched(Wrapping(RandomSampler(DATA, generator=generator()))),
    ],
)
def test_a_generator_of_the_samplers_own_does_not_break_resuming(make):
    """The order of an epoch is the same in a new process that goes through no epoch before it."""
    whole = make()
    epochs = [whole.plan(3, epoch).order.tolist() for epoch in range(3)]
    assert epochs[1] != epochs[2]
    assert make().plan(3, 2).order.tolist() == epochs[2]
    assert whole.plan(3, 2).order.tolist() == epochs[2]


class Counting(Sampler[int]):
    """Has another order in each epoch, and counts the epochs itself."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return SIZE

    def __iter__(self):  # type: ignore[no-untyped-def]
        self.epoch += 1
        return iter(np.random.default_rng(self.epoch).permutation(SIZE).tolist())


@pytest.mark.parametrize(
    "make",
    [
        lambda sampler: source(sampler=sampler),
        lambda sampler: source(sampler=Wrapping(sampler)),
        batched,
    ],
)
def test_the_first_order_of_a_sampler_that_counts_epochs_is_not_lost_to_the_fingerprint(make):
    sampler, first = Counting(), list(Counting())
    given = make(sampler)
    assert given.fingerprint == given.fingerprint
    assert sampler.epoch == 0
    assert given.plan(0, 0).order.tolist() == first


class Uncopied(Counting):
    def __copy__(self) -> Any:
        raise TypeError("there is one of it")


def test_a_sampler_that_cannot_be_copied_is_asked_itself():
    assert source(sampler=Uncopied()).fingerprint == source(sampler=Counting()).fingerprint


class Unseeded(np.random.PCG64):
    """A bit generator of somebody's own, which takes no seed."""

    def __init__(self) -> None:
        super().__init__(1)


@pytest.mark.parametrize(
    "own",
    [random.SystemRandom(), np.random.Generator(Unseeded()), np.random.RandomState(Unseeded())],
)
def test_a_generator_that_cannot_be_seeded_is_used_as_it_is(own):
    given = source(sampler=Keeping(own))
    assert sorted(given.plan(3, 0).order.tolist()) == list(range(SIZE))


def test_a_sampler_without_samples_is_still_seeded():
    own = generator()
    empty = Drawn("torch", 0)
    empty.own = own
    given = source(sampler=empty)
    given.plan(3, 0)
    seeded = own.initial_seed()
    given.plan(3, 1)
    assert own.initial_seed() != seeded


@pytest.mark.parametrize("kind", [SequentialSampler, RandomSampler])
def test_a_sampler_over_fewer_samples_than_the_dataset_is_the_users_order(kind):
    given = source(sampler=kind(range(7)))
    assert given.length == 7
    assert sorted(given.plan(3, 0).order.tolist()) == list(range(7))
    assert source(sampler=kind(DATA)).sampler is None


BASE: dict[str, Any] = {"batch_size": 5, "shuffle": True, "drop_last": False}


def test_the_fingerprint_depends_on_nothing_of_this_process():
    subset = [3, 1, 2]
    assert source(**BASE).fingerprint == source(**BASE).fingerprint
    for indices in (np.array(subset), torch.tensor(subset), tuple(subset)):
        found = source(dataset=Subset(DATA, indices)).fingerprint
        assert found == source(dataset=Subset(DATA, subset)).fingerprint
    stir(1)
    first = source(sampler=Drawn("numpy")).fingerprint
    stir(2)
    state = torch.get_rng_state()
    assert source(sampler=Drawn("numpy")).fingerprint == first
    assert torch.equal(torch.get_rng_state(), state)
    assert 0 <= first < 1 << 32


def test_the_fingerprint_tells_all_of_these_apart():
    whole = [
        source(**BASE),
        source(**{**BASE, "batch_size": 6}),
        source(**{**BASE, "shuffle": False}),
        source(**{**BASE, "drop_last": True}),
        source(**BASE, dataset=tensors(23)),
        source(**BASE, dataset=Subset(DATA, range(SIZE))),
        source(**BASE, dataset=Subset(DATA, range(SIZE - 1, -1, -1))),
        source(**BASE, dataset=Subset(Subset(DATA, range(SIZE)), range(SIZE))),
        source(**BASE, dataset=Subset(Subset(DATA, range(SIZE - 1, -1, -1)), range(SIZE))),
        source(**BASE, dataset=ConcatDataset([Subset(DATA, range(12)), Subset(DATA, range(12))])),
        source(**BASE, dataset=ConcatDataset([Subset(DATA, range(12))] + 12 * [
            Subset(DATA, [0])])),
        source(sampler=SubsetRandomSampler(range(SIZE))),
        source(sampler=Drawn("numpy")),
        source(sampler=SequentialSampler(tensors(SIZE - 1))),
        batched(SequentialSampler(DATA)),
        batched(SequentialSampler(DATA), 6),
    ]  # fmt: skip
    found = [each.fingerprint for each in whole]
    assert len(set(found)) == len(found)


def test_the_fingerprint_sees_where_the_users_batches_end():
    class Own(BatchSampler):
        def __iter__(self):  # type: ignore[no-untyped-def]
            yield from self.sampler

        def __len__(self) -> int:
            return 2

    one, other = (
        make_source(DataLoader(DATA, batch_sampler=Own(batches, 2, False)))
        for batches in ([[0], [1, 2]], [[0, 1], [2]])
    )
    assert one.plan(3, 0).order.tolist() == other.plan(3, 0).order.tolist()
    assert one.fingerprint != other.fingerprint


def test_a_subset_by_name_has_a_fingerprint():
    class ByName(Dataset[int]):
        def __getitem__(self, name: Any) -> int:
            return len(name)

    def of(*names: Any) -> int:
        return source(dataset=Subset(ByName(), names)).fingerprint  # type: ignore[arg-type]

    assert of("a", "b") == of("a", "b") != of("b", "a")
    assert of(("a",), ("b", "c")) == of(("a",), ("b", "c"))
    assert isinstance(of(object(), object()), int)
    assert of(object(), object()) == of(object(), object())


def plain(**options: Any) -> Source:
    return make_source(DATA, 4, shuffle=True, options=options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_worker": 4}, "num_worker=.*did you mean num_workers\\?"),
        ({"prefetch": 4, "num_workers": 1}, "prefetch=.*did you mean prefetch_factor\\?"),
        ({"shufle": True}, "shufle=.*did you mean shuffle\\?"),
        ({"micro_batchs": 2}, "micro_batchs=.*did you mean micro_batch_size\\?"),
        ({"zzz": 2}, "zzz=.*use one of num_workers, prefetch_factor"),
        ({"sampler": SequentialSampler(DATA)}, "sampler=.*give a DataLoader instead"),
        ({"batch_sampler": None}, "batch_sampler=.*give a DataLoader instead"),
        ({"generator": torch.Generator()}, "generator=.*give a DataLoader instead"),
        ({"prefetch_factor": 2}, "prefetch_factor=2.*torch refuses.*multiprocessing"),
        ({"persistent_workers": True}, "persistent_workers=True.*torch refuses"),
        ({"multiprocessing_context": "spawn"}, "multiprocessing_context.*torch refuses"),
        ({"num_workers": 1, "multiprocessing_context": "x"}, "torch refuses.*start method"),
        ({"timeout": -1}, "timeout=-1.*torch refuses"),
        ({"num_workers": None}, "num_workers=None.*torch refuses"),
        ({"num_workers": -1}, "num_workers=-1.*whole number"),
        ({"num_workers": 1.5}, "num_workers=1.5.*whole number"),
        ({"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor=0.*at least 1"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused_at_once(options, text):
    with pytest.raises(DataError, match=f"(?s){text}"):
        plain(**options)


def test_options_of_reading_are_kept():
    options = {
        "num_workers": 2,
        "prefetch_factor": 3,
        "persistent_workers": True,
        "timeout": 5,
        "worker_init_fn": stir,
        "multiprocessing_context": "spawn",
        "pin_memory": False,
    }
    kept = plain(**options).options
    assert kept.pop("multiprocessing_context").get_start_method() == "spawn"
    assert kept == {name: options[name] for name in kept}
    assert len(kept) == len(options) - 1
    assert plain(num_workers=0, prefetch_factor=None).options["prefetch_factor"] is None
    plain(num_workers=1000)  # torch's warning comes when the workers are started, not here


class StreamingDataset(IterableDataset[int]):
    """Stands for MosaicML's, which is not installed here; `make real` tries the real one."""

    __module__ = "streaming.base.dataset"

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(range(SIZE))


class Around(IterableDataset[int]):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self.inner)


@pytest.mark.parametrize("data", [StreamingDataset(), Around(StreamingDataset())])
def test_several_workers_are_refused_for_a_stream_whose_workers_wait_for_each_other(data):
    with pytest.raises(DataError, match="read it by index"):
        make_source(data, 4, options={"num_workers": 2})
    for workers in (0, 1):
        assert make_source(data, 4, options={"num_workers": workers}).batch_size == 4
    assert make_source(Around([1, 2]), 4, options={"num_workers": 2}).batch_size == 4


def test_a_batch_sampler_with_an_empty_batch_is_refused():
    """It would make an optimizer step without samples, with a loss that is NaN."""
    with pytest.raises(DataError, match=r"batch 1 of .* in epoch 0\n.*no samples"):
        make_source(DataLoader(DATA, batch_sampler=[[0], [], [1]])).plan(0, 0)


@pytest.mark.parametrize(
    "options",
    [
        *({"sampler": [(0, 8), (1, 16)]}, {"sampler": ["7", "8"]}, {"sampler": [0.0, 1.5]}),
        *({"batch_sampler": [[(0, 8)]]}, {"batch_sampler": [torch.ones(2, 2)]}),
        {"batch_sampler": [3, 4]},
    ],
    ids=str,
)
def test_what_is_no_index_is_refused(options):
    with pytest.raises(DataError, match=r"the order of .*\n.*cannot be read as indices"):
        make_source(DataLoader(DATA, **options)).plan(0, 0)


@pytest.mark.parametrize("option", ["sampler", "batch_sampler"])
@pytest.mark.parametrize("num_items", [0, 1])
@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_an_error_of_the_users_sampler_itself_stays_what_it_is(option, num_items, error):
    class Failing(Sampler[Any]):
        def __len__(self) -> int:
            return 2

        def __iter__(self):  # type: ignore[no-untyped-def]
            yield from [0 if option == "sampler" else [0]] * num_items
            raise error("of the sampler")

    with pytest.raises(error, match=r"^of the sampler$"):
        make_source(DataLoader(DATA, **{option: Failing()})).plan(0, 0)


def test_an_error_before_the_users_sampler_yields_stays_what_it_is():
    class Failing(Sampler[int]):
        def __len__(self) -> int:
            return 2

        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter(random.sample(range(3), None))  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="NoneType"):
        make_source(DataLoader(DATA, sampler=Failing())).plan(0, 0)


@pytest.mark.parametrize("sampler", [[0, "7"], [0, 1.5], [0, 2**70]], ids=str)
def test_a_later_item_that_is_no_index_is_refused(sampler):
    with pytest.raises(DataError, match=r"the order of .*\n.*cannot be read as indices"):
        make_source(DataLoader(DATA, sampler=sampler)).plan(0, 0)


def test_indices_may_be_of_any_kind_of_integer():
    batches = [torch.tensor([3, 1]), np.array([2]), [torch.tensor(0), np.int32(4)], iter([5])]
    plan = make_source(DataLoader(DATA, batch_sampler=batches)).plan(0, 0)
    assert [batch.tolist() for batch in plan.batches()] == [[3, 1], [2], [0, 4], [5]]
