"""The fork server alone, with small work in place of a script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from lockstep.run.start import left_behind
from lockstep.run.start.fork_server import ForkServer, FreshForkServer
from lockstep.run.start.left_behind import _has_ended_completely, end_with_descendants

pytestmark = pytest.mark.launcher


def work() -> NoReturn:
    """Does what the variable says."""
    how = os.environ["HOW"]
    if how == "tell":
        line = f"{os.getpid() == os.getsid(0)} {os.environ['HOW']} {os.getpgid(0) == os.getpid()}"
        os.write(1, line.encode())
        os._exit(5)
    if how == "child":
        pid = os.fork()
        if pid:
            os.write(1, b"%d " % pid)
    if how in ("session", "leave") and os.fork() == 0:
        os.setsid()
        if os.fork():  # the other one has no parent from here on
            os._exit(0)
        os.write(1, b"%d " % os.getpid())
        how = "wait"
    if how == "leave":
        os.wait()
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if how == "stubborn" else signal.SIG_DFL)
    os.write(1, b"ready ")
    while True:
        signal.pause()


@contextmanager
def started(
    *hows: str,
    command: tuple[str, ...] = (),
    make: Callable[[], ForkServer] = lambda: ForkServer(work),
) -> Iterator[tuple[ForkServer, list[int], int]]:
    """A fork server with one rank a way of working; their processes, and what they write."""
    fork_server = make()
    reader, writer = os.pipe()
    try:
        for rank, how in enumerate(hows):
            with open(os.devnull) as null:
                fork_server.start(
                    rank,
                    {"HOW": how},
                    (null.fileno(), writer, writer),
                    own_session=True,
                    command=command,
                )
        os.close(writer)
        pids = []
        while len(pids) < len(hows):
            events = fork_server.events(timeout=10)
            pids += [event.pid for event in events if event.code is None]
        yield fork_server, pids, reader
    finally:
        os.close(reader)
        fork_server.close()


def ends(fork_server: ForkServer, number: int) -> dict[int, int]:
    """The codes of ranks, waited for."""
    found: dict[int, int] = {}
    while len(found) < number:
        for event in fork_server.events(timeout=20):
            if event.code is not None:
                found[event.local_rank] = event.code
    return found


def read(reader: int, words: int) -> list[str]:
    text = b""
    while len(text.split()) < words:
        piece = os.read(reader, 1000)
        if not piece:
            break
        text += piece
    return text.decode().split()


LEAVE_S = 60.0  # this file is imported without the others of the tests


def gone(pid: int) -> bool:
    """Waits until the process has ended, for a while."""
    try:
        psutil.Process(pid).wait(timeout=LEAVE_S)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


def made_ahead(number: int) -> tuple[ForkServer, list[int]]:
    """A fork server that has made so many ranks before they are asked for, and these."""
    fork_server = ForkServer(work, number)
    process = psutil.Process(fork_server.pid)
    while len(process.children()) < number:
        fork_server.events(timeout=0.05)
    return fork_server, [child.pid for child in process.children()]


def channels(pid: int) -> set[str]:
    """The sockets and pipes that a process has open."""
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # that of this very look
            found.add(os.readlink(path))
    return {link for link in found if link.startswith(("socket:", "pipe:"))}


def test_spares_become_ranks_first() -> None:
    inherited = channels(os.getpid())
    made, ahead = made_ahead(2)
    with started("wait", "wait", "wait", make=lambda: made) as (fork_server, pids, reader):
        read(reader, 3)
        inherited |= channels(os.getpid())
        assert set(pids[:2]) == set(ahead)
        assert pids[2] not in ahead
        for pid in pids:  # nothing of the fork server's is left in them
            # Pipes that a library makes anew in each copy are not shared with the fork server.
            assert channels(pid) & channels(fork_server.pid) <= inherited
            assert os.getsid(pid) == pid
        fork_server.signal([0, 1, 2], signal.SIGTERM)
        assert ends(fork_server, 3) == dict.fromkeys(range(3), -signal.SIGTERM)


def test_a_spare_that_has_ended_is_replaced() -> None:
    made, ahead = made_ahead(2)
    os.kill(ahead[0], signal.SIGKILL)
    assert gone(ahead[0])
    with started("wait", "wait", make=lambda: made) as (_, pids, reader):
        assert read(reader, 2) == ["ready", "ready"]
        assert ahead[1] in pids
        assert ahead[0] not in pids


def test_spares_that_are_never_asked_for_end_with_the_fork_server() -> None:
    made, ahead = made_ahead(3)
    with started("wait", make=lambda: made) as (_, _, reader):
        read(reader, 1)
    assert all(gone(pid) for pid in ahead)
    made, ahead = made_ahead(2)
    os.kill(made.pid, signal.SIGKILL)
    made.close()
    assert all(gone(pid) for pid in ahead)


def test_a_rank_has_its_own_session_variables_and_streams() -> None:
    before = dict(os.environ)
    fork_server = ForkServer(work)
    reader, writer = os.pipe()
    try:
        fork_server.start(3, {"HOW": "tell"}, (writer, writer, writer), own_session=True)
        os.close(writer)
        assert ends(fork_server, 1) == {3: 5}
        assert read(reader, 3) == ["True", "tell", "True"]
    finally:
        os.close(reader)
        fork_server.close()
    assert dict(os.environ) == before


def test_a_rank_executes_a_command_in_place_of_the_work() -> None:
    # In one piece: what two processes print may be mixed where they are not buffered.
    line = (sys.executable, "-S", "-c", "import os; os.write(1, os.environb[b'HOW'] + b' ')")
    with started("a", "b", command=line) as (_, _, reader):
        # It may have ended before `started` has seen that it runs: only its words are looked at.
        assert sorted(read(reader, 2)) == ["a", "b"]


def test_a_command_may_be_longer_than_a_message() -> None:
    arguments = ["x" * 100] * 3000
    line = (sys.executable, "-S", "-c", "import sys; print(len(sys.argv))", *arguments)
    with started("a", command=line) as (_, _, reader):
        assert read(reader, 1) == ["3001"]


def test_a_command_that_does_not_exist_ends_with_exit_code_127() -> None:
    fork_server = ForkServer(work)
    reader, writer = os.pipe()
    try:
        fork_server.start(0, {}, (writer, writer, writer), own_session=True, command=("/no/such",))
        os.close(writer)
        assert ends(fork_server, 1) == {0: 127}
        assert os.read(reader, 1000) == b"/no/such: No such file or directory\n"
    finally:
        os.close(reader)
        fork_server.close()


def test_signals_reach_the_ranks_named_and_their_children() -> None:
    with started("wait", "child") as (fork_server, _, reader):
        words = read(reader, 4)
        child = next(int(word) for word in words if word.isdigit())
        fork_server.signal([1], signal.SIGTERM)
        assert ends(fork_server, 1) == {1: -signal.SIGTERM}
        assert gone(child)
        fork_server.signal([0], signal.SIGKILL)
        assert ends(fork_server, 1) == {0: -signal.SIGKILL}


def test_a_stopped_rank_is_continued_to_take_a_signal() -> None:
    with started("wait") as (fork_server, [pid], reader):
        read(reader, 1)
        os.kill(pid, signal.SIGSTOP)
        fork_server.signal([0], signal.SIGTERM)
        assert ends(fork_server, 1) == {0: -signal.SIGTERM}


def test_the_end_of_the_fork_server_is_reported_and_ends_the_ranks() -> None:
    with started("stubborn") as (fork_server, [pid], reader):
        read(reader, 1)
        os.kill(fork_server.pid, signal.SIGKILL)
        assert gone(pid)
        with pytest.raises(ChildProcessError, match="is gone"):
            fork_server.events(timeout=10)
        with pytest.raises(ChildProcessError, match="is gone"):
            fork_server.start(1, {}, (0, 1, 2), own_session=True)


def test_closing_ends_ranks_that_ignore_sigterm() -> None:
    with started("wait", "stubborn", "child") as (_, pids, reader):
        words = read(reader, 5)
    assert all(gone(int(pid)) for pid in [*pids, *(w for w in words if w.isdigit())])


LAUNCHER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from test_fork_server import work, fresh, started, read, ForkServer
make = fresh if sys.argv[2] == "fresh" else lambda: ForkServer(work, 1)
with started("wait", "stubborn", "session", make=make) as (fork_server, pids, reader):
    words = read(reader, 5)
    print(fork_server.pid, *pids, *filter(str.isdigit, words), flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["fresh", pytest.param("copy", marks=pytest.mark.thorough)])
def test_nothing_outlives_a_launcher_that_was_killed(how: str) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, os.path.dirname(__file__), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdin is not None
    assert launcher.stdout is not None
    with launcher.stdin, launcher.stdout:
        pids = [int(word) for word in launcher.stdout.readline().split()]
        assert len(pids) == 5
        launcher.kill()
        launcher.wait()
        assert all(gone(pid) for pid in pids)


def test_a_process_that_a_rank_leaves_in_another_session_goes_on() -> None:
    with started("leave") as (fork_server, _, reader):
        pid = next(int(word) for word in read(reader, 2) if word.isdigit())
        assert ends(fork_server, 1) == {0: 0}
    left = psutil.Process(pid)
    assert left.ppid() != fork_server.pid
    left.kill()
    assert gone(pid)


def test_processes_left_behind_are_ended_on_request_and_ranks_are_not() -> None:
    with started("leave", "wait") as (fork_server, pids, reader):
        words = read(reader, 3)
        left = next(int(word) for word in words if word.isdigit())
        assert ends(fork_server, 1) == {0: 0}
        fork_server.end_left_behind()
        assert gone(left)
        fork_server.signal([1], signal.SIGTERM)
        assert ends(fork_server, 1) == {1: -signal.SIGTERM}
        fork_server.end_left_behind()  # nothing is left
    assert gone(pids[1])


def becomes_true(condition: Callable[[], bool]) -> bool:
    """Waits until a condition is true, for a while."""
    deadline = time.monotonic() + LEAVE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_zombies_are_not_among_the_processes_that_do_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A zombie that cannot be collected, as that is up to a parent that does not end."""
    endless = subprocess.Popen(["sleep", "600"])
    ended = subprocess.Popen(["true"])
    try:
        zombie = psutil.Process(ended.pid)
        assert becomes_true(lambda: zombie.status() == psutil.STATUS_ZOMBIE)
        left = [psutil.Process(endless.pid), zombie]
        monkeypatch.setattr(left_behind, "KILL_TIMEOUT_S", 0.1)
        monkeypatch.setattr(left_behind, "wait_for_ends", lambda pids, timeout: set())
        for name in ("terminate", "kill", "resume"):  # as if it were in state D
            monkeypatch.setattr(psutil.Process, name, lambda process: None)
        assert end_with_descendants(lambda: left, 0.0) == [endless.pid]
    finally:
        for process in (endless, ended):
            process.kill()
            process.wait()


MAIN_THREAD_ENDS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_whose_main_thread_has_ended_has_not_ended_itself() -> None:
    started_process = subprocess.Popen([sys.executable, "-c", MAIN_THREAD_ENDS])
    process = psutil.Process(started_process.pid)
    try:
        assert becomes_true(lambda: process.status() == psutil.STATUS_ZOMBIE)
        assert not _has_ended_completely(process)
        started_process.kill()
        assert becomes_true(lambda: process.num_threads() == 1)
        assert _has_ended_completely(process)
    finally:
        started_process.kill()
        started_process.wait()
    assert _has_ended_completely(process)


FRESH = """
import os, sys
sys.path.insert(0, sys.argv[1])
from lockstep.run.start.fork_server_process import serve
from test_fork_server import work
serve(int(sys.argv[2]), work)
"""


def fresh() -> FreshForkServer:
    line = [sys.executable, "-c", FRESH, os.path.dirname(__file__)]
    return FreshForkServer(line, os.environ)


def test_a_fresh_fork_server_starts_ranks() -> None:
    fork_server = fresh()
    reader, writer = os.pipe()
    try:
        fork_server.start(3, {"HOW": "tell"}, (writer, writer, writer), own_session=True)
        assert ends(fork_server, 1) == {3: 5}
        assert read(reader, 3) == ["True", "tell", "True"]
        fork_server.start(4, {"HOW": "wait"}, (writer, writer, writer), own_session=True)
        os.close(writer)
        assert read(reader, 1) == ["ready"]
        assert os.getpgid(fork_server.pid) == fork_server.pid
        fork_server.signal([4], signal.SIGTERM)
        assert ends(fork_server, 1) == {4: -signal.SIGTERM}
    finally:
        os.close(reader)
        fork_server.close()
    assert gone(fork_server.pid)


def test_a_fresh_fork_server_that_ends_at_once_raises_an_error() -> None:
    fork_server = FreshForkServer([sys.executable, "-S", "-c", "raise SystemExit(3)"], os.environ)
    try:
        with pytest.raises(ChildProcessError, match="is gone"):
            fork_server.events(timeout=20)
    finally:
        fork_server.close()
