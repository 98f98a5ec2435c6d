"""What of a sample is compared between ranks."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from lockstep.batch.digest import digest
from lockstep.batch.digest_matching import Match, digests_match, match_samples

pytestmark = pytest.mark.unit

IMAGE = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(0))


class Pair(NamedTuple):
    image: Any
    label: int


class Picture:
    """What PIL's images have."""

    def __init__(self, array: Any) -> None:
        self.array, self.__array_interface__ = array, array.__array_interface__


def same(one: Any, other: Any) -> bool:
    """As it is seen on the other side of an exchange of text."""
    return digests_match(json.loads(json.dumps(digest(one))), json.loads(json.dumps(digest(other))))


PIXELS = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
ALIKE = {
    "itself": (Pair(IMAGE, 3), Pair(IMAGE.clone(), 3)),
    "rounded": (IMAGE, IMAGE * (1 + 1e-6)),
    "decoded a little differently": (Picture(PIXELS), Picture(np.minimum(PIXELS, 254))),
    "NaN": ([float("nan"), torch.tensor(float("nan"))],) * 2,
    "bf16": (IMAGE.bfloat16(), IMAGE.bfloat16()),
    "paths": ("/data/a.jpg", "/scratch/a.jpg"),
    "objects": (object(), object()),
    "nothing": (None, None),
    "of no elements": (torch.zeros(0, 3), torch.zeros(0, 3)),
    "tokens": (torch.arange(100), torch.arange(100)),
    "names": (np.array(["a", "b"]), np.array(["c", "d"])),
}
DIFFERENT = {
    "label": (Pair(IMAGE, 3), Pair(IMAGE, 4)),
    "label in a tensor": (torch.tensor(3), torch.tensor(4)),
    "image": (IMAGE, torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(1))),
    "sign": (IMAGE, -IMAGE),
    "mirrored": (IMAGE.cumsum(2), IMAGE.cumsum(2).flip(2)),
    "pixels": (PIXELS, PIXELS[::-1] // 2),
    "one token": (torch.arange(100), torch.arange(100).index_fill(0, torch.tensor([7]), 5)),
    "shape": (IMAGE, IMAGE.flatten()),
    "dtype": (IMAGE, IMAGE.double()),
    "text": ("a dog", "a cat"),
    "bytes": (b"a dog", b"a cat"),
    "number": ({"target": 0.5}, {"target": 0.51}),
    "names of fields": ({"x": 1}, {"y": 1}),
    "length": ([1, 2], [1, 2, 3]),
    "kind": (1, "1"),
    "missing": (None, 0),
    "small": (torch.tensor([0.1, 0.2]), torch.tensor([0.2, 0.1])),
}


@pytest.mark.parametrize("name", ALIKE)
def test_alike(name):
    assert same(*ALIKE[name])


@pytest.mark.parametrize("name", DIFFERENT)
def test_different(name):
    assert not same(*DIFFERENT[name])


def reading(labels: list[int], brightness: float = 1.0) -> list[Any]:
    """Digests of images with their labels."""
    images = [torch.full((3, 8), brightness * (number + 1)) for number in range(len(labels))]
    pairs = zip(images, labels, strict=True)
    return json.loads(json.dumps([digest({"image": x, "label": y}) for x, y in pairs]))


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (reading([3, 1, 2]), reading([3, 1, 2]), Match.SAME),
        (reading([3, 1, 2]), reading([3, 1, 2, 9]), Match.SAME),  # only what both have
        (reading([3, 1, 2]), reading([3, 1, 2], 0.5), Match.CHANGED),
        (reading([3, 1, 2]), reading([3, 1, 4]), Match.CHANGED),  # some labels were corrected
        (reading([3, 1, 2]), reading([3, 1, 4], 0.5), Match.OTHER),
        (reading([3, 3, 3]), reading([3, 3, 3], 0.5), Match.OTHER),  # a label that all have
        ([digest(n) for n in range(3)], [digest(n) for n in (0, 2, 1)], Match.OTHER),
        ([digest([*range(20)])], [digest([*range(1, 21)])], Match.OTHER),  # tokens
        ([digest({"x": 1})], [digest({"y": 1})], Match.OTHER),
        ([], [digest(1)], Match.SAME),
    ],
)
def test_what_two_readings_of_the_same_places_have_in_common(before, now, expected):
    assert match_samples(before, now) is expected
