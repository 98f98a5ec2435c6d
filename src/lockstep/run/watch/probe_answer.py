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
        _read_record(record, calls, completed)
    calls.sort(key=lambda call: call.time_s)

    stacks: dict[int, Stack] = {}
    for thread, frames in answer["stacks"].items():
        stacks[int(thread)] = tuple(Frame(*fields) for fields in frames)

    # If the main thread is not known, all stacks are treated as those of other threads. Before the
    # answer, the rank may have written its main stack at a signal: `state.stack` is that one or
    # None, and is kept.
    main_stack = state.stack
    if main_thread in stacks:
        main_stack = stacks.pop(main_thread)

    # The process group that the main thread is about to create, if any.
    group_being_made = None
    if answer.get("making") is not None:
        group_being_made = from_values(NewGroup, answer["making"])

    return replace(
        state,
        answered=True,
        calls=tuple(calls),
        completed=completed,
        groups=from_values(tuple[Group, ...], answer["groups"]),
        making=group_being_made,
        stack=main_stack,
        threads=tuple(stacks.values()),
        main_thread=None if main_thread == 0 else main_thread,
    )


def _read_record(
    record: Mapping[str, Any], calls: list[CollectiveCall], completed: dict[str, int]
) -> None:
    """Reads one record: appends its calls to `calls`, and writes its status into `completed`.

    Calls of groups that were destroyed are left out. The recorder keeps them, and the next group
    that is created may have the same key and number its calls from 1 again. Only torch's group id
    ("pg_id") distinguishes the two groups.
    """
    calls_with_group_id: list[tuple[CollectiveCall, str]] = []
    for entry in record.get("entries") or ():
        calls_with_group_id.append((_read_call(entry), str(entry["pg_id"])))
    calls_with_group_id.sort(key=lambda pair: pair[0].time_s)
    calls_with_group_id = _with_states_of_batches(calls_with_group_id)

    # The group that made the latest call with a key is the one that exists now.
    present_group_ids: dict[str, str] = {}
    for call, group_id in calls_with_group_id:
        present_group_ids[call.key] = group_id
    for call, group_id in calls_with_group_id:
        if group_id == present_group_ids[call.key]:
            calls.append(call)

    # The status of a group is one number: that of its last completed call. A group of NCCL's has
    # two countings, one for collectives and one for sends and receives, and the status does not say
    # which one its number is from. Then it is not used; the calls have a state, too.
    keys_with_ambiguous_status = set()
    for call in calls:
        if call.p2p and call.backend == "nccl":
            keys_with_ambiguous_status.add(call.key)

    status_of_group = record.get("pg_status") or {}  # by torch's group id
    for key, group_id in present_group_ids.items():
        if group_id in status_of_group and key not in keys_with_ambiguous_status:
            completed[key] = int(status_of_group[group_id]["last_completed_collective"])


def _with_states_of_batches(
    calls_with_group_id: Sequence[tuple[CollectiveCall, str]],
) -> list[tuple[CollectiveCall, str]]:
    """Gives the sends and receives of each batch the state of their batch.

    For a batch of sends and receives (`batch_isend_irecv`), NCCL's recorder has one entry for each
    of them, whose state never changes, followed by an entry `coalesced` for the batch, which has
    the state. This last entry is left out of the result, as it carries the number of an earlier
    collective:

        send 7 scheduled, recv 7 scheduled, coalesced 3 completed
        -> send 7 completed, recv 7 completed

    Args:
        calls_with_group_id: the calls of a record, each with torch's id of its group, by time.
    """
    result: list[tuple[CollectiveCall, str]] = []
    indices_of_group: dict[tuple[str, str], list[int]] = {}  # the indices in `result`

    for call, group_id in calls_with_group_id:
        indices = indices_of_group.setdefault((call.key, group_id), [])
        previous_call = result[indices[-1]][0] if indices else None

        if call.op == BATCH_OP and previous_call is not None and previous_call.p2p:
            # This is the entry of a batch. The sends and receives of the batch are the last calls
            # of the group so far, and share one number.
            for index in reversed(indices):
                earlier_call, _ = result[index]
                if not earlier_call.p2p or earlier_call.seq != previous_call.seq:
                    break
                result[index] = (replace(earlier_call, state=call.state), group_id)
        else:
            indices.append(len(result))
            result.append((call, group_id))

    return result


def _read_call(entry: Mapping[str, Any]) -> CollectiveCall:
    """Reads one entry of a record, which is one call.

    The fields are defined in torch/csrc/distributed/c10d/FlightRecorderDetail.hpp. Numbers may be
    strings, and `frames`, `thread_id` and `timeout_ms` may be missing.
    """
    backend, _, op = entry["profiling_name"].rpartition(":")  # "gloo:all_reduce"
    peer = None
    between_ranks = SEND_OR_RECEIVE.fullmatch(op)  # "send 0->1"
    if between_ranks is not None:
        op = between_ranks["op"]
        peer = int(between_ranks["peer"])

    is_p2p = bool(entry["is_p2p"])
    seq = entry["p2p_seq_id"] if is_p2p else entry["collective_seq_id"]
    thread = str(entry.get("thread_id", ""))
    timeout_ms = entry.get("timeout_ms")

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
        timeout_s=timeout_ms / 1e3 if timeout_ms else None,
        frames=frames,
    )
