from __future__ import annotations

import math
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from ranks import run_ranks

import lockstep
from lockstep.communication import routing
from lockstep.distributed.collective_calls import pack_nest
from lockstep.distributed.collectives import Collectives, run_on_all_ranks
from lockstep.distributed.tensor_bytes import from_bytes, to_bytes
from lockstep.errors import RanksDifferError, UsageError
from lockstep.machine.topology import DataParallelRank, Topology
from lockstep.run.watch.error_record import describe_error

pytestmark = pytest.mark.ranks

ALONE = Collectives(Topology(), torch.device("cpu"))
Pair = namedtuple("Pair", "a b")
EIGHT_BITS = [
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
INTEGERS = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, *EIGHT_BITS]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]


def same_on_all_ranks(fn: Callable[[], Any], size: int) -> Any:
    """What `fn` returns, which must be the same on every rank."""
    first, *others = run_ranks(fn, size)
    for other in others:
        assert other == first
    return first


def everything(backend: str | None = None) -> dict[str, Any]:
    with lockstep.init(backend=backend) as world:
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
            "min": world.min([r + 1, -float(r), torch.tensor([r + 1, -r])]),
            "bool": [world.max(r == 1), world.min(r == 1), world.min(r >= 0)],
            "gather": world.gather(torch.arange(r + 1)),
            "gather empty": world.gather(torch.zeros(0 if r == 0 else 2, 3)).shape,
            "gather complex": world.gather(torch.tensor([1j * r])),
            "gather numbers": world.gather({"n": r, "s": f"rank {r}", "z": torch.tensor(r)}),
            "broadcast": world.broadcast({"w": torch.full((2,), 5.0), "n": 3} if r == 0 else None),
            "broadcast text": world.broadcast("über" if r == 1 else None, source=1),
            "exchange": [world._run.collectives.exchange("ü" * n * r) for n in (1, 59, 300)],
            "barrier": world.barrier(),
        }


def everything_by_first() -> dict[str, Any]:
    """As where there are too many ranks for a ring."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "MAX_RING_RANKS", 1)
        return everything("gloo")


@pytest.mark.parametrize(
    ("size", "everything"), [(2, everything), (3, everything), (3, everything_by_first)]
)
def test_collectives(size, everything):
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
        assert found["min"][:2] == [1, 1.0 - size]
        assert found["min"][2].tolist() == [1, 1 - size]
        assert found["bool"] == [1, 0, 1]
        assert found["gather"].tolist() == [i for r in ranks for i in range(r + 1)]
        assert found["gather complex"].tolist() == [1j * r for r in ranks]
        assert found["gather empty"] == (2 * (size - 1), 3)
        numbers = found["gather numbers"]
        assert numbers["n"] == list(ranks)
        assert numbers["s"] == [f"rank {r}" for r in ranks]
        assert numbers["z"].tolist() == list(ranks)
        assert found["broadcast"]["w"].tolist() == [5.0, 5.0]
        assert found["broadcast"]["n"] == 3
        assert found["broadcast text"] == "über"
        assert found["exchange"] == [["ü" * n * r for r in ranks] for n in (1, 59, 300)]


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
            lambda: world.gather(["name"] * (251 - r)),
            lambda: world.sum({f"class {i}": 1 for i in range(251 - r)}),
        ):
            try:
                call()
            except RanksDifferError as error:
                messages.append(str(error))
        world.barrier()
    return messages


def test_what_does_not_match_is_an_error_on_every_rank():
    for messages in run_ranks(mismatch, 2):
        assert len(messages) == 7
        assert "rank 0: sum of float32[2]; rank 1: sum of float32[3]" in messages[0]
        assert "rank 1: sum of int, int" in messages[1]
        assert "float64[2]" in messages[2]
        assert "rank 0: max of int; rank 1: sum of int" in messages[3]
        texts = "rank 0: gather of a list of 251 texts; rank 1: gather of a list of 250 texts\n"
        assert texts in messages[5]
        assert "json.dumps" in messages[5]
        assert "int, int, ... (250 values) in ...lass 2" in messages[6]
        assert "'class 249', 'class 250']" in messages[6]  # where they differ
        assert len(messages[6].splitlines()) == 4
        assert len(messages[6]) < 1000


CALLS: dict[str, Callable[[Any], Any]] = {
    "barrier": lambda world: world.barrier(),
    "broadcast": lambda world: world.broadcast({"a": torch.ones(3)}),
    "exchange": lambda world: world._run.collectives.exchange("text" * world.rank),
    "sum": lambda world: world.sum(1.0),
    "mean": lambda world: world.mean(1.0),
    "max": lambda world: world.max([torch.ones(2), 1]),
    "min": lambda world: world.min([torch.ones(2), 1]),
    "gather": lambda world: world.gather(torch.ones(2 + world.rank)),
}


def attempt(call: Callable[[], Any]) -> tuple[str, str, str, str]:
    """What kind of error the call raises, and its three parts."""
    try:
        call()
    except (RanksDifferError, UsageError) as error:
        return type(error).__name__, error.was_set, error.found, error.do
    return "nothing", "", "", ""


def mixed_calls() -> list[tuple[str, str, tuple[str, ...]]]:
    with lockstep.init() as world:
        last = world.size - 1
        met = []
        for most, other in combinations(CALLS, 2):
            mine = CALLS[other if world.rank == last else most]
            met.append((most, other, attempt(lambda mine=mine: mine(world))))
        met.append(("broadcast", "broadcast", attempt(lambda: world.broadcast(1, world.rank))))
        assert world.sum(1) == world.size
        return met


@pytest.mark.parametrize("size", [2, 3])
def test_different_collectives_are_the_same_error_on_every_rank(size):
    first = same_on_all_ranks(mixed_calls, size)
    assert len(first) == 29
    for most, other, (kind, _, found, _) in first:
        assert kind == "RanksDifferError"
        parts = found.split("; ")
        assert [part.split()[:3] for part in parts] == [
            ["rank", f"{rank}:", other if rank == size - 1 else most] for rank in range(size)
        ]
    assert "rank 1: broadcast from rank 1" in first[-1][2][2]


def data_of(dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Powers of two, which every dtype holds."""
    values = [1, 2, 4] if rank else [8, 2, 1]
    if dtype in COMPLEX:
        return torch.tensor([complex(v, -v) for v in values]).to(dtype)
    return torch.tensor(values).to(dtype)


def plain(tensor: torch.Tensor) -> tuple[str, list[Any]]:
    if tensor.is_complex():
        tensor = tensor.to(torch.complex128)
    elif tensor.is_floating_point():
        tensor = tensor.double()
    return str(tensor.dtype), tensor.tolist()


def every_dtype() -> dict[str, Any]:
    with lockstep.init() as world:
        r = world.rank
        found: dict[str, Any] = {}
        for dtype in INTEGERS + FLOATS + COMPLEX:
            mine = data_of(dtype, r)
            results = {
                "sum": world.sum(mine),
                "sum of one": world.sum(mine[0]),
                "gather": world.gather(mine[: r + 1]),
                "gather of one": world.gather(mine[0]),
                "gather of none": world.gather(mine[:0]),
                "broadcast": world.broadcast(mine.view(1, 3, 1) if r == 1 else None, source=1),
                "broadcast of one": world.broadcast(mine[0] if r == 0 else None),
                "broadcast of none": world.broadcast(mine.new_empty(0, 2) if r == 0 else None),
            }
            if dtype not in COMPLEX:
                results["max"] = world.max(mine)
                results["max of one"] = world.max(mine[0])
                results["min"] = world.min(mine)
                results["min of one"] = world.min(mine[0])
                results["none on rank 1"] = world.sum(0 if r == 1 else mine[1])
            assert all(x.dtype == dtype for x in results.values() if isinstance(x, torch.Tensor))
            found[str(dtype)] = {
                name: plain(x)[1] if isinstance(x, torch.Tensor) else x
                for name, x in results.items()
            }
        return found


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("size", [2, 3])
def test_every_dtype(size):
    # e8m0 holds powers of two alone, and rounds the sums to them.
    def stored(values: Any, dtype: torch.dtype) -> Any:
        return plain(torch.tensor(values).to(dtype))[1]

    for found in run_ranks(every_dtype, size):
        for dtype in INTEGERS + FLOATS + COMPLEX:
            one = complex(1, -1) if dtype in COMPLEX else 1
            has = found[str(dtype)]
            total = [one * (8 + size - 1), one * 2 * size, one * (1 + 4 * (size - 1))]
            assert has["sum"] == stored(total, dtype)
            assert has["sum of one"] == stored(total[0], dtype)
            rows = [one * v for v in ([8], [8, 1, 2], [8, 1, 2, 1, 2, 4])[size - 1]]
            assert has["gather"] == rows
            assert has["gather of one"] == [one * v for v in [8] + [1] * (size - 1)]
            assert has["gather of none"] == has["broadcast of none"] == []
            assert has["broadcast"] == [[[one], [one * 2], [one * 4]]]
            assert has["broadcast of one"] == one * 8
            if dtype not in COMPLEX:
                assert has["max"] == [8, 2, 4]
                assert has["max of one"] == 8
                assert has["min"] == [1, 2, 1]
                assert has["min of one"] == 1
                assert has["none on rank 1"] == stored(2 * (size - 1), dtype)


def extremes_of_nan(backend: str | None) -> list[Any]:
    """NaN is on the last rank alone, behind a number and before one."""
    with lockstep.init(backend=backend) as world:
        number = math.nan if world.rank == world.size - 1 else float(world.rank)
        found = []
        for extreme in (world.max, world.min):
            found.append(extreme(number))
            for dtype in (torch.float64, torch.bfloat16, torch.float8_e4m3fn):
                tensor = extreme(torch.tensor([number, world.rank, -math.inf]).to(dtype))
                assert tensor.dtype == dtype
                found.append(tensor.double().tolist())
            found.append(extreme(torch.tensor(number)).item())
        return found


def nan_both_ways() -> list[Any]:
    return extremes_of_nan(None) + extremes_of_nan("gloo")


def test_the_extreme_of_nan_is_nan():
    for found in run_ranks(nan_both_ways, 3):
        for of_way in (found[:10], found[10:]):
            for of_extreme, second in ((of_way[:5], 2), (of_way[5:], 0)):
                assert math.isnan(of_extreme[0])
                for values in of_extreme[1:3]:
                    assert math.isnan(values[0])
                    assert values[1:] == [second, -math.inf]
                assert math.isnan(of_extreme[3][0])
                assert math.isnan(of_extreme[4])


def exact_ends() -> dict[str, Any]:
    with lockstep.init() as world:
        r = world.rank
        ends = [2**64 - 1 - r, 2**63 + r, r]
        large = torch.tensor(ends, dtype=torch.uint64)
        bits = torch.tensor([0x7FC12345 + r], dtype=torch.int32)  # a NaN with a payload
        turned = torch.tensor([1 + 2j, 3 - r]).conj()
        mask = torch.tensor([True, r == 0, False])
        alone = torch.tensor(r > 0)
        return {
            "uint64": [
                x.tolist() for x in (world.max(large), world.min(large), world.gather(large[:1]))
            ],
            "uint64 sum": world.sum(torch.tensor([2**62 + r], dtype=torch.uint64)).tolist(),
            "uint64 0-dim": [world.max(large[0]).item(), world.min(large[0]).item()],
            "uint16": plain(
                world.sum(torch.tensor([60000 if r == 0 else 1000], dtype=torch.uint16))
            ),
            "nan": world.broadcast(bits.view(torch.float32) if r == 0 else None).view(torch.int32),
            "conj": plain(world.sum(turned)),
            "conj gather": plain(world.gather(turned)),
            "strided": world.gather(torch.arange(6, dtype=torch.int16).view(2, 3).T).tolist(),
            "bool": [plain(world.sum(x)) for x in (mask, alone)] + [world.sum(r > 0)],
            "bool max": [plain(world.max(x)) for x in (mask, alone)] + [world.max(r > 0)],
            "bool min": [plain(world.min(x)) for x in (mask, alone)] + [world.min(r > 0)],
            "bool gather": [plain(world.gather(mask)), world.gather(r > 0)],
            "bool mean": world.mean(mask).tolist(),
            "bool on a rank": world.sum(0 if r == 1 else torch.tensor(True)),
            "float8 mean": plain(world.mean(torch.ones(2).to(torch.float8_e4m3fn))),
            "int and float": [world.sum(torch.tensor(7) if r == 0 else x) for x in (0.5, 0.0)],
        }


@pytest.mark.parametrize("size", [2, 3])
def test_exact_to_the_ends_of_a_dtype(size):
    for rank, found in enumerate(run_ranks(exact_ends, size)):
        assert found["uint64"] == [
            [2**64 - 1, 2**63 + size - 1, size - 1],
            [2**64 - size, 2**63, 0],
            [2**64 - 1 - r for r in range(size)],
        ]
        assert found["uint64 sum"] == [size * 2**62 + sum(range(size))]
        assert found["uint64 0-dim"] == [2**64 - 1, 2**64 - size]
        assert found["uint16"] == ("torch.uint16", [60000 + 1000 * (size - 1)])
        assert found["nan"].tolist() == [0x7FC12345]
        rows = [[1 - 2j, 3 - r + 0j] for r in range(size)]
        assert found["conj"][1] == [sum(column) for column in zip(*rows, strict=True)]
        assert found["conj gather"][1] == sum(rows, [])
        assert found["strided"] == [[0, 3], [1, 4], [2, 5]] * size
        counts = ("torch.int64", [size, 1, 0])
        assert found["bool"] == [counts, ("torch.int64", size - 1), size - 1]
        assert found["bool max"] == [
            ("torch.bool", [True, True, False]),
            ("torch.bool", True),
            True,
        ]
        assert found["bool min"] == [
            ("torch.bool", [True, False, False]),
            ("torch.bool", False),
            False,
        ]
        masks = [x for r in range(size) for x in (True, r == 0, False)]
        assert found["bool gather"] == [("torch.bool", masks), [r > 0 for r in range(size)]]
        assert found["bool mean"] == pytest.approx([1, 1 / size, 0])
        assert found["bool on a rank"] == size - 1
        assert found["float8 mean"][1] == [1, 1]
        half, none = found["int and float"]
        assert (half, none) == (7 + 0.5 * (size - 1), 7)
        assert isinstance(half, torch.Tensor) == (rank == 0)


UNSENDABLE = {
    "bytes": b"raw",
    "int32": numpy.int32(3),
    "Path": Path("a"),
    "Pair": Pair(1, 2),
    "('a', 1)": {("a", 1): 2},
    "sparse": torch.eye(2).to_sparse(),
    "bits8": torch.zeros(2, dtype=torch.uint8).view(torch.bits8),
    "object": [object()],
}


def unsendable() -> list[tuple[str, ...]]:
    with lockstep.init() as world:
        r, last = world.rank, world.size - 1
        met = []
        for value in UNSENDABLE.values():
            for source in (0, last):
                mine = value if r == source else None
                met.append(attempt(lambda v=mine, s=source: world.broadcast(v, s)))
        assert world.broadcast({"still": [None, "here"]}) == {"still": [None, "here"]}
        return met


@pytest.mark.parametrize("size", [2, 3])
def test_what_cannot_be_broadcast_is_the_same_error_on_every_rank(size):
    first = same_on_all_ranks(unsendable, size)
    for place, (kind, was_set, found, _) in enumerate(first):
        assert kind == "UsageError"
        assert "world.broadcast" in was_set or "a collective on a" in was_set
        assert found.startswith(f"rank {(0, size - 1)[place % 2]}: ")


def wrapped_in_much(value: object) -> dict[str, Any]:
    """A nest as a checkpoint is, with one value deep inside of it."""
    weights = {f"layers.{number}.weight": 0 for number in range(100)}
    return {"model": weights, "state": [{"step": 3}, {"last": value}], "names": list(weights)}


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (Pair(1, 2), "value is a Pair, whose structure cannot be sent"),
        (
            wrapped_in_much(Pair(1, 2)),
            "value['state'][1]['last'] is a Pair, whose structure cannot be sent",
        ),
        (
            wrapped_in_much({"a": 1, ("a", 1): 2}),
            "value['state'][1]['last'] has the key ('a', 1), which cannot be sent",
        ),
        (
            OrderedDict(a=defaultdict(lambda: 0, b=1)),
            "value['a'] is a defaultdict, whose structure cannot be sent",
        ),
    ],
)
def test_the_part_that_cannot_be_broadcast_is_named_alone(value: object, found: str) -> None:
    problem = pack_nest(value).problem
    assert problem is not None
    assert problem[1] == found


def not_on_one_rank() -> list[tuple[str, ...]]:
    with lockstep.init() as world:
        last = world.rank == world.size - 1
        complex_ones = torch.ones(2, dtype=torch.complex64)
        small = torch.tensor(100, dtype=torch.int8)
        calls = [
            lambda: world.sum(None if last else 1.0),
            lambda: world.mean({"a": "text" if last else 1.0}),
            lambda: world.max(2**70 if last else 1),
            lambda: world.gather([b"raw" if last else 1]),
            lambda: world.max(complex_ones if last else torch.ones(2)),
            lambda: world.max(complex_ones),
            lambda: world.max(complex_ones[0]),
            lambda: world.min(complex_ones),
            lambda: world.sum(0 if last else small) if world.size > 2 else world.sum(small),
            lambda: world.broadcast(1, source=world.size),
            lambda: world.broadcast(1, source=-1 if last else 0),
        ]
        met = [attempt(call) for call in calls]
        assert world.sum(complex_ones[0]).item() == world.size
        return met


@pytest.mark.parametrize("size", [2, 3])
def test_what_one_rank_cannot_reduce_is_the_same_error_on_every_rank(size):
    first = same_on_all_ranks(not_on_one_rank, size)
    assert {kind for kind, *_ in first} == {"UsageError"}
    for place, found in ((0, "None"), (1, "str"), (3, "bytes"), (5, "complex64"), (7, "min")):
        assert found in first[place][1]
    assert "200, does not fit into int8" in first[8][2]


def digests() -> dict[str, int]:
    """How many all-gathers each call takes."""
    with lockstep.init() as world:
        counted: dict[str, int] = {}
        plain_all_gather = world._run.collectives._all_gather
        calls = 0

        def counting(tensor: torch.Tensor) -> list[torch.Tensor]:
            nonlocal calls
            calls += 1
            return plain_all_gather(tensor)

        world._run.collectives._all_gather = counting
        for name, call in {**CALLS, "sum": lambda w: w.sum(torch.ones(3))}.items():
            if name != "gather":  # whose lengths differ here
                calls = 0
                call(world)
                counted[name] = calls
        return counted


def test_where_all_agree_one_digest_is_all():
    assert run_ranks(digests, 2)[0] == {
        "barrier": 1,
        "sum": 1,
        "broadcast": 3,  # its form is long
        "exchange": 2,
        "mean": 2,
        "max": 2,
        "min": 2,
    }


def test_alone_they_are_the_identity():
    tensor = torch.ones(3)
    for call in (ALONE.sum, ALONE.max, ALONE.min, ALONE.broadcast):
        assert call(tensor) is tensor
        assert call({"a": 1})["a"] == 1
    assert ALONE.mean([3, 5]) == [3.0, 5.0]
    assert ALONE.gather(2) == [2]
    assert ALONE.gather(tensor) is tensor
    assert ALONE.exchange("a") == ["a"]
    ALONE.barrier()
    # Of the same type at any number of ranks.
    assert ALONE.sum(torch.tensor([True])).dtype == torch.int64
    assert ALONE.sum(True) == 1
    assert ALONE.max(torch.tensor([True])).dtype == torch.bool


@pytest.mark.parametrize("value", [object(), None, 2**63])
def test_what_cannot_be_reduced(value):
    with pytest.raises(UsageError):
        ALONE.sum([value])


@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "gather"])
def test_in_an_evaluation_loop(name):
    collectives = Collectives(Topology(), torch.device("cpu"))
    with collectives.blocked_because("some ranks have no batch"):
        # In an evaluation inside, which all ranks run equally often.
        with (
            collectives.blocked_because(None),
            pytest.raises(UsageError, match="some ranks have no batch"),
        ):
            getattr(collectives, name)(1)
        collectives.unblock()
        getattr(collectives, name)(1)
    getattr(collectives, name)(1)


def only_the_first_two_count() -> Any:
    """As in a pipeline, where further ranks compute the same part and hold none of the results."""
    with lockstep.init() as world:
        world._run.collectives.data_parallel = DataParallelRank(rank=world.rank % 2, size=2)
        r, nothing = world.rank, [float("nan")] * 2
        counts = r < 2
        assert world._run.collectives.contributes is counts
        values = [1.0 + r, -5.0] if counts else nothing
        found = {
            "sum": world.sum(torch.tensor(values)),
            "max": world.max(torch.tensor(values)),
            "min": world.min(torch.tensor(values)),
            "smallest integers": world.min(torch.tensor([5, 7]) - 100 * (not counts)),
            "smallest bool": world.min(torch.tensor([counts])),
            "integers": world.max(torch.tensor([-5, -7]) + 100 * (not counts)),
            "mean": world.mean(torch.tensor(values)),
            "numbers": [world.sum(10**r), world.mean(r), world.max(r), world.gather(r)],
            "gather": world.gather(torch.full((r + 1, 2), float(r))),
            "broadcast": world.broadcast(r, world.size - 1),
        }
        return {n: x.tolist() if isinstance(x, torch.Tensor) else x for n, x in found.items()}


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_without_results_do_not_count(size):
    found = same_on_all_ranks(only_the_first_two_count, size)
    assert found == {
        "sum": [3.0, -10.0],
        "max": [2.0, -5.0],
        "min": [1.0, -5.0],
        "smallest integers": [5, 7],
        "smallest bool": [True],
        "integers": [-5, -7],
        "mean": [1.5, -5.0],
        "numbers": [11, 0.5, 1, [0, 1]],
        "gather": [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]],
        "broadcast": size - 1,
    }


def gradient_where_the_first_two_count() -> Any:
    """Returns the gradient that each rank gets back; the third rank's rows are in no result."""
    with lockstep.init() as world:
        collectives = world._run.collectives
        collectives.data_parallel = DataParallelRank(rank=world.rank % 2, size=2)
        rows = torch.ones(world.rank + 1, 2, requires_grad=True)
        gathered = collectives.gather(rows, gradient=True)
        factors = torch.tensor([[1.0], [2.0], [3.0]])
        (gathered * factors).sum().backward()
        assert rows.grad is not None
        return rows.grad.tolist()


def test_gradients_of_ranks_without_results_are_zero() -> None:
    gradients = run_ranks(gradient_where_the_first_two_count, 3)
    # Each row has its factor from the losses of all three ranks.
    assert gradients == [
        [[3.0, 3.0]],
        [[6.0, 6.0], [9.0, 9.0]],
        [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]],
    ]


def test_an_empty_tensor_of_any_stride_travels_as_bytes() -> None:
    empty = torch.ones(1, dtype=torch.float64).expand(0)
    data = to_bytes(empty)
    assert (data.dtype, data.shape) == (torch.uint8, (0,))
    assert from_bytes(data, empty.dtype, empty.shape).shape == (0,)


def errors_that_say_whose_they_are() -> list[tuple[str, int | None]]:
    """What each of two ways tells of an error of rank 1: by its kind, and by whose it is."""

    def fail_on_rank_1() -> None:
        if world.rank == 1:
            raise OSError("no space")

    told = []
    with lockstep.init() as world:
        for way in (
            lambda: run_on_all_ranks(world._run.collectives, "saving", fail_on_rank_1),
            lambda: world.sum(1 if world.rank == 0 else {1, 2}),
        ):
            try:
                way()
            except Exception as error:
                record = describe_error(error)
                told.append((record.type, record.of_rank))
    return told


def test_an_error_that_is_passed_on_says_whose_it_is() -> None:
    first, second, third = run_ranks(errors_that_say_whose_they_are, 3)
    assert first == [("CheckpointError", 1), ("UsageError", 1)]
    assert second == [("OSError", None), ("UsageError", 1)]
    assert third == [("CheckpointError", 1), ("UsageError", 1)]
