"""Collectives on CUDA tensors: the values, dtypes and devices that they have on the CPU."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
import torch
from on_devices import ON_RANKS, run_on, settings
from torch import Tensor
from torch.utils import _pytree as pytree

import lockstep

pytestmark = pytest.mark.ranks

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32,
          torch.int16, torch.uint8, torch.complex64]  # fmt: skip


def nest(rank: int, device: torch.device | str) -> dict[str, Any]:
    """What a rank brings to a reduction."""
    return {
        **{str(d): torch.tensor([1, 2, 5 - rank], device=device).to(d) for d in DTYPES},
        "one number": torch.tensor(rank + 2, device=device),
        "one real number": torch.tensor(rank + 0.5, device=device),
        "nothing": torch.empty(0, 3, device=device),
        "not dense": torch.arange(6.0, device=device).reshape(2, 3).t() * (rank + 1),
        "on the CPU": [torch.full((2,), rank), rank, rank / 2],
    }


def rows(rank: int, device: torch.device | str) -> dict[str, Any]:
    """What a rank brings to a gather: longer on later ranks."""
    return {
        "rows": torch.arange(3 * rank, 9 * rank, device=device).reshape(-1, 3),
        "marks": torch.full((2,), bool(rank), device=device),
        "one": torch.tensor(float(rank), device=device),
        "text": f"rank {rank}",
    }


def collect(device: str) -> dict[str, Any]:
    """The results on the CPU, and where they were."""
    with lockstep.init(**settings(device)) as world:
        mine = nest(world.rank, world.device)
        real = {name: value for name, value in mine.items() if "complex" not in name}
        last = world.rank == world.size - 1
        sent = {"here": mine, "from the CPU": torch.arange(4)}
        found = {
            "sum": world.sum(mine),
            "mean": world.mean(mine),
            "max": world.max(real),
            "min": world.min(real),
            "gather": world.gather(rows(world.rank, world.device)),
            "broadcast": world.broadcast(sent if last else None, source=world.size - 1),
            "kept": mine,
        }
        world.barrier()
        places = {
            (name, leaf.device.type)
            for name, value in found.items()
            for leaf in pytree.tree_leaves(value)
            if isinstance(leaf, Tensor)
        }
        return {"values": pytree.tree_map_only(Tensor, Tensor.cpu, found), "places": places}


@pytest.mark.parametrize(("device", "size"), ON_RANKS)
def test_they_give_what_plain_torch_gives(device: str, size: int) -> None:
    brought = [nest(rank, "cpu") for rank in range(size)]
    for rank, found in enumerate(run_on(collect, size, device)):
        values = found["values"]
        for name in brought[0]:
            leaves = zip(*(pytree.tree_leaves(other[name]) for other in brought), strict=True)
            for place, of_ranks in enumerate(leaves):
                total = sum(of_ranks[1:], of_ranks[0])
                same(pytree.tree_leaves(values["sum"][name])[place], total)
                mean = pytree.tree_leaves(values["mean"][name])[place]
                torch.testing.assert_close(mean, total / size)
                if "complex" not in name:
                    for extreme, of_tensors, of_numbers in (
                        ("max", torch.maximum, max),
                        ("min", torch.minimum, min),
                    ):
                        both = of_tensors if isinstance(of_ranks[0], Tensor) else of_numbers
                        expected = reduce(both, of_ranks)
                        same(pytree.tree_leaves(values[extreme][name])[place], expected)
        given = [rows(other, "cpu") for other in range(size)]
        assert values["gather"]["text"] == ["rank 0", "rank 1"][:size]
        same(values["gather"]["one"], torch.stack([other["one"] for other in given]))
        for name in ("rows", "marks"):
            same(values["gather"][name], torch.cat([other[name] for other in given]))
        pytree.tree_map(same, values["broadcast"]["here"], brought[-1])
        same(values["broadcast"]["from the CPU"], torch.arange(4))
        pytree.tree_map(same, values["kept"], brought[rank])
        both = {"cpu", device}
        kinds = ("sum", "mean", "max", "min", "kept")
        assert {p for n, p in found["places"] if n in kinds} == both
        assert {p for n, p in found["places"] if n == "gather"} == {device}
        # The others hold nothing: what the last rank sends from its CPU comes to their device too.
        sender = rank == size - 1
        assert {p for n, p in found["places"] if n == "broadcast"} == (both if sender else {device})


def same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, Tensor):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    else:
        assert found == wanted
