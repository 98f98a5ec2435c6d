"""Reads the file in which a rank's probe answers: its stacks, process groups and recorded calls.

A *record* is what torch's Flight Recorder, or Lockstep's shared memory, has kept of the latest
calls. Its *entries* are the calls. Its *status* says which call of each group completed last.
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

# What NCCL's recorder writes of a send or receive, such as "send 0->1" or "recv 1<-0": first the
# number of the rank itself in the group, then that of its peer.
SEND_OR_RECEIVE = re.compile(r"(?P<op>send|recv) \d+(->|<-)(?P<peer>\d+)")
BATCH_OP = "coalesced"


def with_answer(state: RankState, text: str, main_thread: int) -> RankState:
    """Returns a rank's state with what its probe has answered.

    Both of torch's forms of a record are understood: that of `_dump_fr_trace_json` (numbers are
    texts, there are no frames), and that of `_dump_fr_trace` turned into JSON.

    Args:
        state: what is known of the rank so far.
        text: the contents of `flight.json`.
        main_thread: the identifier of the rank's main thread; 0 if it is not known.

    Returns:
        The state with `answered` set to True, or to None if the answer cannot be read.
    """
    try:
        return _add_answer(state, json.loads(text), main_thread)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return replace(state, answered=None)


def _add_answer(state: RankState, answer: Mapping[str, Any], main_thread: int) -> RankState:
    """Returns a rank's state with an answer.

    Args:
        state: what is known of the rank so far.
        answer: what the probe has written (`Probe._answer`), as values of JSON.
        main_thread: the identifier of the rank's main thread; 0 if it is not known.

    Raises:
        ValueError, KeyError, TypeError, IndexError, AttributeError: the answer lacks something, or
            something in it is of another form.
    """
    calls: list[CollectiveCall] = []
    completed: dict[str, int] = {}  # the number of the last completed call, by the group's key
    for record in answer["records"]:
        _read_record(record, calls, completed)

    calls.sort(key=lambda call: call.time_s)
    stacks: dict[int, Stack] = {}
    for thread, frames in answer["stacks"].items():
        stacks[int(thread)] = tuple(Frame(*fields) for fields in frames)

    # If it is not known which stack is the main thread's, all of them count as other threads, and
    # the main stack stays what a signal has shown, or None.
    main_stack = state.stack
    if main_thread in stacks:
        main_stack = stacks.pop(main_thread)

    # The process group that the main thread is about to create; missing or None: it creates none.
    making = None
    if answer.get("making") is not None:
        making = from_values(NewGroup, answer["making"])

    return replace(
        state,
        answered=True,
        calls=tuple(calls),
        completed=completed,
        groups=from_values(tuple[Group, ...], answer["groups"]),
        making=making,
        stack=main_stack,
        threads=tuple(stacks.values()),
        main_thread=None if main_thread == 0 else main_thread,
    )


def _read_record(
    record: Mapping[str, Any], calls: list[CollectiveCall], completed: dict[str, int]
) -> None:
    """Adds the calls of one record to `calls`, and its status to `completed`.

    The calls of a group that was destroyed are left out. The recorder keeps them, and the group
    that is created next may have the same key and number its calls from 1 again. Only torch's group
    id ("pg_id") tells the two groups apart.
    """
    calls_with_group_id: list[tuple[CollectiveCall, str]] = []
    for entry in record.get("entries") or ():
        calls_with_group_id.append((_read_call(entry), str(entry["pg_id"])))

    calls_with_group_id.sort(key=lambda pair: pair[0].time_s)
    calls_with_group_id = _with_states_of_batches(calls_with_group_id)
    present_group_ids: dict[str, str] = {}  # by key; the latest call decides, as it comes last
    for call, group_id in calls_with_group_id:
        present_group_ids[call.key] = group_id

    for call, group_id in calls_with_group_id:
        if group_id == present_group_ids[call.key]:
            calls.append(call)

    # With NCCL the status is the number of the call that was completed last, be it a collective or
    # a send or receive, which are numbered apart. The states of its calls say more.
    without_status = {call.key for call in calls if call.p2p and call.backend == "nccl"}
    status = record.get("pg_status") or {}  # by torch's group id
    for key, group_id in present_group_ids.items():
        if group_id in status and key not in without_status:
            completed[key] = int(status[group_id]["last_completed_collective"])


def _with_states_of_batches(
    calls_with_group_id: Sequence[tuple[CollectiveCall, str]],
) -> list[tuple[CollectiveCall, str]]:
    """Gives the sends and receives of each batch the state of the batch.

    Of a batch of sends and receives (`batch_isend_irecv`) NCCL's recorder keeps an entry for each,
    whose state never changes, and after them one for the batch, `coalesced`, which has the state.
    The latter is left out here: it has the number of a collective that came before.

    Args:
        calls_with_group_id: the calls of a record with torch's id of their group, by time.
    """
    result: list[tuple[CollectiveCall, str]] = []
    indices_of_group: dict[tuple[str, str], list[int]] = {}  # where the calls of a group stand
    for call, group_id in calls_with_group_id:
        indices = indices_of_group.setdefault((call.key, group_id), [])
        last_call = result[indices[-1]][0] if indices else None
        if call.op != BATCH_OP or last_call is None or not last_call.p2p:
            indices.append(len(result))
            result.append((call, group_id))
            continue

        for index in reversed(indices):
            call_of_batch, _ = result[index]
            if not call_of_batch.p2p or call_of_batch.seq != last_call.seq:
                break
            result[index] = (replace(call_of_batch, state=call.state), group_id)

    return result


def _read_call(entry: Mapping[str, Any]) -> CollectiveCall:
    """Reads one entry of a record: one call.

    Which fields there are says torch/csrc/distributed/c10d/FlightRecorderDetail.hpp. Numbers may be
    texts. `frames`, `thread_id` and `timeout_ms` may be missing.
    """
    backend, _, op = entry["profiling_name"].rpartition(":")  # "gloo:all_reduce"
    peer = None
    between_ranks = SEND_OR_RECEIVE.fullmatch(op)
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
