"""What instruments write, as values: faulthandler's stacks, the Flight Recorder's answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.diagnose.snapshot import Call, Frame, Group, Stack

_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


def parse_stack(text: str) -> Stack | None:
    """The last stack in what `faulthandler` writes for one thread; None: there is none.

    It has the 100 innermost frames.
    """
    _, heading, last = text.rpartition("Stack (most recent call first):\n")
    if not heading:
        return None
    found = [_FRAME.fullmatch(line) for line in last.splitlines()]
    return tuple(
        Frame(frame[1], 0 if frame[2] == "???" else int(frame[2]), frame[3])
        for frame in found
        if frame
    )


@dataclass(frozen=True)
class Flight:
    """One answer of a rank's Flight Recorder."""

    request: int
    """Which question it answers."""
    calls: tuple[Call, ...]
    completed: dict[str, int]
    groups: tuple[Group, ...]
    stacks: dict[int, Stack]
    """By the thread's identifier."""


def parse_flight(text: str) -> Flight | None:
    """The answer that `launch.instruments` writes; None where the recorder could not be read.

    torch's two forms are understood: that of `_dump_fr_trace_json` (numbers as texts, no frames)
    and that of `_dump_fr_trace` turned into JSON.
    """
    try:
        data = json.loads(text)
        if "records" not in data:
            return None
        calls: list[Call] = []
        completed: dict[str, int] = {}
        for record in data["records"]:
            entries = record.get("entries") or ()
            calls += [_call(entry) for entry in entries]
            completed |= _completed(record.get("pg_status") or {}, entries)
        groups = tuple(
            Group(g["name"], g["description"], tuple(g["ranks"])) for g in data["groups"]
        )
        in_order = tuple(sorted(calls, key=lambda c: c.time_s))
        stacks = {
            int(ident): tuple(Frame(*frame) for frame in stack)
            for ident, stack in data["stacks"].items()
        }
        return Flight(data["request"], in_order, completed, groups, stacks)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None


def _call(entry: Mapping[str, Any]) -> Call:
    backend, _, op = entry["profiling_name"].partition(":")
    frames = entry.get("frames")
    thread = str(entry.get("thread_id", ""))
    return Call(
        group=str(entry["process_group"][0]),
        backend=backend if op else "",
        seq=int(entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]),
        op=op or backend,
        input_sizes=tuple(tuple(size) for size in entry["input_sizes"]),
        output_sizes=tuple(tuple(size) for size in entry["output_sizes"]),
        dtypes=tuple(str(dtype).lower() for dtype in entry["input_dtypes"]),
        p2p=bool(entry["is_p2p"]),
        state=entry["state"],
        time_s=int(entry["time_created_ns"]) / 1e9,
        thread=int(thread) if thread.isdigit() else None,
        frames=None
        if frames is None
        else tuple(Frame(f["filename"], int(f["line"]), f["name"]) for f in frames),
    )


def _completed(status: Mapping[str, Any], entries: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    keys = {}
    for entry in entries:
        backend = entry["profiling_name"].partition(":")[0]
        keys[str(entry["pg_id"])] = f"{backend}:{entry['process_group'][0]}"
    return {
        keys[str(number)]: int(found["last_completed_collective"])
        for number, found in status.items()
        if str(number) in keys
    }
