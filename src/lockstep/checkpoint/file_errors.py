"""Turns errors of the file system into `CheckpointError`s that tell the user what to do.

Code that reads or writes checkpoints and weights runs inside `plain_errors`.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

from safetensors import SafetensorError

from lockstep.errors import CheckpointError


class FileProblem(NamedTuple):
    """The text for errors with certain error numbers (`errno`)."""

    error_numbers: frozenset[int]
    found: str
    """The problem, for users, with a field for the error."""
    advice: str
    """What to do about it."""


FILE_PROBLEMS = (
    FileProblem(
        frozenset({errno.ENOSPC}),
        "no space is left for it ({error})",
        "free some space or choose another folder; the last complete checkpoint is untouched",
    ),
    FileProblem(
        frozenset({errno.EDQUOT, errno.EFBIG}),
        "your quota, or a limit on the size of a file, is used up ({error})",
        "remove what you do not need, ask for more, or choose another folder; the last complete "
        "checkpoint is untouched",
    ),
    FileProblem(
        frozenset({errno.EROFS}),
        "the file system is read-only ({error})",
        "choose another folder; where it could be written before, look at the machine's log: a "
        "disk that fails is made read-only",
    ),
    FileProblem(
        frozenset({errno.EACCES, errno.EPERM}),
        "permission is denied ({error})",
        "choose a folder that you may read and write, or change its permissions",
    ),
    FileProblem(
        frozenset({errno.ENOTDIR, errno.EEXIST}),
        "a file is where a folder should be ({error})",
        "choose another folder, or move the file away",
    ),
    FileProblem(
        frozenset({errno.ENOENT}),
        "it is not there, or went away meanwhile ({error})",
        "check the path, and whether its file system is still mounted",
    ),
    FileProblem(
        frozenset(
            {errno.ESTALE, errno.EIO, errno.ENOTCONN, errno.ETIMEDOUT, errno.ENODEV, errno.ENXIO}
        ),
        "the disk or the network file system does not answer as it should ({error})",
        "look at the mount and the machine's log; an earlier checkpoint there is untouched",
    ),
)


@contextmanager
def plain_errors(action: str, path: Path) -> Iterator[None]:
    """Turns errors of the file system and of safetensors into a `CheckpointError`.

    Args:
        action: what the block does with the path: "saving the checkpoint".
        path: the path, which is named in the error.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        found = str(error)
        # Python prints the cause above the new error, because that is raised `from` it.
        advice = "see the cause above"
        # An error of safetensors has no number, so it is none of these problems.
        error_number = getattr(error, "errno", None)
        for problem in FILE_PROBLEMS:
            if error_number in problem.error_numbers:
                found = problem.found.format(error=error)
                advice = problem.advice
                break

        raise CheckpointError(f"{action} {path}", found, advice) from error


def unreadable(
    path: Path, found: str, do: str = "copy or download the file again, or use another one"
) -> CheckpointError:
    """Builds the error for a file or folder whose weights cannot be read."""
    return CheckpointError(f"reading weights from {path}", found, do)


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Opens a file of weights for reading.

    Raises:
        CheckpointError: the file does not exist, cannot be read, or is not a plain file. (Reading
            from a pipe, for example, could block forever.)
    """
    with plain_errors("reading weights from", path):
        if not S_ISREG(path.stat().st_mode):
            raise unreadable(path, "it is no file, but a folder, a pipe or a device")
        with path.open("rb") as file:
            yield file


def make_parent_folders(path: Path) -> None:
    """Creates the missing folders above a file that is going to be written.

    Raises:
        OSError: they cannot be created, or the path of the file is a folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder")
