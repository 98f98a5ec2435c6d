from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks

import lockstep
from lockstep.errors import RanksDifferError, UsageError
from lockstep.runtime.collectives import Collectives
from lockstep.topology import Topology

ALONE = Collectives(Topology(), torch.device("cpu"))


def everything() -> dict[str, Any]:
    with lockstep.init() as world:
        r = world.rank
        return {
            "int": world.sum(2**53 + r),
            "float": world.sum(0.5 + r),
            "nest": world.sum({"a": [r, torch.ones(2) * r], "b": (1.5,)}),
            "zero-dim": world.sum(torch.tensor(3 + r)),
            "none on rank 1": world.sum(0 if r == 1 else torch.tensor(7)),
            "none on rank 1, real": world.sum(0 if r == 1 else torch.tensor(0.25)),
            "mean": world.mean({"x": r, "t": torch.tensor([1, 2]) * r}),
            "max": world.max([r, -float(r), torch.tensor([r, -r])]),
            "bool": world.max(r == 1),
            "gather": world.gather(torch.arange(r + 1)),
            "gather empty": world.gather(torch.zeros(0 if r == 0 else 2, 3)).shape,
            "gather numbers": world.gather({"n": r, "s": f"rank {r}", "z": torch.tensor(r)}),
            "broadcast": world.broadcast({"w": torch.full((2,), 5.0), "n": 3} if r == 0 else None),
            "broadcast text": world.broadcast("über" if r == 1 else None, source=1),
            "exchange": world.collectives.exchange("x" * r),
            "barrier": world.barrier(),
        }


@pytest.mark.parametrize("size", [2, 3])
def test_collectives(size):
    ranks = range(size)
    total = sum(ranks)
    for found in run_ranks(everything, size):
        assert found["int"] == size * 2**53 + total
        assert found["float"] == 0.5 * size + total
        assert found["nest"]["a"][0] == total
        assert found["nest"]["a"][1].tolist() == [total, total]
        assert found["nest"]["b"] == (1.5 * size,)
        assert int(found["zero-dim"]) == 3 * size + total
        assert found["none on rank 1"] == 7 * (size - 1)
        assert float(found["none on rank 1, real"]) == 0.25 * (size - 1)
        assert found["mean"]["x"] == total / size
        assert found["mean"]["t"].tolist() == pytest.approx([total / size, 2 * total / size])
        assert found["max"][:2] == [size - 1, 0.0]
        assert found["max"][2].tolist() == [size - 1, 0]
        assert found["bool"] == 1
        assert found["gather"].tolist() == [i for r in ranks for i in range(r + 1)]
        assert found["gather empty"] == (2 * (size - 1), 3)
        numbers = found["gather numbers"]
        assert numbers["n"] == list(ranks)
        assert numbers["s"] == [f"rank {r}" for r in ranks]
        assert numbers["z"].tolist() == list(ranks)
        assert found["broadcast"]["w"].tolist() == [5.0, 5.0]
        assert found["broadcast"]["n"] == 3
        assert found["broadcast text"] == "über"
        assert found["exchange"] == ["x" * r for r in ranks]


def mismatch() -> list[str]:
    messages = []
    with lockstep.init() as world:
        r = world.rank
        for call in (
            lambda: world.sum(torch.ones(2 + r)),
            lambda: world.sum([1] * (1 + r)),
            lambda: world.sum(torch.ones(2, dtype=torch.float64 if r else torch.float32)),
            lambda: world.sum(1) if r else world.max(1),
            lambda: world.gather(torch.ones(1, 2 + r)),
        ):
            try:
                call()
            except RanksDifferError as error:
                messages.append(str(error))
        world.barrier()
    return messages


def test_what_does_not_match_is_an_error_on_every_rank():
    for messages in run_ranks(mismatch, 2):
        assert len(messages) == 5
        assert "rank 0: sum of float32[2]; rank 1: sum of float32[3]" in messages[0]
        assert "rank 1: sum of int, int" in messages[1]
        assert "float64[2]" in messages[2]
        assert "rank 0: max of int; rank 1: sum of int" in messages[3]


def test_alone_they_are_the_identity():
    tensor = torch.ones(3)
    for call in (ALONE.sum, ALONE.max, ALONE.broadcast):
        assert call(tensor) is tensor
        assert call({"a": 1})["a"] == 1
    assert ALONE.mean([3, 5]) == [3.0, 5.0]
    assert ALONE.gather(2) == [2]
    assert ALONE.gather(tensor) is tensor
    assert ALONE.exchange("a") == ["a"]
    ALONE.barrier()


@pytest.mark.parametrize("value", [object(), None, 2**63])
def test_what_cannot_be_reduced(value):
    with pytest.raises(UsageError):
        ALONE.sum([value])
