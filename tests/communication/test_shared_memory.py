from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from namespaces import until
from ranks import RankFailed, in_gloo_group, run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import lockstep
from lockstep.communication import routing, shared_memory
from lockstep.communication.shared_memory import SharedMemory, open_shared_memory
from lockstep.errors import RanksDifferError

pytestmark = pytest.mark.netns

FLOATS = torch.float32, torch.float64, torch.bfloat16, torch.float16
OPS = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN


@contextmanager
def in_threads(size: int) -> Iterator[Callable[[Callable[[SharedMemory], Any]], list[Any]]]:
    """Threads for ranks: what runs a function on every one of them, and gives their results."""
    meet, told = threading.Barrier(size), [None] * size

    def exchange(rank: int, value: Any) -> list[Any]:
        told[rank] = value
        meet.wait()
        everything = list(told)
        meet.wait()
        return everything

    def opened(rank: int) -> SharedMemory:
        found, why = open_shared_memory(rank, 0, 600.0, lambda value: exchange(rank, value))
        assert found is not None, why
        return found

    with ThreadPoolExecutor(size) as pool:
        ranks = list(pool.map(opened, range(size)))
        yield lambda fn: list(pool.map(fn, ranks))
        for rank in ranks:
            rank.close()


def number(shared: SharedMemory) -> int:
    return shared._local_rank


def naive(values: list[Tensor], op: Any, scale: float) -> Tensor:
    """What every rank holds after an all-reduce: one after the other, in the order of the ranks."""
    combine = {OPS[0]: torch.add, OPS[1]: torch.maximum, OPS[2]: torch.minimum}[op]
    total, *others = [value * scale if scale != 1.0 else value.clone() for value in values]
    for other in others:
        total = combine(total, other)
    return total


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(2, 5),
    lengths=st.lists(st.integers(0, 700), min_size=1, max_size=4),
    dtype=st.sampled_from((*FLOATS, torch.int64, torch.int32, torch.uint8)),
    op=st.sampled_from(OPS),
    offset=st.integers(0, 3),
    mean=st.booleans(),
    chunk=st.sampled_from((256, 1024, 2**20)),
    by_all=st.sampled_from((0, 512, 2**21)),
    few=st.sampled_from((1, 8)),
)
def test_it_is_the_naive_reduction(
    size: int,
    lengths: list[int],
    dtype: torch.dtype,
    op: Any,
    offset: int,
    mean: bool,
    chunk: int,
    by_all: int,
    few: int,
) -> None:
    generator = torch.Generator().manual_seed(sum(lengths) + size)
    given = [
        [(torch.randn(n + offset, generator=generator) * 9).to(dtype)[offset:] for n in lengths]
        for _ in range(size)
    ]
    scale = 1.0 / size if mean and dtype.is_floating_point else 1.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "CHUNK_BYTES", chunk)
        patch.setattr(shared_memory, "MAX_BYTES_READ_BY_ALL", by_all)
        patch.setattr(shared_memory, "MAX_RANKS_OF_FLAT_BARRIER", few)
        with in_threads(size) as each:

            def reduced(shared: SharedMemory) -> list[Tensor]:
                own = [tensor.clone() for tensor in given[number(shared)]]
                for tensor in own:
                    shared.all_reduce(tensor, op, scale=scale)
                return own

            def gathered(shared: SharedMemory) -> list[Tensor]:
                own = given[number(shared)]
                rows = [t.new_empty(size, *t.shape) for t in own]
                for tensor, places in zip(own, rows, strict=True):
                    shared.all_gather(places, tensor)
                return rows

            def broadcast(shared: SharedMemory) -> list[list[Tensor]]:
                came = [[t.clone() for t in given[number(shared)]] for _ in range(size)]
                for source, tensors in enumerate(came):
                    for tensor in tensors:
                        shared.broadcast(tensor, source)
                return came

            sums, rows, came = each(reduced), each(gathered), each(broadcast)
    for place in range(len(lengths)):
        values = [given[rank][place] for rank in range(size)]
        expected = naive(values, op, scale)
        for rank in range(size):
            assert torch.equal(sums[rank][place], expected)
            assert torch.equal(rows[rank][place], torch.stack(values))
            assert all(torch.equal(came[rank][r][place], values[r]) for r in range(size))


def against_gloo() -> list[bool]:
    """Whether sums of two ranks have the same bits, small and large, by dtype."""
    with lockstep.init(device="cpu") as world:
        shared = routing.shared_memory()
        assert shared is not None
        found = []
        generator = torch.Generator().manual_seed(world.rank)
        for dtype in FLOATS:
            for length in (1, 33, 5_000, 700_001):
                own = torch.randn(length, generator=generator).to(dtype)
                other = own * 0.5
                dist.all_reduce(other)
                shared.all_reduce(own, scale=0.5)
                found.append(torch.equal(own, other))
        return found


def test_two_ranks_have_the_bits_of_gloo() -> None:
    assert run_ranks(against_gloo, 2) == [[True] * 16] * 2


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 300), nn.Linear(300, 4))


def steps(model: nn.Module, optimizer: Any, rank: int, backward: Callable[[Tensor], None]) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        backward(model(torch.randn(8, 20, generator=generator)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


@in_gloo_group
def by_torch() -> list[Tensor]:
    model = DistributedDataParallel(small_model())
    steps(model, torch.optim.AdamW(model.parameters()), dist.get_rank(), Tensor.backward)
    return [p.detach().clone() for p in model.parameters()]


def by_lockstep(own_hook: bool) -> tuple[list[Tensor], int]:
    """The weights, and how many buckets went through shared memory."""
    with lockstep.init("ddp", device="cpu") as world:
        inner = small_model()
        model, optimizer = world.prepare(inner, torch.optim.AdamW(inner.parameters()))
        if own_hook:
            model.register_comm_hook(None, default_hooks.allreduce_hook)
        steps(model, optimizer, world.rank, world.backward)
        found = [p.detach().clone() for p in model.parameters()]
        shared = routing.shared_memory()
        assert shared is not None
        whole = (sum(p.numel() for p in found),)
        return found, sum(call[1:3] == ("all_reduce", whole) for call in shared.calls)


@pytest.mark.parametrize("own_hook", [False, True])
def test_weights_are_those_of_ddp_and_a_hook_of_the_users_is_taken(own_hook: bool) -> None:
    expected = run_ranks(by_torch, 2)
    for rank, (found, buckets) in enumerate(run_ranks(by_lockstep, 2, own_hook)):
        assert all(map(torch.equal, found, expected[rank]))
        assert buckets == (0 if own_hook else 4)


def on_machines(*sizes: int) -> tuple[list[Tensor], list[Tensor], str]:
    """The weights, sums of little and much, and what the block of choices says.

    The first ranks are on a first machine, and so on, as far as the environment says.
    """
    places = [(node, local) for node, size in enumerate(sizes) for local in range(size)]
    node, local = places[int(os.environ["RANK"])]
    here = {"GROUP_RANK": node, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": sizes[node]}
    os.environ.update({name: str(value) for name, value in here.items()})
    out = io.StringIO()
    options = lockstep.strategies.DDP(bucket_cap_mb=0.1)  # several buckets
    with contextlib.redirect_stdout(out), lockstep.init(options, device="cpu") as world:
        inner = small_model()
        model, optimizer = world.prepare(inner, torch.optim.AdamW(inner.parameters()))
        steps(model, optimizer, world.rank, world.backward)
        sums = [world.sum(torch.arange(n) * (world.rank + 1)) for n in (1, 3, 200_001)]
        highest = world.max(torch.tensor([world.rank, -world.rank]))
        weights = [p.detach().clone() for p in model.parameters()]
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    said = next((line for line in lines if line.startswith("CPU tensors")), "")
    return weights, [*sums, highest], said


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ((2, 2), "through shared memory 2 ranks a machine sum up there"),
        ((2, 1), "through the backend 1 or 2 ranks a machine"),
        pytest.param((1, 1), "through the backend 1 rank a machine", marks=pytest.mark.thorough),
    ],
)
def test_between_machines_each_rank_sends_its_part(sizes: tuple[int, ...], line: str) -> None:
    size = sum(sizes)
    expected = run_ranks(by_torch, size)[0]
    found = run_ranks(on_machines, size, *sizes)
    assert found[0][2].startswith(f"CPU tensors {line}")
    for weights, (*sums, highest), _ in found:
        assert all(map(torch.equal, weights, found[0][0]))
        for own, other in zip(weights, expected, strict=True):
            torch.testing.assert_close(own, other, rtol=0, atol=1e-6)
        times = size * (size + 1) // 2
        assert all(torch.equal(each, torch.arange(len(each)) * times) for each in sums)
        assert highest.tolist() == [size - 1, 0]


def differing(calls: Sequence[Callable[[SharedMemory, Tensor], object]]) -> str:
    with lockstep.init(device="cpu") as world:
        shared = routing.shared_memory()
        assert shared is not None
        with pytest.raises(RanksDifferError) as raised:
            calls[world.rank](shared, torch.zeros(3))
        with pytest.raises(dist.DistNetworkError, match="number 1 did not finish"):
            shared.all_reduce(torch.zeros(3))
        return raised.value.found


def with_one_more(shared: SharedMemory, tensor: Tensor) -> None:
    shared.all_reduce(torch.zeros(len(tensor) + 1))


@pytest.mark.parametrize(
    "calls",
    [
        {
            "all_reduce of 3 numbers": SharedMemory.all_reduce,
            "all_reduce of 4 numbers": with_one_more,
            "all_reduce (maximum) of 3 numbers": partial(
                SharedMemory.all_reduce, op=dist.ReduceOp.MAX
            ),
        },
        {
            "all_reduce in slices of 3 numbers": SharedMemory.start_all_reduce,
            "broadcast from rank 1 of 3 numbers": partial(SharedMemory.broadcast, source=1),
            "broadcast from rank 2 of 3 numbers": partial(SharedMemory.broadcast, source=2),
        },
    ],
)
def test_calls_that_differ_are_an_error_on_all_ranks(calls: dict[str, Any]) -> None:
    expected = "; ".join(f"rank {rank}: {text} in float32" for rank, text in enumerate(calls))
    assert run_ranks(partial(differing, [*calls.values()]), 3) == [expected] * 3


def killed(victim: int, few: int) -> None:
    shared_memory.MAX_RANKS_OF_FLAT_BARRIER = few
    shared_memory.MAX_RANKS_CHECKED_AT_ONCE = few
    with lockstep.init(device="cpu") as world:
        world.barrier()
        if world.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        world.barrier()


@pytest.mark.parametrize(("victim", "few"), [(1, 8), (1, 1), (0, 1)])
def test_the_end_of_a_rank_is_noticed(victim: int, few: int) -> None:
    with pytest.raises(RankFailed) as failed:
        run_ranks(partial(killed, victim, few), 3)
    for rank in {0, 1, 2} - {victim}:
        expected = f"rank {victim} ended while this rank waited in all_gather"
        assert expected in failed.value.errors[rank]


def waiting_for_the_first(victim: int) -> None:
    """Barriers go by rank 0, which is killed as it waits; or it hears of rank 2, and lives on."""
    shared_memory.MAX_RANKS_OF_FLAT_BARRIER = 1
    shared_memory.MAX_RANKS_CHECKED_AT_ONCE = 1
    with lockstep.init(device="cpu") as world:
        world.barrier()
        shared = routing.shared_memory()
        assert shared is not None
        if world.rank == 2 and victim == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if world.rank == 2:
            at = shared._memory, shared._barrier_number_offsets[0]
            until(lambda: shared_memory.BARRIER_NUMBER.unpack_from(*at)[0] > shared._num_barriers)
            os.kill(shared._pids[victim], signal.SIGKILL)
        try:
            if world.rank != 2:
                world.barrier()
        finally:
            if world.rank in (0, 2):
                until(lambda: not shared_memory._is_running(shared._pids[1]))


@pytest.mark.parametrize("victim", [0, 2])
def test_who_waits_for_the_first_hears_of_an_end(victim: int) -> None:
    with pytest.raises(RankFailed) as failed:
        run_ranks(partial(waiting_for_the_first, victim), 3)
    expected = f"rank {victim} ended while this rank waited in all_gather"
    assert expected in failed.value.errors[1]


def late() -> list[str]:
    """What rank 0 says of a rank that does not come, and of one that comes and stands still."""
    found = []
    with lockstep.init(device="cpu") as world:
        for other_has_come in (False, True):
            shared, _ = open_shared_memory(world.rank, 0, 0.01, world._run.collectives.exchange)
            assert shared is not None
            if world.rank == 0:
                if other_has_come:
                    offset_of_other = shared._barrier_number_offsets[1]
                    shared_memory.BARRIER_NUMBER.pack_into(shared._memory, offset_of_other, 1)
                with pytest.raises(dist.DistNetworkError) as raised:
                    shared.all_reduce(torch.zeros(3))
                found.append(str(raised.value))
            world.barrier()
            shared.close()
    return found


def test_a_rank_that_does_not_come_is_named() -> None:
    late_ranks = ["rank 1 did not come", "all ranks have come, but one did not go on"]
    texts = [f"shared memory: {late} within 0.01 s to all_reduce number 1" for late in late_ranks]
    assert run_ranks(late, 2) == [texts, []]


def fail(*_: object) -> Any:
    raise PermissionError(13, "Permission denied")


def without(what: str) -> tuple[str, int]:
    """The line of the block of choices on rank 0, and a sum over the ranks."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        rank = int(os.environ["RANK"])
        if what == "file size" and rank == 0:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
        elif what == "memfd" and rank == 0:
            patch.delattr(os, "memfd_create")
        elif what == "permission" and rank == 1:
            patch.setattr(shared_memory, "_map", fail)
        backend = "gloo" if what == "backend" else None
        with lockstep.init(device="cpu", backend=backend) as world:
            assert (routing.shared_memory() is None) is (what != "nothing")
            maps = Path("/proc/self/maps").read_text()
            assert ("memfd:lockstep (deleted)" in maps) is (what == "nothing")
            world.prepare(nn.Linear(2, 2))  # prints the choices
            total = world.sum(world.rank + 1)
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    return next((line for line in lines if line.startswith("CPU tensors")), ""), total


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("nothing", "through shared memory all ranks are on one machine"),
        ("backend", "through the backend backend='gloo' was asked for"),
        ("file size", "through the backend no memory can be shared: [Errno 27] File too large"),
        ("memfd", "through the backend no memory can be shared: module 'os' has no attribute"),
        ("permission", "through the backend rank 1 cannot map the memory of rank 0: [Errno 13]"),
    ],
)
def test_where_memory_cannot_be_shared_the_backend_serves(what: str, line: str) -> None:
    (said, total), (nothing, other) = run_ranks(without, 2, what)
    assert said.startswith(f"CPU tensors {line}")
    assert (total, other, nothing) == (3, 3, "")
