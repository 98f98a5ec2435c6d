"""Data of the same length that are not those of the checkpoint."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    random_split,
)

import lockstep
from lockstep.batch import consistency
from lockstep.batch.data_identity import check_fingerprint, read_fingerprint
from lockstep.batch.fingerprint import Fingerprint
from lockstep.batch.loader import Loader
from lockstep.batch.source import make_source
from lockstep.errors import CheckpointError, LockstepWarning

pytestmark = pytest.mark.ranks

SIZE = 40
IMAGES = torch.randn(2 * SIZE, 5, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(2 * SIZE) % 3
ALL = TensorDataset(IMAGES, LABELS)


def half(seed: int) -> Subset[Any]:
    return random_split(ALL, [0.5, 0.5], torch.Generator().manual_seed(seed))[0]


def fold(held_out: int, folds: int = 10) -> list[Any]:
    """All but a tenth: most of the samples are at the same places as those of the next fold."""
    size = len(ALL) // folds
    kept = [n for n in range(len(ALL)) if n // size != held_out]
    return [ALL[n] for n in kept]


class Pictures(Dataset[Any]):
    """A dataset of the user's, with augmentation."""

    def __init__(self, first: int, *, brightness: float = 1.0, noise: str = "seeded") -> None:
        self.first = first
        self.brightness = brightness
        self.noise = noise

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = random.random() if self.noise == "seeded" else random.SystemRandom().random()
        image = self.brightness * IMAGES[self.first + index] + 0.1 * drawn
        if self.noise == "only":
            return {"image": image}
        return {"image": image, "label": int(LABELS[self.first + index])}


class Tokens(Pictures):
    """As a dataset of Hugging Face's: what `_fingerprint` stands for is not changed by a
    transform that is applied while reading.
    """

    _fingerprint = "5f2c"


class Broken(Pictures):
    def __getitem__(self, index: int) -> dict[str, Any]:
        raise OSError("not there")


def files(folder: str, first: int) -> list[str]:
    return [f"{folder}/{number:05}.jpg" for number in range(first, first + SIZE)]


def resumed(before: Any, now: Any, workers: int = 0) -> None:
    """What is found where a checkpoint of one dataset is resumed with another."""
    options: Any = {"num_workers": workers}
    if workers:
        options["multiprocessing_context"] = "fork"
    sources = [make_source(DataLoader(each, batch_size=8, **options)) for each in (before, now)]
    found = [read_fingerprint(source, 0) for source in sources]
    assert found[0] is not None
    assert found[1] is not None
    check_fingerprint(sources[1], Fingerprint.from_text(found[0].to_text()), found[1])


OTHER = {
    "random_split with another seed": (half(0), half(1)),
    "subsets": (Subset(ALL, range(SIZE)), Subset(ALL, range(SIZE, 2 * SIZE))),
    "tensors": (TensorDataset(IMAGES[:SIZE]), TensorDataset(IMAGES[SIZE:])),
    "lists": ([*range(SIZE)], [*range(SIZE, 2 * SIZE)]),
    "another order": ([*range(SIZE)], random.Random(0).sample(range(SIZE), SIZE)),
    "texts": ([f"line {n}" for n in range(9)], [f"line {n}" for n in range(9, 18)]),
    "names of files": (files("/data", 0), files("/data", SIZE)),
    "the next fold": (fold(3), fold(4)),
    "parts of another": (
        ConcatDataset([TensorDataset(IMAGES[:9]), TensorDataset(IMAGES[9:SIZE])]),
        ConcatDataset([TensorDataset(IMAGES[:9]), TensorDataset(IMAGES[SIZE + 9 :])]),
    ),
    "subsets of subsets": (
        Subset(half(0), range(8)),
        Subset(half(0), range(8, 16)),
    ),
    "a dataset of the user's": (Pictures(0), Pictures(SIZE)),
    "other fields": ([{"x": n} for n in range(5)], [{"y": n} for n in range(5)]),
}
SAME = {
    "itself": (half(0), half(0)),
    "built in another way": (ALL, Subset(ALL, range(2 * SIZE))),
    "augmented": (Pictures(0), Pictures(0)),
    "noise that no seed reaches": (Pictures(0, noise="unseeded"), Pictures(0, noise="unseeded")),
    "nothing but such noise": (Pictures(0, noise="only"), Pictures(0, noise="only")),
    "another folder": (files("/data", 0), files("/scratch/job7", 0)),
    "nothing can be read": (Broken(0), Broken(SIZE)),
    "nothing": ([], []),
}  # fmt: skip
CHANGED = {
    "brighter": (Pictures(0), Pictures(0, brightness=2.0)),
    "of Hugging Face's": (Tokens(0), Tokens(SIZE)),
}


@pytest.mark.parametrize("name", OTHER)
def test_other_data_of_the_same_length_are_refused(name):
    with pytest.raises(CheckpointError, match="not the data of the checkpoint"):
        resumed(*OTHER[name])


@pytest.mark.parametrize("name", SAME)
def test_the_same_data_are_taken(name):
    resumed(*SAME[name])


@pytest.mark.parametrize("name", CHANGED)
def test_what_may_be_the_same_data_is_a_warning(name):
    with pytest.warns(LockstepWarning, match="differ.*as in the checkpoint"):
        resumed(*CHANGED[name])


def test_a_worker_reads_the_samples_where_the_loader_has_some(monkeypatch):
    # On a busy machine the worker may have read only a part of the samples at the usual limit.
    monkeypatch.setattr(consistency, "READ_TIME_LIMIT_S", 600.0)
    with pytest.raises(CheckpointError, match="of 32 samples that were compared 32 differ: 0, "):
        resumed(Pictures(0), Pictures(SIZE), workers=1)


def test_the_samples_that_are_read_first_are_spread_over_the_dataset():
    found = read_fingerprint(make_source([*range(SIZE)], 8), 0)
    assert found is not None
    assert [*found.samples][:3] == [0, 16, 32]
    assert {0, SIZE - 1} < found.samples.keys()


class Stream(IterableDataset[int]):
    """Some numbers in a row."""

    def __init__(self, first: int = 0) -> None:
        self.first = first

    def __iter__(self) -> Iterator[int]:
        yield from range(self.first, self.first + SIZE)


class Seeking(Stream):
    def skip(self, n: int) -> list[int]:
        return list(self)[n:]


class Seeded(Stream):
    def __iter__(self) -> Iterator[int]:
        numbers = list(super().__iter__())
        random.shuffle(numbers)
        yield from numbers


class Reseeded(Stream):
    """Shuffled by a generator of its own, seeded when the program starts; here on all ranks alike,
    as else they differ from each other at once.
    """

    def __iter__(self) -> Iterator[int]:
        numbers = [*range(SIZE)]
        random.Random(self.first).shuffle(numbers)
        yield from numbers


class Noisy(Stream):
    """The same samples; what is drawn with them is another start's."""

    def __iter__(self) -> Iterator[Any]:
        noise = random.Random(self.first)
        for number in range(SIZE):
            yield number, torch.tensor([number + noise.random()])


def every_nth(start: int, step: int) -> Iterator[int]:
    return iter(range(start, SIZE, step))


def every_nth_of_others(start: int, step: int) -> Iterator[int]:
    return iter(range(SIZE + start, 2 * SIZE, step))


STREAMS: dict[str, tuple[Any, Any]] = {
    "another": (Stream(), Stream(SIZE)),
    "one that skips": (Seeking(), Seeking(SIZE)),
    "one that is asked for its part": (every_nth, every_nth_of_others),
    "shuffled by a generator with another seed": (Reseeded(1), Reseeded(2)),
    "the same": (Stream(), Stream()),
    "the same, shuffled by the global generators": (Seeded(), Seeded()),
    "the same, with other noise": (Noisy(1), Noisy(2)),
    "the same, which skips": (Seeking(), Seeking()),
    "the same, asked for its part": (every_nth, every_nth),
}


def loader_of(world: lockstep.World, data: Any) -> Loader:
    if isinstance(data, Stream):
        return world.loader(data, 8)
    return world.loader(Stream(), 8, shard=data)


def resume_streams() -> dict[str, str]:
    """What is said where a training goes on in the middle of an epoch, and after the epoch."""
    said: dict[str, str] = {}
    with lockstep.init(seed=3) as world:
        layer = torch.nn.Linear(1, 1)
        model, optimizer = world.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.0))
        for name, (before, now) in STREAMS.items():
            loader = loader_of(world, before)
            states = []
            for batch in loader:
                numbers = batch[0] if isinstance(batch, list) else batch
                world.backward(model(numbers.unsqueeze(1).float()).mean())
                optimizer.step()
                states.append(loader.state_dict())
            states.append(loader.state_dict())
            for state, steps in ((states[2], 2), (states[-1], 5)):
                resumed = loader_of(world, now)
                resumed.load_state_dict(state)
                assert resumed.state_dict() == state
                try:
                    assert len(list(resumed)) == steps
                except CheckpointError as error:
                    said[f"{name}, {steps} steps"] = error.found
    return said


def test_a_stream_that_begins_with_other_samples_is_refused_in_the_middle_of_an_epoch():
    expected = {f"{name}, 2 steps" for name in STREAMS if not name.startswith("the same")}
    found = resume_streams()
    assert found.keys() == expected
    assert all(text.startswith("sample 0 of this epoch is not") for text in found.values())


@pytest.mark.thorough
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_refuse_it(size):
    expected = {f"{name}, 2 steps" for name in STREAMS if not name.startswith("the same")}
    for found in run_ranks(resume_streams, size):
        assert found.keys() == expected
