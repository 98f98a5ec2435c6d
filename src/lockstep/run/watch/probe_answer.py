"""Reads the answer of a rank's probe: its stacks, its process groups and its recorded calls.

A *record* holds the latest calls of a rank, as kept by torch's Flight Recorder or by Lockstep's
shared memory. Its *entries* are the calls, and its *status* says which call of each process group
completed last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lockstep.error_in_flight import ErrorInFlight
from lockstep.run.watch.dataclass_json import from_values
from lockstep.run.watch.snapshot import CollectiveCall, Group, NewGroup, RankState
from lockstep.run.watch.stacks import Frame, Stack

# NCCL's recorder writes sends and receives as "send 0->1" or "recv 1<-0": first the number of the
# rank itself in the group, then that of its peer.
SEND_OR_RECEIVE = re.compile(r"(?P<op>send|recv) \d+(->|<-)(?P<peer>\d+)")
BATCH_OP = "coalesced"


def with_answer(state: RankState, text: str, main_thread: int) -> RankState:
    """Adds the answer of a rank's probe to the state of the rank.

    Two forms of torch's records are understood: that of `_dump_fr_trace_json`, in which numbers are
    strings and there are no frames, and that of `_dump_fr_trace` written as JSON.

    Args:
        state: what is known about the rank so far.
        text: the contents of `flight.json`.
        main_thread: the identifier of the rank's main thread; 0 if it is not known.

    Returns:
        The new state. Its `answered` is True, or None if the answer cannot be read.
    """
    try:
        return _add_answer(state, json.loads(text), main_thread)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return replace(state, answered=None)


def _add_answer(state: RankState, answer: Mapping[str, Any], main_thread: int) -> RankState:
    """Adds an answer that has been parsed to the state of a rank.

    Args:
        state: what is known about the rank so far.
        answer: the answer of the probe (`Probe._answer`), parsed from JSON.
        main_thread: the identifier of the rank's main thread; 0 if it is not known.

    Raises:
        ValueError, KeyError, TypeError, IndexError, AttributeError: a part of the answer is missing
            or does not have the expected form.
    """
    calls: list[CollectiveCall] = []
    completed: dict[str, int] = {}  # the number of the last completed call, by the group's key
    for record in answer["records"]:
        calls_of_record = _read_calls(record)
        calls += [call for call, group_id in calls_of_record]
        completed.update(_read_status(record, calls_of_record))
    calls.sort(key=lambda call: call.time_s)

    stacks: dict[int, Stack] = {}
    for thread, frames in answer["stacks"].items():
        stacks[int(thread)] = tuple(Frame(*fields) for fields in frames)

    # The stack of the main thread is taken from the answer, if the main thread is known. Otherwise
    # the stack that is already known is kept, which the rank may have written at a signal.
    main_stack = state.stack
    if main_thread in stacks:
        main_stack = stacks.pop(main_thread)

    idle_loops = [stacks.pop(thread) for thread in answer.get("idle_loops", ()) if thread in stacks]

    # The process group that the main thread is about to create, if any.
    group_being_made = None
    if answer.get("making") is not None:
        group_being_made = from_values(NewGroup, answer["making"])

    in_flight = None
    if answer.get("in_flight") is not None:
        in_flight = from_values(ErrorInFlight, answer["in_flight"])

    return replace(
        state,
        answered=True,
        calls=tuple(calls),
        completed=completed,
        groups=from_values(tuple[Group, ...], answer["groups"]),
        making=group_being_made,
        in_flight=in_flight,
        trained_steps=answer.get("trained_steps"),
        stack=main_stack,
        threads=tuple(stacks.values()),
        idle_loops=tuple(idle_loops),
        main_thread=None if main_thread == 0 else main_thread,
    )


def _read_calls(record: Mapping[str, Any]) -> list[tuple[CollectiveCall, str]]:
    """Reads the calls of one record, without those of groups that were destroyed.

    The recorder keeps calls of destroyed groups. The next group that is created may have the same
    key and number its calls from 1 again. Only torch's group id ("pg_id") distinguishes the two: if
    `nccl:3` was the key of group 7 and then of group 9, the calls of group 7 are left out.

    Returns:
        The calls by time, each with torch's id of its group.
    """
    calls: list[tuple[CollectiveCall, str]] = []
    for entry in record.get("entries") or ():
        calls.append((_read_call(entry), str(entry["pg_id"])))
    calls.sort(key=lambda call_and_id: call_and_id[0].time_s)

    # Some entries (`coalesced`) are not calls of their own, but say in which state a batch of sends
    # and receives is.
    calls = _with_states_of_batches(calls)

    # Of the groups that had one key, the one that made the latest call exists now.
    id_of_present_group: dict[str, str] = {}  # by key
    for call, group_id in calls:
        id_of_present_group[call.key] = group_id

    calls_of_present_groups = []
    for call, group_id in calls:
        if group_id == id_of_present_group[call.key]:
            calls_of_present_groups.append((call, group_id))
    return calls_of_present_groups


def _read_status(
    record: Mapping[str, Any], calls_of_record: Sequence[tuple[CollectiveCall, str]]
) -> dict[str, int]:
    """Reads the number of the last completed collective of each group from one record.

    For example, the status `{"7": {"last_completed_collective": 2}}` and calls of a group with the
    key `nccl:3` and the id "7" give `{"nccl:3": 2}`.

    NCCL numbers the collectives of a group 1, 2, 3, and its sends and receives 1, 2, 3 as well. If
    the status of the group says 2, the second collective or the second send may have completed. So
    the status of a group with sends or receives is left out; each of its calls has a state that
    says whether it has completed.

    Args:
        record: the record.
        calls_of_record: its calls, each with torch's id of its group; all calls with one key are of
            one group.

    Returns:
        The numbers, by the groups' keys.
    """
    completed: dict[str, int] = {}
    status_of_group = record.get("pg_status") or {}  # by torch's group id
    for call, group_id in calls_of_record:
        if group_id in status_of_group:
            completed[call.key] = int(status_of_group[group_id]["last_completed_collective"])

    for call, _ in calls_of_record:
        number_is_ambiguous = call.p2p and call.backend == "nccl"
        if number_is_ambiguous:
            completed.pop(call.key, None)
    return completed


def _with_states_of_batches(
    calls: Sequence[tuple[CollectiveCall, str]],
) -> list[tuple[CollectiveCall, str]]:
    """Gives the sends and receives of each batch the state of their batch.

    For a batch of sends and receives (`batch_isend_irecv`), NCCL's recorder has one entry for each
    of them, whose state never changes, and after these an entry `coalesced` with the state of the
    batch. Their state is set to it, and that entry is left out:

        send 7 scheduled, recv 7 scheduled, coalesced completed
        -> send 7 completed, recv 7 completed

    An entry `coalesced` after anything else, such as a batch of collectives, stays in the result.

    Args:
        calls: the calls of a record by time, each with torch's id of its group.
    """
    result: list[tuple[CollectiveCall, str]] = []
    # The indices in `result`, by key and group id: a key may stand for several groups.
    indices_of_group: dict[tuple[str, str], list[int]] = {}

    for call, group_id in calls:
        indices = indices_of_group.setdefault((call.key, group_id), [])

        closed_batch = _last_batch(result, indices) if call.op == BATCH_OP else []
        for index in closed_batch:
            send_or_receive, _ = result[index]
            result[index] = (replace(send_or_receive, state=call.state), group_id)

        if not closed_batch:
            indices.append(len(result))
            result.append((call, group_id))

    return result


def _last_batch(calls: Sequence[tuple[CollectiveCall, str]], indices: Sequence[int]) -> list[int]:
    """Finds the batch of sends and receives that a group has called last.

    The calls of a batch share one number. For `send 6, all_reduce 3, send 7, recv 7`, the result is
    the indices of `recv 7` and `send 7`.

    Args:
        calls: calls of several groups by time, each with torch's id of its group.
        indices: the indices of this group's calls.

    Returns:
        The indices of the batch's calls, the latest first; empty if the last call of the group is
        no send or receive.
    """
    if not indices:
        return []
    last_call, _ = calls[indices[-1]]

    batch: list[int] = []
    for index in reversed(indices):
        call, _ = calls[index]
        is_in_batch = call.p2p and call.seq == last_call.seq
        if not is_in_batch:
            break
        batch.append(index)
    return batch


def _read_call(entry: Mapping[str, Any]) -> CollectiveCall:
    """Reads one entry of a record, which is one call.

    The fields are defined in torch/csrc/distributed/c10d/FlightRecorderDetail.hpp. Numbers may be
    strings, and `frames`, `thread_id` and `timeout_ms` may be missing.
    """
    # The name is "gloo:all_reduce" or "nccl:send 0->1", which is a send to the peer 1.
    backend, _, op = entry["profiling_name"].rpartition(":")
    peer = None
    send_or_receive = SEND_OR_RECEIVE.fullmatch(op)
    if send_or_receive is not None:
        op = send_or_receive["op"]
        peer = int(send_or_receive["peer"])

    is_p2p = bool(entry["is_p2p"])
    seq = entry["p2p_seq_id"] if is_p2p else entry["collective_seq_id"]
    thread = str(entry.get("thread_id", ""))

    # If the timeout is missing or 0, it is not known.
    timeout_s = None
    if entry.get("timeout_ms"):
        timeout_s = entry["timeout_ms"] / 1e3

    frames: Stack | None = None
    if entry.get("frames") is not None:
        frames = tuple(
            Frame(frame["filename"], int(frame["line"]), frame["name"]) for frame in entry["frames"]
        )

    group_name, *_ = entry["process_group"]  # the group's name and description
    return CollectiveCall(
        group=str(group_name),
        backend=backend,
        seq=int(seq),
        op=op,
        input_sizes=tuple(tuple(size) for size in entry["input_sizes"]),
        output_sizes=tuple(tuple(size) for size in entry["output_sizes"]),
        dtypes=tuple(str(dtype).lower() for dtype in entry["input_dtypes"]),
        p2p=is_p2p,
        peer=peer,
        state=entry["state"],
        time_s=int(entry["time_created_ns"]) / 1e9,
        thread=int(thread) if thread.isdigit() else None,
        timeout_s=timeout_s,
        frames=frames,
    )
