from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from fake_snapshots import TIME, make_call, rank_state, stack_at, stack_in_backward

from lockstep.run.watch.snapshot import CollectiveCall, Group, Snapshot
from lockstep.run.watch.straggler import find_straggler
from lockstep.run.watch.verdict import Verdict

pytestmark = pytest.mark.unit

STEP_S = 0.1


def find_in_run(
    late: Callable[[int, int], float], size: int = 3, steps: int = 60, hosts: str = "aaaaaaaa"
) -> Verdict | None:
    """Steps of two collectives each; `late(rank, step)` is what a rank computes in a step."""
    calls: list[list[CollectiveCall]] = [[] for _ in range(size)]
    step_begin_s = TIME
    for step in range(steps):
        arrivals = [step_begin_s + late(rank, step) for rank in range(size)]
        for rank in range(size):
            # Two buckets, the second called while the first is under way.
            for part in (0, 1):
                made = make_call(
                    "all_reduce",
                    2 * step + part + 1,
                    10,
                    frames=stack_in_backward(20),
                    time_s=arrivals[rank] + 1e-4 * part,
                )
                calls[rank].append(made)
        step_begin_s = max(arrivals) + 0.01
    groups = (Group("0", "default_pg", tuple(range(size))),)
    states = (
        rank_state(r, stack_at(3), *calls[r], groups=groups, host=hosts[r]) for r in range(size)
    )
    return find_straggler(Snapshot(step_begin_s, tuple(states)))


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_rank_that_is_slow_in_every_step_is_a_straggler(size: int) -> None:
    verdict = find_in_run(lambda rank, step: STEP_S * (2 if rank == 1 else 1), size)
    assert verdict is not None
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("straggler", False, (1,))
    assert "wait" in verdict.headline
    assert "48% of the time" in verdict.headline or "47% of the time" in verdict.headline
    assert verdict.rows[1].does == "comes last to all_reduce of 10 float"
    assert verdict.rows[1].line is not None


def test_even_ranks_have_no_straggler() -> None:
    assert find_in_run(lambda rank, step: STEP_S) is None


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_disturb_each_other_have_no_straggler(size: int, seed: int) -> None:
    numbers = random.Random(seed)
    assert find_in_run(lambda rank, step: STEP_S * numbers.expovariate(1.0), size, 200) is None


@pytest.mark.parametrize("seed", range(10))
def test_a_slow_rank_is_found_among_ranks_with_jitter(seed: int) -> None:
    numbers = random.Random(seed)
    verdict = find_in_run(
        lambda rank, step: STEP_S * numbers.uniform(0.9, 1.2) * (1.6 if rank == 2 else 1), 3, 100
    )
    assert verdict is not None
    assert verdict.ranks == (2,)


def test_a_slightly_slower_rank_is_not_worth_a_word() -> None:
    assert find_in_run(lambda rank, step: STEP_S * (1.15 if rank == 1 else 1)) is None


def test_a_rank_that_saves_a_checkpoint_now_and_then_is_no_straggler() -> None:
    assert (
        find_in_run(lambda rank, step: STEP_S + (5.0 if rank == 0 and step % 25 == 0 else 0.0))
        is None
    )


def test_a_slow_first_batch_does_not_hide_what_comes_after() -> None:
    verdict = find_in_run(
        lambda rank, step: (8.0 if rank == 0 and step == 0 else 0) + STEP_S * (1 + (rank == 2)),
        steps=80,
    )
    assert verdict is not None
    assert verdict.ranks == (2,)


def test_a_few_slow_steps_say_nothing() -> None:
    assert find_in_run(lambda rank, step: STEP_S * (2 if rank == 1 else 1), steps=8) is None
    assert find_in_run(lambda rank, step: 5.0 * (2 if rank == 1 else 1), steps=8) is None


def test_a_rank_that_was_slow_for_a_moment_is_no_straggler() -> None:
    assert find_in_run(lambda rank, step: STEP_S * (3 if rank == 1 and 20 < step < 60 else 1),
               steps=150) is None  # fmt: skip


def test_clocks_of_several_hosts_cannot_be_compared() -> None:
    assert find_in_run(lambda rank, step: STEP_S * (2 if rank == 1 else 1), hosts="aab") is None


def test_ranks_that_cannot_be_compared_have_no_straggler() -> None:
    assert find_straggler(Snapshot(TIME, ())) is None
    assert find_straggler(Snapshot(TIME, (rank_state(0, stack_at(3)),))) is None
    assert (
        find_straggler(
            Snapshot(TIME, (rank_state(0, stack_at(3)), rank_state(1, stack_at(3), answered=False)))
        )
        is None
    )
