from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import HANG_S, context

from lockstep.run.start.process import Process
from lockstep.run.watch import probe
from lockstep.run.watch.evidence import Evidence
from lockstep.run.watch.heartbeat import read_heartbeat
from lockstep.run.watch.process_status import (
    ProcessStatus,
    cpu_of_descendants,
    harmless_stack_signal,
    read_process,
)
from lockstep.run.watch.snapshot import RankState, Snapshot, from_json
from lockstep.run.watch.stacks import Frame
from lockstep.run.watch.supervisor import write_report
from lockstep.run.watch.take_snapshot import take_snapshot
from lockstep.run.watch.verdict import Verdict

pytestmark = pytest.mark.launcher


@contextlib.contextmanager
def running_rank(fn: Callable[[], None], folder: Path) -> Iterator[Any]:
    process = context.Process(target=_rank, args=(fn, folder))
    process.start()
    try:
        limit = time.monotonic() + HANG_S
        while (
            read_heartbeat(Evidence.in_folder(folder).heartbeat) is None
            or not (folder / "ready").exists()
        ):
            assert time.monotonic() < limit
            assert process.is_alive()
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.join()


def _rank(fn: Callable[[], None], folder: Path) -> None:
    probe.install(Evidence.in_folder(folder))
    (folder / "ready").touch()
    fn()


def sleep_forever() -> None:
    while True:
        time.sleep(0.1)


def compute_forever() -> None:
    while True:
        torch.ones(10).sum()


def step_twice_and_sleep() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.step()
    optimizer.step()
    sleep_forever()


def wait_for_state(folder: Path, process: Any, condition: Callable[[RankState], bool]) -> RankState:
    limit = time.monotonic() + HANG_S
    while True:
        (state,) = take_snapshot([Process(0, 0, folder, process.pid)], timeout_s=HANG_S).ranks
        if condition(state):
            return state
        assert time.monotonic() < limit, state


def test_a_sleeping_rank_answers_with_stack_and_times(tmp_path: Path) -> None:
    with running_rank(sleep_forever, tmp_path) as process:
        state = wait_for_state(
            tmp_path, process, lambda s: bool(s.stack and s.stack[0].function == "sleep_forever")
        )
    assert (state.rank, state.pid, state.alive, state.stopped) == (0, process.pid, True, False)
    assert state.stack is not None
    assert state.stack[0].file == __file__
    assert state.steps == 0
    # No process group so far.
    assert (state.answered, state.calls, state.groups, state.threads) == (True, (), (), ())


def test_a_rank_that_computes_uses_the_processor(tmp_path: Path) -> None:
    with running_rank(compute_forever, tmp_path) as process:
        start = wait_for_state(
            tmp_path, process, lambda s: s.cpu_s is not None and s.stack is not None
        )
        wait_for_state(tmp_path, process, lambda s: (s.cpu_s or 0) > (start.cpu_s or 0) + 0.1)
        wait_for_state(
            tmp_path, process, lambda s: (s.main_cpu_s or 0) > (start.main_cpu_s or 0) + 0.1
        )


def test_a_snapshot_has_the_optimizer_steps(tmp_path: Path) -> None:
    with running_rank(step_twice_and_sleep, tmp_path) as process:
        wait_for_state(tmp_path, process, lambda s: s.steps == 2)


def test_a_stopped_rank_is_not_waited_for(tmp_path: Path) -> None:
    with running_rank(sleep_forever, tmp_path) as process:
        os.kill(process.pid, signal.SIGSTOP)
        wait_until_stopped(process.pid)
        (state,) = take_snapshot([Process(0, 0, tmp_path, process.pid)], timeout_s=HANG_S).ranks
        assert state.stopped
        assert (state.alive, state.stack, state.answered) == (True, None, None)
        os.kill(process.pid, signal.SIGCONT)
        assert wait_for_state(tmp_path, process, lambda s: s.stopped is False).stack is not None


def wait_until_stopped(pid: int) -> None:
    limit = time.monotonic() + HANG_S
    while (seen := read_process(pid)) is None or seen.state != "T":
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_process_without_our_handler_is_not_signalled(tmp_path: Path) -> None:
    """The signal would end it: a script may have replaced itself by another program."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            (state,) = take_snapshot([Process(0, 0, tmp_path, process.pid)], timeout_s=HANG_S).ranks
            assert (state.alive, state.stack, state.steps) == (True, None, None)
        finally:
            process.communicate(b"\n")
    assert process.returncode == 0


def test_a_heartbeat_of_an_earlier_process_is_not_believed(tmp_path: Path) -> None:
    with running_rank(step_twice_and_sleep, tmp_path):
        pass
    (state,) = take_snapshot([Process(0, 0, tmp_path, os.getpid())], timeout_s=0.1).ranks
    assert (state.steps, state.stack) == (None, None)


def test_a_snapshot_has_the_exit_codes(tmp_path: Path) -> None:
    codes = [0, 3, -9]
    ended = [Process(r, r, tmp_path / str(r), 4194304, code) for r, code in enumerate(codes)]
    snapshot = take_snapshot(ended, timeout_s=HANG_S)
    assert [s.code for s in snapshot.ranks] == codes
    assert not any(s.alive for s in snapshot.ranks)


def test_a_snapshot_of_no_processes_is_empty() -> None:
    assert take_snapshot([]).ranks == ()


def write_task(folder: Path, state: str, times: str = "0 0", switches: int = 7) -> None:
    """What the kernel says of a thread, see proc(5)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stat").write_text(f"77 (a) b (c) {state} 1 2 3 4 5 6 7 8 9 10 {times} 0 0 20\n")
    caught = 1 << (probe.MAIN_THREAD_SIGNAL - 1) | 1 << (probe.ALL_THREADS_SIGNAL - 1)
    (folder / "status").write_text(
        f"Name:\ta\nSigCgt:\t{caught:016x}\nvoluntary_ctxt_switches:\t{switches}\n"
    )
    (folder / "wchan").write_text("hrtimer_nanosleep" if state == "S" else "0")


def test_process_status_is_read_from_proc(tmp_path: Path) -> None:
    write_task(tmp_path / "77", "T", "250 50")
    write_task(tmp_path / "77" / "task" / "77", "T", "100 20", 9)
    ticks = os.sysconf("SC_CLK_TCK")
    assert read_process(77, tmp_path) == ProcessStatus("T", 300 / ticks, 120 / ticks, 9, True)
    status = tmp_path / "77" / "status"
    for caught in (0, 1 << (probe.MAIN_THREAD_SIGNAL - 1)):
        status.write_text(f"Name:\ta\nSigCgt:\t{caught:016x}\n")
        assert read_process(77, tmp_path) == ProcessStatus("T", 300 / ticks, 120 / ticks, 9, False)
    status.write_text(f"SigBlk:\t{1 << (probe.MAIN_THREAD_SIGNAL - 1):x}\nSigCgt:\t{2**64 - 1:x}\n")
    assert read_process(77, tmp_path) == ProcessStatus("T", 300 / ticks, 120 / ticks, 9, False)
    (tmp_path / "77" / "task" / "77" / "stat").unlink()
    assert read_process(77, tmp_path) == ProcessStatus("T", 300 / ticks, None, None, False)
    assert read_process(78, tmp_path) is None
    (tmp_path / "77" / "stat").write_text("nonsense")
    assert read_process(77, tmp_path) is None


def test_a_sleeping_thread_is_sent_no_signal(tmp_path: Path) -> None:
    def signal_for(
        main: str, *others: str, before: int | None = 7, answers: bool = True
    ) -> int | None:
        for number, state in enumerate((main, *others), 77):
            write_task(tmp_path / "77" / "task" / str(number), state)
        return harmless_stack_signal(77, before, answers=answers, root=tmp_path)

    assert harmless_stack_signal(77, 7, answers=True, root=tmp_path) is None
    write_task(tmp_path / "77", "S")
    assert signal_for("R", "S") == probe.MAIN_THREAD_SIGNAL
    assert signal_for("R", "S", before=6) is None  # it has slept since
    assert signal_for("R", "S", before=None) is None
    assert signal_for("S", "S") == probe.ALL_THREADS_SIGNAL
    assert signal_for("S", "D") == probe.ALL_THREADS_SIGNAL
    assert signal_for("S", "R") is None
    assert signal_for("S", "S", before=6) is None
    assert signal_for("t", "t") is None
    assert signal_for("S", "S", answers=False) is None


def test_only_a_futex_without_timeout_may_be_interrupted(tmp_path: Path) -> None:
    def signal_for(other: str, before: int | None = 7, *, answers: bool = False) -> int | None:
        write_task(tmp_path / "77" / "task" / "78", other)
        return harmless_stack_signal(77, before, answers=answers, root=tmp_path)

    main = tmp_path / "77" / "task" / "77"
    write_task(main, "S")
    write_task(tmp_path / "77", "S")
    (main / "wchan").write_text("futex_do_wait")
    assert signal_for("S") is None  # not known
    for text in ("running", "202 0x7f0 0x189 0x0 0x7ffd 0x0 0xffffffff 0x7ffc 0x7fff"):
        (main / "syscall").write_text(text)
        assert signal_for("S") is signal_for("R") is signal_for("R", answers=True) is None
        assert signal_for("S", None, answers=True) == probe.ALL_THREADS_SIGNAL
    (main / "syscall").write_text("202 0x7f0 0x189 0x0 0x0 0x0 0xffffffff 0x7ffc 0x7fff")
    assert signal_for("S") == probe.MAIN_THREAD_SIGNAL
    assert signal_for("R", answers=True) == probe.MAIN_THREAD_SIGNAL
    assert signal_for("S", answers=True) == probe.ALL_THREADS_SIGNAL
    assert signal_for("R", 6) is None  # it was in another one


LIBC = ctypes.PyDLL(None, use_errno=True)  # with the interpreter's lock


def sem_wait(semaphore: Any, end: int) -> int:
    return LIBC.sem_wait(semaphore)  # type: ignore[no-any-return]


def sem_timedwait(semaphore: Any, end: int) -> int:
    limit = struct.pack("qq", int(time.time() + 2 * HANG_S), 0)  # a struct timespec
    return LIBC.sem_timedwait(semaphore, limit)  # type: ignore[no-any-return]


def poll(semaphore: Any, end: int) -> int:
    found = LIBC.poll(struct.pack("ihh", end, select.POLLIN, 0), 1, -1)  # a struct pollfd
    return int(found) - 1


def nanosleep(semaphore: Any, end: int) -> int:
    return LIBC.nanosleep(struct.pack("qq", 3, 0), None)  # type: ignore[no-any-return]


def shared_semaphore(folder: Path) -> Any:
    size = 64  # a sem_t has at most as many bytes
    with open(folder / "semaphore", "a+b") as file:
        file.truncate(size)
        return (ctypes.c_char * size).from_buffer(mmap.mmap(file.fileno(), size))


def call_c_function(call: Callable[[Any, int], int], busy: bool, folder: Path) -> None:
    semaphore, end = shared_semaphore(folder), os.open(folder / "pipe", os.O_RDWR)
    if busy:
        args = ("sha256", b"", b"", 2**31 - 1)
        threading.Thread(target=hashlib.pbkdf2_hmac, args=args, daemon=True).start()
    (folder / "made").write_text(f"{call(semaphore, end)} {ctypes.get_errno()}")
    sleep_forever()


def has_returned(made: Path) -> bool:
    return made.exists() and made.read_text() != ""


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize(
    "call",
    [
        sem_wait,
        pytest.param(sem_timedwait, marks=pytest.mark.thorough),
        pytest.param(poll, marks=pytest.mark.thorough),
        pytest.param(nanosleep, marks=pytest.mark.thorough),
    ],
)
def test_no_c_call_is_interrupted_by_a_snapshot(
    call: Callable[[Any, int], int], busy: bool, tmp_path: Path
) -> None:
    """Of one that holds the interpreter's lock, also where a thread computes without it."""
    semaphore, made = shared_semaphore(tmp_path), tmp_path / "made"
    assert LIBC.sem_init(semaphore, 1, 0) == 0
    os.mkfifo(tmp_path / "pipe")
    end = os.open(tmp_path / "pipe", os.O_RDWR)
    with running_rank(partial(call_c_function, call, busy, tmp_path), tmp_path) as process:
        silent: list[RankState] = []
        while len(silent) < 2 and not made.exists():  # a nap ends by itself
            (state,) = take_snapshot([Process(0, 0, tmp_path, process.pid)]).ranks
            if not state.answered and (state.stack or call is not sem_wait):
                silent.append(state)  # without a stack it may be on its way to the call
        LIBC.sem_post(semaphore)
        os.write(end, b".")
        os.close(end)
        # It may also have answered before the call.
        wait_for_state(
            tmp_path, process, lambda state: state.answered is True and has_returned(made)
        )
        assert made.read_text().split()[0] == "0", made.read_text()
    if call is sem_wait:
        assert [s.stack[0].function for s in silent] == ["sem_wait"] * 2


def test_this_process_can_be_read_from_proc() -> None:
    status = read_process(os.getpid())
    assert status is not None
    assert status.state == "R"
    assert not status.shows_stacks


def test_a_report_is_written(tmp_path: Path) -> None:
    stack = (Frame("/home/me/train.py", 3, "main"),)
    snapshot = Snapshot(
        1.0,
        (
            RankState(rank=0, host="a", pid=5, alive=True, stack=stack, threads=(stack,), steps=7,
                      calls=()),
            RankState(rank=1, host="b", pid=6, alive=False, code=-9),
        ),
    )  # fmt: skip
    folder = tmp_path / "new" / "folder"
    write_report(folder, snapshot, Verdict("left", True, (1,), "so it is"))
    text = (folder / "hang.txt").read_text()
    assert text.startswith("so it is\n\nrank 0 on a, process 5\n")
    assert "/home/me/train.py:3 in main" in text
    assert "optimizer steps: 7" in text
    assert "signal 9" in text
    assert from_json((folder / "hang.json").read_text()) == snapshot
    assert sorted(p.name for p in folder.iterdir()) == ["hang.json", "hang.txt"]


def test_a_script_name_that_is_not_utf8_is_written(tmp_path: Path) -> None:
    stack = (Frame(os.fsdecode(b"/home/me/tr\xe4in.py"), 3, "main"),)
    state = RankState(rank=0, host="a", pid=5, alive=True, stack=stack)
    write_report(tmp_path, Snapshot(1.0, (state,)), Verdict("left", True, (0,), "so it is"))
    assert r"tr\udce4in.py:3 in main" in (tmp_path / "hang.txt").read_text()


def test_processor_time_of_descendants_is_summed(tmp_path: Path) -> None:
    """Of a rank 10, its child 11 and grandchild 12; 13 is nobody's. Names hold brackets."""

    def write_process(pid: int, parent: int, own: int, waited: int) -> None:
        fields = ["S", str(parent), *["0"] * 9, str(own), "0", str(waited), "0"]
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) b) {' '.join(fields)}")

    write_process(10, 1, 1000, 200)
    write_process(11, 10, 300, 0)
    write_process(12, 11, 400, 100)
    write_process(13, 1, 9000, 0)
    ticks = os.sysconf("SC_CLK_TCK")
    assert cpu_of_descendants([10, 12, 77], tmp_path) == {10: 1000 / ticks, 12: 100 / ticks}
