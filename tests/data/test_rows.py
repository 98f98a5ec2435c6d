"""Batches of other numbers of rows than samples: the parts weigh by the rows that came."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import difference, mean_loss, mlp, tensors as samples_of, weights
from ranks import run_ranks
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

import lockstep
from lockstep.batch.rows import RowCounter

pytestmark = pytest.mark.ranks

UNREADABLE = {1, 2, 9, 12, 13}


class Files(Dataset[Any]):
    """Samples of which some cannot be read."""

    def __init__(self, size: int = 16) -> None:
        self.data = samples_of(size)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return None if index in UNREADABLE else self.data[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        files = Files()
        return (files[index] for index in range(len(files)))


def readable(samples: list[Any]) -> Any:
    """Leaves samples out; None where nothing is left."""
    left = [sample for sample in samples if sample is not None]
    return default_collate(left) if left else None


def empty_batch(samples: list[Any]) -> Any:
    """Leaves samples out; tensors of shape (0, *) where nothing is left."""
    batch = readable(samples)
    if batch is None:
        x, y = samples_of(1).tensors
        return [x[:0], y[:0]]
    return batch


def two_views(samples: list[Any]) -> Any:
    """Makes two rows of every second sample."""
    left = [sample for sample in samples if sample is not None]
    if not left:
        return None
    return default_collate(left + left[::2])


def as_dict(samples: list[Any]) -> Any:
    batch = readable(samples)
    return None if batch is None else {"x": batch[0], "y": batch[1], "classes": torch.zeros(16)}


Collate = Callable[[list[Any]], Any]
# Of each global batch all ranks together must give the rows that one process gives.
LEAVES_OUT: dict[str, tuple[Collate, dict[str, Any]]] = {
    "None": (readable, {}),
    "shape (0, *)": (empty_batch, {}),
    "pieces": (readable, {"micro_batch_size": 1}),
}


def train(world: lockstep.World, data: Any, collate: Collate, **options: Any) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    model, optimizer = world.prepare(model, optimizer)
    loader = world.loader(data, 4, collate_fn=collate, **options)
    losses, logged = [], []
    for _ in range(2):
        for batch in world.progress(loader):
            loss = mean_loss(model, batch)
            world.backward(loss)
            world.log(loss=loss)
            if (of_all := world.loss()) is not None:
                losses.append(of_all)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            seen = 0
            for batch in world.progress(loader):
                if batch is not None:
                    seen += len(batch[0])
                    world.log(loss=mean_loss(model, batch))
            logged.append(world.sum(seen))
    return weights(model), losses, logged


def all_that_leave_out() -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as told, lockstep.init() as world:
        warnings.simplefilter("always")
        found = {
            name: train(world, Files(), collate, **options)
            for name, (collate, options) in LEAVES_OUT.items()
        }
        found["stream"] = train(world, Stream(), readable)
        found["told"] = [str(each.message) for each in told if "rows" in str(each.message)]
        return found


def plain(collate: Collate) -> Any:
    """The same in plain torch."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for _ in range(2):
        for batch in DataLoader(Files(), 4, collate_fn=collate):
            loss = mean_loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return weights(model), losses


@pytest.mark.parametrize(
    "size",
    [pytest.param(1, marks=pytest.mark.thorough), pytest.param(2, marks=pytest.mark.thorough), 3],
)
def test_parts_weigh_by_the_rows_that_came(size):
    expected, expected_losses = plain(readable)
    for rank, found in enumerate(run_ranks(all_that_leave_out, size)):
        told = found.pop("told")
        assert len(told) == (len(found) if rank == 0 else 0)
        for name, (trained, losses, seen) in found.items():
            assert losses == pytest.approx(expected_losses), name
            assert difference(expected, trained) < 1e-12, name
            assert seen == [11, 11], name


def test_what_a_batch_shows():
    def count(batch: Any, planned: int, *before: tuple[Any, int]) -> int | None:
        counter = RowCounter()
        for earlier, of in before:
            counter.count(earlier, of)
        return counter.count(batch, planned)

    def of(*shape: int) -> Tensor:
        return torch.zeros(*shape)

    assert count([of(4, 6), of(4)], 4) == 4
    assert count([of(3, 6), of(3)], 4) == 3
    assert count([of(3, 4), of(3)], 4) == 3
    assert count({"x": of(9, 6), "y": of(9)}, 4) == 9
    assert count([of(0, 1)], 1) == 0
    assert count([of(1, 6), of(1, 6)], 2) is None  # two fields, or two samples of one row
    assert count(([of(3, 5), of(3, 5)], [0, 1]), 2) == 2
    assert count(None, 4) == 0
    assert count([], 4) == 0
    assert count("text", 4) == 4
    assert count((["a", "b", "c"], of(3, 5)), 4) == 3
    # Time first, with lengths and without.
    assert count([of(7, 4), of(4)], 4) == 4
    assert count({"source": of(7, 4), "target": of(9, 4)}, 4) == 4
    assert count(of(7, 4), 4) is None
    assert count(of(3, 4), 4, (of(5, 4), 5)) == 3
    # Graphs: nodes, edges and graphs. Packed: one row. A list of images of several sizes.
    assert count({"x": of(20, 3), "edges": of(2, 50), "y": of(4)}, 4) == 4
    assert count({"x": of(20, 3), "edges": of(2, 50)}, 4) is None
    assert count([of(1, 30), of(1, 30)], 4) == 1
    assert count(([of(3, 5, 6), of(3, 7, 8)], [{"boxes": of(1, 4)}, {"boxes": of(5, 4)}]), 2) == 2


def only_readable(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if sample is not None])


def test_a_collate_function_that_cannot_return_an_empty_batch():
    with lockstep.init() as world:
        loader = world.loader(Files(), 1, collate_fn=only_readable)
        with pytest.raises(IndexError) as failed:
            list(loader)
    assert "let it return None" in failed.value.__notes__[0]
