"""The files by which a rank tells its launcher what it does, and what has ended it.

They are in memory that the launcher holds: whoever cleans temporary folders, a full disk and a
quota take nothing of it, and what a rank has written there is left when the rank is gone. A rank
opens them as `/proc/LAUNCHER/fd/NUMBER`. Links in the rank's folder lead to them while it runs;
what is worth keeping is copied there when it has ended.

Where the system has no such memory, and for processes that a script has started itself, they are
plain files in a folder.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

FOLDER = "LOCKSTEP_RANK_FOLDER"
"""Variable of a rank: where its logs and evidence lie."""
EVIDENCE = "LOCKSTEP_EVIDENCE"
"""Variable of a rank: the paths of its files in memory, in the order of `Evidence`'s fields."""

_NAMES = ("heartbeat", "stacks.txt", "crash.txt", "flight.json", "error.json", "ask")
_KEPT = _NAMES[1:5]


@dataclass(frozen=True)
class Evidence:
    """Where a rank's files are."""

    heartbeat: Path
    """Optimizer steps and times (`probe.Heartbeat`), in shared memory."""
    stacks: Path
    """The stacks that it was asked for by a signal."""
    crash: Path
    """The stacks at a fatal signal (faulthandler)."""
    answer: Path
    """Its answer to the last request: torch's Flight Recorder and the stacks of all threads."""
    error: Path
    """The exception that ended it."""
    ask: Path
    """A pipe that takes requests `NUMBER [lines]`, one a line."""

    @classmethod
    def in_folder(cls, folder: Path) -> Evidence:
        """The files of a folder, which need not exist."""
        return cls(*(folder / name for name in _NAMES))

    @classmethod
    def of_this_process(cls, environ: Mapping[str, str], folder: Path) -> Evidence:
        """The files that a rank's launcher has made for it.

        Args:
            environ: the rank's variables.
            folder: of the rank; its files are here where the launcher's memory cannot be reached.
        """
        paths = [Path(name) for name in environ.get(EVIDENCE, "").split()]
        reached = all(os.access(path, os.R_OK | os.W_OK) for path in paths)
        if len(paths) == len(fields(cls)) and reached:
            return cls(*paths)
        return cls.in_folder(folder)


class LaunchersMemory:
    """Memory for the files of one rank.

    Args:
        folder: of the rank, in which links to the files are made.

    Raises:
        OSError: the system gives none.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptors: list[int] = []
        try:
            for name in _NAMES[:-1]:
                self._descriptors.append(os.memfd_create(f"lockstep-{name}"))
            self._descriptors.append(_make_pipe())
        except OSError:
            self.close()
            raise
        paths = [Path(f"/proc/{os.getpid()}/fd/{number}") for number in self._descriptors]
        self.evidence = Evidence(*paths)
        self.variables = {EVIDENCE: " ".join(map(str, paths))}
        """By which the rank finds them."""
        for name, path in zip(_NAMES, paths, strict=True):
            with contextlib.suppress(OSError):
                (folder / name).symlink_to(path)

    def keep(self) -> None:
        """Copies what the rank has written to its folder, which is made anew if it is gone.

        Raises:
            OSError: the folder cannot be written.
        """
        for name, number in zip(_NAMES, self._descriptors, strict=True):
            size = os.fstat(number).st_size if name in _KEPT else 0
            (self._folder / name).unlink(missing_ok=True)  # the link
            if size:
                self._folder.mkdir(parents=True, exist_ok=True)
                (self._folder / name).write_bytes(os.pread(number, size, 0))

    def close(self) -> None:
        """Frees the memory."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def launchers_memory(folder: Path) -> LaunchersMemory | None:
    """Memory for one rank's files; None where the system has none that a rank can open."""
    if sys.platform != "linux":
        return None
    try:
        memory = LaunchersMemory(folder)
    except OSError:
        return None
    if os.path.exists(memory.evidence.heartbeat):  # /proc may not be there
        return memory
    memory.close()
    return None


def write(path: Path, text: str) -> None:
    """Writes one of the files in place, so that no reader takes a part of it for all.

    A file is to be read as JSON, and begins with a zero byte until all of it is there.

    Raises:
        OSError: it cannot be written.
    """
    # Names of files may hold bytes that are no text in UTF-8.
    data = text.encode("utf-8", errors="backslashreplace")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        os.ftruncate(descriptor, 0)
        written = 1
        while written < len(data):
            written += os.pwrite(descriptor, data[written:], written)
        os.pwrite(descriptor, data[:1], 0)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is never seen half written.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f"{path.name}.new")
    # Names of files may hold bytes that are no text in UTF-8.
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    temporary.replace(path)


def _make_pipe() -> int:
    """A pipe with both of its ends in one descriptor: writing to it finds it open, or full."""
    reading, writing = os.pipe()
    try:
        return os.open(f"/proc/self/fd/{reading}", os.O_RDWR | os.O_NONBLOCK)
    finally:
        os.close(reading)
        os.close(writing)
