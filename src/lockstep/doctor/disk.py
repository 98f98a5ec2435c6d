"""The folder for checkpoints: is there room, may one write, and how fast does it get to disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from lockstep.doctor.base import ERROR, WARNING, Facts, Finding, gib, verdict
from lockstep.wording import count_noun

_PIECE, _MOST, _LONGEST_S = 2**22, 2**26, 3.0
_LITTLE, _SLOW = 5 * 2**30, 50e6
_LITTLE_TEMPORARY = 2**28


def gather(folder: Path) -> Facts:
    """Bytes, and bytes a second of a file that is written and flushed; some files are left alone.

    A folder that is not there is looked at where it would be made.
    """
    places = (folder, *folder.absolute().parents)
    nearest = next(place for place in places if os.path.lexists(place))
    there = next(place for place in places if os.path.isdir(place))
    usage, nodes = shutil.disk_usage(there), os.statvfs(there)
    facts = {
        "folder": str(folder),
        "exists": there == folder,
        "total": usage.total,
        "free": usage.free,
        "files": nodes.f_favail if nodes.f_files else None,
        "temporary": tempfile.gettempdir(),
        "temporary_free": shutil.disk_usage(tempfile.gettempdir()).free,
    }
    if there != nearest:
        return {**facts, "speed": None, "problem": f"{nearest} is no folder"}
    try:
        with contextlib.suppress(FileNotFoundError):
            folder.stat()  # a mount that is stale is there, too
        return {**facts, "speed": _speed(there), "problem": None}
    except OSError as error:
        return {**facts, "speed": None, "problem": error.strerror or str(error)}


def _speed(folder: Path) -> float:
    piece, written = os.urandom(_PIECE), 0
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        begun = time.monotonic()
        while written < _MOST and time.monotonic() - begun < _LONGEST_S:
            written += file.write(piece)
            os.fsync(file.fileno())
        return written / max(time.monotonic() - begun, 1e-9)


def judge(facts: Facts) -> Finding:
    """No room, no permission, or a slow disk."""
    summary = f"{gib(facts['free'])} of {gib(facts['total'])} free in {facts['folder']}"
    problems = []
    if facts["problem"] is not None:
        found = f"{facts['folder']} cannot be written: {facts['problem']}"
        problems.append(Finding(ERROR, found, "name another by --folder, or make it writable"))
    elif facts["speed"] < _SLOW:
        found = f"{facts['speed'] / 1e6:.0f} MB/s, so that checkpoints take long"
        problems.append(Finding(WARNING, found, "choose a faster disk, or save less often"))
    else:
        summary += f", {facts['speed'] / 1e6:.0f} MB/s"
    if facts["problem"] is None and not facts["exists"]:
        do = "it is made with the first checkpoint, or by --fix"
        problems.append(Finding("ok", "the folder is not there yet", do))
    if facts["free"] < _LITTLE:
        problems.append(Finding(WARNING, "that is little for checkpoints", "make room"))
    if facts["files"] is not None and facts["files"] < 1000:
        found = f"no more than {count_noun(facts['files'], 'file')} can be made"
        problems.append(Finding(WARNING, found, "remove some of the many small files"))
    if facts["temporary_free"] < _LITTLE_TEMPORARY:
        found = f"{gib(facts['temporary_free'])} free in {facts['temporary']}, where logs go"
        problems.append(Finding(WARNING, found, "make room, or give lockstep run --log-dir"))
    return verdict(summary, problems)


def fix(facts: Facts) -> list[str]:
    """Makes the folder."""
    if facts["exists"] or facts["problem"] is not None:
        return []
    Path(facts["folder"]).mkdir(parents=True, exist_ok=True)
    return [f"made {facts['folder']}"]
