"""Streams: the same global batches on any number of ranks and workers, to the end and after a stop.

Samples are texts of what was drawn for them, so a batch tells which samples it holds and how they
were augmented.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plans import plan_of
from problems import difference, mlp, tensors, weights
from ranks import run_ranks
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import lockstep
from lockstep.batch.loader import Loader
from lockstep.batch.make_loader import make_loader
from lockstep.batch.source import make_source
from lockstep.distributed.collectives import Collectives
from lockstep.errors import (
    CheckpointError,
    DataError,
    LengthUnknownError,
    RanksDifferError,
    SettingError,
    UsageError,
)
from lockstep.machine.topology import Topology
from lockstep.session.step import Step

pytestmark = pytest.mark.ranks

LENGTH, BATCH = 23, 6
FORKED = {"multiprocessing_context": "fork"}
"""For loader workers: another way of starting them leaves a process of its own behind."""


CPU = torch.device("cpu")


class Numbers(IterableDataset[int]):
    """0 to `length` - 1."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        yield from range(self.length)


class Shuffled(IterableDataset[float]):
    """In an order of its own each time, with noise, from all three random streams."""

    def __iter__(self) -> Iterator[float]:
        for number in torch.randperm(LENGTH).tolist():
            yield number + 0.3 * random.random() + 0.3 * float(np.random.rand())


class SplitByWorkers(Numbers):
    """As torch's documentation says that a stream should be written."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(self.length)[
            0 if info is None else info.id :: info.num_workers if info else 1
        ]


class Skips(Numbers):
    """Need not read what comes before."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[int] = []

    def skip(self, n: int) -> list[int]:
        self.begun.append(n)
        return list(range(n, LENGTH))

    def __iter__(self) -> Iterator[int]:
        self.begun.append(0)
        return super().__iter__()


class BeginsAgain(IterableDataset[int]):
    """Is its own iterator, and `iter` takes it back to its first sample."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length
        self.following = 0

    def __iter__(self) -> BeginsAgain:
        self.following = 0
        return self

    def __next__(self) -> int:
        if self.following == self.length:
            raise StopIteration
        self.following += 1
        return self.following - 1


class Behind(Numbers):
    """Hands on the iterator of another stream, as a wrapper does that changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = BeginsAgain()

    def __iter__(self) -> BeginsAgain:  # type: ignore[override]
        return iter(self.inner)


class Once(BeginsAgain):
    """Goes on where it was, whoever calls `iter`."""

    def __iter__(self) -> Once:
        return self


class Hub(Numbers):
    """As a stream of Hugging Face's `datasets`: files in another order in every epoch, which are
    divided among loader workers; what has been skipped to has the order of epoch 0 (5.2.0).
    """

    def __init__(self, begin: int = 0) -> None:
        super().__init__()
        self.begin, self.epoch = begin, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def skip(self, n: int) -> Hub:
        return Hub(self.begin + n)

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        files = [list(range(i, min(i + 4, LENGTH))) for i in range(0, LENGTH, 4)]
        files = files[self.epoch % 3 :] + files[: self.epoch % 3]
        files = files if info is None else files[info.id :: info.num_workers]
        yield from itertools.islice(itertools.chain(*files), self.begin, None)


class SplitByRank(Numbers):
    """Gives each rank every n-th sample, as plain DDP needs it; the ranks come to differ."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size

    def __iter__(self) -> Iterator[int]:
        yield from range(self.rank, self.length, self.size)


def noisy(sample: float) -> float:
    return round(sample + 0.1 * float(torch.rand(())) + 0.1 * random.random(), 9)


def every_nth(opened: list[int], start: int, step: int) -> Iterator[int]:
    """What `shard=` is given: a source that can seek."""
    opened.append(start)
    return iter(range(start, LENGTH, step))


def make(data: Any, batch_size: int | None = None, **options: Any) -> Loader:
    """A loader on one process."""
    names = ("micro_batch_size", "shares", "sample_rng", "open_size")
    own = {name: options.pop(name) for name in names if name in options}
    collectives, source = Collectives(Topology(), CPU), make_source(data, batch_size, **options)
    plan = plan_of(source, collectives, own, open_size=own.pop("open_size", False))
    return make_loader(source, plan=plan, seed=3, collectives=collectives, step=Step(), **own)


def read(loader: Loader) -> list[list[Any]]:
    return [batch.tolist() for batch in loader]


def handed(world: lockstep.World, loader: Loader) -> list[list[Any]]:
    """One training pass: the samples of each global batch, gathered from all ranks."""
    batches: list[list[Any]] = []
    counts = []
    for batch in loader:
        now = loader.current
        if now.first:
            batches.append([])
            counts.append(now.global_samples)
        batches[-1] += batch.tolist()
    everywhere = [eval(text) for text in world._run.collectives.exchange(repr(batches))]
    joined = [sorted(sum(parts, [])) for parts in zip(*everywhere, strict=True)]
    assert [len(batch) for batch in joined] == counts
    return joined


def full(length: int = LENGTH) -> list[list[int]]:
    return [list(range(length))[i : i + BATCH] for i in range(0, length, BATCH)]


def cases() -> dict[str, Any]:
    world = lockstep.init(seed=3)
    size, rank = world.size, world.rank
    found: dict[str, Any] = {}
    with world:
        handed_of = partial(handed, world)
        for workers in (0, 2):
            options = FORKED | {"num_workers": workers} if workers else {}
            name = f"{workers} workers"
            plain = world.prepare(DataLoader(SplitByWorkers(), batch_size=BATCH, **options))
            found[f"numbers, {name}"] = [handed_of(plain), handed_of(plain)]
            noise = world.loader(
                Shuffled(), BATCH, transform=noisy, persistent_workers=workers > 0,
                **options,
            )  # fmt: skip
            found[f"noise, {name}"] = [handed_of(noise), handed_of(noise)]
            hub = world.prepare(DataLoader(Hub(), batch_size=BATCH, **options))
            found[f"hub, {name}"] = [handed_of(hub), handed_of(hub)]
            opened: list[int] = []
            seeks = world.loader(Numbers(), BATCH, shard=partial(every_nth, opened), **options)
            found[f"seeks, {name}"] = [handed_of(seeks)]
        assert opened == []  # in the workers
        seeks = world.loader(Numbers(), 4, micro_batch_size=1, shard=partial(every_nth, opened),
                             drop_last=True)  # fmt: skip
        found["seeks, dropped"] = handed_of(seeks)
        assert opened in ([rank], [rank, 0])  # once, and where a sample is needed to empty it
        own = world.loader(SplitByRank(rank, size), BATCH, shard=False)
        found["own"] = sorted(sum(handed_of(own), []))
        found["fewer than ranks"] = handed_of(world.loader(Numbers(1), BATCH))
        for workers in (0, 2):
            options = FORKED | {"num_workers": workers} if workers else {}
            # On three ranks the last one has no sample of any global batch.
            small = world.loader(Behind(), 2, **options)
            found[f"begins again, {workers} workers"] = [handed_of(small), handed_of(small)]
        found["dropped"] = handed_of(
            world.loader(Numbers(), BATCH, drop_last=True, micro_batch_size=2)
        )
        found["shares"] = handed_of(world.loader(Numbers(), BATCH, shares=range(1, size + 1)))
        shuffled = world.loader(Shuffled(), BATCH)
        found["shuffled"] = [handed_of(shuffled), handed_of(shuffled)]
        found["resumed"] = resumed(handed_of, world)
        found["evaluated"] = evaluated(world)
    for thread in threading.enumerate():  # of the queues to loader workers, which have ended
        if thread.name == "QueueFeederThread":
            thread.join()
    return found


def resumed(handed_of: Any, world: lockstep.World) -> list[Any]:
    """From the third global batch of the second epoch on."""
    found = []
    skips = Skips()
    for data, shard in (
        (Shuffled(), None), (Hub(), None), (skips, None), (Numbers(), partial(every_nth, []))
    ):  # fmt: skip
        loader = world.loader(data, BATCH, shard=shard)
        loader.load_state_dict(loader.state_dict() | {"epoch": 1, "step": 2})
        found.append(handed_of(loader))
    assert skips.begun == [2 * BATCH]
    return found


def evaluated(world: lockstep.World) -> list[Any]:
    found = []
    for options in ({}, {"shard": partial(every_nth, [])}, FORKED | {"num_workers": 1}):
        loader = world.loader(Numbers(), BATCH, **options)
        with torch.no_grad():
            mine = sum(read(loader), [])
        found.append(
            sorted(sum((eval(t) for t in world._run.collectives.exchange(repr(mine))), []))
        )
    return found


@pytest.fixture(scope="module")
def on_one() -> dict[str, Any]:
    return cases()


def test_one_process_reads_the_stream_in_its_order(on_one):
    assert on_one["numbers, 0 workers"] == [full(), full()]
    assert on_one["seeks, dropped"] == [list(range(i, i + 4)) for i in range(0, 20, 4)]
    assert on_one["dropped"] == full()[:-1]
    pairs = [[*range(i, min(i + 2, LENGTH))] for i in range(0, LENGTH, 2)]
    assert on_one["begins again, 0 workers"] == [pairs, pairs]
    assert on_one["begins again, 2 workers"] == [pairs, pairs]
    assert on_one["own"] == list(range(LENGTH))
    first, second = on_one["noise, 0 workers"]
    assert first != second
    assert sorted(int(sample) for sample in sum(first, [])) == list(range(LENGTH))
    noise, hub, *numbers = on_one["resumed"]
    assert numbers == [full()[2:]] * 2
    assert noise == on_one["shuffled"][1][2:]
    assert hub == on_one["hub, 0 workers"][1][2:]
    assert on_one["hub, 0 workers"][0] == full() != on_one["hub, 0 workers"][1]
    assert on_one["evaluated"] == [list(range(LENGTH))] * 3


def test_the_global_batches_are_the_same_on_any_number_of_ranks_and_workers(on_one):
    for name in ("numbers", "noise", "hub", "seeks"):
        assert on_one[f"{name}, 2 workers"] == on_one[f"{name}, 0 workers"]
    for found in run_ranks(cases, 3):
        assert found == on_one


@pytest.mark.parametrize("data", [BeginsAgain(), Behind()])
def test_an_iterator_that_begins_again_when_iter_is_called_is_advanced_with_next(data):
    loader = make(data, BATCH)
    assert read(loader) == full() == read(loader)
    position = loader.state_dict() | {"step": 2}
    loader.load_state_dict(position)
    assert read(loader) == full()[2:]
    # In the middle of a pass others read the stream from its beginning.
    batches = []
    for batch in loader:
        batches.append(batch.tolist())
        loader.example()
        with torch.no_grad():
            next(iter(loader))
    assert batches == full()


@pytest.mark.parametrize("data", [Once(), [*range(LENGTH)].__iter__(), Numbers().__iter__()])
def test_what_can_be_read_once_is_refused_in_its_second_pass_at_the_latest(data):
    with pytest.raises(DataError, match="can be read once"):
        loader = make(data, BATCH)
        assert read(loader) == full()
        read(loader)


class OwnOrder(Numbers):
    """Shuffled by a generator that nobody has seeded, as webdataset's `.shuffle` is."""

    def __iter__(self) -> Iterator[int]:
        yield from random.Random().sample(range(self.length), self.length)


class OwnNoise(Numbers):
    """Always the same samples in the same order; with noise of its own."""

    def __iter__(self) -> Iterator[Any]:
        noise = random.Random()
        for number in range(self.length):
            yield number, torch.tensor([number + noise.random()])


class FromPlace(Numbers):
    """Has other samples from a place on in one worker, or no more."""

    def __init__(self, length: int, place: int, more: bool) -> None:
        super().__init__(length)
        self.place, self.more = place, more

    def __iter__(self) -> Iterator[int]:
        yield from range(self.place)
        if self.more:
            yield from range(-self.place, -self.length, -1)


def in_worker_1(worker: int) -> None:
    """Changes the stream that is read in the second of two workers."""
    info = get_worker_info()
    assert info is not None
    if worker == 0:
        info.dataset.place = info.dataset.length


def with_workers(data: Any, **options: Any) -> Loader:
    return make(DataLoader(data, batch_size=BATCH, **FORKED, **{"num_workers": 2, **options}))


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (OwnOrder(), "worker 1 and worker 0, global batch 0"),
        (FromPlace(700, 602, more=True), "worker 1 and worker 0, global batch 100"),
        (FromPlace(LENGTH, 17, more=False), "gave worker 0 23 samples, and worker 1 17"),
    ],
)
def test_loader_workers_that_read_other_streams_are_told(data, found):
    options = {"worker_init_fn": in_worker_1} if isinstance(data, FromPlace) else {}
    for context in (torch.enable_grad(), torch.no_grad()):
        with context, pytest.raises(DataError, match=found) as caught:
            read(with_workers(data, **options))
        assert caught.value.code == "LS109"


def test_workers_may_draw_noise_of_their_own_and_one_worker_an_order_of_its_own():
    batches = list(with_workers(OwnNoise()))
    assert [batch[0].tolist() for batch in batches] == full()
    assert sorted(sum(read(with_workers(OwnOrder(), num_workers=1)), [])) == [*range(LENGTH)]


class Rows(IterableDataset[Any]):
    """Inputs and labels."""

    def __iter__(self) -> Iterator[Any]:
        yield from tensors(LENGTH)


def trained(options: dict[str, Any], stream: bool = True) -> dict[str, torch.Tensor]:
    with lockstep.init(seed=3) as world:
        model = mlp(batch_norm="micro_batch_size" not in options)  # which is looked for in pieces
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        loader = world.loader(Rows() if stream else tensors(LENGTH), 8, **options)
        for _ in range(2):
            for x, y in loader:
                world.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        return weights(model)


def trained_in_many_ways() -> list[dict[str, torch.Tensor]]:
    return [trained(options) for options in WAYS]


WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"weight": lambda batch: len(batch[1])},
    {"micro_batch_size": "auto"},
    {"shard": lambda start, step: itertools.islice(tensors(LENGTH), start, None, step)},
)


def test_the_weights_are_those_of_data_with_an_index():
    expected = [trained(options, stream=False) for options in ({}, {}, {"micro_batch_size": 8}, {})]
    for found in run_ranks(trained_in_many_ways, 2):
        same = [difference(a, b) < 1e-9 for a, b in zip(found, expected, strict=True)]
        assert same == [True] * len(WAYS)


class Unlike(Numbers):
    """Another stream on another rank, from a sample on."""

    def __init__(self, rank: int, first: int, length: int = LENGTH) -> None:
        super().__init__(length)
        self.rank, self.first = rank, first

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            yield -self.rank - number if self.rank and number >= self.first else number


def wrong_streams() -> list[str]:
    said = []
    with lockstep.init(seed=3) as world:
        rank, size = world.rank, world.size
        for data, options in (
            (SplitByRank(rank, size), {}),
            (Unlike(rank, 15), {"batch_size": 20}),
            (Unlike(rank, 602), {}),
            (Numbers(LENGTH - rank), {}),
            (Numbers(LENGTH - 23 * rank), {}),
            (Numbers(), {"shard": False}),
            (Numbers(), {"shard": lambda start, step: iter(range(LENGTH))}),
        ):
            data.length = 700 if getattr(data, "first", 0) > LENGTH else data.length
            loader = world.loader(data, **({"batch_size": BATCH} | options))
            with pytest.raises(RanksDifferError) as caught:
                list(loader)
            said.append(f"{caught.value.code}: {caught.value.found}")
    return said


def test_ranks_that_read_other_streams_are_told():
    for said in run_ranks(wrong_streams, 2):
        assert said == [
            "LS109: sample 0 on rank 1 differs from sample 0 on rank 0",
            "LS109: sample 15 on rank 1 differs from sample 15 on rank 0",
            "LS109: sample 602 on rank 1 differs from sample 602 on rank 0",
            "LS104: it ends after 23 samples on rank 0, after 22 samples on rank 1",
            "LS104: it ends not yet on rank 0, after 0 samples on rank 1",
            "LS108: ranks 0, 1 were given the same samples (epoch 0, from sample 0 on)",
            "LS108: ranks 0, 1 were given the same samples (epoch 0, from sample 0 on)",
        ]


def test_a_length_that_is_not_known():
    loader = make(Numbers(), BATCH)
    with pytest.raises(LengthUnknownError, match="known only at its end"):
        len(loader)
    assert loader.steps is None
    assert len(list(loader)) == 4  # list() asks for the length and does without


def test_a_length_that_the_stream_tells():
    class Told(Numbers):
        def __len__(self) -> int:
            return self.length

    loader = make(Told(), BATCH, micro_batch_size=4)
    assert loader.steps == 4
    assert len(loader) == len(list(loader)) == 8
    assert "6 of 23" in loader.choice(0).value


def test_without_sample_rng_the_random_streams_are_left_alone():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    drawn = read(make(Shuffled(), BATCH, sample_rng=False, transform=noisy))
    assert not torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(0)
    assert read(make(Shuffled(), BATCH, transform=noisy)) != drawn
    assert torch.equal(torch.get_rng_state(), state)


def test_a_position_is_refused_where_it_means_other_samples():
    rows = make(tensors(LENGTH), BATCH)
    stream = make(Numbers(), BATCH)
    with pytest.raises(CheckpointError, match="the data of the checkpoint"):
        stream.load_state_dict(rows.state_dict())
    with pytest.raises(CheckpointError, match="length"):
        rows.load_state_dict(stream.state_dict())
    with pytest.raises(CheckpointError, match="ranks"):
        stream.load_state_dict(make(Numbers(), BATCH, shard=False).state_dict())
    with pytest.raises(CheckpointError, match="batch size"):
        stream.load_state_dict(make(Numbers(), 7).state_dict())


@pytest.mark.parametrize(
    ("error", "text", "data", "options"),
    [
        (UsageError, "inside its __iter__", Numbers(), {"shuffle": True}),
        (UsageError, "neither a function", Numbers(), {"shard": 3}),
        (UsageError, "map-style dataset", tensors(LENGTH), {"transform": noisy}),
        (DataError, "is an iterator", iter(Numbers()), {}),
        (DataError, "beside a dataset", Numbers(), {"options": {"sampler": range(3)}}),
        (DataError, "at least 1", Numbers(), {"batch_size": 0}),
        (SettingError, "leave shard out", Numbers(), {"shard": False, "open_size": True}),
        (SettingError, "all parts are equal", Numbers(), {"shard": every_nth, "shares": (1, 2)}),
    ],
)
def test_streams_that_cannot_be_read(error, text, data, options):
    with pytest.raises(error, match=text):
        make(data, **({"batch_size": BATCH} | options))


def test_a_stream_without_samples_has_no_empty_batch():
    loader = make(Numbers(0), BATCH)
    assert read(loader) == []
    with pytest.raises(DataError, match="no samples for this rank"):
        loader.example()
