"""Every case of the table in "Supervision", from snapshots made by hand."""

from __future__ import annotations

import inspect
import threading
from dataclasses import replace

import pytest
from fake_snapshots import (
    C10D,
    DDP,
    TIME,
    TORCH,
    completed_all_reduces,
    ended_rank,
    make_call,
    make_snapshots,
    rank_state,
    script_frame,
    stack_at,
    stack_in_backward,
    stack_in_data_loader,
    stack_in_ddp_buffer_broadcast,
    stack_in_ddp_constructor,
    stack_in_init_process_group,
    stack_in_lockstep_init,
    stack_in_op,
    stack_in_pipeline_wire,
)

from lockstep.run.watch.hang import find
from lockstep.run.watch.snapshot import CollectiveCall, Group, NewGroup, RankState, Snapshot
from lockstep.run.watch.stacks import LOCKSTEP_FOLDER, Frame, Stack
from lockstep.run.watch.verdict import Verdict

pytestmark = pytest.mark.unit

GROUP_OF_TWO = (Group("0", "default_pg", (0, 1)),)
GROUP_OF_THREE = (Group("0", "default_pg", (0, 1, 2)),)


def find_verdict(
    *later: RankState, working: tuple[int, ...] = (), waited_s: float = 8.0
) -> Verdict:
    verdict = find(*make_snapshots(*later, working=working), waited_s)
    assert verdict is not None
    assert [row.rank for row in verdict.rows] == [s.rank for s in later]
    return verdict


def test_a_call_is_a_move_also_where_no_step_is_made() -> None:
    late = rank_state(
        1,
        stack_in_op("barrier", 40),
        *completed_all_reduces(5),
        make_call("barrier", 6, time_s=TIME - 2.0),
    )
    ranks = (
        rank_state(
            0,
            stack_in_op("all_reduce", 30),
            *completed_all_reduces(5),
            make_call("all_reduce", 6, 5),
        ),
        late,
    )
    assert [round(row.for_s or 0) for row in find_verdict(*ranks).rows] == [94, 2]
    assert "nothing has moved for 2 s" in find_verdict(*ranks).headline


def rank_at_barrier(rank: int, seq: int = 6, **fields: object) -> RankState:
    return rank_state(
        rank,
        stack_in_op("barrier", 40),
        *completed_all_reduces(seq - 1),
        make_call("barrier", seq),
        **fields,
    )


# --- deadlocks


def test_a_rank_that_got_through_a_call_of_other_sizes_is_not_said_to_wait_in_it() -> None:
    sizes = completed_all_reduces(5)
    through = (make_call("all_reduce", 6, 3), make_call("all_gather", 7, 3))
    verdict = find_verdict(
        rank_state(0, stack_in_op("all_gather", 8), *sizes, *through),
        rank_state(1, stack_in_op("all_reduce", 6), *sizes, make_call("all_reduce", 6, 4)),
    )
    assert (verdict.kind, verdict.fatal) == ("deadlock", True)
    assert "collectives that do not match, after all_reduce had different sizes" in verdict.headline


def test_all_ranks_in_a_circle_of_groups_are_named() -> None:
    """Each waits in a group whose other rank waits in the next group. Rank 3 waits for rank 0."""
    members = {"a": (0, 1), "b": (1, 2), "c": (2, 0), "d": (3, 0)}
    groups = tuple(Group(name, "gloo", ranks) for name, ranks in members.items())
    states = []
    for rank, name in enumerate("abcd"):
        call = make_call("all_reduce", 1, 2, group=name)
        stack = stack_in_op("all_reduce", 8)
        states.append(rank_state(rank, stack, call, groups=groups, completed={}))
    verdict = find_verdict(*states)
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("deadlock", True, (0, 1, 2))


def test_different_operations_are_a_deadlock() -> None:
    verdict = find_verdict(
        rank_state(
            0,
            stack_in_op("all_reduce", 30),
            *completed_all_reduces(5),
            make_call("all_reduce", 6, 5),
        ),
        rank_at_barrier(1),
    )
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("deadlock", True, (0, 1))
    assert verdict.mismatch is not None
    assert (verdict.mismatch.group, verdict.mismatch.seq) == ("the default group", 6)
    assert [c.op for _, c in verdict.mismatch.calls if c] == ["all_reduce", "barrier"]
    assert [row.does for row in verdict.rows] == [
        "waits in all_reduce of 5 float (step 5)", "waits in barrier (step 5)",
    ]  # fmt: skip
    assert [row.line and row.line.line for row in verdict.rows] == [30, 40]
    # Of the calls they wait in, the line is known from the stack.
    assert [c.frames[2].line for _, c in verdict.mismatch.calls if c and c.frames] == [30, 40]
    assert "same collectives in the same order" in verdict.advice[0]


def test_one_operation_with_different_sizes_is_a_deadlock() -> None:
    verdict = find_verdict(
        rank_state(
            0,
            stack_in_op("all_reduce", 30),
            *completed_all_reduces(5),
            make_call("all_reduce", 6, 5),
            groups=GROUP_OF_THREE,
        ),
        rank_state(
            1,
            stack_in_op("all_reduce", 30),
            *completed_all_reduces(5),
            make_call("all_reduce", 6, 7),
            groups=GROUP_OF_THREE,
        ),
        rank_state(
            2,
            stack_in_op("all_reduce", 30),
            *completed_all_reduces(5),
            make_call("all_reduce", 6, 5),
            groups=GROUP_OF_THREE,
        ),
    )
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("deadlock", True, (1,))
    assert "different sizes" in verdict.headline
    assert "same size" in verdict.advice[0]


def test_one_operation_with_different_types_is_a_deadlock() -> None:
    verdict = find_verdict(
        rank_state(0, stack_in_op("all_reduce", 30), make_call("all_reduce", 1, 5)),
        rank_state(
            1, stack_in_op("all_reduce", 30), make_call("all_reduce", 1, 5, dtypes=("double",))
        ),
    )
    assert (verdict.kind, verdict.fatal) == ("deadlock", True)


def test_another_shape_of_the_same_size_matches() -> None:
    sizes = {"input_sizes": ((5, 2),), "output_sizes": ((5, 2),)}
    verdict = find_verdict(
        rank_state(0, stack_in_op("all_reduce", 30), make_call("all_reduce", 1, 10)),
        rank_state(1, stack_in_op("all_reduce", 30), make_call("all_reduce", 1, 10, **sizes)),
    )
    assert verdict.kind == "transport"


def test_sizes_that_may_differ_match() -> None:
    verdict = find_verdict(
        rank_state(0, stack_in_op("gather", 30), make_call("gather", 1, 10)),
        rank_state(1, stack_in_op("gather", 30), make_call("gather", 1, 10, output_sizes=())),
    )
    assert verdict.kind == "transport"


def test_an_uneven_number_of_steps_is_a_deadlock() -> None:
    verdict = find_verdict(
        rank_state(
            0,
            stack_in_backward(20),
            *completed_all_reduces(5),
            make_call("all_reduce", 6, 25),
            steps=6,
        ),
        rank_at_barrier(1),
    )
    assert (verdict.kind, verdict.fatal) == ("deadlock", True)
    assert "in backward" in verdict.rows[0].does
    assert "same number of batches" in verdict.advice[0]


def test_a_rank_that_skipped_a_batch_is_the_odd_one_of_three() -> None:
    """The others' forward pass broadcasts buffers; one of them has got past that."""
    broadcast = make_call("broadcast", 6, 8)
    verdict = find_verdict(
        rank_state(
            0,
            stack_in_ddp_buffer_broadcast(20),
            *completed_all_reduces(5),
            broadcast,
            groups=GROUP_OF_THREE,
        ),
        rank_at_barrier(1, groups=GROUP_OF_THREE),
        rank_state(
            2,
            stack_in_backward(20),
            *completed_all_reduces(5),
            broadcast,
            make_call("all_reduce", 7, 25),
            groups=GROUP_OF_THREE,
        ),
    )
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("deadlock", True, (1,))


def test_a_rank_that_ran_out_of_data_is_the_odd_one_of_three() -> None:
    verdict = find_verdict(
        rank_state(
            0,
            stack_in_backward(20),
            *completed_all_reduces(5),
            make_call("all_reduce", 6, 25),
            groups=GROUP_OF_THREE,
        ),
        rank_state(
            1,
            stack_in_backward(20),
            *completed_all_reduces(5),
            make_call("all_reduce", 6, 25),
            groups=GROUP_OF_THREE,
        ),
        rank_at_barrier(2, groups=GROUP_OF_THREE),
    )
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("deadlock", True, (2,))


def test_an_evaluation_on_rank_0_alone_is_a_deadlock_with_the_barrier() -> None:
    verdict = find_verdict(
        rank_state(
            0,
            stack_in_ddp_buffer_broadcast(50),
            *completed_all_reduces(5),
            make_call("broadcast", 6, 8),
            make_call("broadcast", 7, 1),
            completed={"gloo:0": 5},
        ),
        rank_at_barrier(1),
    )
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("deadlock", True, (0,))
    # Of the two broadcasts under way it is the first that parts.
    assert "waits in broadcast of 8 float, in the DDP model's forward" in verdict.rows[0].does
    assert "model.module" in verdict.advice[0]


def test_an_evaluation_on_rank_0_alone_is_a_deadlock_with_training() -> None:
    verdict = find_verdict(
        rank_state(
            0,
            stack_in_ddp_buffer_broadcast(50),
            *completed_all_reduces(5),
            make_call("broadcast", 6, 8),
        ),
        rank_state(
            1, stack_in_backward(20), *completed_all_reduces(5), make_call("all_reduce", 6, 25)
        ),
    )
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("deadlock", True, (0,))
    assert "model.module" in verdict.advice[0]


@pytest.mark.parametrize(("line", "advice"), [(50, "model.module"), (20, "number of batches")])
def test_the_line_distinguishes_an_evaluation_from_an_extra_step(line: int, advice: str) -> None:
    before = [
        make_call("broadcast", seq, 8, frames=stack_in_ddp_buffer_broadcast(20)) for seq in (1, 2)
    ]
    verdict = find_verdict(
        rank_state(
            0,
            stack_in_ddp_buffer_broadcast(line),
            *before,
            make_call("broadcast", 3, 8, frames=(script_frame(line),)),
        ),
        rank_state(1, stack_in_op("barrier", 40), *before, make_call("barrier", 3)),
    )
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("deadlock", True, (0,))
    assert [advice in text for text in verdict.advice] == [True]


def test_collectives_in_different_groups_are_a_deadlock() -> None:
    groups = (Group("1", "undefined", (0, 1)), Group("2", "model", (0, 1)))
    both = [make_call("all_reduce", 1, 2, group=g, time_s=TIME - 30) for g in "12"]
    verdict = find_verdict(
        rank_state(
            0,
            stack_in_op("all_reduce", 30),
            *both,
            make_call("all_reduce", 2, 3, group="1"),
            groups=groups,
        ),
        rank_state(
            1,
            stack_in_op("all_reduce", 30),
            *both,
            make_call("all_reduce", 2, 3, group="2"),
            groups=groups,
        ),
    )
    assert (verdict.kind, verdict.fatal) == ("deadlock", True)
    assert [row.does.split(" of ")[-1] for row in verdict.rows] == [
        "group '1' (step 5)", "group 'model' (step 5)",
    ]  # fmt: skip
    assert "process groups" in verdict.advice[0]


@pytest.mark.parametrize(
    ("inner", "says"),
    [
        ((Frame(f"{LOCKSTEP_FOLDER}world.py", 353, "loss"),), "call world.loss() on all ranks"),
        (
            (
                Frame(f"{LOCKSTEP_FOLDER}world.py", 9, "gather"),
                Frame(f"{LOCKSTEP_FOLDER}checkpoint/checkpointer.py", 7, "save"),
            ),
            "call checkpoint.save() on all ranks",
        ),
        (
            (Frame(f"{LOCKSTEP_FOLDER}strategies/sync_batchnorm.py", 154, "forward"),),
            "`model.eval()` before",
        ),
    ],
)
def test_a_collective_of_lockstep_on_rank_0_alone_is_named(inner: Stack, says: str) -> None:
    groups = (Group("1", "shared memory", (0, 1)), Group("2", "model", (0, 1)))
    both = [make_call("all_gather", 1, 2, group=g, time_s=TIME - 30) for g in "12"]
    waits = make_call("all_gather", 2, 3, group="1")
    trains = make_call("broadcast", 2, 3, group="2")
    in_op = stack_in_op("all_gather", 30)
    stack = (*in_op[:2], *inner, *in_op[2:])
    ranks = [
        rank_state(0, stack, *both, waits, groups=groups),
        rank_state(1, stack_in_op("broadcast", 40), *both, trains, groups=groups),
    ]
    assert says in find_verdict(*ranks).advice[0]
    # Outside of the user's line such a frame says nothing, and neither if no rank is elsewhere.
    ranks[0] = rank_state(0, (*in_op, *inner), *both, waits, groups=groups)
    assert "process groups" in find_verdict(*ranks).advice[0]


def test_a_cycle_over_two_groups_is_a_deadlock() -> None:
    # 0 waits for 1 in a group of two, 1 and 2 wait for 0 in the barrier of all.
    groups = (*GROUP_OF_THREE, Group("1", "pair", (0, 1)))
    verdict = find_verdict(
        rank_state(
            0,
            stack_in_op("all_reduce", 30),
            make_call("all_reduce", 1, 3, group="1"),
            groups=groups,
        ),
        rank_at_barrier(1, 1, groups=groups),
        rank_at_barrier(2, 1, groups=GROUP_OF_THREE),
    )
    assert (verdict.kind, verdict.fatal) == ("deadlock", True)


def test_a_group_at_work_is_not_taken_for_a_deadlock() -> None:
    # 0 and 1 match, so their transfer may end; 2 waits for them only.
    groups = (*GROUP_OF_THREE, Group("1", "pair", (0, 1)))
    pair = make_call("all_reduce", 1, 3, group="1")
    verdict = find_verdict(
        rank_state(0, stack_in_op("all_reduce", 30), pair, groups=groups),
        rank_state(1, stack_in_op("all_reduce", 30), pair, groups=groups),
        rank_at_barrier(2, 1, groups=GROUP_OF_THREE),
    )
    assert (verdict.kind, verdict.fatal) == ("transport", False)


def test_a_mismatch_while_a_third_rank_works_is_not_fatal() -> None:
    verdict = find_verdict(
        rank_state(
            0, stack_in_op("all_reduce", 30), make_call("all_reduce", 1, 5), groups=GROUP_OF_THREE
        ),
        rank_at_barrier(1, 1, groups=GROUP_OF_THREE),
        rank_state(2, stack_at(60), groups=GROUP_OF_THREE),
        working=(2,),
    )
    assert (verdict.kind, verdict.fatal) == ("deadlock", False)


def test_a_mismatched_asynchronous_call_is_a_deadlock() -> None:
    # `work.wait()` leaves no frame: the rank is blocked in a line of its own.
    verdict = find_verdict(
        rank_state(0, stack_at(30), *completed_all_reduces(5), make_call("all_reduce", 6, 5)),
        rank_at_barrier(1),
    )
    assert (verdict.kind, verdict.fatal) == ("deadlock", True)


STACK_IN_NEW_GROUP = (
    Frame(C10D, 2169, "_new_process_group_helper"),
    Frame(C10D, 6056, "_new_group_with_tag"),
    Frame(C10D, 5863, "new_group"),
    script_frame(9),
)


def rank_creating_group(
    rank: int, name: str, *ranks: int, backend: str = "gloo", members_only: bool = True
) -> RankState:
    group = NewGroup(name, ranks, backend, members_only)
    return rank_state(rank, STACK_IN_NEW_GROUP, *completed_all_reduces(2), making=group)


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        (  # in another order
            [rank_creating_group(0, "1", 0, 1), rank_creating_group(1, "2", 0, 1)],
            ["for ranks 0-1 (group '1', over gloo)", "for ranks 0-1 (group '2', over gloo)"],
        ),
        (  # with other members, where all ranks of the run wait for each other
            [
                rank_creating_group(0, "1", 0, 1, members_only=False),
                rank_creating_group(1, "1", 0, 1, members_only=False),
                rank_creating_group(2, "1", 0, 2, members_only=False),
            ],
            ["for ranks 0-1 (group '1', over gloo)"] * 2
            + ["for ranks 0, 2 (group '1', over gloo)"],
        ),
        (  # over other backends
            [rank_creating_group(0, "1", 0, 1), rank_creating_group(1, "1", 0, 1, backend="nccl")],
            ["for ranks 0-1 (group '1', over gloo)", "for ranks 0-1 (group '1', over nccl)"],
        ),
        (  # pairs of neighbours in a ring, each rank with the next one first
            [
                rank_creating_group(0, "ab", 0, 1),
                rank_creating_group(1, "bc", 1, 2),
                rank_creating_group(2, "ca", 0, 2),
            ],
            [
                "for ranks 0-1 (over gloo)",
                "for ranks 1-2 (over gloo)",
                "for ranks 0, 2 (over gloo)",
            ],
        ),
    ],
)
def test_new_groups_are_compared_by_their_members(ranks: list[RankState], says: list[str]) -> None:
    verdict = find_verdict(*ranks)
    assert (verdict.kind, verdict.fatal) == ("deadlock", True)
    assert "wait in new_group, for process groups that differ" in verdict.headline
    assert [row.does for row in verdict.rows] == [
        f"waits in new_group {words} (step 5)" for words in says
    ]
    assert "the same ranks and backend" in verdict.advice[0]


def test_the_same_new_group_is_no_deadlock() -> None:
    """The network may be slow; what torch takes for its default may be this very backend."""
    verdict = find_verdict(
        rank_creating_group(0, "1", 0, 1), rank_creating_group(1, "1", 0, 1, backend="undefined")
    )
    assert (verdict.kind, verdict.fatal) == ("transport", False)


def test_a_call_in_a_destroyed_group_of_the_same_name_is_no_mismatch() -> None:
    """Rank 2 still has a call of its own group '1', which it has destroyed."""
    groups = (*GROUP_OF_THREE, Group("1", "pair", (0, 1)))
    destroyed = make_call("all_reduce", 1, 3, group="1", state="completed")
    verdict = find_verdict(
        rank_state(
            0,
            stack_in_op("all_reduce", 30),
            *completed_all_reduces(5),
            make_call("all_reduce", 6, 5),
            groups=groups,
        ),
        rank_at_barrier(1, groups=groups),
        rank_state(
            2,
            stack_in_op("barrier", 40),
            *completed_all_reduces(5),
            destroyed,
            make_call("barrier", 6),
            groups=GROUP_OF_THREE,
        ),
    )
    assert verdict.kind == "deadlock"
    assert verdict.mismatch is not None
    assert (verdict.mismatch.group, verdict.mismatch.seq) == ("the default group", 6)


def test_members_of_a_new_group_wait_for_one_that_has_not_come() -> None:
    both = [rank_creating_group(rank, "1", 0, 1, 2) for rank in range(2)]
    verdict = find_verdict(*both, rank_state(2, stack_at(4)), working=[2])
    assert (verdict.kind, verdict.ranks) == ("working", (2,))


def test_groups_of_one_name_and_other_members_are_different_groups() -> None:
    """As NCCL lets ranks make them, which connects at the first collective."""
    one = [
        rank_state(
            rank,
            stack_in_op("all_reduce", 7),
            *completed_all_reduces(1),
            make_call("all_reduce", 1, 3, group="1", time_s=TIME - 9),
            groups=(Group("0", "default_pg", (0, 1, 2)), Group("1", "undefined", ranks)),
        )
        for rank, ranks in enumerate([(0, 1), (0, 1, 2), (1, 2)])
    ]
    verdict = find_verdict(*one)
    assert (verdict.kind, verdict.fatal) == ("deadlock", True)
    assert "of group '1 of ranks 0-1'" in verdict.rows[0].does
    assert "of group '1 of ranks 0-2'" in verdict.rows[1].does
    # Pairs that have one name, and each its own collectives, are none.
    pairs = [
        rank_state(
            rank,
            stack_in_op("all_reduce", 7),
            make_call("all_reduce", 1, 3 + rank // 2, group="1"),
            groups=(Group("1", "undefined", (rank - rank % 2, rank - rank % 2 + 1)),),
        )
        for rank in range(4)
    ]
    assert find_verdict(*pairs).kind == "transport"


@pytest.mark.parametrize("field", ["children_cpu_s", "cpu_s"])
def test_a_rank_whose_children_or_threads_compute_is_at_work(field: str) -> None:
    """As where it waits for the processes of torch's compiler, or for a pool of threads."""
    waits = rank_state(
        0, stack_in_op("barrier", 3), *completed_all_reduces(2), make_call("barrier", 3)
    )
    blocked = rank_state(1, stack_at(7), children_cpu_s=1.0)
    earlier, later = make_snapshots(waits, blocked)
    verdict = find(earlier, later, 8.0)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("blocked", (1,))
    assert "without computing" in verdict.headline
    before = replace(blocked, **{field: getattr(blocked, field) - 0.8})
    verdict = find(replace(earlier, ranks=(waits, before)), later, 8.0)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("working", (1,))
    assert "is blocked while threads or processes that it has started compute" in verdict.headline


def test_new_group_on_some_ranks_is_a_deadlock() -> None:
    stack = (
        Frame(C10D, 2169, "_new_process_group_helper"),
        Frame(C10D, 5863, "new_group"),
        script_frame(9),
    )
    verdict = find_verdict(rank_state(0, stack, *completed_all_reduces(5)), rank_at_barrier(1))
    assert (verdict.kind, verdict.fatal) == ("deadlock", True)
    assert verdict.rows[0].does.startswith("waits in new_group")
    assert "all ranks" in verdict.advice[0]


def test_constructing_ddp_on_some_ranks_is_a_deadlock() -> None:
    verdict = find_verdict(
        rank_state(
            0, stack_in_ddp_constructor(9), *completed_all_reduces(5), make_call("all_gather", 6, 1)
        ),
        rank_at_barrier(1),
    )
    assert (verdict.kind, verdict.fatal) == ("deadlock", True)
    assert "construct DistributedDataParallel on all ranks" in verdict.advice[0]


def find_verdict_on_gpus(
    *of_ranks: tuple[str, ...] | None, state_of_call: str = "scheduled"
) -> Verdict | None:
    """The main threads spin in lines of their own, `loss.item()`, waiting for their GPUs.

    Each rank has called the operations given, of which none is completed; None: it has ended.
    """
    fields = {"backend": "nccl", "state": state_of_call}
    ranks = [
        ended_rank(rank)
        if ops is None
        else rank_state(
            rank,
            stack_at(30 + rank),
            *[make_call(op, seq, 5, **fields) for seq, op in enumerate(ops, 1)],
            completed={},
        )
        for rank, ops in enumerate(of_ranks)
    ]
    return find(*make_snapshots(*ranks, working=range(len(ranks))), 8.0)


def test_nccl_calls_are_judged_by_what_all_ranks_have_called() -> None:
    """Torch does not say what a GPU has started, unless it is told to take the times."""
    for state_of_call in ("started", "scheduled"):
        verdict = find_verdict_on_gpus(
            ("all_reduce",), ("all_gather",), state_of_call=state_of_call
        )
        assert verdict is not None
        assert (verdict.kind, verdict.fatal) == ("deadlock", True)
        assert "waits in all_reduce" in verdict.rows[0].does
    # The GPUs still have work before it; and a host that runs ahead of them waits for nobody.
    assert find_verdict_on_gpus(("all_reduce",), ("all_reduce",)) is None
    assert find_verdict_on_gpus(("all_reduce", "barrier"), ("all_reduce",)) is None


def test_a_gpu_waits_for_the_rank_that_has_not_come() -> None:
    verdict = find_verdict_on_gpus(("all_reduce",), ())
    assert verdict is not None
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("working", False, (1,))
    verdict = find_verdict_on_gpus(("all_reduce",), None)
    assert verdict is not None
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("left", True, (1,))


STAGES = (Group("0", "default_pg", (0, 1, 2)), Group("4", "activations of model 0", (0, 1, 2)))


def find_verdict_on_stages(*of_ranks: tuple[str, ...], **of_last_rank: object) -> Verdict | None:
    """The main threads spin in lines of their own, as they wait for their GPUs over NCCL.

    Each rank has called batches of sends and receives, such as "recv 2, send 0", of which none is
    completed.
    """
    ranks = []
    for rank, batches in enumerate(of_ranks):
        calls = []
        for seq, batch in enumerate(batches, 1):
            for call in batch.split(", "):
                op, _, peer = call.partition(" ")
                calls.append(
                    make_call(op, seq, 4, p2p=True, peer=int(peer), backend="nccl", group="4")
                )
        is_last = rank == len(of_ranks) - 1
        fields = of_last_rank if is_last else {}
        ranks.append(rank_state(rank, stack_at(30 + rank), *calls, groups=STAGES, **fields))
    working = range(len(of_ranks) - bool(of_last_rank))
    return find(*make_snapshots(*ranks, working=working), 8.0)


def test_a_gpu_waits_for_the_stage_that_has_not_sent() -> None:
    for ops, awaited in (
        ((("recv 1",), ()), 1),  # rank 1 has not called the send
        ((("recv 1",), ("recv 0", "send 0")), None),  # both receive first
        ((("recv 1",), ("recv 2", "send 0"), ()), 2),  # the send of rank 1 is behind a receive
        ((("recv 1",), ("recv 2, send 0",), ()), 2),  # it is in one batch with the receive
    ):
        verdict = find_verdict_on_stages(*ops)
        assert verdict is not None
        assert not verdict.fatal
        if awaited is None:
            assert (verdict.kind, verdict.ranks) == ("deadlock", (0, 1))
            assert "wait in recv, for each other" in verdict.headline
        else:
            assert (verdict.kind, verdict.ranks) == ("working", (awaited,))
            assert "waits in recv of 4 float" in verdict.rows[awaited - 1].does
    # In the last case rank 1 has come to the send for which rank 0 waits.
    verdict = find_verdict_on_stages(("recv 1",), ("recv 2, send 0",), ())
    assert verdict is not None
    assert "works on" in verdict.rows[0].does
    verdict = find_verdict_on_stages(("recv 1",), (), state="T")
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("stopped", (1,))


def test_a_gpu_that_may_compute_waits_for_nobody() -> None:
    # The GPU of rank 1 has work before its send; it computes while it sends.
    assert find_verdict_on_stages(("recv 1",), ("send 0",)) is None
    assert find_verdict_on_stages(("send 1",), ()) is None
    # A rank whose receive was not known in the first snapshot has gone on since.
    receives = make_call("recv", 1, 4, p2p=True, peer=1, backend="nccl", group="4")
    ranks = (
        rank_state(0, stack_at(30), receives, groups=STAGES),
        rank_state(1, stack_at(31), groups=STAGES),
    )
    earlier, later = make_snapshots(*ranks, working=(0, 1))
    earlier = replace(earlier, ranks=(replace(earlier.ranks[0], calls=None), earlier.ranks[1]))
    assert find(earlier, later, 8.0) is None


def test_a_mismatch_says_since_when_the_lines_differ() -> None:
    same, other = (script_frame(20),), (script_frame(50),)
    before = [make_call("broadcast", seq, 8, frames=same) for seq in (1, 2, 3)]
    apart = [replace(c, frames=other) if c.seq > 1 else c for c in before]
    verdict = find_verdict(
        rank_state(
            0, stack_in_ddp_buffer_broadcast(50), *apart, make_call("broadcast", 4, 8, frames=other)
        ),
        rank_state(1, stack_in_backward(20), *before, make_call("all_reduce", 4, 25, frames=same)),
    )
    assert verdict.mismatch is not None
    assert (verdict.mismatch.seq, verdict.mismatch.lines_differ_since) == (4, 2)


def test_a_call_dropped_by_the_recorder_does_not_count_as_missing() -> None:
    verdict = find_verdict(
        rank_state(
            0, stack_in_op("barrier", 40), *completed_all_reduces(5)[3:], make_call("barrier", 6)
        ),
        rank_state(
            1, stack_in_op("barrier", 40), *completed_all_reduces(5), make_call("barrier", 6)
        ),
    )
    assert verdict.kind == "transport"


BUSY_STACK = (
    Frame("/home/me/saver.py", 30, "save"),
    Frame("/usr/lib/python3.11/threading.py", 1, "run"),
)


def stack_in_condition_wait(code: str) -> Stack:
    """A thread that waits for another one, in this line of Python's own `Condition.wait`."""
    lines, first = inspect.getsourcelines(threading.Condition.wait)
    number = next(first + n for n, line in enumerate(lines) if line.strip().endswith(code))
    return (Frame(threading.__file__, number, "wait"), *BUSY_STACK)


STACK_WITHOUT_TIMEOUT, STACK_WITH_TIMEOUT = (
    stack_in_condition_wait("waiter.acquire()"),
    stack_in_condition_wait("waiter.acquire(True, timeout)"),
)
STACK_IN_POOL = (
    Frame("/usr/lib/python3.11/concurrent/futures/thread.py", 81, "_worker"),
    *BUSY_STACK[1:],
)
STACK_OF_LOCK = (
    *STACK_WITH_TIMEOUT[:1],
    Frame("/usr/lib/lockstep/checkpoint/signs_of_life.py", 55, "_run"),
)
STACK_OF_SIGNALS = (
    Frame("/usr/lib/lockstep/checkpoint/termination.py", 46, "_watch"),
    *BUSY_STACK[1:],
)
STACK_OF_PROGRESS_BAR = (
    *STACK_WITH_TIMEOUT[:1],
    Frame("/usr/lib/python3.11/site-packages/tqdm/_monitor.py", 69, "run"),
)
STACK_OF_PINNED_MEMORY = (
    *STACK_WITH_TIMEOUT[:1],
    Frame("/usr/lib/python3.11/queue.py", 180, "get"),
    Frame("/usr/lib/torch/utils/data/_utils/pin_memory.py", 27, "do_one_step"),
    Frame("/usr/lib/torch/utils/data/_utils/pin_memory.py", 52, "_pin_memory_loop"),
)
STACK_IN_DOWNLOAD = (Frame("/usr/lib/python3.11/selectors.py", 468, "select"), *BUSY_STACK)
GROUPS_WITH_SAVERS = (*GROUP_OF_TWO, Group("3", "savers", (0, 1)))


@pytest.mark.parametrize(
    ("thread", "earlier", "kind"),
    [
        (BUSY_STACK, (), "working"),  # no thread of rank 0 has used the group so far
        (BUSY_STACK, (make_call("barrier", 1, group="3", thread=8, state="completed"),), "working"),
        (BUSY_STACK, (make_call("barrier", 1, group="3", state="completed"),), "working"),
        (STACK_WITH_TIMEOUT, (), "working"),
        (STACK_IN_DOWNLOAD, (), "working"),
        (STACK_WITHOUT_TIMEOUT, (), "deadlock"),
        (STACK_IN_POOL, (), "deadlock"),
        (STACK_OF_LOCK, (), "deadlock"),  # it wakes up now and then, and helps nobody
        (STACK_OF_SIGNALS, (), "deadlock"),  # is there since the last save in the background
        (STACK_OF_PROGRESS_BAR, (), "deadlock"),
        (STACK_OF_PINNED_MEMORY, (), "deadlock"),
        (stack_in_op("barrier", 30), (), "deadlock"),
    ],
)
def test_a_rank_with_a_working_thread_may_yet_make_the_call(
    thread: Stack, earlier: tuple[CollectiveCall, ...], kind: str
) -> None:
    """Rank 1 waits for what rank 0's checkpoint thread will do, and the main thread of rank 0
    for rank 1: no deadlock, as long as that thread works."""
    calls = (*completed_all_reduces(5), *earlier, make_call("all_reduce", 6, 1))
    rank_0 = rank_state(
        0, stack_in_op("all_reduce", 40), *calls, groups=GROUPS_WITH_SAVERS, threads=(thread,)
    )
    waits = make_call("barrier", len(earlier) + 1, group="3")
    rank_1 = rank_state(
        1,
        stack_in_op("barrier", 50),
        *completed_all_reduces(5),
        *earlier,
        waits,
        groups=GROUPS_WITH_SAVERS,
    )
    verdict = find_verdict(rank_0, rank_1)
    assert (verdict.kind, verdict.fatal) == (kind, kind == "deadlock")
    if kind == "working":
        assert verdict.ranks == (0,)
        assert verdict.headline.startswith("rank 0 may yet come in another thread; rank 1 has")
        assert verdict.rows[0].line == BUSY_STACK[0]


@pytest.mark.parametrize(
    ("backend", "timeout_s", "fatal"),
    [
        ("gloo", 18.0, False),
        ("gloo", 600.0, False),
        ("gloo", 1800.0, True),
        ("nccl", 18.0, False),
        ("nccl", 900.0, False),
        ("nccl", 600.0, True),  # what torch gives a group that has NCCL alone
        ("nccl", 1800.0, True),
    ],
)
def test_a_group_that_was_given_a_shorter_timeout_is_left_to_it(
    backend: str, timeout_s: float, fatal: bool
) -> None:
    """The program may expect that nobody comes to a call of it."""
    side = Group("3", "", (0, 1))
    probes = make_call("all_reduce", 1, 1, group="3", timeout_s=timeout_s, backend=backend)
    before = completed_all_reduces(5, timeout_s=1800.0, backend=backend)
    barrier = make_call("barrier", 6, timeout_s=1800.0, backend=backend)
    groups = (*GROUP_OF_TWO, side)
    verdict = find_verdict(
        rank_state(0, stack_in_op("all_reduce", 40), *before, probes, groups=groups),
        rank_state(1, stack_in_op("barrier", 40), *before, barrier, groups=groups),
    )
    assert verdict.fatal == fatal
    if not fatal:
        assert (verdict.kind, verdict.ranks) == ("blocked", (0,))
        assert "until the timeout of a group that has one of its own" in verdict.headline
        assert "all_reduce of 1 float, of a group with a timeout" in verdict.rows[0].does


def test_the_call_of_another_thread_is_not_what_the_main_thread_waits_in() -> None:
    groups = (*GROUP_OF_TWO, Group("3", "", (0, 1)))
    others = make_call("all_gather", 1, 3, group="3", thread=8)
    verdict = find_verdict(
        rank_state(
            0,
            stack_in_op("all_reduce", 40),
            *completed_all_reduces(6),
            others,
            groups=groups,
            main_thread=7,
        ),
        rank_state(1, stack_at(50), *completed_all_reduces(5), groups=groups),
    )
    assert (verdict.kind, verdict.ranks) == ("blocked", (1,))
    assert verdict.rows[0].does.startswith("waits in all_reduce of 25 float")


def test_threads_of_all_ranks_may_yet_come() -> None:
    groups = [Group(name, "", (0, 1)) for name in "12"]
    first, second = (
        rank_state(
            rank,
            stack_in_op("barrier", 30),
            make_call("barrier", 1, group=groups[rank].name),
            groups=tuple(groups),
            threads=(STACK_WITHOUT_TIMEOUT, BUSY_STACK),
        )
        for rank in (0, 1)
    )
    verdict = find_verdict(first, second)
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("working", False, (0, 1))
    assert verdict.headline == "ranks 0-1 may yet come in another thread, for 8 s"
    verdict = find_verdict(
        first, replace(second, threads=(STACK_WITHOUT_TIMEOUT, STACK_WITHOUT_TIMEOUT))
    )
    assert verdict.headline.startswith("rank 0 may yet come in another thread; rank 1 has")
    assert find_verdict(
        *(
            replace(rank, threads=(STACK_WITHOUT_TIMEOUT, STACK_WITHOUT_TIMEOUT))
            for rank in (first, second)
        )
    ).fatal


def test_no_thread_helps_where_the_calls_do_not_match() -> None:
    threads = {"threads": (BUSY_STACK,)}
    buffers = [make_call("broadcast", 6, 8), make_call("broadcast", 7, 1)]
    verdict = find_verdict(
        rank_state(
            0,
            stack_in_ddp_buffer_broadcast(50),
            *completed_all_reduces(5),
            *buffers,
            completed={"gloo:0": 5},
            **threads,
        ),
        rank_at_barrier(1, **threads),
    )
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("deadlock", True, (0,))


# --- a rank is gone


def test_a_rank_that_ended_without_error_is_left_and_fatal() -> None:
    verdict = find_verdict(rank_at_barrier(0), ended_rank(1))
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("left", True, (1,))
    assert verdict.rows[1].does.startswith("has ended with exit code 0")


def test_a_group_that_is_taken_down_waits_for_nobody_who_has_ended() -> None:
    """NCCL takes seconds for it, and the others may well have ended meanwhile."""
    verdict = find_verdict(
        rank_state(0, stack_in_op("destroy_process_group", 90), *completed_all_reduces(5)),
        ended_rank(1),
    )
    assert not verdict.fatal


def test_a_rank_outside_a_new_group_is_no_reason_for_the_wait_of_its_members() -> None:
    """Rank 1 may be continued, and rank 3 goes on by itself. Rank 0 does not wait for rank 2."""
    verdict = find_verdict(
        rank_creating_group(0, "1", 0, 1),
        rank_state(1, None, state="T", answered=False, calls=None),
        ended_rank(2),
        rank_state(3, stack_in_op("destroy_process_group", 90), *completed_all_reduces(5)),
    )
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("left", False, (2,))


def test_the_members_of_a_new_group_wait_for_no_other_rank_that_works() -> None:
    verdict = find_verdict(
        rank_creating_group(0, "1", 0, 1),
        ended_rank(1),
        rank_state(2, stack_at(80), *completed_all_reduces(5)),
        working=(2,),
    )
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("left", True, (1,))


def test_a_rank_in_backward_waits_for_one_that_has_ended_also_without_a_record() -> None:
    verdict = find_verdict(rank_state(0, stack_in_backward(8), calls=None), ended_rank(1))
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("left", True, (1,))


@pytest.mark.parametrize("code", [3, -9])
def test_a_rank_that_died_is_lost_and_fatal(code: int) -> None:
    verdict = find_verdict(rank_at_barrier(0), ended_rank(1, code))
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("lost", True, (1,))


def test_a_stopped_rank_is_reported_and_not_fatal() -> None:
    verdict = find_verdict(
        rank_at_barrier(0), rank_state(1, None, state="T", answered=False, calls=None)
    )
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("stopped", False, (1,))
    assert "kill -CONT" in verdict.advice[0]


def test_no_verdict_while_the_last_rank_still_works() -> None:
    """A rank has ended well, another still saves: nobody waits for the first."""
    assert (
        find(
            *make_snapshots(
                ended_rank(0), rank_state(1, stack_at(80), *completed_all_reduces(5)), working=(1,)
            ),
            8.0,
        )
        is None
    )


def test_a_rank_that_has_just_ended_is_no_finding_yet() -> None:
    earlier, later = make_snapshots(rank_at_barrier(0), ended_rank(1))
    earlier = Snapshot(earlier.time, (earlier.ranks[0], rank_state(1, stack_at(3))))
    assert find(earlier, later, 8.0) is None


def test_a_death_that_none_has_reaped_yet_is_no_finding() -> None:
    assert find(*make_snapshots(rank_at_barrier(0), ended_rank(1, None)), 8.0) is None


def test_a_receive_from_an_unknown_rank_is_no_proof_while_another_works() -> None:
    receives = rank_state(0, stack_in_op("recv", 30), groups=GROUP_OF_THREE)
    verdict = find_verdict(receives, ended_rank(1), rank_state(2, stack_at(60)), working=(2,))
    assert (verdict.kind, verdict.fatal) == ("left", False)
    assert find_verdict(receives, ended_rank(1), ended_rank(2)).fatal


# --- patience


def test_a_rank_that_works_alone_is_waited_for() -> None:
    verdict = find_verdict(
        rank_state(0, stack_at(95), *completed_all_reduces(5)), rank_at_barrier(1), working=(0,)
    )
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("working", False, (0,))
    # Since the call, which is longer than nothing has moved.
    assert verdict.waited_s == pytest.approx(94.0)
    assert verdict.rows[1].for_s == pytest.approx(94.0)
    assert verdict.advice == ()


@pytest.mark.parametrize("in_kernel", ["S", "D"])
def test_a_rank_that_is_blocked_outside_collectives_is_waited_for(in_kernel: str) -> None:
    verdict = find_verdict(
        rank_state(
            0, stack_at(95), *completed_all_reduces(5), state=in_kernel, completed={"gloo:0": 5}
        ),
        rank_at_barrier(1),
    )
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("blocked", False, (0,))
    assert ("kernel" in verdict.rows[0].does) == (in_kernel == "D")


def test_a_completed_call_that_gloo_reports_late_is_not_waited_in() -> None:
    """All five calls are complete, Gloo says four: the rank sleeps in a line of its own."""
    verdict = find_verdict(
        rank_state(0, stack_at(95), *completed_all_reduces(5)), rank_at_barrier(1)
    )
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("blocked", False, (0,))


def test_a_rank_that_sleeps_after_an_asynchronous_call_is_not_deadlocked() -> None:
    groups = (*GROUP_OF_THREE, Group("1", "other", (0, 1)))
    sleeps = rank_state(0, stack_at(95), make_call("all_reduce", 1, 5, group="1"), groups=groups)
    verdict = find_verdict(sleeps, rank_at_barrier(1, 1, groups=groups))
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("blocked", False, (0,))


def test_a_rank_that_waits_for_data_has_advice_on_its_data_loader() -> None:
    verdict = find_verdict(
        rank_state(0, stack_in_data_loader(95), *completed_all_reduces(5), completed={"gloo:0": 5}),
        rank_at_barrier(1),
    )
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("loading", False, (0,))
    assert "DataLoader" in verdict.advice[0]


def test_a_rank_that_never_answers_holds_the_interpreter_lock() -> None:
    silent = rank_state(0, stack_at(95), answered=False, calls=None, completed=None, groups=None)
    for working in ((), (0,)):
        verdict = find_verdict(silent, rank_at_barrier(1), working=working)
        assert (verdict.kind, verdict.fatal, verdict.ranks) == ("gil", False, (0,))


def test_a_rank_without_a_stack_is_unknown() -> None:
    verdict = find_verdict(rank_state(0, None, *completed_all_reduces(5)), rank_at_barrier(1))
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("unknown", False, (0,))


def test_a_rank_that_has_not_joined_yet_is_waited_for() -> None:
    young = {"answered": None, "calls": None, "completed": None, "groups": None, "steps": 0}
    verdict = find_verdict(
        rank_state(0, stack_at(5), **young),
        rank_state(1, stack_in_init_process_group(8), **young),
        working=(0,),
    )
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("working", False, (0,))
    assert verdict.rows[1].does == "waits in init_process_group"


@pytest.mark.parametrize("working", [(0,), ()])
def test_a_rank_in_lockstep_init_waits_for_one_that_has_not_come(working: tuple[int, ...]) -> None:
    """Rank 0 computes or sleeps. Rank 1 is seen in two different moments of its attempts."""
    young = {"answered": None, "calls": None, "completed": None, "groups": None, "steps": 0}
    pause = Frame("/opt/venv/site-packages/lockstep/machine/network.py", 522, "wait_until")
    attempt = Frame("/usr/lib/python3.11/socket.py", 836, "create_connection")
    earlier, later = make_snapshots(
        rank_state(0, stack_at(5), **young),
        rank_state(1, stack_in_lockstep_init(8, pause), **young),
        working=working,
    )
    before = replace(earlier.ranks[1], stack=stack_in_lockstep_init(8, attempt))
    verdict = find(replace(earlier, ranks=(earlier.ranks[0], before)), later, 8.0)
    assert verdict is not None
    assert (verdict.kind, verdict.fatal) == ("working" if working else "blocked", False)
    assert verdict.ranks == (0,)
    assert verdict.rows[1].does == "waits in lockstep.init"


def test_ranks_at_different_places_in_lockstep_init_are_not_deadlocked() -> None:
    """One rank opens the group already, the other still looks for the store: all is well."""
    young = {"answered": None, "calls": None, "completed": None, "groups": None, "steps": 0}
    opens_group = (*stack_in_init_process_group(8)[:4], *stack_in_lockstep_init(8)[4:])
    verdict = find_verdict(
        rank_state(0, opens_group, **young),
        rank_state(1, stack_in_lockstep_init(8), **young),
    )
    assert (verdict.kind, verdict.fatal) == ("transport", False)
    assert "same address" in verdict.advice[0]


def test_all_ranks_waiting_to_join_get_advice_on_the_address() -> None:
    young = {"answered": None, "calls": None, "completed": None, "groups": None, "steps": 0}
    verdict = find_verdict(
        rank_state(0, stack_in_init_process_group(8), **young),
        rank_state(1, stack_in_init_process_group(8), **young),
    )
    assert (verdict.kind, verdict.fatal) == ("transport", False)
    assert "same address" in verdict.advice[0]


def test_without_flight_recorder_the_stacks_decide() -> None:
    blind = {"answered": None, "calls": None, "completed": None, "groups": None}
    waits = rank_state(1, stack_in_op("all_reduce", 40), **blind)
    assert find_verdict(rank_state(0, stack_at(5), **blind), waits, working=(0,)).kind == "working"
    assert (
        find_verdict(rank_state(0, stack_in_op("all_reduce", 41), **blind), waits).kind
        == "transport"
    )
    verdict = find_verdict(rank_state(0, stack_in_op("barrier", 41), **blind), waits)
    assert (verdict.kind, verdict.fatal) == ("deadlock", True)
    verdict = find_verdict(rank_state(0, stack_in_backward(41), **blind), waits)
    assert verdict.rows[0].does == "waits in a collective, in backward (step 5)"


def test_matching_collectives_that_do_not_move_are_a_transport_problem() -> None:
    verdict = find_verdict(rank_at_barrier(0), rank_at_barrier(1))
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("transport", False, (0, 1))
    assert "network" in verdict.advice[0]


def test_ranks_that_only_receive_may_have_data_in_transit() -> None:
    verdict = find_verdict(
        rank_state(0, stack_in_op("recv", 30)), rank_state(1, stack_in_op("recv", 31))
    )
    assert (verdict.kind, verdict.fatal) == ("transport", False)
    assert "every send needs its receive" in verdict.advice[0]
    verdict = find_verdict(
        rank_state(0, stack_in_op("recv", 30), *completed_all_reduces(5)), rank_at_barrier(1)
    )
    assert (verdict.kind, verdict.fatal) == ("transport", False)
    assert verdict.headline.startswith(
        "all ranks wait in barrier and recv, for each other; nothing"
    )


def test_ranks_that_only_receive_are_deadlocked_if_nothing_is_in_transit() -> None:
    """On one host, still for a while, and no other thread that could send."""
    both = [rank_state(rank, stack_in_op("recv", 30 + rank)) for rank in range(2)]
    verdict = find_verdict(*both, waited_s=12.0)
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("deadlock", True, (0, 1))
    assert "ranks 0-1 wait in recv, for each other" in verdict.headline
    assert "every send needs its receive" in verdict.advice[0]
    meets = (rank_state(0, stack_in_op("recv", 30), *completed_all_reduces(5)), rank_at_barrier(1))
    assert find_verdict(*meets, waited_s=12.0).fatal
    thread = {"threads": (stack_at(90),)}
    idle = {"threads": (STACK_WITHOUT_TIMEOUT,)}
    verdict = find_verdict(both[0], replace(both[1], **thread), waited_s=12.0)
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("working", False, (1,))
    assert find_verdict(both[0], replace(both[1], **idle), waited_s=12.0).fatal
    assert not find_verdict(both[0], replace(both[1], host="b"), waited_s=12.0).fatal
    assert not find_verdict(*both, working=(0,), waited_s=12.0).fatal
    assert not find_verdict(*both, rank_state(2, stack_at(60)), waited_s=12.0).fatal
    on_gpu = make_call("recv", 6, 4, p2p=True, backend="nccl", state="started")
    gpus = [rank_state(rank, stack_at(30 + rank), on_gpu, completed={}) for rank in range(2)]
    assert not find_verdict(*gpus, waited_s=12.0).fatal


def test_pipeline_stages_with_different_loop_turns_are_deadlocked() -> None:
    verdict = find_verdict(
        rank_state(0, stack_in_pipeline_wire("take", 30)),
        rank_state(1, stack_in_pipeline_wire("take", 31)),
        waited_s=12.0,
    )
    assert (verdict.kind, verdict.fatal) == ("deadlock", True)
    assert verdict.rows[0].does == "waits in recv, between the stages of the pipeline (step 5)"
    assert "same turns of the loop" in verdict.advice[0]
    verdict = find_verdict(
        rank_state(0, stack_in_pipeline_wire("wait", 30)), rank_at_barrier(1), waited_s=12.0
    )
    assert (verdict.kind, verdict.fatal) == ("deadlock", True)
    assert "wait in barrier and send, for each other" in verdict.headline
    verdict = find_verdict(
        rank_state(0, stack_in_pipeline_wire("take", 30)),
        rank_state(1, stack_in_pipeline_wire("take", 31)),
    )
    assert (verdict.kind, verdict.fatal) == ("transport", False)
    assert "same turns of the loop" in verdict.advice[0]
    verdict = find_verdict(
        rank_state(0, stack_in_pipeline_wire("take", 30)),
        rank_state(1, stack_at(31)),
        working=(1,),
        waited_s=12.0,
    )
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("working", False, (1,))


def test_ranks_that_are_all_blocked_outside_collectives_are_reported() -> None:
    verdict = find_verdict(
        rank_state(0, stack_at(5), completed={}), rank_state(1, stack_in_data_loader(6))
    )
    assert (verdict.kind, verdict.fatal) == ("blocked", False)


def test_ranks_that_all_give_no_answer_are_reported() -> None:
    """As where they have executed other programs: they are asked, and nobody answers."""
    blind = {"answered": False, "calls": None}
    verdict = find_verdict(rank_state(0, None, **blind), rank_state(1, None, **blind))
    assert (verdict.kind, verdict.fatal, verdict.ranks) == ("unknown", False, (0, 1))
    assert "os.execv" in verdict.advice[0]
    gone = {"answered": None, "calls": None}  # they could not even be asked
    assert find_verdict(rank_state(0, None, **gone), rank_state(1, None, **blind)).kind == "unknown"
    # A program that is not Python has never told of its steps.
    other = {"answered": None, "calls": None, "steps": None}
    assert (
        find(*make_snapshots(rank_state(0, None, **other), rank_state(1, None, **other)), 8.0)
        is None
    )


def test_ranks_that_all_wait_for_data_are_reported() -> None:
    verdict = find_verdict(
        rank_state(0, stack_in_data_loader(6)), rank_state(1, stack_in_data_loader(6))
    )
    assert (verdict.kind, verdict.fatal) == ("loading", False)
    assert verdict.headline == "all ranks wait for data, for 8 s"


def test_a_rank_that_waits_for_its_threads_at_exit_shows_their_line() -> None:
    shutdown = (Frame("/usr/lib/python3.11/threading.py", 1590, "_shutdown"), script_frame(99))
    verdict = find_verdict(ended_rank(0), rank_state(1, shutdown, threads=(BUSY_STACK,)))
    assert verdict.rows[1].does.startswith("has finished, and waits for one of its own threads")
    assert verdict.rows[1].line == BUSY_STACK[0]


def test_at_exit_the_line_is_that_of_the_users_thread_and_not_of_a_progress_bar() -> None:
    shutdown = (Frame("/usr/lib/python3.11/threading.py", 1590, "_shutdown"), script_frame(99))
    threads = (STACK_OF_PROGRESS_BAR, BUSY_STACK)
    verdict = find_verdict(ended_rank(0), rank_state(1, shutdown, threads=threads))
    assert verdict.rows[1].line == BUSY_STACK[0]


def test_a_rank_that_does_not_end_after_the_others_is_reported() -> None:
    silent = rank_state(1, stack_at(9), answered=False)
    for last in (silent, rank_state(1, stack_at(9))):
        verdict = find_verdict(ended_rank(0), last, ended_rank(2))
        assert (verdict.kind, verdict.fatal, verdict.ranks) == ("blocked", False, (1,))
        assert verdict.headline == (
            "ranks 0, 2 have ended; rank 1 has not, and no step or call has been seen for 8 s"
        )
    assert (
        find(*make_snapshots(ended_rank(0), rank_state(1, stack_at(9)), working=(1,)), 8.0) is None
    )
    assert find(*make_snapshots(silent, rank_state(0, stack_at(9), answered=False)), 8.0) is None


# --- no verdict


@pytest.mark.parametrize("size", [1, 2])
def test_no_verdict_if_no_rank_waits(size: int) -> None:
    assert (
        find(*make_snapshots(*(rank_state(r, stack_at(5)) for r in range(size)), working=(0,)), 8.0)
        is None
    )


def test_one_rank_that_waits_for_a_person_is_left_alone() -> None:
    assert find(*make_snapshots(rank_state(0, stack_at(5))), 8.0) is None


def test_no_verdict_if_a_rank_moves() -> None:
    slow = rank_state(0, stack_at(5), *completed_all_reduces(5))
    for moved in (
        rank_state(0, stack_at(5), *completed_all_reduces(5), steps=6),
        rank_state(0, stack_at(5), *completed_all_reduces(6)),
        rank_state(
            0,
            stack_at(5),
            *completed_all_reduces(5)[:4],
            replace(completed_all_reduces(5)[4], state="completed"),
        ),
    ):
        earlier, later = make_snapshots(slow, rank_at_barrier(1))
        assert find(earlier, Snapshot(TIME, (moved, later.ranks[1])), 8.0) is None


def test_a_stack_that_changes_is_work() -> None:
    earlier, later = make_snapshots(
        rank_state(0, stack_at(5), *completed_all_reduces(5)), rank_at_barrier(1)
    )
    later = Snapshot(TIME, (replace(later.ranks[0], stack=stack_at(6)), later.ranks[1]))
    verdict = find(earlier, later, 8.0)
    assert verdict is not None
    assert verdict.kind == "working"


def test_a_runnable_rank_is_working_even_without_processor_time() -> None:
    assert (
        find_verdict(rank_state(0, stack_at(95), state="R"), rank_at_barrier(1)).kind == "working"
    )


def test_a_backward_pass_that_computes_is_work() -> None:
    busy = rank_state(0, stack_in_backward(5), *completed_all_reduces(5))
    verdict = find_verdict(busy, rank_at_barrier(1), working=(0,))
    assert (verdict.kind, verdict.ranks) == ("working", (0,))


def test_clocks_of_other_hosts_are_not_compared() -> None:
    verdict = find_verdict(rank_at_barrier(0), rank_at_barrier(1, host="b"))
    assert verdict.waited_s == 8.0
    assert all(row.for_s is None for row in verdict.rows)


def test_a_rank_that_was_not_there_before_is_left_out() -> None:
    earlier, later = make_snapshots(
        rank_at_barrier(0), rank_at_barrier(1), rank_state(2, stack_at(5))
    )
    earlier = Snapshot(earlier.time, earlier.ranks[:2])
    verdict = find(earlier, later, 8.0)
    assert verdict is not None
    assert [row.rank for row in verdict.rows] == [0, 1]


def test_ddp_buffers_in_the_constructor_are_not_those_of_an_evaluation() -> None:
    stack = (
        Frame(f"{TORCH}/distributed/utils.py", 326, "_sync_params_and_buffers"),
        Frame(f"{TORCH}/distributed/utils.py", 315, "_sync_module_states"),
        Frame(DDP, 1066, "__init__"),
        script_frame(4),
    )
    verdict = find_verdict(
        rank_state(0, stack, *completed_all_reduces(5), make_call("broadcast", 6, 8)),
        rank_at_barrier(1),
    )
    assert "construct" in verdict.advice[0]
