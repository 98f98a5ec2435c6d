"""Two runs and one folder; folders that go away; disks that are full."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import context
from test_checkpointer import Counter, Training

from lockstep.checkpoint import layout, lock as locks, signs_of_life
from lockstep.checkpoint.health import examine
from lockstep.checkpoint.lock import Lock, find_other_writer
from lockstep.checkpoint.schedule import Policy
from lockstep.checkpoint.signs_of_life import SignsOfLife
from lockstep.errors import CheckpointError

pytestmark = pytest.mark.launcher


def hold(folder: str, pipe: Any, run_id: str = "") -> None:
    """Another run: holds the folder until it is told to go on, or killed."""
    os.environ["TORCHELASTIC_RUN_ID"] = run_id
    lock = Lock(Path(folder))
    lock.acquire()
    pipe.send(os.getpid())
    pipe.recv()
    lock.release()
    pipe.send("released")


@pytest.fixture
def other(tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(str(tmp_path), theirs))
    process.start()
    assert ours.recv() == process.pid
    yield process, ours
    process.kill()
    process.join()


def test_a_second_run_in_a_folder_is_refused(tmp_path: Path, other: tuple[Any, Any]) -> None:
    process, pipe = other
    run = Training(tmp_path)
    with pytest.raises(CheckpointError, match=f"process {process.pid} on {socket.gethostname()}"):
        run.checkpoint.save()
    assert f"process {process.pid} on" in (find_other_writer(tmp_path) or "")
    pipe.send("go on")
    assert pipe.recv() == "released"
    assert os.listdir(tmp_path) == []
    run.checkpoint.save()
    assert run.checkpoint.resume(), "its own lock is not in its way"
    assert "writes into" not in run.checkpoint.last_resume_note
    run.end()


@pytest.mark.parametrize(
    ("run_id", "attempt", "waits"),
    [("run17", "1", True), ("run18", "1", False), ("run17", "0", False)],
)
def test_a_restarted_run_waits_for_its_earlier_attempt_on_a_machine_that_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_id: str, attempt: str, waits: bool
) -> None:
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(str(tmp_path), theirs, "run17"))
    process.start()
    assert ours.recv() == process.pid
    num_waits = 0

    def sleep(seconds: float) -> None:
        nonlocal num_waits
        num_waits += 1
        if num_waits == 2 * locks.MAX_ATTEMPTS:  # the earlier attempt ends now
            ours.send("go on")
            assert ours.recv() == "released"

    monkeypatch.setattr(locks.time, "sleep", sleep)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
    lock = Lock(tmp_path)
    if waits:
        lock.acquire()
        lock.release()
    else:
        with pytest.raises(CheckpointError, match=f"process {process.pid} on"):
            lock.acquire()
        assert num_waits < locks.MAX_ATTEMPTS
        ours.send("go on")
    process.join()


def test_a_run_may_resume_from_a_folder_that_another_writes(tmp_path: Path) -> None:
    Training(tmp_path).checkpoint.save()
    first = Training(tmp_path)
    first.end()
    # Those two are of this process, which has let go of the folder only with the last of them.
    for lock in list(locks._locks_of_process):
        locks._locks_of_process.pop(lock)
    ours, theirs = context.Pipe()
    (tmp_path / locks.LOCK_FILE).unlink()
    process = context.Process(target=hold, args=(str(tmp_path), theirs))
    process.start()
    ours.recv()
    run = Training(tmp_path)
    assert run.checkpoint.resume()
    assert f"process {process.pid} on" in run.checkpoint.last_resume_note
    assert run.world.said == [run.checkpoint.last_resume_note]
    process.kill()
    process.join()


def test_a_killed_run_leaves_no_lock(tmp_path: Path, other: tuple[Any, Any]) -> None:
    process, _ = other
    process.kill()
    process.join()
    assert (tmp_path / locks.LOCK_FILE).exists()
    assert find_other_writer(tmp_path) is None
    run = Training(tmp_path)
    run.checkpoint.save()
    run.end()
    assert not (tmp_path / locks.LOCK_FILE).exists()


def test_several_checkpoints_of_one_run_share_the_folder(tmp_path: Path) -> None:
    one, two = Lock(tmp_path), Lock(tmp_path)
    one.acquire()
    two.acquire()
    one.release()
    two.acquire()
    assert (tmp_path / locks.LOCK_FILE).exists()
    two.release()
    assert not (tmp_path / locks.LOCK_FILE).exists()


@pytest.fixture
def no_system_locks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    def make(path: Path, text: bytes) -> SignsOfLife:
        signs = SignsOfLife(path, text)
        made.append(signs)
        return signs

    made: list[SignsOfLife] = []
    monkeypatch.setattr(fcntl, "lockf", no_locks)
    monkeypatch.setattr(locks, "SignsOfLife", make)
    yield
    for signs in made:
        signs.end()  # a test that has failed may have left them


def test_without_system_locks_the_text_of_the_file_decides(
    tmp_path: Path, no_system_locks: None
) -> None:
    """There the text decides, as far as it can be judged."""
    own = locks._describe_this_process()
    ended = subprocess.Popen(["true"])
    ended.wait()
    long_ago = time.time() - 10_000
    cases: list[tuple[dict[str, Any], float | None, bool]] = [
        ({**own, "pid": ended.pid}, None, False),  # it has ended
        ({**own, "pid": os.getppid(), "started": 5.0}, None, False),  # its number is another's now
        ({**own, "host": "elsewhere"}, None, True),
        ({**own, "host": "elsewhere"}, long_ago, False),
        ({}, None, False),
    ]
    file = tmp_path / locks.LOCK_FILE
    for text, changed, alive in cases:
        file.write_text(json.dumps(text))
        if changed:
            os.utime(file, (changed, changed))
        assert (find_other_writer(tmp_path) is not None) == alive, text
        lock = Lock(tmp_path)
        if alive:
            with pytest.raises(CheckpointError, match=r"process .* on elsewhere"):
                lock.acquire()
        else:
            lock.acquire()
            lock.release()
    removed_meanwhile = tmp_path / "gone"
    assert not locks._seems_alive(
        json.dumps({**own, "host": "elsewhere"}).encode(), removed_meanwhile
    )
    lock = Lock(tmp_path)
    lock.acquire()
    file.write_text(json.dumps({**own, "host": "elsewhere", "run": "abc"}))
    with pytest.raises(CheckpointError, match=r"run abc\) has begun to write there"):
        lock.acquire()
    lock.release()
    assert file.exists(), "it is the other's"


HELD = {"run id": "run17", "attempt": 1, "job": "42", "job starts": 0}
"""Whose lock file is found, see `locks._describe_this_process`."""


@pytest.mark.parametrize(
    ("run_id", "attempt", "job", "job_starts", "takes_over"),
    [
        ("run17", 2, "42", 0, True),  # the launcher has restarted it
        ("run99", 0, "42", 1, True),  # Slurm has started the job again
        ("run17", 2, "", 0, True),
        ("run17", 1, "42", 0, False),  # a rank 0 of the same attempt
        ("run17", 0, "42", 0, False),
        ("run99", 2, "42", 0, False),  # another run of the job
        ("run99", 0, "43", 1, False),
        ("none", 2, "", 1, False),  # every torchrun on several machines may have this id
    ],
)
def test_without_system_locks_a_later_attempt_takes_over_from_a_lost_machine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_id: str,
    attempt: int,
    job: str,
    job_starts: int,
    takes_over: bool,
) -> None:
    """At once: the time of its last save says that the machine is alive, for a quarter of an hour.

    A run that was only cut off notices at its next save that it was replaced.
    """

    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOTSUP, "no locks here")

    def sleep(seconds: float) -> None:
        nonlocal num_waits
        num_waits += 1

    num_waits = 0
    monkeypatch.setattr(fcntl, "lockf", no_locks)
    monkeypatch.setattr(locks.time, "sleep", sleep)
    own = {**locks._describe_this_process(), **HELD, "host": "lost", "run": "a"}
    if run_id == "none":
        own["run id"] = "none"
    (tmp_path / locks.LOCK_FILE).write_text(json.dumps(own))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(job_starts))
    monkeypatch.setattr(locks, "MAX_WAIT_FOR_EARLIER_ATTEMPT_S", 0.0)
    assert (find_other_writer(tmp_path) is None) == takes_over
    lock = Lock(tmp_path)
    if takes_over:
        lock.acquire()
        assert num_waits == 0
        lock.release()
    else:
        with pytest.raises(CheckpointError, match=r"process \d+ on lost"):
            lock.acquire()


class Machine:
    """Another machine that sees the same folder. What a test does inside `used()` happens there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._locks: dict[Path, Any] = {}
        self.num_looks = 0
        """How often it has waited for the next look at the lock file."""
        self.actions: dict[int, Callable[[], object]] = {}
        """What happens elsewhere during such a wait, by its number."""

    @contextmanager
    def used(self) -> Iterator[None]:
        with self._monkeypatch.context() as patch:
            patch.setattr(locks, "_locks_of_process", self._locks)
            patch.setattr(socket, "gethostname", lambda: "pod-2")
            patch.setattr(time, "sleep", self._sleep)
            yield

    def _sleep(self, seconds: float) -> None:
        if seconds == signs_of_life.LOOK_INTERVAL_S:
            self.num_looks += 1
            self.actions.get(self.num_looks, lambda: None)()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, no_system_locks: None) -> Machine:
    return Machine(monkeypatch)


def set_age(path: Path, age_s: float) -> None:
    changed = time.time() - age_s
    os.utime(path, (changed, changed))


def signs_of(lock: Lock) -> SignsOfLife:
    assert lock._lock is not None
    signs = lock._lock.signs_of_life
    assert signs is not None
    return signs


def threads_of_locks() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lockstep-lock"]


def test_a_run_that_saves_seldom_keeps_its_folder_where_there_are_no_locks(
    tmp_path: Path, machine: Machine
) -> None:
    holder = Lock(tmp_path)
    holder.acquire()
    set_age(tmp_path / locks.LOCK_FILE, 10_000)  # the last save
    signs_of(holder).give()
    with machine.used():
        assert "another run (process" in (find_other_writer(tmp_path) or "")

    set_age(tmp_path / locks.LOCK_FILE, 100)
    machine.actions = {150: signs_of(holder).give}
    with (
        machine.used(),
        pytest.warns(UserWarning, match="waits up to 180 s for a sign of life"),
        pytest.raises(CheckpointError, match=r"another run \(process .* writes into this folder"),
    ):
        Lock(tmp_path).acquire()
    assert machine.num_looks == 150
    holder.acquire()
    holder.release()
    assert os.listdir(tmp_path) == []


def test_a_run_that_slept_for_long_has_lost_its_folder_and_says_so(
    tmp_path: Path, machine: Machine
) -> None:
    """As one that was stopped by SIGSTOP: another machine has taken the folder meanwhile."""
    path = tmp_path / locks.LOCK_FILE
    holder, successor = Lock(tmp_path), Lock(tmp_path)
    holder.acquire()
    with machine.used():
        with pytest.warns(UserWarning, match="may be lost"):
            successor.acquire()
        assert machine.num_looks == 180

    set_age(path, 100)
    before = signs_of_life.look_at(path)
    signs_of(holder).give()
    assert signs_of_life.look_at(path) == before, "it is no sign of life of the successor"
    with pytest.raises(CheckpointError, match=r"another run .* has begun to write there"):
        holder.acquire()
    holder.release()
    with machine.used():
        successor.acquire()
        successor.release()
    assert not path.exists()


@pytest.mark.parametrize("promises", [True, False])
def test_only_a_run_that_promises_signs_of_life_is_watched(
    tmp_path: Path, machine: Machine, promises: bool
) -> None:
    """One that promises none, for want of a thread, may be alive for 15 minutes."""
    run = {**locks._describe_this_process(), "host": "pod-1"}
    if promises:
        run[locks.SIGNS_OF_LIFE] = 15.0
    (tmp_path / locks.LOCK_FILE).write_text(json.dumps(run))
    lock = Lock(tmp_path)
    with machine.used():
        if promises:
            with pytest.warns(UserWarning, match="on pod-1, since .* which may be lost"):
                lock.acquire()
            lock.release()
        else:
            with pytest.raises(CheckpointError, match="on pod-1"):
                lock.acquire()
    assert machine.num_looks == (180 if promises else 0)


def test_a_run_that_ends_while_it_is_watched_leaves_the_folder(
    tmp_path: Path, machine: Machine
) -> None:
    holder, successor = Lock(tmp_path), Lock(tmp_path)
    holder.acquire()
    machine.actions = {3: (tmp_path / locks.LOCK_FILE).unlink}
    with machine.used():
        with pytest.warns(UserWarning, match="may be lost"):
            successor.acquire()
        successor.release()
    assert machine.num_looks == 3
    holder.release()


def test_of_two_runs_that_wait_for_a_lost_one_the_second_sees_the_first(
    tmp_path: Path, machine: Machine
) -> None:
    path = tmp_path / locks.LOCK_FILE
    lost = {**locks._describe_this_process(), "host": "pod-1", locks.SIGNS_OF_LIFE: 15.0}
    path.write_text(json.dumps(lost))
    text_of_first = json.dumps({**lost, "host": "pod-3", "run": "abc"})
    machine.actions = {180: lambda: path.write_text(text_of_first)}
    with (
        machine.used(),
        pytest.warns(UserWarning, match="may be lost"),
        pytest.raises(CheckpointError, match="writes into this folder"),
    ):
        Lock(tmp_path).acquire()
    assert path.read_text() == text_of_first


@pytest.mark.parametrize("has_locks", [True, False])
def test_signs_of_life_end_with_the_lock(
    tmp_path: Path, request: pytest.FixtureRequest, has_locks: bool
) -> None:
    if not has_locks:
        request.getfixturevalue("no_system_locks")
    one, two = Lock(tmp_path), Lock(tmp_path)
    one.acquire()
    two.acquire()
    expected = 0 if has_locks else 1
    assert len(threads_of_locks()) == expected
    one.release()
    assert len(threads_of_locks()) == expected, "the other one still holds the folder"
    two.release()
    assert threads_of_locks() == []


def test_without_a_thread_no_signs_of_life_are_promised(
    tmp_path: Path, no_system_locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more_threads(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_more_threads)
    lock = Lock(tmp_path)
    lock.acquire()
    assert locks.SIGNS_OF_LIFE not in json.loads((tmp_path / locks.LOCK_FILE).read_text())
    lock.acquire()
    lock.release()
    assert os.listdir(tmp_path) == []


def test_signs_of_life_are_given_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_given = 0
    were_given = threading.Event()

    def give(_: SignsOfLife) -> None:
        nonlocal num_given
        num_given += 1
        if num_given == 3:
            were_given.set()

    monkeypatch.setattr(signs_of_life, "INTERVAL_S", 0.001)
    monkeypatch.setattr(SignsOfLife, "give", give)
    signs = SignsOfLife(tmp_path / "lock", b"")
    try:
        assert were_given.wait(20)
    finally:
        signs.end()
    assert threads_of_locks() == []


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_folder_that_is_removed_meanwhile_is_reported(tmp_path: Path, asynchronous: bool) -> None:
    """As when its file system is unmounted: nothing is written below the empty mount point."""
    mount = tmp_path / "mount"
    run = Training(mount / "runs", policy=Policy(asynchronous=asynchronous))
    run.train(1)
    run.checkpoint.save()
    run.checkpoint.wait()
    mount.rename(tmp_path / "away")
    mount.mkdir()
    for _ in range(2):
        run.train(1)
        with pytest.raises(CheckpointError, match="its lock file is gone") as caught:
            run.checkpoint.save()
        assert "still mounted" in caught.value.do
    assert not (mount / "runs").exists() or os.listdir(mount / "runs") == []
    shutil_back(tmp_path)
    run.checkpoint.save()
    run.checkpoint.wait()
    run.end()
    assert [layout.step_of(p) for p in layout.list_checkpoints(mount / "runs")] == [1, 3]


def shutil_back(folder: Path) -> None:
    for path in (folder / "mount").iterdir():
        path.rmdir()
    (folder / "mount").rmdir()
    (folder / "away").rename(folder / "mount")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    line = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)]
    if os.geteuid() or subprocess.run(line, capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_real_full_disk_and_one_that_turns_read_only(small_disk: Path) -> None:
    own = Counter({"part": torch.zeros(80_000)})
    training = Training(small_disk / "run", own=own)
    run = training.checkpoint
    first = run.save()
    own.state = {"part": torch.zeros(200_000)}
    with pytest.raises(CheckpointError, match="no space is left") as caught:
        run.save()
    assert "free some space" in caught.value.do
    assert sorted(os.listdir(small_disk / "run")) == [".lock", "step-000000000"]
    assert not examine(first, values=True).problems
    assert layout.latest(small_disk / "run") == first
    own.state = {"part": torch.ones(80_000)}
    assert run.save() == first, "and it goes on once there is space"
    training.end()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CheckpointError, match="the file system is read-only"):
        run.save()
    assert not examine(first, values=True).problems
