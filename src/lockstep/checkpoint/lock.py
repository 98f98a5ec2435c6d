"""Notices that two runs write into one folder.

The folder holds a file `.lock` while a run writes there. The system's lock on it (POSIX, as `fcntl`
gives it: also over NFS, not inherited by child processes, gone with its process) says whether a run
lives; what is in the file says which. Some network file systems have no such locks. There the text
alone decides: a process of this machine can be looked up, one of another counts as alive while its
last save is young.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import time
from contextlib import suppress
from errno import EACCES, EAGAIN, EWOULDBLOCK
from pathlib import Path
from typing import Any

import psutil

from lockstep.checkpoint import storage
from lockstep.errors import CheckpointError

NAME = ".lock"
_YOUNG_S = 900.0
"""Seconds since its last save for which a run on another machine counts as alive."""
_HELD = {EACCES, EAGAIN, EWOULDBLOCK}
_LONGEST = 10_000
_LOOKS, _PAUSE_S = 5, 0.02

_own: dict[Path, _Held] = {}
"""What this process holds. The system would give it the same lock again, and take it away as soon
as the first of two owners closes the file."""


class _Held:
    """A lock that this process holds."""

    def __init__(self, descriptor: int, text: bytes) -> None:
        self.descriptor, self.text = descriptor, text
        self.owners = 0


class Lock:
    """The right of one run to write into a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = Path(os.path.abspath(folder))
        self._held: _Held | None = None

    def hold(self) -> None:
        """Takes the lock, or looks whether it is still there.

        Raises:
            CheckpointError: another run writes here; or, of a lock that is held, the folder is
                not the one in which it was taken.
            OSError: the folder is not there or not writable.
        """
        path = self._folder / NAME
        if self._held is None:
            held = _own.get(path) or _take(path)
            held.owners += 1
            _own[path] = self._held = held
        elif (now := _read(path)) != self._held.text:
            other = _in_words(_identity_in(now))
            found = f"{other} has begun to write there" if now else "its lock file is gone"
            raise CheckpointError(
                f"saving a checkpoint in {self._folder}",
                f"it is not the folder that this run has written to: {found}",
                "check whether its file system is still mounted and nobody has removed or "
                "replaced the folder; give each run a folder of its own",
            )
        else:
            with suppress(OSError):  # says to other machines that we are alive
                os.utime(path)

    def release(self) -> None:
        """Gives it back; the file goes."""
        held, self._held = self._held, None
        if held is None:
            return
        held.owners -= 1
        path = self._folder / NAME
        if not held.owners:
            del _own[path]
            with suppress(OSError):
                if _read(path) == held.text:
                    storage.unlink(path)
            os.close(held.descriptor)


def holder(folder: Path) -> str | None:
    """The run that writes into a folder, in words, if there is one other than this process."""
    path = Path(os.path.abspath(folder)) / NAME
    if path in _own:
        return None
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _other(descriptor, path)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _take(path: Path) -> _Held:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            other = _other(descriptor, path)
            for _ in range(_LOOKS):  # it may be somebody who only looks, see `holder`
                if other is None:
                    break
                time.sleep(_PAUSE_S)
                other = _other(descriptor, path)
            if other is not None:
                raise CheckpointError(
                    f"saving a checkpoint in {path.parent}",
                    f"{other} writes into this folder",
                    f"give each run a folder of its own, or end that one (if it has ended, "
                    f"remove {path})",
                )
            if not _same_file(descriptor, path):  # the former owner has just removed it
                os.close(descriptor)
                continue
            text = json.dumps(_identity()).encode()
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text, 0)
        except BaseException:
            with suppress(OSError):
                os.close(descriptor)
            raise
        return _Held(descriptor, text)


def _other(descriptor: int, path: Path) -> str | None:
    """Who else holds the lock; where nobody does, it is ours while the file is open."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        who = _identity_in(_read(path))
        if error.errno in _HELD:
            return _in_words(who)
        return _in_words(who) if _seems_alive(who, path) else None  # there are no locks here
    return None


def _seems_alive(who: dict[str, Any], path: Path) -> bool:
    if who.get("host") != socket.gethostname():
        return bool(who) and time.time() - path.stat().st_mtime < _YOUNG_S
    try:
        process = psutil.Process(int(who["pid"]))
        # Within what a clock that was set in between changes.
        same = abs(process.create_time() - float(who["started"])) < 3.0
        return bool(same) and process.pid != os.getpid()
    except (psutil.Error, KeyError, ValueError, TypeError):
        return False


def _identity() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": int(psutil.Process().create_time()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "run": secrets.token_hex(8),
    }


def _identity_in(text: bytes) -> dict[str, Any]:
    with suppress(ValueError):
        found = json.loads(text)
        if isinstance(found, dict):
            return found
    return {}


def _in_words(who: dict[str, Any]) -> str:
    if not who:
        return "another run"
    return (
        f"another run (process {who.get('pid')} on {who.get('host')}, since {who.get('since')}, "
        f"run {who.get('run')})"
    )


def _read(path: Path) -> bytes:
    """What is in the file, read apart from any lock of ours: closing it would give that up."""
    held = _own.get(path)
    try:
        if held is not None and not _same_file(held.descriptor, path):
            return b""
        if held is not None:
            return os.pread(held.descriptor, _LONGEST, 0)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(descriptor, _LONGEST, 0)
    finally:
        os.close(descriptor)


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        ours, there = os.fstat(descriptor), os.stat(path)
    except OSError:
        return False
    return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)
