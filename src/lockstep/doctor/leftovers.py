"""What runs have left behind: shared memory of processes that are gone, and old logs."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

from lockstep.doctor.base import WARNING, Facts, Finding, verdict
from lockstep.wording import count_noun

_SHARED, _PROC = Path("/dev/shm"), Path("/proc")
_OF_TORCH = re.compile(r"torch_(\d+)_")
"""How torch's names begin, with the process that made it."""
_YOUNG_S = 3600.0
_OLD_S = 14 * 24 * 3600.0
_MUCH = 2**28
_ALL_PIDS = 0xEFFFFFFC
"""The number of the first namespace of processes (PROC_PID_INIT_INO in Linux's proc_ns.h)."""
_HIDDEN = "remove them if no container uses this /dev/shm: its processes have other numbers"


def gather(folder: Path) -> Facts:
    """This user's alone: paths and bytes."""
    shared = []
    for path in _SHARED.glob("torch_*") if _SHARED.is_dir() else ():
        made_by = _OF_TORCH.match(path.name)
        try:
            found = path.stat()
            # A young one may be of a process that has another number in its own container.
            old_enough = time.time() - found.st_mtime > _YOUNG_S
            ours = found.st_uid == os.getuid() and old_enough
            if made_by and ours and not _runs(int(made_by[1])):
                shared.append([str(path), found.st_size])
        except OSError:  # it is gone
            continue
    used = _mapped() if shared else set()
    shared = [found for found in shared if found[0] not in used]
    logs = Path(tempfile.gettempdir(), f"lockstep-logs-{os.getuid()}")
    old = []
    for run in logs.iterdir() if logs.is_dir() and logs.stat().st_uid == os.getuid() else ():
        files = [path.lstat() for path in run.rglob("*")] if run.is_dir() else []
        newest = max((file.st_mtime for file in files), default=run.lstat().st_mtime)
        if time.time() - newest > _OLD_S:
            old.append([str(run), sum(file.st_size for file in files)])
    return {"shared": shared, "sees_all": _sees_all(), "logs": old}


def _sees_all() -> bool:
    """Whether no process of this user's has another number than here, as those of containers do."""
    seen = set()
    for process in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's, or it has ended
            seen.add(os.stat(process / "ns/pid").st_ino)
    return seen == {_ALL_PIDS}


def _mapped() -> set[str]:
    """The files of shared memory that processes have, whatever their numbers elsewhere."""
    found, name = set(), re.compile(rf"{re.escape(str(_SHARED))}/torch_\S+")
    for maps in _PROC.glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            found.update(name.findall(maps.read_text(errors="replace")))
    return found


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _size(paths: list[tuple[str, int]]) -> int:
    return sum(size for _, size in paths)


def judge(facts: Facts) -> Finding:
    """What takes memory, and what takes much of a disk."""
    shared, logs = facts["shared"], facts["logs"]
    problems = []
    if shared:
        size = _size(shared) >> 20
        files = count_noun(len(shared), "file")
        found = f"/dev/shm holds {size} MiB in {files} of ended processes"
        do = "--fix removes them" if facts["sees_all"] else _HIDDEN
        problems.append(Finding(WARNING, found, do))
    if (size := _size(logs)) > _MUCH:
        runs = count_noun(len(logs), "run")
        found = f"logs of {runs} of more than two weeks ago take {size >> 20} MiB"
        problems.append(Finding(WARNING, found, "--fix removes them"))
    return verdict("nothing that matters" if not problems else "of earlier runs", problems)


def fix(facts: Facts) -> list[str]:
    """Removes both, the logs where they take much."""
    done = []
    for path, _ in facts["shared"] if facts["sees_all"] else ():
        Path(path).unlink(missing_ok=True)
        done.append(f"removed {path}")
    for path, _ in facts["logs"] if _size(facts["logs"]) > _MUCH else ():
        shutil.rmtree(path, ignore_errors=True)
        done.append(f"removed {path}")
    return done
