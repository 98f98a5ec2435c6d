"""Recognizes deadlocks: ranks that wait for each other in calls that can never match.

`waiting` is always a dictionary with the activity of each deadlocked rank. Its `op` is the function
that the rank waits in (`all_reduce`), its `wait.context` the part of torch around it ("in
backward"), and its `created_group` the process group that the rank waits to create. The *mismatch*
is the first collective of a group that the ranks did not all call in the same way. From these the
verdict tells the kinds of deadlock apart: different sizes, different groups, an evaluation on one
rank only, a batch too many.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import Enum, auto
from itertools import chain

from lockstep.run.watch.activity import Activity
from lockstep.run.watch.call_table import Mismatch, Signature, find_mismatch, signature
from lockstep.run.watch.case import Case, may_wait_in
from lockstep.run.watch.repeated_failure import key_of_error_in_flight
from lockstep.run.watch.snapshot import CollectiveCall
from lockstep.run.watch.stacks import (
    DDP_BUFFER_BROADCAST,
    PIPELINE_TRANSFER,
    collective_of_lockstep,
    is_in_sync_batchnorm,
    user_frame,
)
from lockstep.run.watch.verdict import Verdict
from lockstep.wording import conjugate, format_ranks


def deadlock(case: Case) -> Verdict | None:
    """Reports that ranks wait for each other in calls that can never match.

    The verdict is fatal only if the deadlock is proven and no other rank can still help.

    Returns:
        The verdict, or None if no rank is deadlocked or if the calls may still match.
    """
    waiting = {rank: case.activities[rank] for rank in sorted(case.graph.deadlocked)}
    if not waiting:
        return None

    mismatch = find_mismatch(case.table, case.graph.deadlocked)
    if mismatch is not None:
        mismatch = _with_stacks_of_waiting_ranks(mismatch, waiting)

    some_are_in_send_or_receive = any(activity.waits_in_p2p for activity in waiting.values())
    if some_are_in_send_or_receive:
        is_deadlock = _is_deadlock_of_sends(case, waiting)
        advice = advice_on_p2p(waiting)

        # A send or receive may look stuck while its data is still being transferred. That is only
        # ruled out if all processors are idle, and if no GPU is used, which could send by itself.
        is_proven = case.nothing_in_transit and not _uses_gpu(waiting)
    else:
        is_deadlock = _is_deadlock_of_collectives(waiting, mismatch)
        advice = _advice(waiting, mismatch)

        # The records show for each collective which ranks have called it. If a rank that waits
        # elsewhere has not, the collective cannot complete, whatever is being transferred.
        is_proven = True

    if not is_deadlock:
        return None

    # A rank that does not wait might still free the others.
    no_other_rank_can_help = all(rank in case.graph.waits_for for rank in case.alive)
    is_fatal = is_proven and no_other_rank_can_help

    after_error = _ranks_led_elsewhere_by_error(waiting, mismatch)
    if after_error:
        return _deadlock_after_error(case, after_error, fatal=is_fatal, mismatch=mismatch)

    headline = (
        f"deadlock: {format_ranks(waiting)} {conjugate('waits', len(waiting))} in "
        f"{_describe_calls(waiting, mismatch)}, and nothing has moved for "
        f"{case.since_last_call_s:.0f} s"
    )
    return case.make_verdict(
        "deadlock",
        _ranks_at_fault(case, waiting, mismatch),
        headline,
        advice,
        fatal=is_fatal,
        mismatch=mismatch,
    )


def _ranks_led_elsewhere_by_error(
    waiting: Mapping[int, Activity], mismatch: Mismatch | None
) -> dict[int, Activity]:
    """Returns the ranks that an exception has led to another call than the other ranks.

    For example, rank 1 handles a ValueError and waits in `barrier`, while ranks 0 and 2 wait in
    `all_reduce`: the result is rank 1.

    The result is empty if an exception does not explain the deadlock.

    Args:
        waiting: what the deadlocked ranks do, by rank.
        mismatch: the first collective that the ranks did not all call in the same way.
    """
    with_error: dict[int, Activity] = {}
    without_error: dict[int, Activity] = {}
    for rank, activity in waiting.items():
        error = activity.state.in_flight
        # An exception with which the rank has gone on training is no reason for what it does now.
        if error is not None and not error.training_went_on:
            with_error[rank] = activity
        else:
            without_error[rank] = activity

    calls_with_error = _kinds_of_calls(with_error, mismatch)
    calls_without_error = _kinds_of_calls(without_error, mismatch)

    # If ranks 0 and 2, which handle no exception, wait in different calls, or if all ranks handle
    # an exception, another reason must exist.
    others_are_in_one_call = len(calls_without_error) == 1

    # If rank 1, with an exception, waits in `all_reduce` too, it was not led elsewhere.
    some_are_in_same_call = bool(calls_with_error & calls_without_error)

    if others_are_in_one_call and not some_are_in_same_call:
        return with_error
    return {}


def _kinds_of_calls(
    activities: Mapping[int, Activity], mismatch: Mismatch | None
) -> set[Signature | str]:
    """Returns the different calls that ranks are in.

    For each rank, this is the signature of its call at the mismatch, such as "all_reduce of 10
    numbers in float32". If no such call is known, it is the name of the function that the rank
    waits in, such as "barrier".
    """
    calls_at_mismatch = {} if mismatch is None else dict(mismatch.calls)
    kinds: set[Signature | str] = set()
    for rank, activity in activities.items():
        call = calls_at_mismatch.get(rank)
        kinds.add(activity.op if call is None else signature(call))
    return kinds


def _deadlock_after_error(
    case: Case, after_error: Mapping[int, Activity], *, fatal: bool, mismatch: Mismatch | None
) -> Verdict:
    """Returns the verdict on ranks that an exception has led to another call than the others.

    Args:
        case: what is known about the run.
        after_error: the ranks that handle an exception, and what they do.
        fatal: True if the run cannot recover by itself.
        mismatch: the first collective that the ranks did not all call in the same way.
    """
    # If the ranks handle several exceptions, the headline names that of the first rank. What the
    # other ranks handle is in the rows of the verdict, of which each rank has one.
    first_rank = min(after_error)
    first_state = after_error[first_rank].state
    error = first_state.in_flight
    assert error is not None  # each of these ranks handles an exception
    with_same_error = {}
    for rank, activity in after_error.items():
        if activity.state.in_flight == error:
            with_same_error[rank] = activity

    headline = (
        f"deadlock after an exception: {format_ranks(with_same_error)} "
        f"{conjugate('waits', len(with_same_error))} in {name_ops(with_same_error)} while handling "
        f"{error.headline}; nothing has moved for {case.since_last_call_s:.0f} s"
    )
    # Two attempts of the run with equal keys hang for the same reason. Then it is not tried again.
    key = key_of_error_in_flight(error, first_state.steps, first_state.trained_steps, case.waited_s)
    return case.make_verdict(
        "deadlock",
        after_error,
        headline,
        (_ADVICE_ON_ERROR_IN_FLIGHT,),
        fatal=fatal,
        mismatch=mismatch,
        key=key,
    )


def _uses_gpu(waiting: Mapping[int, Activity]) -> bool:
    """Returns True if a rank waits in an NCCL call, which runs on its GPU."""
    for activity in waiting.values():
        if activity.call is not None and activity.call.backend == "nccl":
            return True
    return False


def _with_stacks_of_waiting_ranks(mismatch: Mismatch, waiting: Mapping[int, Activity]) -> Mismatch:
    """Fills in the stacks of calls that were recorded without one, for the lines in the report.

    A rank that still waits in its call is at the line of that call, so the stack that the snapshot
    shows of the rank is the stack of the call.
    """
    calls = []
    for rank, call in mismatch.calls:
        shown_call = call
        if call is not None and call.frames is None and rank in waiting:
            waits_in_call = may_wait_in(waiting[rank], call)
            if waits_in_call:
                shown_call = replace(call, frames=waiting[rank].state.stack)
        calls.append((rank, shown_call))
    return replace(mismatch, calls=tuple(calls))


def _is_deadlock_of_sends(case: Case, waiting: Mapping[int, Activity]) -> bool:
    """Returns True if ranks, some of them in a send or receive, wait for each other in vain.

    Usually it is not known which rank a send or receive waits for, and its data may be in transit.
    So this is only a deadlock if nothing is in transit, or if a rank is in a mismatched collective.
    """
    has_mismatched_rank = bool(case.graph.mismatched & waiting.keys())
    all_partners_are_known = case.graph.partners_unknown.isdisjoint(waiting)
    return case.nothing_in_transit or has_mismatched_rank or all_partners_are_known


def _is_deadlock_of_collectives(waiting: Mapping[int, Activity], mismatch: Mismatch | None) -> bool:
    """Returns True if the collectives that the ranks wait in can never match.

    If all ranks wait in the same collective, there is no deadlock: the network does not move the
    data.
    """
    ops = {activity.op for activity in waiting.values()}
    calls_differ = mismatch is not None or len(ops) > 1
    return calls_differ or _create_different_groups(waiting)


def _calls_made(mismatch: Mismatch | None) -> list[CollectiveCall]:
    """Returns the calls of those ranks that have reached the mismatch; empty without a mismatch."""
    if mismatch is None:
        return []
    return [call for _, call in mismatch.calls if call is not None]


def _describe_calls(waiting: Mapping[int, Activity], mismatch: Mismatch | None) -> str:
    """Says what the ranks wait in, for the headline: `all_reduce with different sizes or types`.

    The text follows the words `deadlock: ranks 0-1 wait in`.
    """
    if any(activity.waits_in_p2p for activity in waiting.values()):
        return f"{name_ops(waiting)}, for each other"

    if _create_different_groups(waiting):
        return f"{name_ops(waiting)}, for process groups that differ"

    ops_now = {activity.op for activity in waiting.values()}  # in which the ranks wait now
    ops_at_mismatch = {call.op for call in _calls_made(mismatch)}  # empty without a mismatch

    if _only_sizes_differ(mismatch):
        (op,) = ops_at_mismatch  # one operation, as only the sizes differ
        all_wait_in_it_now = ops_now == {op}  # if not, some ranks have got through it
        if all_wait_in_it_now:
            return f"{op} with different sizes or types"
        return f"collectives that do not match, after {op} had different sizes or types"

    operations_differ = len(ops_now) > 1 or len(ops_at_mismatch) > 1
    if operations_differ:
        return "collectives that do not match"

    # The ranks call the same operation in different groups: rank 0 waits for rank 1 in an
    # all_reduce of group a, and rank 1 for rank 0 in an all_reduce of group b.
    return "collectives that the others never come to"


def name_ops(waiting: Mapping[int, Activity]) -> str:
    """Lists the operations that ranks wait in, each once: `all_reduce and barrier`."""
    ops = {activity.op or "a collective" for activity in waiting.values()}
    return " and ".join(sorted(ops))


def _create_different_groups(waiting: Mapping[int, Activity]) -> bool:
    """Returns True if every rank waits to create a process group, but not all of them the same."""
    groups = []
    for activity in waiting.values():
        # A rank without such a group waits in something else, or its group is not known.
        if activity.created_group is None:
            return False
        groups.append(activity.created_group)

    first_group = groups[0]
    all_are_the_same = all(first_group.may_be_same(group) for group in groups)
    return not all_are_the_same


def _only_sizes_differ(mismatch: Mismatch | None) -> bool:
    """Returns True if all ranks called the same operation, with different sizes or types."""
    calls = _calls_made(mismatch)
    ops = {call.op for call in calls}
    signatures = {signature(call) for call in calls}
    return len(ops) == 1 and len(signatures) > 1


def _ranks_at_fault(
    case: Case, waiting: Mapping[int, Activity], mismatch: Mismatch | None
) -> Iterable[int]:
    """Returns the ranks to blame: those that did not do what most ranks did at the mismatch.

    If nobody can be singled out, all ranks that may be to blame are returned.

    Args:
        case: what is known about the run.
        waiting: what the deadlocked ranks do, by rank.
        mismatch: the first collective that the ranks did not all call in the same way.
    """
    # Each side is the list of the ranks that made one of the different calls, the longest first.
    sides = _sides_of_mismatch(mismatch)

    # 1. Nobody: the members that are left all made the same call. The rank that made another one
    # has left the group.
    if len(sides) == 1:
        return []

    # 2. The ranks that are in the minority at the mismatch.
    if len(sides) > 1:
        largest, second_largest = sides[:2]
        has_majority = len(largest) > len(second_largest)
        if has_majority:
            return list(chain.from_iterable(sides[1:]))

    # 3. The ranks in DDP's forward pass: they probably run the model while the other ranks do not.
    ranks_in_forward = _ranks_in_ddp_forward(waiting)
    only_some_in_forward = 0 < len(ranks_in_forward) < len(waiting)
    if only_some_in_forward:
        return ranks_in_forward

    # 4. All ranks that wait, if no mismatch is known.
    if mismatch is None or not mismatch.calls:
        return list(waiting)

    # 5. The ranks that wait for each other in several groups, and so do not come to the call.
    some_have_not_come = any(call is None for _, call in mismatch.calls)
    if some_have_not_come:
        ranks_in_circle = _ranks_in_circle(case, waiting)
        if ranks_in_circle:
            return ranks_in_circle

    # 6. All ranks of the group with the mismatch.
    return [rank for rank, _ in mismatch.calls]


def _ranks_in_circle(case: Case, waiting: Iterable[int]) -> set[int]:
    """Returns the deadlocked ranks that wait for each other, without those that wait for them.

    For example, if rank 0 waits for rank 1, 1 for 2, and 2 for 1, the result is ranks 1 and 2.

    Args:
        case: what is known about the run.
        waiting: the deadlocked ranks.
    """
    remaining = set(waiting)
    while True:
        # No rank waits for itself, although a set of awaited ranks may contain it.
        awaited: set[int] = set()
        for rank in remaining:
            awaited |= case.graph.waits_for[rank] - {rank}
        every_rank_is_awaited = remaining <= awaited
        if every_rank_is_awaited:
            return remaining
        remaining &= awaited  # drop the ranks that no remaining rank waits for, and look again


def _sides_of_mismatch(mismatch: Mismatch | None) -> list[list[int]]:
    """Groups the ranks by the call that they made at the mismatch, the largest group first.

    Ranks that have not reached the call form a group of their own. For example, ranks 0 and 2 in
    `all_reduce` and rank 1 in `barrier` give `[[0, 2], [1]]`. Without a mismatch the list is empty.
    """
    if mismatch is None:
        return []

    ranks_by_signature: dict[Signature | None, list[int]] = defaultdict(list)
    for rank, call in mismatch.calls:
        # None stands for ranks that have not reached the call.
        signature_or_none = None if call is None else signature(call)
        ranks_by_signature[signature_or_none].append(rank)

    return sorted(ranks_by_signature.values(), key=len, reverse=True)


# --- Advice

_ADVICE_ON_ERROR_IN_FLIGHT = (
    "look at the exception first; and after an exception let a rank call no collective in "
    "`finally`, `except` or `__exit__`, as the others are at another call and do not reach it"
)
_ADVICE_ON_EVALUATION = (
    "where one rank alone evaluates, call `model.module(...)` there, or let all ranks evaluate"
)
_ADVICE_ON_CONDITIONS = (
    "every rank must call the same collectives in the same order: look for one that only some "
    "ranks reach (`if rank == 0`, an exception that was caught, `continue`)"
)
_ADVICE_ON_SYNC_BATCHNORM = (
    "call a model whose BatchNorm is synchronized on all ranks; where one rank alone calls it, "
    "call `model.eval()` before and `model.train()` after"
)
_ADVICE_ON_NUMBER_OF_STEPS = (
    "give each rank the same number of batches (DistributedSampler, drop_last), or use `Join`; do "
    "not skip a step on one rank alone"
)
_ADVICE_ON_NEW_GROUP = (
    "`new_group`, and what calls it, such as `init_device_mesh`, must be called by all "
    "ranks of the run, also by those outside the group, in the same order and with the "
    "same ranks and backend; with use_local_synchronization by all ranks of the group"
)
_ADVICE_ON_DDP_CONSTRUCTOR = "construct DistributedDataParallel on all ranks, at the same point"
_ADVICE_ON_SIZES = (
    "bring tensors of the same size and type on all ranks: pad them, or exchange the sizes first"
)
_ADVICE_ON_ORDER_OF_GROUPS = "use the same process groups in the same order on all their ranks"
_ADVICE_ON_PIPELINE = (
    "every rank of a pipeline must make the same turns of the loop: look for a `continue`, "
    "a `break`, an exception that was caught, or a collective such as `world.sum` that "
    "only some ranks come to; those without the last stage get NaN for a loss"
)
_ADVICE_ON_SEND_AND_RECEIVE = (
    "every send needs its receive, in the same order on both ranks: where both send or receive "
    "first, change the order on one of them, or use `batch_isend_irecv`"
)


def advice_on_p2p(waiting: Mapping[int, Activity]) -> tuple[str, ...]:
    """Returns the advice for ranks that wait for each other in sends and receives."""
    if any(activity.wait.context == PIPELINE_TRANSFER for activity in waiting.values()):
        return (_ADVICE_ON_PIPELINE,)
    return (_ADVICE_ON_SEND_AND_RECEIVE,)


def _advice(waiting: Mapping[int, Activity], mismatch: Mismatch | None) -> tuple[str, ...]:
    """Returns the advice for collectives that do not match, the most likely advice first.

    Args:
        waiting: what the deadlocked ranks do, by rank.
        mismatch: the first collective that the ranks did not all call in the same way.
    """
    # Where in torch each rank waits, such as "in backward"; empty for a call in the user's code.
    contexts = [activity.wait.context for activity in waiting.values()]
    if _only_some(context == DDP_BUFFER_BROADCAST for context in contexts):
        return _advice_on_ddp_forward(waiting)

    if any(_creates_group(activity) for activity in waiting.values()):
        return (_ADVICE_ON_NEW_GROUP,)

    if "while DDP is constructed" in contexts:
        return (_ADVICE_ON_DDP_CONSTRUCTOR,)

    # Names the method that the user called, such as `world.sum`; empty if only torch's were called.
    on_lockstep = _advice_on_collective_of_lockstep(waiting)

    # If only some ranks are in backward, the others have left the loop or have skipped a step.
    if _only_some(context == "in backward" for context in contexts):
        return (_ADVICE_ON_NUMBER_OF_STEPS, on_lockstep or _ADVICE_ON_CONDITIONS)

    if _only_sizes_differ(mismatch):  # False if no mismatch is known
        return (_ADVICE_ON_SIZES,)

    if on_lockstep:
        return (on_lockstep,)

    if _only_some(is_in_sync_batchnorm(activity.state.stack) for activity in waiting.values()):
        return (_ADVICE_ON_SYNC_BATCHNORM,)

    # The key of a call is `backend:group`.
    keys = {activity.call.key for activity in waiting.values() if activity.call is not None}
    several_groups_are_used = len(keys) > 1
    if several_groups_are_used:
        return (_ADVICE_ON_ORDER_OF_GROUPS,)

    return (_ADVICE_ON_CONDITIONS,)


def _only_some(flags: Iterable[bool]) -> bool:
    """Returns True if some of the flags are True and some are False."""
    return len(set(flags)) == 2


def _creates_group(activity: Activity) -> bool:
    """Returns True if a rank waits to create a process group, even if not known which one."""
    return activity.created_group is not None or activity.op == "new_group"


def _advice_on_collective_of_lockstep(waiting: Mapping[int, Activity]) -> str:
    """Returns the advice if some ranks wait in a collective of Lockstep's that others do not call.

    The advice is empty if no rank waits in such a collective, or if all ranks wait in the same one.
    """
    # "" stands for a rank that waits in no collective of Lockstep's.
    called = {collective_of_lockstep(activity.state.stack) for activity in waiting.values()}
    all_are_in_the_same = len(called) == 1
    if all_are_in_the_same:
        return ""
    names = sorted(called - {""})

    return (
        f"call {' and '.join(names)} on all ranks, in the same order: look for what only some "
        "ranks reach (`if world.is_main`, an exception that was caught, `continue`)"
    )


def _advice_on_ddp_forward(waiting: Mapping[int, Activity]) -> tuple[str, ...]:
    """Returns the advice if only some ranks are in the forward pass of a DDP model.

    If they train, they make more steps than the other ranks. If they evaluate, the other ranks do
    not evaluate. If it is not known which of the two a rank does, both pieces of advice are given.
    """
    # The first rank that does not surely evaluate decides.
    for rank in _ranks_in_ddp_forward(waiting):
        loop = _loop_of(waiting[rank])
        if loop is _Loop.TRAINING:
            return (_ADVICE_ON_NUMBER_OF_STEPS,)
        if loop is _Loop.NOT_KNOWN:
            return (_ADVICE_ON_EVALUATION, _ADVICE_ON_NUMBER_OF_STEPS)
    return (_ADVICE_ON_EVALUATION,)


def _ranks_in_ddp_forward(waiting: Mapping[int, Activity]) -> list[int]:
    """Returns the ranks that wait in the forward pass of a DDP model."""
    ranks = []
    for rank, activity in waiting.items():
        if activity.wait.context == DDP_BUFFER_BROADCAST:
            ranks.append(rank)
    return ranks


class _Loop(Enum):
    """The loop in which a rank calls its model."""

    TRAINING = auto()
    EVALUATION = auto()
    NOT_KNOWN = auto()


def _loop_of(activity: Activity) -> _Loop:
    """Returns the loop in which a rank calls its model.

    A line that has called collectives in earlier steps is in the training loop. A line that has
    called none is in an evaluation, which comes after the steps.
    """
    # The pending calls are those of the present step, and say nothing about earlier steps.
    pending = activity.state.pending_calls()
    all_calls = activity.state.calls or ()
    earlier_calls = [call for call in all_calls if call not in pending]

    lines_are_known = all(call.frames is not None for call in earlier_calls)
    if not earlier_calls or not lines_are_known:
        return _Loop.NOT_KNOWN

    lines_of_earlier_calls = [user_frame(call.frames) for call in earlier_calls]
    return _Loop.TRAINING if activity.line in lines_of_earlier_calls else _Loop.EVALUATION
