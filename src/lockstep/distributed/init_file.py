"""Opens the store of `init_method="file:///path"`, unless its file is left over from another run.

The store is torch's FileStore, through which the ranks meet. It removes its file when the last rank
has closed it. A run that was killed leaves the file behind, and the next run would wait for
processes that no longer exist. So the file is read first, as bytes and without changing it: the
messages of the ranks are JSON (see `join`), whatever the format of the file around them.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import psutil
from torch.distributed import FileStore, Store

from lockstep import errors
from lockstep.distributed.join import ERROR_MARK, REQUEST_MARK, JoinRequest

SAME_START_S = 3.0
"""Processes that were created within this time of each other were started together."""
CREATION_TIME_TOLERANCE_S = 1.0
"""Two readings of the time at which a process was created differ by less."""


def open_file(path: Path, size: int, timeout_s: float) -> Store:
    """Opens the store at a path, and creates the file if no other rank has done so.

    Args:
        path: an absolute path on a file system that all ranks share.
        size: the world size. The file is removed when as many processes have closed it.
        timeout_s: how long ranks wait for each other.

    Raises:
        SettingError: the folder does not exist or cannot be written, or the path is a folder.
        StaleInitFileError: the file is left over from an earlier run.
    """
    _check_writable(path)
    _check_not_stale(path, timeout_s)
    return FileStore(str(path), size)


def _check_writable(path: Path) -> None:
    """Checks that this user can create or write the file.

    Raises:
        SettingError: the user cannot.
    """
    setting = f"init_method='file://{path}'"
    if path.is_dir():
        raise errors.SettingError(setting, "it is a folder", "name a file in it")
    if not path.parent.is_dir():
        raise errors.SettingError(
            setting, f"there is no folder {path.parent}", "create it on every machine"
        )

    must_be_writable = path if path.exists() else path.parent
    if not os.access(must_be_writable, os.W_OK):
        raise errors.SettingError(
            setting, "it cannot be written", "choose a path that this user may write"
        )


def _check_not_stale(path: Path, timeout_s: float) -> None:
    """Checks that the file, if it exists, is not left over from an earlier run.

    Raises:
        StaleInitFileError: the file is left over from an earlier run.
    """
    try:
        modified = path.stat().st_mtime
        content = path.read_bytes()
    except FileNotFoundError:
        return
    if not content:  # created by the user, or by another rank just now
        return

    # The file may be on a server whose clock differs from the clock of this machine. So the present
    # time is taken from the file system too.
    age_s = max(0.0, _file_system_time(path.parent) - modified)
    reason = _reason_file_is_stale(content, age_s, timeout_s)
    if not reason:
        return

    age = _format_age(age_s)
    raise errors.StaleInitFileError(
        f"init_method='file://{path}'",
        f"the file is left over from an earlier run: last changed {age} ago, owner "
        f"{_owner(path)}; {reason}",
        f"make sure that no run uses it, then remove it (rm {path}), or name another file",
    )


def _format_age(age_s: float) -> str:
    """Returns an age as text: "3 days", or, below one day, "0:05:12"."""
    age, _, _ = str(timedelta(seconds=round(age_s))).partition(", ")  # "3 days, 4:05:06"
    return age


def _reason_file_is_stale(content: bytes, age_s: float, timeout_s: float) -> str:
    """Returns why the file must be from an earlier run, or "" if it may be from this one.

    Args:
        content: the content of the file. Each rank has written a `JoinRequest` into it, and rank 0
            then its decision whether the run can start.
        age_s: how long ago the file was last changed.
        timeout_s: how long ranks wait for each other.
    """
    own_start = psutil.Process().create_time()
    ended = [request for request in _find_requests(content) if _has_ended(request)]

    # Rank 0 of this run may have decided that it cannot start. Other ranks have read that, and
    # ended. This process must read it, too, so the file is not stale.
    rank_0_decided_against_start = ERROR_MARK.encode() in content
    if ended and rank_0_decided_against_start and _were_started_at(ended, own_start):
        return ""

    if ended:
        return f"written by {ended[0].process}, which has ended"

    # Otherwise ranks of this run may be joining just now. They wait `timeout_s` seconds for this
    # process: if it was started a minute ago and the timeout is ten minutes, a file of this run was
    # changed at most eleven minutes ago.
    process_age_s = time.time() - own_start
    is_too_old = age_s > process_age_s + timeout_s
    return "from long before this process was started" if is_too_old else ""


def _were_started_at(requests: list[JoinRequest], time_s: float) -> bool:
    """Returns True if all processes that wrote these requests were started at about a time."""
    return all(abs(request.started - time_s) < SAME_START_S for request in requests)


def _find_requests(content: bytes) -> list[JoinRequest]:
    """Finds the join requests in the content of a store's file.

    Between other bytes, a request is a JSON object such as `{"number": 1, "rank": 0, ...}`. It
    begins with `REQUEST_MARK`, which is `{"number": `.
    """
    text = content.decode(errors="replace")

    # Each part except the first follows a mark: it is the rest of a request, then other bytes.
    parts = text.split(REQUEST_MARK)[1:]
    requests = []
    for part in parts:
        # A ValueError means that the request is still being written, and a TypeError that another
        # version of Lockstep has written it.
        with suppress(ValueError, TypeError):
            # `raw_decode` reads one object and ignores what follows.
            fields, _ = json.JSONDecoder().raw_decode(REQUEST_MARK + part)
            requests.append(JoinRequest(**fields))
    return requests


def _has_ended(request: JoinRequest) -> bool:
    """Returns True if the process that wrote a request has certainly ended."""
    if request.host != socket.gethostname():
        return False  # nothing is known about processes of other machines
    try:
        created = psutil.Process(request.pid).create_time()
    except psutil.NoSuchProcess:
        return True

    # The operating system may have given the number of the process (its pid) to a new process,
    # which has another creation time.
    pid_was_reused = abs(created - request.started) > CREATION_TIME_TOLERANCE_S
    return bool(pid_was_reused)


def _file_system_time(folder: Path) -> float:
    """Returns the time by the clock of the file system, which may be another machine's."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def _owner(path: Path) -> str:
    """Returns the name of the user who owns a file, or "user 1000" if there is no name."""
    try:
        return path.owner()
    except (KeyError, OSError):
        return f"user {path.stat().st_uid}"
