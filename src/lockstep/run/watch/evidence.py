"""Manages the files in which a rank records what it does and what ended it: its *evidence*.

They are files in memory that the launcher holds open. So a full disk, a quota or a program that
cleans temporary folders cannot destroy them, and they still exist when the rank is gone. A rank
opens them as `/proc/LAUNCHER/fd/NUMBER`. While it runs, links in the rank's folder lead to them;
when it has ended, the files worth keeping are copied there.

On systems without such memory, and for processes that a script has started itself, the evidence is
written to ordinary files in a folder.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from lockstep.run.run_folder import CRASH_NAME

FOLDER_VARIABLE = "LOCKSTEP_RANK_FOLDER"
"""Environment variable of a rank: the folder of its logs and evidence."""
EVIDENCE_VARIABLE = "LOCKSTEP_EVIDENCE"
"""Environment variable of a rank: the paths of its files, in the order of `Evidence`'s fields."""

# In the order of `Evidence`'s fields. `run_folder` says who writes and who reads each file.
FILE_NAMES = ("heartbeat", "stacks.txt", CRASH_NAME, "flight.json", "error.json", "ask")
_PIPE_NAME = "ask"
_FILES_WORTH_KEEPING = ("stacks.txt", CRASH_NAME, "flight.json", "error.json")


@dataclass(frozen=True)
class Evidence:
    """The paths of a rank's files."""

    heartbeat: Path
    """Optimizer steps and times (`heartbeat.Heartbeat`), in shared memory."""
    stacks: Path
    """The stacks that the launcher has asked for by a signal."""
    crash: Path
    """The stacks at a fatal signal, written by faulthandler."""
    answer: Path
    """The answer to the last request: torch's Flight Recorder and the stacks of all threads."""
    error: Path
    """The exception that has ended the rank."""
    request_pipe: Path
    """A pipe that takes requests, one a line: `NUMBER`, or `NUMBER call_stacks` to be told the
    stack of each recorded call too."""

    @classmethod
    def in_folder(cls, folder: Path) -> Evidence:
        """Returns the paths of the files in a folder, which need not exist."""
        return cls(*(folder / name for name in FILE_NAMES))

    @classmethod
    def of_this_process(cls, environ: Mapping[str, str], folder: Path) -> Evidence:
        """Returns the paths of the files that the launcher has created for this rank.

        Args:
            environ: environment variables of the rank, one of which lists the paths.
            folder: the rank's folder. The files are in this folder if the launcher listed none, or
                if its memory cannot be reached, for example from another container.
        """
        paths = [Path(path) for path in environ.get(EVIDENCE_VARIABLE, "").split()]
        all_are_named = len(paths) == len(fields(cls))
        if all_are_named and all(os.access(path, os.R_OK | os.W_OK) for path in paths):
            return cls(*paths)
        return cls.in_folder(folder)


class EvidenceMemory:
    """The memory that holds the evidence files of one rank, in the launcher.

    Args:
        folder: the rank's folder, in which links to the files are created.

    Raises:
        OSError: the system has no such memory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptors: dict[str, int] = {}
        try:
            for name in FILE_NAMES:
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
        self.evidence = Evidence(*paths.values())  # its fields are in the order of `FILE_NAMES`
        self.variables = {EVIDENCE_VARIABLE: " ".join(str(path) for path in paths.values())}
        """The environment variables by which the rank finds the files."""

        for name, path in paths.items():
            with contextlib.suppress(OSError):
                (folder / name).symlink_to(path)

    def copy_to_folder(self) -> None:
        """Copies the files worth keeping to the rank's folder, which is recreated if it is gone.

        Raises:
            OSError: the folder cannot be written.
        """
        for name, descriptor in self._descriptors.items():
            path = self._folder / name

            # Remove the link to the memory, which is freed soon. If the file is worth keeping, its
            # content is then copied from the memory, which `descriptor` still gives access to.
            path.unlink(missing_ok=True)
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
    """Creates the memory for one rank's evidence, and links to it in the rank's folder.

    Args:
        folder: the rank's folder.

    Returns:
        The memory, or None if this system has no memory that a rank could open as a file.
    """
    if sys.platform != "linux":
        return None

    try:
        memory = EvidenceMemory(folder)
    except OSError:
        return None

    # Ranks open the files by paths in /proc, which may not be mounted. Any of the files shows that.
    can_be_opened = os.path.exists(memory.evidence.heartbeat)
    if not can_be_opened:
        memory.close()
        return None
    return memory


def write_in_place(path: Path, text: str) -> None:
    """Writes JSON into an evidence file, so that no reader mistakes a part of it for the whole.

    Until the text is complete, the file begins with a zero byte, which is not valid JSON. The file
    cannot be replaced by a complete one instead: its path may be `/proc/LAUNCHER/fd/NUMBER`, which
    cannot be the target of a rename.

    Raises:
        OSError: the file cannot be written.
    """
    # File names in the text may contain bytes that are not valid UTF-8.
    data = text.encode("utf-8", errors="backslashreplace")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        os.ftruncate(descriptor, 0)

        # Write everything except the first byte, which becomes zero as the file was empty.
        offset = 1
        while offset < len(data):
            offset += os.pwrite(descriptor, data[offset:], offset)

        os.pwrite(descriptor, data[:1], 0)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Writes a file under a temporary name and renames it, so that nobody sees it half written.

    Raises:
        OSError: the file cannot be written. Nothing is left of it.
    """
    temporary_path = path.with_name(f"{path.name}.new")
    try:
        # File names in the text may contain bytes that are not valid UTF-8.
        temporary_path.write_text(text, encoding="utf-8", errors="backslashreplace")
        temporary_path.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary_path.unlink()
        raise


def _open_pipe() -> int:
    """Creates a pipe, and returns one descriptor for both of its ends.

    As the reading end is always open, a writer never fails because nobody reads.
    """
    # On Linux, opening a pipe by its path in /proc gives a new descriptor, which can be used for
    # reading and writing. The two descriptors of `os.pipe` are closed again.
    reading_end, writing_end = os.pipe()
    try:
        return os.open(f"/proc/self/fd/{reading_end}", os.O_RDWR | os.O_NONBLOCK)
    finally:
        os.close(reading_end)
        os.close(writing_end)
