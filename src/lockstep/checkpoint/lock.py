"""Prevents two runs from writing into the same folder.

While a run writes into a folder, the folder holds a file `.lock`. Its text says which run that is,
and a system lock on the file says whether that run is alive. (It is a POSIX lock from `fcntl`: it
works over NFS too, is not inherited by child processes, and ends with its process.)

Some network file systems have no such locks. Then only the text decides: a process of this machine
can be looked up, and a process of another machine is considered alive if the file has changed
lately. There are two exceptions. If the process belongs to an earlier attempt of this run, this
attempt has replaced it. And if the text says that the process gives *signs of life*, a run that
wants the lock watches for them (see `signs_of_life`).
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from lockstep.checkpoint import layout, signs_of_life, storage
from lockstep.checkpoint.signs_of_life import SignsOfLife
from lockstep.errors import CheckpointError, warn

LOCK_FILE = ".lock"
MAX_LOCK_FILE_AGE_S = 900.0
"""A run on another machine seems alive for this long after the last change of its lock file: its
last save or sign of life."""
MAX_ATTEMPTS = 6
ATTEMPT_INTERVAL_S = 0.02
MAX_WAIT_FOR_EARLIER_ATTEMPT_S = 120.0
"""How long a run that was restarted waits for the lock of its earlier attempt. A machine that was
cut off from the others ends its ranks some seconds after the others have restarted. If it was
lost, a file server may keep its locks for 90 s."""
RUN_IDS_OF_MANY_RUNS = ("", "none")
"""Ids that do not tell a run from others: that of a run without a launcher, and torchrun's default
for several machines."""
SIGNS_OF_LIFE = "sign interval"
"""The entry of a lock file's text that promises signs of life. Its value is the time between them
in seconds."""
MAX_CLOCK_CHANGE_S = 3.0
"""The start time of a process differs by less than this if the clock was adjusted meanwhile."""


@dataclass
class _FileLock:
    """A lock file that this process holds."""

    descriptor: int
    """The open lock file."""
    text: bytes
    """What this process has written into it."""
    signs_of_life: SignsOfLife | None
    """What shows that this process is alive, if the file system has no locks. None if it has, or if
    no thread could be started."""
    owners: int = 0
    """Number of `Lock` objects that share it."""

    @property
    def may_be_system_lock(self) -> bool:
        """True if the system may have locked the file for this process.

        False if it has signs of life, which are only given where the file system has no locks.
        """
        return self.signs_of_life is None


_locks_of_process: dict[Path, _FileLock] = {}
"""The locks of this process by their files. They are shared, because the system would give the
process the same lock again, and take it away as soon as the first of two owners closes the file."""


class Lock:
    """The right of this run to write into a folder.

    Args:
        folder: the folder of the run's checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = Path(os.path.abspath(folder))
        self._path = self._folder / LOCK_FILE
        self._lock: _FileLock | None = None

    def acquire(self) -> None:
        """Takes the lock, or checks that this run still has it. Called before every save.

        Several objects of one process share the lock on a folder. Each later call also updates the
        time of the lock file, by which runs on other machines see that this run is alive.

        Raises:
            CheckpointError: another run writes into the folder; or this is no longer the folder in
                which the lock was taken.
            OSError: the folder does not exist or is not writable.
        """
        if self._lock is None:  # before the first save
            self._lock = self._take()
        else:
            self._check_still_held(self._lock)

    def _take(self) -> _FileLock:
        """Takes the system lock, or shares it if another object of this process has it."""
        if self._path not in _locks_of_process:
            _locks_of_process[self._path] = _make_lock(self._path)
        lock = _locks_of_process[self._path]
        lock.owners += 1
        return lock

    def _check_still_held(self, lock: _FileLock) -> None:
        """Checks that the lock file still belongs to this run, and updates its time.

        Raises:
            CheckpointError: the file is gone, or belongs to another run.
        """
        text = _read_text(self._path)
        if text != lock.text:
            found = "its lock file is gone"
            if text:
                found = f"{_describe_run(text)} has begun to write there"
            raise CheckpointError(
                f"saving a checkpoint in {self._folder}",
                f"it is not the folder that this run has written to: {found}",
                "check whether its file system is still mounted and nobody has removed or "
                "replaced the folder; give each run a folder of its own",
            )
        with suppress(OSError):
            os.utime(self._path)  # the time of the last save, for runs on other machines

    def release(self) -> None:
        """Gives up this object's share of the lock. The last owner removes the lock file."""
        lock = self._lock
        self._lock = None
        if lock is None:
            return

        lock.owners -= 1
        if lock.owners > 0:
            return
        del _locks_of_process[self._path]
        if lock.signs_of_life is not None:
            lock.signs_of_life.end()
        with suppress(OSError):
            # If the folder was replaced meanwhile, the lock file may belong to another run.
            is_own_file = _read_text(self._path) == lock.text
            if is_own_file:
                storage.unlink(self._path)
        os.close(lock.descriptor)


def find_other_writer(folder: Path) -> str | None:
    """Returns a description of another run that writes into a folder, or None if there is none."""
    path = Path(os.path.abspath(folder)) / LOCK_FILE
    if path in _locks_of_process:
        return None  # this process has the lock, so no other run does

    # If the lock is free, `_try_lock` takes it, and closing the file releases it at once.
    with suppress(OSError), path.open("rb+") as file:
        try:
            _try_lock(file.fileno(), path)
        except _OtherRunHasLock as other_run:
            return str(other_run)
    return None


class _OtherRunHasLock(Exception):
    """Another run has the lock. The argument describes that run."""


def _make_lock(path: Path) -> _FileLock:
    """Locks the lock file, which is created if necessary, and writes into it which run this is.

    Raises:
        CheckpointError: another run has the lock.
    """
    waits_until = time.monotonic() + MAX_WAIT_FOR_EARLIER_ATTEMPT_S
    while True:
        try:
            return _acquire_patiently(path, waits_until)
        except _OtherRunHasLock as error:
            other_run = str(error)

        lock_is_gone = _wait_for_sign_or_remove(path, other_run)
        if not lock_is_gone:
            raise CheckpointError(
                f"saving a checkpoint in {path.parent}",
                f"{other_run} writes into this folder",
                f"give each run its own folder, or end that one (if it has ended, remove {path})",
            )
        time.sleep(ATTEMPT_INTERVAL_S)


def _acquire_patiently(path: Path, waits_until: float) -> _FileLock:
    """Does what `_acquire` does. If another run has the lock, it tries again for a moment.

    Another process may have the lock for an instant only: its `find_other_writer` takes it to see
    whether it is free. If this run was restarted, its former ranks may have the lock for longer, so
    they are waited for.

    Args:
        path: the path of the lock file.
        waits_until: when to stop waiting for former ranks, as `time.monotonic` counts.

    Raises:
        _OtherRunHasLock: another run has the lock.
    """
    num_refused = 0
    while True:
        try:
            return _acquire(path)
        except _OtherRunHasLock:
            time_is_left = time.monotonic() < waits_until
            waits_for_former_ranks = time_is_left and _is_of_earlier_attempt(_read_text(path))
            if not waits_for_former_ranks:
                num_refused += 1
            if num_refused == MAX_ATTEMPTS:
                raise
        time.sleep(ATTEMPT_INTERVAL_S)


def _wait_for_sign_or_remove(path: Path, other_run: str) -> bool:
    """Waits for a sign of life of a run on another machine, and removes its lock if none comes.

    Args:
        path: the path of the lock file.
        other_run: a description of that run.

    Returns:
        True if the file is gone. False if the run is alive, or promises no signs of life.
    """
    if not _promises_signs_of_life(_read_text(path)):
        return False

    warn(
        f"saving a checkpoint in {path.parent}",
        found=f"the first save waits up to {signs_of_life.MAX_SILENCE_S:.0f} s for a sign of life "
        f"from {other_run}, which may be lost",
        do=f"wait; or, if you know that the other run has ended, remove {path}",
    )
    try:
        stayed_silent = signs_of_life.stays_silent(path)  # looks at the file for some minutes
        if not stayed_silent:
            return False
        storage.unlink(path)
    except FileNotFoundError:
        pass  # it is gone already: its run has removed it at its end, or another waiting run has
    return True


def _promises_signs_of_life(text: bytes) -> bool:
    """Returns True if a lock file is of another machine, and says that its run gives signs of life.

    Args:
        text: the text of the lock file, see `_describe_this_process`.
    """
    with suppress(ValueError):
        run = layout.parse_object(text)
        return SIGNS_OF_LIFE in run and run.get("host") != socket.gethostname()
    return False


def _acquire(path: Path) -> _FileLock:
    """Locks the lock file, and writes into it which run this is.

    Raises:
        _OtherRunHasLock: another run has the lock.
    """
    lock = None
    while lock is None:
        # None if the former owner has removed the file just now. Then the next attempt finds, or
        # creates, the file that has the name by then.
        lock = _acquire_unless_removed(path)
    return lock


def _acquire_unless_removed(path: Path) -> _FileLock | None:
    """Locks the lock file, and writes into it which run this is.

    Returns:
        The lock; None if the file was removed since it was opened.

    Raises:
        _OtherRunHasLock: another run has the lock.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    with ExitStack() as unless_acquired:
        unless_acquired.callback(os.close, descriptor)

        is_system_lock = _try_lock(descriptor, path)

        if not _is_same_file(descriptor, path):
            return None  # no other process would see the lock on a file without a name

        run = _describe_this_process()
        signs = None if is_system_lock else _start_signs_of_life(path, run)
        if signs is not None:
            unless_acquired.callback(signs.end)
            text = signs.text  # promises signs of life
        else:
            text = json.dumps(run).encode()

        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text, 0)
        if not is_system_lock:
            os.fsync(descriptor)  # other machines must see the text soon
        unless_acquired.pop_all()  # the descriptor stays open, and the thread runs on
        return _FileLock(descriptor, text, signs)


def _start_signs_of_life(path: Path, run: Mapping[str, Any]) -> SignsOfLife | None:
    """Starts to give signs of life, for a lock file whose text promises them.

    Other runs take a run that has promised them and gives none for lost.

    Args:
        path: the path of the lock file.
        run: what the file says about this run, without the promise.

    Returns:
        What gives the signs, with the text of the file. None if the system allows no more threads:
        then nothing must be promised.
    """
    promise = {SIGNS_OF_LIFE: signs_of_life.INTERVAL_S}
    text_with_promise = json.dumps({**run, **promise}).encode()
    try:
        return SignsOfLife(path, text_with_promise)
    except RuntimeError:
        return None


def _try_lock(descriptor: int, path: Path) -> bool:
    """Tries to take the system lock on an open file. Closing the file releases it.

    If the file system has no locks, the text in the file decides whether this process may write.

    Returns:
        True if this process has the system lock. False if the file system has no locks, and this
        process may write.

    Raises:
        _OtherRunHasLock: another run has the lock, or the file system has no locks and the run that
            the text names seems to be alive.
    """
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # another process has the lock
        raise _OtherRunHasLock(_describe_run(_read_text(path))) from None
    except OSError:  # this file system has no locks
        text = _read_text(path)
        if _seems_alive(text, path):
            raise _OtherRunHasLock(_describe_run(text)) from None
        return False
    return True


def _seems_alive(text: bytes, path: Path) -> bool:
    """Returns True if the run that a lock file names seems to be alive, and is not this process.

    Args:
        text: the text of the lock file, see `_describe_this_process`.
        path: the path of the lock file.
    """
    try:
        run = layout.parse_object(text)
        if not run:  # {}, which is not the text of a lock file
            return False
        if run.get("host") == socket.gethostname():
            return _is_other_process_of_this_machine(run)
        return _seems_alive_on_other_machine(run, path)
    except (psutil.Error, FileNotFoundError):  # the process has ended, or removed the file just now
        return False
    except (KeyError, ValueError, TypeError):  # the text is not that of a lock file
        return False


def _is_other_process_of_this_machine(run: Mapping[str, Any]) -> bool:
    """Returns True if the process that has written a lock file still runs, and is not this one.

    Args:
        run: the content of the lock file, see `_describe_this_process`.

    Raises:
        psutil.Error: there is no process with this number.
    """
    process = psutil.Process(int(run["pid"]))

    # Another process may have got the number since: then its start time differs. (The start time is
    # computed from the clock, so it changes a little if the clock is adjusted.)
    difference_s = abs(process.create_time() - float(run["started"]))
    is_process_of_run = bool(difference_s < MAX_CLOCK_CHANGE_S)
    is_own_process = process.pid == os.getpid()
    return is_process_of_run and not is_own_process


def _seems_alive_on_other_machine(run: Mapping[str, Any], path: Path) -> bool:
    """Returns True if a process of another machine was alive lately, and may save again.

    Such a process cannot be looked up, but its saves and signs of life update the time of the lock
    file.

    Args:
        run: the content of the lock file, see `_describe_this_process`.
        path: the path of the lock file.
    """
    # If that run was started again as this one, its former processes save no more. Either their
    # machine is lost, and a save needs all ranks. Or they still run; then they will see before
    # their next save that the lock file belongs to this run.
    if _is_replaced_by_this_attempt(run, _describe_this_process()):
        return False
    age_s = time.time() - path.stat().st_mtime
    return age_s < MAX_LOCK_FILE_AGE_S


def _is_of_earlier_attempt(text: bytes) -> bool:
    """Returns True if a lock file seems to be one that this run has written before its restart.

    Another run with the same id, such as "none", may also have written it. So the caller only waits
    for the lock, and does not take it.

    Args:
        text: the text of the lock file, see `_describe_this_process`.
    """
    own = _describe_this_process()
    try:
        run = layout.parse_object(text)
        is_of_earlier_restart = run["run id"] == own["run id"] and run["attempt"] < own["attempt"]
        # If Slurm has started the whole job again, the attempts are counted from 0 again.
        return bool(is_of_earlier_restart or _is_replaced_by_this_attempt(run, own))
    except (KeyError, ValueError, TypeError):  # the text is not that of a lock file
        return False


def _is_replaced_by_this_attempt(run: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Returns True if this process continues the run that has written a lock file.

    It does if the launcher has restarted the ranks of that run since, or if Slurm has started the
    job of that run again, as Slurm does after it has lost a machine.

    Args:
        run: the content of the lock file, see `_describe_this_process`.
        own: what this process would write into a lock file.

    Raises:
        KeyError: `run` is not the content of a lock file.
    """
    is_of_same_job = own["job"] != "" and run.get("job") == own["job"]
    if is_of_same_job and run.get("job starts", 0) < own["job starts"]:
        return True

    # torchrun, for example, gives every run without --rdzv-id the id "none".
    has_id_of_its_own = own["run id"] not in RUN_IDS_OF_MANY_RUNS
    is_same_run = has_id_of_its_own and run["run id"] == own["run id"]
    return bool(is_same_run and run["attempt"] < own["attempt"])


def _describe_this_process() -> dict[str, Any]:
    """Returns the content of the lock file of this run, as JSON."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        # Distinguishes the process from a later one with the same number.
        "started": int(psutil.Process().create_time()),
        # For users: when the lock was taken.
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        # The id that the launchers of the run share, and how often its ranks were restarted.
        "run id": os.environ.get("TORCHELASTIC_RUN_ID", ""),
        "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0),
        # The number of Slurm's job, and how often Slurm has started it again.
        "job": os.environ.get("SLURM_JOB_ID", ""),
        "job starts": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
        # No other lock has this text, so that each process recognises its own lock file.
        "run": secrets.token_hex(8),
    }


def _describe_run(text: bytes) -> str:
    """Describes a run for an error message, given the text that it wrote into the lock file."""
    with suppress(ValueError, KeyError):
        run = layout.parse_object(text)
        return (
            f"another run (process {run['pid']} on {run['host']}, since {run['since']}, "
            f"run {run['run']})"
        )
    return "another run"


def _read_text(path: Path) -> bytes:
    """Returns the text of a lock file.

    If this process has the system lock, the text is read through the descriptor that is already
    open, because closing another descriptor of the same file would release the lock.

    Returns:
        The text. It is b"" if the file does not exist, or if this process has the system lock and
        somebody has put another file in the place of the lock file.
    """
    lock = _locks_of_process.get(path)
    with suppress(OSError):
        if lock is not None and lock.may_be_system_lock:
            if _is_same_file(lock.descriptor, path):
                return os.pread(lock.descriptor, signs_of_life.MAX_TEXT_BYTES, 0)
            return b""
        text, _ = signs_of_life.look_at(path)
        return text
    return b""


def _is_same_file(descriptor: int, path: Path) -> bool:
    """Returns True if an open file is still the one at this path."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False
