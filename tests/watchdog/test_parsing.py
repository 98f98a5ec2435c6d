from __future__ import annotations

import faulthandler
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.run.watch.probe_answer import with_answer
from lockstep.run.watch.snapshot import Group, RankState
from lockstep.run.watch.stacks import Frame, parse_stack

pytestmark = pytest.mark.unit

ASKED = RankState(rank=0, host="a", pid=1, alive=True, answered=False)
DUMP = """Stack (most recent call first):
  File "/an/earlier/one.py", line 1 in main
Stack (most recent call first):
  Garbage-collecting
  File "/a b/x, line 3.py", line 24 in watcher
  File "???", line ??? in ???
  File "<frozen runpy>", line 88 in _run_code
"""

# As torch 2.13.0 writes it (`_dump_fr_trace_json`, Gloo, 2 ranks); two of three calls.
JSON_RECORD = """{"comm_lib_version":"","entries":[
{"collective_seq_id":2,"input_dtypes":["Float"],"input_sizes":[[5]],"is_p2p":false,"op_id":2,
 "output_dtypes":["Float"],"output_sizes":[[5]],"p2p_seq_id":0,"pg_id":0,
 "process_group":["0","default_pg"],"profiling_name":"gloo:all_reduce","record_id":1,
 "retired":false,"state":"scheduled","thread_id":"140715032198016","thread_name":"python",
 "time_created_ns":1795284343628692034,"time_discovered_completed_ns":0,
 "time_discovered_started_ns":0,"timeout_ms":1800000},
{"collective_seq_id":3,"input_dtypes":[],"input_sizes":[],"is_p2p":false,"op_id":3,
 "output_dtypes":[],"output_sizes":[],"p2p_seq_id":0,"pg_id":1,
 "process_group":["mesh_dp","undefined"],"profiling_name":"gloo:barrier","record_id":2,
 "retired":false,"state":"scheduled","thread_id":"140715032198016","thread_name":"python",
 "time_created_ns":1795284343628692999,"time_discovered_completed_ns":0,
 "time_discovered_started_ns":0,"timeout_ms":1800000}],
"nccl_comm_state":{},"pg_config":{"":{"desc":"","name":"","ranks":"[0, 1]"}},
"pg_status":{"0":{"last_completed_collective":"1","last_enqueued_collective":"2",
 "last_started_collective":"-1"},"1":{"last_completed_collective":"-1",
 "last_enqueued_collective":"3","last_started_collective":"-1"}},"version":"2.10"}"""


STACKS = {"5": [["/home/me/train.py", 3, "main"]]}


def answer(*records: Any, request: int = 7) -> str:
    groups = [{"name": "0", "description": "default_pg", "ranks": [0, 1]}]
    return json.dumps({"request": request, "groups": groups, "records": records, "stacks": STACKS})


def test_the_last_of_several_stacks_is_parsed() -> None:
    assert parse_stack(DUMP) == (
        Frame("/a b/x, line 3.py", 24, "watcher"),
        Frame("???", 0, "???"),
        Frame("<frozen runpy>", 88, "_run_code"),
    )


@pytest.mark.parametrize("text", ["", "Fatal Python error: Aborted\n", "Stack (most recent"])
def test_text_without_a_stack_parses_to_none(text: str) -> None:
    assert parse_stack(text) is None


def test_the_output_of_faulthandler_is_parsed(tmp_path: Path) -> None:
    with open(tmp_path / "dump", "w+") as file:
        faulthandler.dump_traceback(file, all_threads=False)
        file.seek(0)
        stack = parse_stack(file.read())
    assert stack is not None
    assert stack[0].file == __file__
    assert stack[0].function == "test_the_output_of_faulthandler_is_parsed"


def test_calls_are_read_from_torchs_json_without_lines() -> None:
    state = with_answer(ASKED, answer(json.loads(JSON_RECORD)), 6)
    assert state.groups == (Group("0", "default_pg", (0, 1)),)
    assert (state.threads, state.main_thread) == (
        ((Frame("/home/me/train.py", 3, "main"),),),
        6,
    )
    # By the group's name, not by torch's number of it.
    assert state.completed == {"gloo:0": 1, "gloo:mesh_dp": -1}
    assert state.calls is not None
    first, second = state.calls
    assert (first.op, first.backend, first.group, first.seq) == ("all_reduce", "gloo", "0", 2)
    assert (first.input_sizes, first.dtypes, first.frames) == (((5,),), ("float",), None)
    assert first.time_s == pytest.approx(1795284343.628692)
    assert first.thread == 140715032198016
    assert (second.op, second.input_sizes) == ("barrier", ())


def test_calls_are_read_with_their_lines() -> None:
    record = json.loads(JSON_RECORD)
    for entry in record["entries"]:
        entry["frames"] = [{"filename": "/home/me/train.py", "line": 3, "name": "main"}]
    state = with_answer(ASKED, answer(record), 0)
    assert state.calls is not None
    assert state.calls[0].frames == (Frame("/home/me/train.py", 3, "main"),)


def test_records_of_two_recorders_are_put_in_the_order_of_time() -> None:
    gloo, nccl = json.loads(JSON_RECORD), json.loads(JSON_RECORD)
    nccl["entries"] = nccl["entries"][:1]
    nccl["entries"][0] |= {"profiling_name": "nccl:send", "is_p2p": True, "p2p_seq_id": 9}
    nccl["entries"][0] |= {"state": "started", "time_created_ns": 1}
    state = with_answer(ASKED, answer(gloo, nccl), 0)
    assert [(c.backend, c.seq, c.p2p) for c in state.calls or ()] == [
        ("nccl", 9, True), ("gloo", 2, False), ("gloo", 3, False),
    ]  # fmt: skip


def nccl_entry(name: str, number: int, **fields: Any) -> dict[str, Any]:
    entry = json.loads(JSON_RECORD)["entries"][0]
    entry |= {"profiling_name": f"nccl:{name}", "time_created_ns": number, "op_id": number}
    return entry | fields


@pytest.mark.parametrize("says_p2p", [False, True])
def test_the_sends_and_receives_of_a_batch_have_its_state(says_p2p: bool) -> None:
    """As ProcessGroupNCCL records `batch_isend_irecv`: the state is that of the last entry."""
    p2p = {"is_p2p": True, "p2p_seq_id": 1, "collective_seq_id": 7}
    second = {**p2p, "p2p_seq_id": 2}
    record = json.loads(JSON_RECORD)
    record["entries"] = [
        nccl_entry("all_reduce", 1, collective_seq_id=7, state="completed"),
        nccl_entry("recv 1<-0", 2, **p2p),
        nccl_entry("send 1->2", 3, **p2p),
        nccl_entry("coalesced", 3, **{**p2p, "is_p2p": says_p2p, "state": "completed"}),
        nccl_entry("recv 1<-0", 4, **second),
        nccl_entry("coalesced", 4, **{**second, "is_p2p": says_p2p}),
        nccl_entry("send 1->0", 5, **{**p2p, "p2p_seq_id": 3}),
        nccl_entry("_reduce_scatter_base", 6, collective_seq_id=8),
        nccl_entry("coalesced", 6, collective_seq_id=8, p2p_seq_id=3),
    ]
    record["pg_status"]["0"]["last_completed_collective"] = "9"  # a number of sends and receives
    state = with_answer(ASKED, answer(record), 0)
    assert [(c.op, c.seq, c.peer, c.state) for c in state.calls or ()] == [
        ("all_reduce", 7, None, "completed"),
        ("recv", 1, 0, "completed"),
        ("send", 1, 2, "completed"),
        ("recv", 2, 0, "scheduled"),
        ("send", 3, 0, "scheduled"),
        ("_reduce_scatter_base", 8, None, "scheduled"),
        ("coalesced", 8, None, "scheduled"),
    ]
    assert [c.op for c in state.pending_calls()] == [
        "recv", "send", "_reduce_scatter_base", "coalesced",
    ]  # fmt: skip


def test_calls_of_a_group_that_is_gone_are_left_out() -> None:
    record = json.loads(JSON_RECORD)
    old, other = record["entries"]
    new = {**old, "pg_id": 10, "collective_seq_id": 1, "time_created_ns": 1795284343628700000}
    record["entries"] = [old, other, new]
    status = {"last_completed_collective": "0"}
    record["pg_status"] = {"0": {"last_completed_collective": "2"}, "10": status, "9": status}
    state = with_answer(ASKED, answer(record), 0)
    assert [(c.group, c.seq) for c in state.calls or ()] == [("mesh_dp", 3), ("0", 1)]
    assert state.completed == {"gloo:0": 0}


def test_an_answer_without_calls_is_read() -> None:
    state = with_answer(ASKED, answer({"pg_status": {}, "version": "2.10"}), 0)
    assert (state.calls, state.completed) == ((), {})


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"request": 3, "error": "no recorder"}', '{"records": [{}]}',
     '{"request": 1, "groups": [], "stacks": {}, "records": [{"entries": [{}]}]}'],
)  # fmt: skip
def test_an_unreadable_answer_leaves_answered_none(text: str) -> None:
    assert with_answer(ASKED, text, 0) == replace(ASKED, answered=None)
