"""The files in which a rank tells its launcher what it does, and what has ended it: its *evidence*.

They are files in memory that the launcher holds open. So nothing is lost by a full disk, a quota or
a program that cleans temporary folders, and what a rank has written is still there when the rank is
gone. A rank opens them as `/proc/LAUNCHER/fd/NUMBER`. While it runs, links in the rank's folder
lead to them; when it has ended, what is worth keeping is copied there.

If the system has no such memory, and for processes that a script has started itself, they are plain
files in a folder.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

FOLDER_VARIABLE = "LOCKSTEP_RANK_FOLDER"
"""Environment variable of a rank: the folder of its logs and evidence."""
EVIDENCE_VARIABLE = "LOCKSTEP_EVIDENCE"
"""Environment variable of a rank: the paths of its files, in the order of `Evidence`'s fields."""

# In the order of `Evidence`'s fields.
_FILE_NAMES = ("heartbeat", "stacks.txt", "crash.txt", "flight.json", "error.json", "ask")
_PIPE_NAME = "ask"
_FILES_WORTH_KEEPING = ("stacks.txt", "crash.txt", "flight.json", "error.json")


@dataclass(frozen=True)
class Evidence:
    """The paths of a rank's files."""

    heartbeat: Path
    """Optimizer steps and times (`heartbeat.Heartbeat`), in shared memory."""
    stacks: Path
    """The stacks that a signal has asked for."""
    crash: Path
    """The stacks at a fatal signal, written by faulthandler."""
    answer: Path
    """The answer to the last request: torch's Flight Recorder and the stacks of all threads."""
    error: Path
    """The exception that has ended the rank."""
    ask: Path
    """A pipe that takes requests, one a line: `NUMBER` or `NUMBER lines`."""

    @classmethod
    def in_folder(cls, folder: Path) -> Evidence:
        """Returns the paths of the files in a folder, which need not exist."""
        return cls(*(folder / name for name in _FILE_NAMES))

    @classmethod
    def of_this_process(cls, environ: Mapping[str, str], folder: Path) -> Evidence:
        """Returns the paths of the files that a rank's launcher has made for it.

        Args:
            environ: the rank's environment variables, one of which lists the paths.
            folder: the rank's folder. The files are there if the launcher has listed none, or if
                its memory cannot be reached, as from another container.
        """
        paths = [Path(path) for path in environ.get(EVIDENCE_VARIABLE, "").split()]
        all_are_named = len(paths) == len(fields(cls))
        if all_are_named and all(os.access(path, os.R_OK | os.W_OK) for path in paths):
            return cls(*paths)
        return cls.in_folder(folder)


class EvidenceMemory:
    """The memory that a launcher holds for the files of one rank.

    Args:
        folder: the rank's folder, in which links to the files are made.

    Raises:
        OSError: the system has no such memory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptors: dict[str, int] = {}
        try:
            for name in _FILE_NAMES:
                if name == _PIPE_NAME:
                    self._descriptors[name] = _open_pipe()
                else:
                    self._descriptors[name] = os.memfd_create(f"lockstep-{name}")
        except OSError:
            self.close()
            raise

        paths = {
            name: Path(f"/proc/{os.getpid()}/fd/{descriptor}")
            for name, descriptor in self._descriptors.items()
        }
        self.evidence = Evidence(*paths.values())  # both are in the order of `_FILE_NAMES`
        self.variables = {EVIDENCE_VARIABLE: " ".join(str(path) for path in paths.values())}
        """The environment variables by which the rank finds the files."""

        for name, path in paths.items():
            with contextlib.suppress(OSError):
                (folder / name).symlink_to(path)

    def keep(self) -> None:
        """Copies what the rank has written to its folder, which is created again if it is gone.

        Raises:
            OSError: the folder cannot be written.
        """
        for name, descriptor in self._descriptors.items():
            path = self._folder / name
            path.unlink(missing_ok=True)  # the link to the memory, whose place the file takes
            if name not in _FILES_WORTH_KEEPING:
                continue

            size = os.fstat(descriptor).st_size
            if size > 0:
                self._folder.mkdir(parents=True, exist_ok=True)
                path.write_bytes(os.pread(descriptor, size, 0))

    def close(self) -> None:
        """Frees the memory."""
        while self._descriptors:
            _, descriptor = self._descriptors.popitem()
            os.close(descriptor)


def create_evidence_memory(folder: Path) -> EvidenceMemory | None:
    """Creates the memory for one rank's files, and links to it in a folder.

    Args:
        folder: the rank's folder.

    Returns:
        None if the system has no memory that a rank could open as a file.
    """
    if sys.platform != "linux":
        return None

    try:
        memory = EvidenceMemory(folder)
    except OSError:
        return None

    # Ranks open the memory by a path in /proc, which may be missing.
    if os.path.exists(memory.evidence.heartbeat):
        return memory

    memory.close()
    return None


def write_in_place(path: Path, text: str) -> None:
    """Writes JSON into one of the files so that no reader mistakes a part of it for the whole.

    The file begins with a zero byte, which is not JSON, until all of the text is there. Replacing
    the file by a complete one is not possible, as its path stands for a descriptor.

    Raises:
        OSError: the file cannot be written.
    """
    # File names in the text may contain bytes that are not valid in UTF-8.
    data = text.encode("utf-8", errors="backslashreplace")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        os.ftruncate(descriptor, 0)
        # All but the first byte. To write behind the first byte of an empty file makes it zero.
        offset = 1
        while offset < len(data):
            offset += os.pwrite(descriptor, data[offset:], offset)
        os.pwrite(descriptor, data[:1], 0)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Writes a file under a temporary name and renames it, so that it is never seen half written.

    Raises:
        OSError: the file cannot be written.
    """
    temporary_path = path.with_name(f"{path.name}.new")
    # File names in the text may contain bytes that are not valid in UTF-8.
    temporary_path.write_text(text, encoding="utf-8", errors="backslashreplace")
    temporary_path.replace(path)


def _open_pipe() -> int:
    """Returns one descriptor that is both ends of a new pipe.

    As the reading end is always open, a writer never gets an error for want of a reader.
    """
    # Linux opens a pipe anew by its path in /proc, then for reading and writing. So the two
    # descriptors of `os.pipe` are needed only for a moment.
    reading_end, writing_end = os.pipe()
    try:
        return os.open(f"/proc/self/fd/{reading_end}", os.O_RDWR | os.O_NONBLOCK)
    finally:
        os.close(reading_end)
        os.close(writing_end)
