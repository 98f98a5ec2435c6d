from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from lockstep.checkpoint import comparison
from lockstep.checkpoint.comparison import (
    ValueDifferences,
    compare,
    compare_values,
    rename_to_match,
)
from lockstep.checkpoint.contents import open_contents
from lockstep.checkpoint.lazy_tensor import TensorInMemory

pytestmark = pytest.mark.unit

NAN, INF = math.nan, math.inf


def values(a: Tensor, b: Tensor, **tolerance: float) -> ValueDifferences:
    return compare_values(TensorInMemory(a), TensorInMemory(b), **tolerance)


@pytest.mark.parametrize(
    ("a", "b", "count", "absolute", "relative"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0, 0.0, 0.0),
        ([1.0, 2.0], [1.0, 4.0], 1, 2.0, 0.5),
        ([0.0], [-0.0], 0, 0.0, 0.0),
        ([NAN, 1.0], [NAN, 1.0], 0, 0.0, 0.0),
        ([NAN, 1.0], [0.0, 1.0], 1, 0.0, 0.0),
        ([INF, -INF], [INF, -INF], 0, 0.0, 0.0),
        ([INF], [1.0], 1, INF, INF),
        ([INF], [-INF], 1, INF, INF),
        ([0.0], [1e-30], 1, 1e-30, 1.0),
    ],
)
def test_differences_of_two_values(
    a: list[float], b: list[float], count: int, absolute: float, relative: float
) -> None:
    one, other = (torch.tensor(x, dtype=torch.float64) for x in (a, b))
    found = values(one, other)
    assert (found.count, found.absolute, found.relative) == (count, absolute, relative)
    assert found.nans == [int(one.isnan().sum()), int(other.isnan().sum())]
    assert (values(other, one).count, values(other, one).absolute) == (count, absolute)


def test_differences_within_tolerance_do_not_count() -> None:
    a, b = torch.tensor([1.0, 100.0, NAN, INF]), torch.tensor([1.5, 101.0, 1.0, 1.0])
    assert values(a, b, atol=0.6).count == 3
    assert values(a, b, rtol=0.02).count == 3
    assert values(a, b, atol=1.0).count == 2
    assert values(a, b, rtol=10.0).count == 2


@pytest.mark.parametrize(
    "dtype",
    ["bool", "uint8", "int8", "uint16", "int32", "uint64", "int64", "float16", "bfloat16",
     "float8_e4m3fn", "complex64", "float64"],
)  # fmt: skip
def test_every_dtype_can_be_compared(dtype: str) -> None:
    kind = getattr(torch, dtype)
    a = torch.tensor([0, 1, 1, 0]).to(kind)
    b = torch.tensor([0, 1, 0, 0]).to(kind)
    assert values(a, a) == ValueDifferences()
    assert values(a, b) == ValueDifferences(1, 1.0, 1.0)


def test_integers_beyond_float64_are_compared_exactly() -> None:
    for dtype in (torch.int64, torch.uint64):
        a, b = (torch.tensor([2**53 + i], dtype=torch.int64).view(dtype) for i in (0, 1))
        assert values(a, b).count == 1
        assert values(a, b, atol=1.0).count == 0


floats = st.floats(width=32) | st.sampled_from([NAN, INF, -INF, 0.0, 1.0])


@settings(deadline=None)
@given(st.lists(st.tuples(floats, floats), max_size=12), st.integers(1, 5))
def test_the_size_of_chunks_makes_no_difference(
    pairs: list[tuple[float, float]], size: int
) -> None:
    a = torch.tensor([a for a, _ in pairs])
    b = torch.tensor([b for _, b in pairs])
    whole = values(a, b)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "CHUNK_ELEMENTS", size)
        assert values(a, b) == whole
    # As one would write it without regard to memory.
    same = (a == b) | (a.isnan() & b.isnan())
    assert whole.count == int((~same).sum())
    apart = (a.double() - b.double()).abs()[~same]
    assert whole.absolute == max([0.0, *(x for x in apart.tolist() if x == x)])


def test_tensors_on_one_side_only_differ(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}, tmp_path / "a.pt")
    torch.save(
        {"b": torch.ones(3), "c": torch.ones(2).half(), "d": torch.ones(1)}, tmp_path / "b.pt"
    )
    sides = [open_contents(tmp_path / name).tensors for name in ("a.pt", "b.pt")]
    pairs = {pair.name: pair for pair in compare(*sides)}
    assert list(pairs) == ["a", "b", "c", "d"]
    assert all(pair.differs for pair in pairs.values())
    assert pairs["a"].b is None
    assert pairs["b"].values is None
    assert pairs["c"].values == ValueDifferences()
    assert pairs["d"].a is None


def test_names_that_wrappers_changed_are_paired() -> None:
    a = {name: TensorInMemory(torch.ones(2)) for name in ("x.w", "y.w")}
    b = {f"module.{name}": value for name, value in a.items()} | {
        "more": TensorInMemory(torch.ones(1))
    }
    paired, changes = rename_to_match(a, b)
    assert paired.keys() == {"x.w", "y.w", "more"}
    assert changes == "removed the prefix 'module.'"
    assert rename_to_match(a, a) == (a, "")
