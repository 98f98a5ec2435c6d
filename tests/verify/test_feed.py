"""Batches that one process is given as those of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader

from lockstep.errors import UsageError
from lockstep.verify.feed import BatchReader, BatchWriter, LoadedBatch, join

pytestmark = pytest.mark.unit


class Pair(NamedTuple):
    x: torch.Tensor
    names: list[str]


def test_batches_of_ranks_are_joined_in_their_order() -> None:
    one = {"pair": Pair(torch.zeros(2, 3), ["a", "b"]), "size": 2, "t": (torch.ones(2), "text")}
    other = {"pair": Pair(torch.ones(1, 3), ["c"]), "size": 2, "t": (torch.ones(1), "text")}
    both = join([one, other])
    assert both["pair"].x.tolist() == [[0.0] * 3, [0.0] * 3, [1.0] * 3]
    assert (both["pair"].names, both["size"]) == (["a", "b", "c"], 2)
    assert (both["t"][0].tolist(), both["t"][1]) == ([1.0] * 3, "text")


def test_batches_of_other_lengths_are_no_batch() -> None:
    with pytest.raises(UsageError, match=r"shapes \[2, 3\] and \[2, 4\]"):
        join([torch.zeros(2, 3), torch.zeros(2, 4)])


def test_a_pass_has_what_any_rank_had(tmp_path: Path) -> None:
    loaders = [DataLoader(range(8), batch_size=2), DataLoader(range(3))]
    for rank, batches in enumerate(([[0, 1], [4]], [[2, 3]])):
        writer = BatchWriter(tmp_path, rank)
        for loader in loaders:
            writer.add_loader(loader)
        assert [writer.begin_pass(loaders[1]), writer.begin_pass(loaders[0])] == ["1-1", "0-1"]
        for number, ids in enumerate(batches):
            writer.write("0-1", number, LoadedBatch(torch.tensor(ids), ids))
        writer.write_lengths()
    reader = BatchReader(tmp_path)
    other = [DataLoader(range(8)), DataLoader(range(3))]
    for loader in other:
        reader.add_loader(loader)
    found = [(fed.batch.tolist(), fed.ids) for fed in reader.batches(reader.begin_pass(other[0]))]
    assert found == [([0, 1, 2, 3], [0, 1, 2, 3]), ([4], [4])]
    assert (reader.length(other[0]), reader.length(other[1])) == (4, 3)
    assert list(reader.batches(reader.begin_pass(other[0]))) == []


def test_what_cannot_be_kept_is_said(tmp_path: Path) -> None:
    writer = BatchWriter(tmp_path, 0)
    with pytest.raises(UsageError, match="a batch cannot be kept"):
        writer.write("0-1", 0, LoadedBatch(lambda: None, None))


def test_lists_of_single_images_are_joined_image_by_image() -> None:
    def batch(*sizes: int) -> tuple[tuple[torch.Tensor, ...], tuple[dict[str, torch.Tensor], ...]]:
        images = tuple(torch.full((3, size, size), float(size)) for size in sizes)
        return images, tuple({"boxes": torch.ones(size - 4, 4)} for size in sizes)

    # Of two images and two targets, each rank has a tuple of two tuples of two.
    images, targets = join([batch(5, 6), batch(7, 8)])
    assert [len(image[0]) for image in images] == [5, 6, 7, 8]
    assert [len(target["boxes"]) for target in targets] == [1, 2, 3, 4]

    ids = [[0], [1, 2]]
    by_key = join([{"images": list(batch(5)[0])}, {"images": list(batch(6, 7)[0])}], ids)
    assert [len(image[0]) for image in by_key["images"]] == [5, 6, 7]
    dictionaries = join([[{"image": image}] for image in batch(5, 6)[0]], [[0], [1]])
    assert [len(each["image"][0]) for each in dictionaries] == [5, 6]


@pytest.mark.parametrize("size", [1, 3])
def test_lists_of_batches_are_joined_batch_by_batch(size: int) -> None:
    first, second, labels = torch.randn(6, 8, 7), torch.randn(6, 8, 5), torch.arange(6)
    parts = []
    for start in range(0, 6, size):
        rows = slice(start, start + size)
        parts.append(([first[rows], second[rows]], labels[rows]))

    joined_inputs, joined_labels = join(parts)
    assert [x.tolist() for x in joined_inputs] == [first.tolist(), second.tolist()]
    assert joined_labels.tolist() == labels.tolist()


def test_empty_lists_are_joined_to_an_empty_list() -> None:
    assert join([[], []]) == []
