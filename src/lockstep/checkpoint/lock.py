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
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from lockstep.checkpoint import layout, storage
from lockstep.errors import CheckpointError

NAME = ".lock"
_YOUNG_S = 900.0
"""Seconds since its last save for which a run on another machine counts as alive."""
_LONGEST = 10_000
"""Bytes of its text."""
_LOOKS, _PAUSE_S = 5, 0.02

_own: dict[Path, _Held] = {}
"""What this process holds. The system would give it the same lock again, and take it away as soon
as the first of two owners closes the file."""


@dataclass
class _Held:
    """A lock that this process holds."""

    descriptor: int
    text: bytes
    owners: int = 0


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
            found = f"{_in_words(now)} has begun to write there" if now else "its lock file is gone"
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
    if path not in _own:
        with suppress(OSError), path.open("rb+") as file:
            return _other(file.fileno(), path)
    return None


def _take(path: Path) -> _Held:
    looks = 0
    while True:
        with ExitStack() as stack:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            stack.callback(os.close, descriptor)
            other = _other(descriptor, path)
            if other is None and _same_file(descriptor, path):
                text = json.dumps(_identity()).encode()
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, text, 0)
                stack.pop_all()
                return _Held(descriptor, text)
        if other is None:  # and the former owner has just removed the file
            continue
        if looks == _LOOKS:
            raise CheckpointError(
                f"saving a checkpoint in {path.parent}",
                f"{other} writes into this folder",
                f"give each run its own folder, or end that one (if it has ended, remove {path})",
            )
        looks += 1  # it may be somebody who only looks, see `holder`
        time.sleep(_PAUSE_S)


def _other(descriptor: int, path: Path) -> str | None:
    """Who else holds the lock; where nobody does, it is ours while the file is open."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return _in_words(_read(path))
    except OSError:  # there are no locks here
        text = _read(path)
        return _in_words(text) if _seems_alive(text, path) else None
    return None


def _seems_alive(text: bytes, path: Path) -> bool:
    try:
        who = layout.parsed(text)
        if who.get("host") != socket.gethostname():
            return bool(who) and time.time() - path.stat().st_mtime < _YOUNG_S
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


def _in_words(text: bytes) -> str:
    run = "another run (process {pid} on {host}, since {since}, run {run})"
    with suppress(ValueError, KeyError):
        return run.format_map(layout.parsed(text))
    return "another run"


def _read(path: Path) -> bytes:
    """What is in the file, read apart from any lock of ours: closing it would give that up."""
    held = _own.get(path)
    with suppress(OSError):
        if held is None:
            with path.open("rb") as file:
                return file.read(_LONGEST)
        if _same_file(held.descriptor, path):
            return os.pread(held.descriptor, _LONGEST, 0)
    return b""


def _same_file(descriptor: int, path: Path) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False
