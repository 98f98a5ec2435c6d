from __future__ import annotations

import array
import contextlib
import ctypes
import faulthandler
import fcntl
import importlib
import json
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import HANG_S, in_clean_process, run_ranks

from lockstep import torch_compat
from lockstep.run.watch import probe
from lockstep.run.watch.evidence import Evidence
from lockstep.run.watch.heartbeat import read_heartbeat
from lockstep.run.watch.probe import ALL_THREADS_SIGNAL, MAIN_THREAD_SIGNAL
from lockstep.run.watch.probe_answer import with_answer
from lockstep.run.watch.snapshot import NewGroup, RankState
from lockstep.run.watch.stack_dump import find_crash
from lockstep.run.watch.stacks import parse_stack

pytestmark = pytest.mark.launcher


@contextlib.contextmanager
def installed_probe(folder: Path) -> Iterator[probe.Probe]:
    made = probe.install(Evidence.in_folder(folder))
    try:
        yield made
    finally:
        made.stop_answering()
        probe._opened_groups.clear()


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        probe._opened_groups.clear()
        # The traceback of an error keeps the groups that the test has opened, and their threads.
        if sys.exception() is None:
            wait_until(lambda: "pt_gloo_runloop" not in thread_names())


def thread_names() -> set[str]:
    names = set()
    for path in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            names.add((path / "comm").read_text().strip())
    return names


def wait_until(condition: Callable[[], Any]) -> Any:
    limit = time.monotonic() + HANG_S
    while not (found := condition()):
        assert time.monotonic() < limit
        time.sleep(0.01)
    return found


def ask_probe(folder: Path, request: str) -> Any:
    with open(folder / "ask", "w") as pipe:
        pipe.write(f"{request}\n")
    number = int(request.split()[0])

    def answer() -> Any:
        with contextlib.suppress(OSError, ValueError):  # not there, or not all of it
            text = (folder / "flight.json").read_text()
            return text if json.loads(text)["request"] == number else None

    return wait_until(answer)


def state_from_answer(text: str) -> RankState:
    state = with_answer(RankState(rank=0, host="", pid=0, alive=True), text, 0)
    assert state.answered
    return state


def make_optimizer() -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], lr=0.1)


def wait_for_child(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@in_clean_process
def test_the_heartbeat_counts_the_steps_of_every_optimizer(tmp_path: Path) -> None:
    assert read_heartbeat(Evidence.in_folder(tmp_path).heartbeat) is None
    with installed_probe(tmp_path):
        begun = read_heartbeat(Evidence.in_folder(tmp_path).heartbeat)
        assert begun == (os.getpid(), threading.main_thread().ident, 0, 0.0, 0.0)
        make_optimizer().step()
        first = read_heartbeat(Evidence.in_folder(tmp_path).heartbeat)
        assert first is not None
        assert (first.steps, first.took_s) == (1, 0.0)
        assert 0 <= time.monotonic() - first.last_step < HANG_S
        make_optimizer().step()
        second = read_heartbeat(Evidence.in_folder(tmp_path).heartbeat)
        assert second is not None
        assert second.steps == 2
        assert second.took_s == pytest.approx(second.last_step - first.last_step)


@in_clean_process
def test_a_forked_child_is_not_the_rank(tmp_path: Path) -> None:
    with installed_probe(tmp_path):
        make_optimizer().step()
        with group_of_one():
            child = os.fork()
            if child == 0:
                with contextlib.suppress(BaseException):
                    make_optimizer().step()
                    alive = [t for t in threading.enumerate() if t.name == "lockstep-answers"]
                    os._exit(0 if not alive else 1)
                os._exit(2)
            assert wait_for_child(child) == 0
            assert "records" in json.loads(ask_probe(tmp_path, "1"))
        heartbeat = read_heartbeat(Evidence.in_folder(tmp_path).heartbeat)
        assert heartbeat is not None
        assert (heartbeat.pid, heartbeat.steps) == (os.getpid(), 1)


@in_clean_process
def test_a_model_that_dies_after_its_group_does_not_take_the_group_along(tmp_path: Path) -> None:
    with installed_probe(tmp_path):
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        dist.destroy_process_group()
        wait_until(lambda: "pt_gloo_runloop" in thread_names())  # a thread is named by itself
        assert len(probe._opened_groups) == 1
        probe._opened_groups.clear()
        wait_until(lambda: "pt_gloo_runloop" not in thread_names())


@in_clean_process
def test_a_signal_brings_the_stack_of_the_main_thread(tmp_path: Path) -> None:
    with installed_probe(tmp_path):
        os.kill(os.getpid(), MAIN_THREAD_SIGNAL)
        stack = wait_until(lambda: parse_stack((tmp_path / "stacks.txt").read_text()))
    assert stack[0].file == __file__
    assert stack[0].function.startswith("test_a_signal")


@in_clean_process
def test_a_second_signal_reaches_no_thread_but_the_one_that_answers(tmp_path: Path) -> None:
    held = ctypes.PyDLL(None).poll  # with the interpreter's lock, which the answer would need
    with installed_probe(tmp_path):
        sender = subprocess.Popen(
            ["sh", "-c", f"sleep 0.1; kill -{ALL_THREADS_SIGNAL} {os.getpid()}"]
        )
        assert held(None, 0, 1000) == 0
        assert sender.wait(HANG_S) == 0
        text = wait_until((tmp_path / "stacks.txt").read_text)
    stack = parse_stack(text, threading.get_ident())
    assert stack is not None
    assert stack[0].function.startswith("test_a_second_signal")
    assert parse_stack(text, threading.get_ident() + 1) is None


@in_clean_process
def test_the_stacks_of_all_threads_come_with_the_answer(tmp_path: Path) -> None:
    ready = threading.Event()
    with installed_probe(tmp_path), group_of_one():
        thread = threading.Thread(target=ready.wait)
        thread.start()
        state = state_from_answer(ask_probe(tmp_path, "1"))
        ready.set()
        thread.join()
    waiting, asking = ([frame.function for frame in stack] for stack in state.threads or ())
    if "ask_probe" in waiting:  # threads come in no particular order
        waiting, asking = asking, waiting
    assert waiting[0] == "wait"
    assert "ask_probe" in asking


@in_clean_process
def test_the_users_own_handlers_are_left_alone(tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    with installed_probe(tmp_path):
        now = {number: signal.getsignal(number) for number in signal.valid_signals()}
    # What is left once faulthandler has taken its own handler away, at the interpreter's end.
    assert now == {**before, MAIN_THREAD_SIGNAL: signal.SIG_IGN, ALL_THREADS_SIGNAL: signal.SIG_IGN}
    assert MAIN_THREAD_SIGNAL not in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGTERM)


def test_a_crash_leaves_its_stack(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="exit code -11"):
        run_ranks(_crash, 1, tmp_path, environment=lambda rank: {})
    assert "in _crash" in (tmp_path / "crash.txt").read_text()


def _crash_after_disabling(folder: Path) -> None:
    probe.install(Evidence.in_folder(folder))
    faulthandler.disable()
    faulthandler._sigsegv()


def _crash_with_own_file(folder: Path) -> None:
    probe.install(Evidence.in_folder(folder))
    with open(folder / "own.log", "w") as own_file:
        faulthandler.enable(own_file)
        faulthandler._sigsegv()


@pytest.mark.thorough
def test_a_script_that_uses_faulthandler_itself_still_leaves_its_stack(tmp_path: Path) -> None:
    for crash in (_crash_after_disabling, _crash_with_own_file):
        folder = tmp_path / crash.__name__
        folder.mkdir()
        with pytest.raises(AssertionError, match="exit code -11"):
            run_ranks(crash, 1, folder, environment=lambda rank: {})
        found = find_crash(-11, folder / "crash.txt", folder / "stderr.log", ())
        assert found.line is not None
        assert found.line.endswith("faulthandler._sigsegv()")
        name = "own.log" if crash is _crash_with_own_file else "crash.txt"
        assert found.stacks_file.endswith(name)


def _crash(folder: Path) -> None:
    probe.install(Evidence.in_folder(folder))
    faulthandler._sigsegv()


@in_clean_process
def test_one_thread_answers_from_the_start(tmp_path: Path) -> None:
    with installed_probe(tmp_path):
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("lockstep-answers") == 1
        assert json.loads(ask_probe(tmp_path, "1"))["groups"] == []
        with group_of_one():
            assert threading.active_count() == 2
            assert len(json.loads(ask_probe(tmp_path, "2"))["groups"]) == 1
    assert threading.active_count() == 1


def test_collectives_are_answered_on_request(tmp_path: Path) -> None:
    run_ranks(
        _answer_with_collectives, 2, tmp_path, env=probe.FLIGHT_RECORDER_VARIABLES, fresh=True
    )


def _answer_with_collectives(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    folder = folder / str(rank)
    # Imported with a group open, as torch's compiler does it, it would keep the group for good.
    importlib.import_module("torch.distributed.nn.functional")
    with installed_probe(folder):
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(3))
        dist.barrier()
        flight = state_from_answer(ask_probe(folder, "1"))
        assert flight.calls is not None
        assert [(c.op, c.seq, c.frames) for c in flight.calls] == [
            ("all_reduce", 1, None), ("barrier", 2, None),
        ]  # fmt: skip
        assert flight.calls[0].input_sizes == ((3,),)
        assert flight.calls[0].thread == threading.get_ident()
        assert [(g.name, g.ranks) for g in flight.groups or ()] == [("0", (0, 1))]
        # Without torch's compiler the lines would cost seconds: they are left out.
        assert "torch._dynamo" not in sys.modules
        flight = state_from_answer(ask_probe(folder, "2 call_stacks"))
        assert flight.calls is not None
        assert flight.calls[0].frames is None
        importlib.import_module("torch._dynamo")
        flight = state_from_answer(ask_probe(folder, "3 call_stacks"))
        assert flight.calls is not None
        assert flight.calls[0].frames is not None
        assert "_answer_with_collectives" in [frame.function for frame in flight.calls[0].frames]
        dist.barrier()
        dist.destroy_process_group()


@in_clean_process
def test_a_recorder_that_fails_is_asked_again(tmp_path: Path) -> None:
    original = torch_compat.flight_record

    def fail(*, stacks: bool) -> str:
        raise RuntimeError("no record")

    with installed_probe(tmp_path), group_of_one():
        torch_compat.flight_record = fail
        try:
            assert json.loads(ask_probe(tmp_path, "1"))["error"] == "RuntimeError('no record')"
        finally:
            torch_compat.flight_record = original
        assert "records" in json.loads(ask_probe(tmp_path, "2"))
        with open(tmp_path / "ask", "w") as pipe:
            pipe.write("nonsense\n\n")
        assert "records" in json.loads(ask_probe(tmp_path, "3"))


@in_clean_process
def test_a_folder_without_pipes_does_not_stop_the_run(tmp_path: Path) -> None:
    """As some shared and some Windows folders: the run goes on, and shows its stacks alone."""
    original = os.mkfifo

    def fail(*_: object) -> None:
        raise PermissionError("no pipes here")

    os.mkfifo = fail
    try:
        with installed_probe(tmp_path), group_of_one():
            assert not (tmp_path / "ask").exists()
    finally:
        os.mkfifo = original


@in_clean_process
def test_a_request_while_the_process_ends_does_no_harm(tmp_path: Path) -> None:
    with installed_probe(tmp_path) as made, group_of_one():
        ask_probe(tmp_path, "1")
        made.stop_answering()  # at exit, before the interpreter's own end
        assert "lockstep-answers" not in {thread.name for thread in threading.enumerate()}
        faulthandler.unregister(MAIN_THREAD_SIGNAL)  # as the interpreter does at its end
        os.kill(os.getpid(), MAIN_THREAD_SIGNAL)


@in_clean_process
def test_a_request_right_behind_the_end_does_not_hide_it(tmp_path: Path) -> None:
    original, answering, go = torch_compat.flight_record, threading.Event(), threading.Event()

    def slowly(*, stacks: bool) -> str:
        answering.set()
        assert go.wait(HANG_S)
        return original(stacks=stacks)

    def write_request(data: bytes) -> None:  # before the thread reads again
        descriptor = os.open(tmp_path / "ask", os.O_WRONLY | os.O_NONBLOCK)
        os.write(descriptor, data)
        os.close(descriptor)

    with installed_probe(tmp_path) as made, group_of_one():
        torch_compat.flight_record = slowly
        write_request(b"1\n")
        assert answering.wait(HANG_S)
        ending = threading.Thread(target=made.stop_answering, daemon=True)
        ending.start()
        wait_until(lambda: bytes_in_pipe(tmp_path / "ask"))
        write_request(b"2\n")
        go.set()
        ending.join(HANG_S)
        assert not ending.is_alive()


def bytes_in_pipe(path: Path) -> int:
    """Bytes that nobody has read so far."""
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        count = array.array("i", [0])
        fcntl.ioctl(descriptor, termios.FIONREAD, count)
        return count[0]
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 100])
def test_a_file_that_is_not_a_heartbeat_reads_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "heartbeat").write_bytes(content)
    assert read_heartbeat(Evidence.in_folder(tmp_path).heartbeat) is None


def test_torchs_private_functions_are_unchanged() -> None:
    """Fails where a new torch has changed what `torch_compat` uses."""
    run_ranks(_private_parts, 1, env=probe.FLIGHT_RECORDER_VARIABLES)


def test_the_thread_that_answers_takes_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    torch_compat.take_gpu()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    torch_compat.take_gpu()
    group = SimpleNamespace(bound_device_id=torch.device("cuda", 2))
    monkeypatch.setattr(dist.distributed_c10d._world, "default_pg", group)
    torch_compat.take_gpu()
    monkeypatch.setattr(dist.distributed_c10d._world, "default_pg", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # this rank is shown its own alone
    torch_compat.take_gpu()
    assert taken == [3, 2]


def last_completed_collective(group_id: int) -> int:
    record = json.loads(torch_compat.flight_record(stacks=False))[0]
    return int(record["pg_status"][str(group_id)]["last_completed_collective"])


def _private_parts() -> None:
    import torch._C._distributed_c10d as c10d

    assert torch_compat.process_groups() == []
    for name in ("_dump_fr_trace", "_dump_fr_trace_json"):
        assert hasattr(c10d, name)
    with group_of_one():
        dist.all_reduce(torch.ones(2, 3))
        pair = dist.new_group([0], group_desc="pair")
        dist.barrier(pair)
        groups = torch_compat.process_groups()
        assert [g["ranks"] for g in groups] == [[0], [0]]
        assert groups[0]["description"] == "default_pg"
        assert "pair" in groups[1]["description"]
        # A build with NCCL has its recorder as well, which has nothing to tell here.
        record, *others = json.loads(torch_compat.flight_record(stacks=False))
        assert not any(other.get("entries") for other in others)
        calls = record["entries"]
        assert [c["profiling_name"] for c in calls] == ["gloo:all_reduce", "gloo:barrier"]
        assert [c["process_group"][0] for c in calls] == [g["name"] for g in groups]
        assert calls[0]["input_sizes"] == [[2, 3]]
        assert calls[0]["input_dtypes"] == ["Float"]
        assert {"collective_seq_id", "p2p_seq_id", "is_p2p", "state", "thread_id", "pg_id",
                "time_created_ns"} <= set(calls[0])  # fmt: skip
        wait_until(lambda: last_completed_collective(calls[0]["pg_id"]) == 1)  # a thread records it
        del pair


@in_clean_process
def test_the_group_that_is_being_made_is_read_from_its_frame() -> None:
    c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
    original = c10d._new_process_group_helper
    seen = []

    def look(*args: Any, **named: Any) -> Any:
        seen.append(torch_compat.group_being_made(sys._getframe()))
        return original(*args, **named)

    with group_of_one():
        c10d._new_process_group_helper = look
        try:
            dist.new_group([0], backend="gloo")
            dist.new_group([0], use_local_synchronization=True)
            os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
            dist.new_group([0])
        finally:
            os.environ.pop("TORCH_DIST_INIT_BARRIER", None)
            c10d._new_process_group_helper = original
    one, other, third = seen
    assert one == {"name": one["name"], "ranks": [0], "backend": "gloo", "members_only": True}
    assert one["name"].isdigit()
    assert not other["name"].isdigit()
    assert [group["members_only"] for group in seen] == [True, True, False]
    assert third["name"] == str(int(one["name"]) + 1)
    assert torch_compat.group_being_made(sys._getframe()) is None
    state = RankState(rank=0, host="", pid=0, alive=True)
    answer = {"stacks": {}, "groups": [], "records": [], "making": one}
    assert with_answer(state, json.dumps(answer), 0).making == NewGroup(
        one["name"], (0,), "gloo", True
    )


def _one_group_after_another() -> None:
    for count in (3, 2):
        with group_of_one():
            for _ in range(count):
                dist.all_reduce(torch.ones(2))
            groups = json.dumps(torch_compat.process_groups())
            records = torch_compat.flight_record(stacks=False)
    text = f'{{"request": 1, "stacks": {{}}, "groups": {groups}, "records": {records}}}'
    state = state_from_answer(text)
    # The recorder still has those of the first, which had the same name and the same numbers.
    assert text.count('"gloo:all_reduce"') == 5
    assert [(call.key, call.seq) for call in state.calls or ()] == [("gloo:0", 1), ("gloo:0", 2)]
    assert set(state.completed or ()) == {"gloo:0"}
    assert (state.completed or {})["gloo:0"] <= 2


def test_calls_of_the_group_before_are_not_taken_for_those_of_the_present_one() -> None:
    run_ranks(_one_group_after_another, 1, env=probe.FLIGHT_RECORDER_VARIABLES, fresh=True)


def test_a_torch_without_a_recorder_gives_no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_compat.recorder, "RECORDERS", ("_dump_of_no_torch",))
    assert torch_compat.flight_record(stacks=False) == "[]"
