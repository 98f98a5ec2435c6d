"""Verdicts on real processes that hang, seen through their probes. Gloo on loopback."""

from __future__ import annotations

import datetime
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hanging_ranks import Ranks, running_ranks
from ranks import HANG_S
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from lockstep.communication.quantized_sum import QuantizedSum
from lockstep.run.watch.hang import find
from lockstep.run.watch.messages import render
from lockstep.run.watch.straggler import find_straggler
from lockstep.run.watch.verdict import Verdict

pytestmark = pytest.mark.ranks

FOREVER = datetime.timedelta(hours=1)


def open_default_group() -> None:
    dist.init_process_group("gloo", timeout=FOREVER)
    dist.barrier()


def train_ddp_model(
    rank: int, steps: int, *, buffers: bool = True
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model = DistributedDataParallel(net, broadcast_buffers=buffers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def all_reduce_against_barrier(rank: int, size: int) -> None:
    open_default_group()
    if rank == 0:
        dist.all_reduce(torch.ones(5))
    else:
        dist.barrier()


def uneven_steps(rank: int, size: int) -> None:
    open_default_group()
    train_ddp_model(rank, 3 + (rank == 0), buffers=False)
    dist.barrier()


def uneven_steps_with_buffers(rank: int, size: int) -> None:
    open_default_group()
    train_ddp_model(rank, 3 + (rank == 0))
    dist.barrier()


def evaluation_on_rank_0(rank: int, size: int) -> None:
    open_default_group()
    model, _ = train_ddp_model(rank, 3)
    if rank == 0:
        model.eval()
        with torch.no_grad():
            model(torch.randn(8, 4))
    dist.barrier()


def other_groups(rank: int, size: int) -> None:
    open_default_group()
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups:
        dist.all_reduce(torch.ones(2), group=group)
    dist.all_reduce(torch.ones(2), group=groups[rank])


def one_rank_never_comes(rank: int, size: int) -> None:
    open_default_group()
    # Rank 0 is the odd one in this group and in the default group: which of the two the first call
    # that differs is of depends on which rank is faster.
    three = dist.new_group([0, 1, 2])
    if rank < 3:
        dist.all_reduce(torch.ones(2), group=three)
    if rank == 0:
        dist.all_reduce(torch.ones(2), group=three)
    dist.barrier()


def mismatched_asynchronous_call(rank: int, size: int) -> None:
    open_default_group()
    if rank == 0:
        work = dist.all_reduce(torch.ones(5), async_op=True)
        assert work is not None
        work.wait()
    dist.barrier()


def one_compressed_step_more(rank: int, size: int) -> None:
    open_default_group()
    gradients = QuantizedSum(300, torch.zeros(1), "int8")
    for _ in range(2 + (rank == 0)):
        gradients.start()
        gradients.advance()
        gradients.end()
    dist.barrier()


def barrier_in_finally_after_an_error(rank: int, size: int) -> None:
    open_default_group()
    try:
        if rank == 1:
            raise ValueError("bad sample 4711")
        dist.all_reduce(torch.ones(5))
    finally:
        dist.barrier()


@pytest.mark.parametrize(
    ("fn", "size", "ranks", "text_in_verdict"),
    [
        (barrier_in_finally_after_an_error, 2, (1,), "while handling ValueError: bad sample 4711"),
        (one_compressed_step_more, 2, (0, 1), "waits in exchange"),
        (all_reduce_against_barrier, 2, (0, 1), "all_reduce of 5 float"),
        (uneven_steps, 2, (0, 1), "in backward"),
        (uneven_steps_with_buffers, 2, (0,), "same number of batches"),
        (evaluation_on_rank_0, 2, (0,), "model.module"),
        (other_groups, 2, (0, 1), "process groups"),
        (one_rank_never_comes, 4, (0,), "has not reached it"),
        (mismatched_asynchronous_call, 2, (0, 1), "all_reduce of 5 float"),
    ],
)
def test_deadlocks_of_real_ranks_are_found(
    tmp_path: Path, fn: object, size: int, ranks: tuple[int, ...], text_in_verdict: str
) -> None:
    with running_ranks(fn, size, tmp_path) as run:  # type: ignore[arg-type]
        verdict = run.wait_for_verdict_of_kind("deadlock")
    assert verdict.fatal
    assert verdict.ranks == ranks
    assert verdict.mismatch is not None
    assert text_in_verdict in render(verdict)
    for row in verdict.rows:
        assert row.line is not None
        assert (row.line.file, row.line.function) in {(__file__, fn.__name__), (__file__, "step")}  # type: ignore[attr-defined]


def new_groups_in_another_order(rank: int, size: int) -> None:
    open_default_group()
    for ranks in ([0, 1], [1]) if rank == 0 else ([1], [0, 1]):
        dist.new_group(ranks)
    dist.barrier()


def new_groups_around_a_ring(rank: int, size: int) -> None:
    open_default_group()
    for first in (rank, rank - 1):
        pair = sorted([first % size, (first + 1) % size])
        dist.new_group(pair, use_local_synchronization=True)


@pytest.mark.parametrize(
    ("fn", "size"),
    [
        (new_groups_in_another_order, 2),
        pytest.param(new_groups_around_a_ring, 3, marks=pytest.mark.thorough),
    ],
)
def test_a_deadlock_of_new_groups(tmp_path: Path, fn: object, size: int) -> None:
    with running_ranks(fn, size, tmp_path) as run:  # type: ignore[arg-type]
        verdict = run.wait_for_verdict_of_kind("deadlock")
    assert verdict.fatal
    assert "new_group, for process groups that differ" in verdict.headline
    for row in verdict.rows:
        assert "waits in new_group for rank" in row.does
        assert row.line is not None
        assert row.line.function == fn.__name__  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("fn", "line", "advice"),
    [
        (evaluation_on_rank_0, "model(torch.randn(8, 4))", "model.module"),
        (uneven_steps_with_buffers, "model(torch.randn(8, 4)).sum()", "same number of batches"),
    ],
)
def test_earlier_lines_distinguish_an_evaluation_from_an_extra_step(
    tmp_path: Path, fn: object, line: str, advice: str
) -> None:
    with running_ranks(fn, 2, tmp_path) as run:  # type: ignore[arg-type]
        run.wait_for_verdict_of_kind("deadlock")
        earlier = run.take_snapshot()
        time.sleep(1.0)
        verdict = find(earlier, run.take_snapshot(20.0, call_stacks=True), 1.0)
    assert verdict is not None
    assert [advice in text for text in verdict.advice] == [True]
    text = render(verdict)
    parted = text[text.index("first mismatch") :]
    assert re.search(rf"test_hang_ranks.py:\d+: {re.escape(line)}", parted)
    assert re.search(r"test_hang_ranks.py:\d+: dist.barrier\(\)", parted)


def computes(rank: int, size: int) -> None:
    open_default_group()
    if rank == 0:
        while True:
            torch.ones(100).sum()
    dist.barrier()


def endless_loop(rank: int, size: int) -> None:
    open_default_group()
    if rank == 0:
        while True:
            pass
    dist.barrier()


def sleeps_outside_collectives(rank: int, size: int) -> None:
    open_default_group()
    if rank == 0:
        time.sleep(1000)
    dist.all_gather_object([None, None], rank)


def reads_from_stdin(rank: int, size: int) -> None:
    open_default_group()
    if rank == 0:
        sys.stdin = os.fdopen(os.pipe()[0])
        input()
    dist.broadcast_object_list([None])


def holds_the_lock(rank: int, size: int) -> None:
    open_default_group()
    if rank == 0:
        re.match(r"(a+)+b", "a" * 60)
    dist.barrier()


class StuckDataset(Dataset[Tensor]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Tensor:
        if index >= 4:
            time.sleep(1000)
        return torch.ones(1)


def waits_for_data(rank: int, size: int) -> None:
    open_default_group()
    if rank == 0:
        for _ in DataLoader(StuckDataset(), batch_size=4):
            pass
    dist.barrier()


def joins_late(rank: int, size: int) -> None:
    if rank == 0:
        time.sleep(1000)
    open_default_group()


def constructs_late(rank: int, size: int) -> None:
    open_default_group()
    if rank == 0:
        time.sleep(1000)
    train_ddp_model(rank, 1)


def misses_monitored_barrier(rank: int, size: int) -> None:
    open_default_group()
    if rank == 0:
        time.sleep(1000)
    dist.monitored_barrier(timeout=FOREVER)


def misses_asynchronous_call(rank: int, size: int) -> None:
    open_default_group()
    if rank == 0:
        time.sleep(1000)
    work = dist.all_reduce(torch.ones(5), async_op=True)
    assert work is not None
    work.wait()


def saves_in_a_thread(rank: int, size: int) -> None:
    """Rank 1 waits for what that thread will do, and rank 0's main thread for rank 1."""
    open_default_group()
    group = dist.new_group(timeout=FOREVER)
    if rank == 0:
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        threading.Thread(target=save, args=(group,), daemon=True).start()
    else:
        dist.barrier(group)
    dist.all_reduce(torch.ones(5))


def save(group: dist.ProcessGroup) -> None:
    time.sleep(1000)
    dist.barrier(group)


@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        (computes, "working"),
        (saves_in_a_thread, "working"),
        (endless_loop, "working"),
        (sleeps_outside_collectives, "blocked"),
        pytest.param(reads_from_stdin, "blocked", marks=pytest.mark.thorough),
        pytest.param(holds_the_lock, "gil", marks=pytest.mark.thorough),  # also in tests/faults
        (waits_for_data, "loading"),
        (joins_late, "blocked"),
        pytest.param(constructs_late, "blocked", marks=pytest.mark.thorough),
        pytest.param(misses_monitored_barrier, "blocked", marks=pytest.mark.thorough),
        (misses_asynchronous_call, "blocked"),
    ],
)
def test_the_others_wait_for_a_rank_that_does_something_else(
    tmp_path: Path, fn: object, kind: str
) -> None:
    with running_ranks(fn, 2, tmp_path) as run:  # type: ignore[arg-type]
        verdict = wait_for_verdict_on_rank_0(run, kind)
    assert (verdict.fatal, verdict.ranks) == (False, (0,))
    line = verdict.rows[0].line
    assert line is not None
    assert line.file == __file__
    assert "waits in" in verdict.rows[1].does


def wait_for_verdict_on_rank_0(run: Ranks, kind: str) -> Verdict:
    """The verdict on rank 0; rank 1 may be late at first."""
    limit = time.monotonic() + HANG_S
    while True:
        verdict = run.wait_for_verdict_of_kind(kind)
        if verdict.ranks == (0,) or time.monotonic() > limit:
            return verdict


def stops_itself(rank: int, size: int) -> None:
    open_default_group()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


def test_a_rank_stopped_by_a_signal_is_found(tmp_path: Path) -> None:
    with running_ranks(stops_itself, 2, tmp_path) as run:
        verdict = run.wait_for_verdict_of_kind("stopped")
    assert (verdict.fatal, verdict.ranks) == (False, (0,))


def slow_on_one_rank(rank: int, size: int) -> None:
    open_default_group()
    model, optimizer = train_ddp_model(rank, 1)
    while True:
        time.sleep(0.06 if rank == 1 else 0.02)
        step(model, optimizer)


def makes_even_steps(rank: int, size: int) -> None:
    open_default_group()
    model, optimizer = train_ddp_model(rank, 1)
    while True:
        time.sleep(0.01)
        step(model, optimizer)


def test_a_slow_rank_is_found_as_a_straggler(tmp_path: Path) -> None:
    with running_ranks(slow_on_one_rank, 2, tmp_path) as run:
        run.wait_until(lambda snapshot: find_straggler(snapshot) is not None)
        verdict = find_straggler(run.take_snapshot())
    assert verdict is not None
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("straggler", False, (1,))


def test_a_run_that_moves_has_no_verdict(tmp_path: Path) -> None:
    with running_ranks(makes_even_steps, 2, tmp_path) as run:
        run.wait_until(lambda snapshot: all((s.steps or 0) > 20 for s in snapshot.ranks))
        for _ in range(3):
            earlier = run.take_snapshot()
            time.sleep(1.0)
            assert find(earlier, run.take_snapshot(), 1.0) is None
