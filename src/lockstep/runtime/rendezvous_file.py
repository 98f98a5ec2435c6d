"""Meeting at a file that all ranks can reach: torch's FileStore, after a look at what is there.

The store removes the file when the last rank has let go of it. A run that was killed leaves it
behind, and the next run would meet the dead. So the file is read first, as plain bytes and without
changing it: the join's records are JSON, whatever the format around them.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from lockstep.errors import SettingError, StaleInitFileError
from lockstep.runtime.joining import ARRIVAL_MARK, FAULT_MARK, Arrival
from lockstep.runtime.store import FileStore, Store

_TOGETHER_S = 3.0
"""Processes that were created within this time of each other were started together."""


def open_file(path: Path, size: int, timeout: float) -> Store:
    """Opens the store at a path, creating the file or meeting those who have.

    Args:
        path: absolute; on a file system that all ranks share.
        size: the world size; the file goes when so many processes have closed it.
        timeout: of the join, in seconds.

    Raises:
        SettingError: the folder does not exist or cannot be written, or the path is a folder.
        StaleInitFileError: the file is left over from an earlier run.
    """
    _check_writable(path)
    _check_fresh(path, timeout)
    return FileStore(str(path), size)


def _check_writable(path: Path) -> None:
    asked = f"init_method='file://{path}'"
    if path.is_dir():
        raise SettingError(asked, "it is a folder", "name a file in it")
    if not path.parent.is_dir():
        raise SettingError(asked, f"there is no folder {path.parent}", "create it on every machine")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise SettingError(asked, "it cannot be written", "choose a path that this user may write")


def _check_fresh(path: Path, timeout: float) -> None:
    try:
        status, content = path.stat(), path.read_bytes()
    except FileNotFoundError:
        return
    if not content:  # made ready by the user, or by another rank just now
        return
    age = max(0.0, _now(path.parent) - status.st_mtime)
    own_start = psutil.Process().create_time()
    dead = [arrival for arrival in _arrivals(content) if _has_ended(arrival)]
    if FAULT_MARK.encode() in content and all(
        abs(arrival.started - own_start) < _TOGETHER_S for arrival in dead
    ):
        return  # the others of this very start have failed already, and left the verdict here
    if dead:
        reason = f"written by {dead[0].process}, which has ended"
    elif age > time.time() - own_start + timeout:
        reason = "from long before this process was started"
    else:
        return
    raise StaleInitFileError(
        f"init_method='file://{path}'",
        f"the file is left over from an earlier run: last changed {_duration(age)} ago, owner "
        f"{_owner(path)}; {reason}",
        f"make sure that no run uses it, then remove it (rm {path}), or name another file",
    )


def _arrivals(content: bytes) -> list[Arrival]:
    text = content.decode(errors="replace")
    decoder = json.JSONDecoder()
    found = []
    position = text.find(ARRIVAL_MARK)
    while position >= 0:
        with suppress(ValueError, TypeError):  # still being written, or of another version
            found.append(Arrival(**decoder.raw_decode(text, position)[0]))
        position = text.find(ARRIVAL_MARK, position + 1)
    return found


def _has_ended(arrival: Arrival) -> bool:
    if arrival.host != socket.gethostname():
        return False  # nothing is known of it
    try:
        return bool(abs(psutil.Process(arrival.pid).create_time() - arrival.started) > 1)
    except psutil.NoSuchProcess:
        return True


def _now(folder: Path) -> float:
    """The time by the clock of the file system, which may be another machine's."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except (KeyError, OSError):
        return f"user {path.stat().st_uid}"


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
