"""Puts files that a script changes back as they were when a run of it is over.

So the next run finds what the first one found, and nothing of the user's is lost. Each rank *keeps*
a file before the script changes it: it copies the file, and writes its path, its *kind* and the
name of the copy into an index. The kind is what was at the path before the run: a file, a link, a
folder, or nothing. After the run the command puts everything back (`restore`). The folder of the
run holds, once for all ranks:

- a copy of each file, named by a hash of its path
- a file HASH.known for each path that was kept
- the index: one line of JSON for each path, `[path, kind, name of the copy or target of the link]`

What `torch.save` writes never gets to its path, see `recording/saved_files.py`.
"""

from __future__ import annotations

import builtins
import fcntl
import hashlib
import inspect
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from stat import S_ISDIR, S_ISLNK, S_ISREG
from typing import Any

COPIES_FOLDER = "before"
INDEX_FILE = "index"
# The kinds of what was at a path before the run.
NOTHING = "nothing"
FILE = "file"
LINK = "link"
FOLDER = "folder"
WRITING_MODE_LETTERS = frozenset("wax+")
"""Letters in the mode of a file that may be written to."""
WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT
FOLDER_DESCRIPTOR_ARGUMENTS = {"dir_fd", "src_dir_fd", "dst_dir_fd"}
"""Arguments that make a path relative to an open folder. Such paths are not supported."""


class FilesBefore:
    """Keeps copies of files as they were before a run, for all of its ranks.

    Args:
        folder: of the run. What lies beside it belongs to other runs, and is not the user's.
    """

    def __init__(self, folder: Path) -> None:
        run_folder = os.path.realpath(folder)
        # The folder of all runs. With a separator at its end, every path in it begins with it.
        self._verify_folder = os.path.dirname(run_folder) + os.sep
        self._copies = os.path.join(run_folder, COPIES_FOLDER)
        os.makedirs(self._copies, exist_ok=True)

        # By the clock of the file system, as the times of files that are compared with it.
        self._start_time = os.stat(self._copies).st_mtime
        # `watch` patches the functions of these modules. Here they are needed unpatched.
        self._copy_file = shutil.copy2
        self._open_descriptor = os.open

    def keep_target(self, path: Any) -> None:
        """Keeps the file that a path leads to, which may be written to from here on.

        If the path is a link, the file behind it is kept, since that is written to.

        Args:
            path: what the script has given; anything that is no path is ignored.
        """
        if isinstance(path, str | os.PathLike):
            self._keep(os.path.realpath(path))

    def keep_path(self, path: Any) -> None:
        """Keeps what is at a path, which may be made, moved or removed.

        If the path is a link, the link itself is kept, and not the file behind it.

        Args:
            path: what the script has given; anything that is no path is ignored.
        """
        if isinstance(path, str | os.PathLike):
            folder, name = os.path.split(os.path.abspath(path))
            # Links in the folder's path are followed, so that a file has the same path each time.
            self._keep(os.path.join(os.path.realpath(folder), name))

    def keep_folder(self, path: Any, moved_to: Any = None) -> None:
        """Keeps everything inside of a folder that may be moved or removed.

        Args:
            path: of the folder; anything that is no folder is ignored.
            moved_to: the new path of the folder, where the same files will be made; None: the
                folder is removed.
        """
        # A link to a folder is moved or removed by itself, without what is in the folder.
        if not isinstance(path, str | os.PathLike) or os.path.islink(path):
            return

        top = os.fsdecode(path)
        for folder, folder_names, file_names in os.walk(top):
            for name in (*folder_names, *file_names):
                inside = os.path.join(folder, name)
                self.keep_path(inside)
                if moved_to is not None:
                    relative = os.path.relpath(inside, top)
                    self.keep_path(os.path.join(os.fsdecode(moved_to), relative))

    def keep_moved(self, path: Any, moved_to: Any) -> None:
        """Keeps what a move changes: both paths, and everything inside of a folder."""
        self.keep_path(path)
        self.keep_path(moved_to)
        self.keep_folder(path, moved_to=moved_to)

    def _keep(self, path: str | bytes) -> None:
        """Keeps what is at a path, unless it lies in a folder of `lockstep verify` itself."""
        path = os.fsdecode(path)
        if path.startswith(self._verify_folder):
            return
        with self._lock():
            self._keep_once(path)

    def _keep_once(self, path: str) -> None:
        """Copies what is at a path and adds it to the index, unless a rank has done so before."""
        copy_name = hashlib.blake2b(path.encode(), digest_size=16).hexdigest()
        copy_path = os.path.join(self._copies, copy_name)
        file_of_known_path = copy_path + ".known"
        if os.path.exists(file_of_known_path):
            return

        kind = NOTHING
        copy_or_link_target = ""  # of a file, the name of its copy; of a link, its target
        with suppress(FileNotFoundError):  # then the kind stays NOTHING
            status = os.lstat(path)
            if S_ISDIR(status.st_mode):
                kind = FOLDER  # without what is in it, which has paths of its own
            elif status.st_mtime >= self._start_time:
                return  # the run itself has made it, as a temporary file: it was not there before
            elif S_ISLNK(status.st_mode):
                kind = LINK
                copy_or_link_target = os.readlink(path)
            elif S_ISREG(status.st_mode):
                self._copy_file(path, copy_path)
                kind = FILE
                copy_or_link_target = copy_name
            else:  # such as a device
                return

        index = os.path.join(self._copies, INDEX_FILE)
        self._append_line(file_of_known_path, "")
        self._append_line(index, [path, kind, copy_or_link_target])

    def _append_line(self, file: str, value: object) -> None:
        """Appends a value to a file as a line of JSON; makes the file if it is not there."""
        descriptor = self._open_descriptor(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(descriptor, (json.dumps(value) + "\n").encode())
        os.close(descriptor)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Lets one rank at a time keep files.

        The others wait, so that none writes to a file while another rank copies it.
        """
        lock_file = os.path.join(self._copies, "lock")
        descriptor = self._open_descriptor(lock_file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    # Patches

    def watch(self) -> None:
        """Patches Python's functions so that every file that this process changes is kept.

        Each function of `os` is given the method that keeps what it changes: what is at the path
        itself, the file that the path leads to, or both paths of a move.
        """
        self._watch_open()
        self._watch_os_open()

        for name in ("remove", "unlink", "rmdir", "mkdir"):
            self._watch_os_function(name, self.keep_path)

        self._watch_os_function("truncate", self.keep_target)

        for name in ("rename", "replace"):
            self._watch_os_function(name, self.keep_moved)

        for name in ("symlink", "link"):
            # `os.symlink(target, path)` changes only the second of its paths.
            self._watch_os_function(name, lambda target, path: self.keep_path(path))

        self._watch_rmtree()

    def _watch_open(self) -> None:
        """Patches `open`, for the modes that may write."""
        plain_open = builtins.open

        @wraps(plain_open)
        def watched_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            # `open` itself refuses a mode that is no text.
            if isinstance(mode, str) and not WRITING_MODE_LETTERS.isdisjoint(mode):
                self.keep_target(file)
            return plain_open(file, mode, *args, **kwargs)

        builtins.open = watched_open
        io.open = watched_open  # the same function under another name, which pathlib uses

    def _watch_os_open(self) -> None:
        """Patches `os.open`, for the flags that may write."""
        plain_open = os.open

        @wraps(plain_open)
        def watched_open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            # With `dir_fd` the path is relative to an open folder. Such paths are not supported.
            if flags & WRITING_FLAGS and "dir_fd" not in kwargs:
                self.keep_target(path)
            return plain_open(path, flags, *args, **kwargs)

        _replace_os_function(plain_open, watched_open)

    def _watch_os_function(self, name: str, keep: Callable[..., None]) -> None:
        """Patches a function of `os` that changes files, such as `os.rename(path, moved_to)`.

        Args:
            name: of the function.
            keep: is called before the function. It gets the function's first arguments, which are
                paths: as many as it has parameters.
        """
        plain: Callable[..., Any] = getattr(os, name)
        num_paths = len(inspect.signature(keep).parameters)

        @wraps(plain)
        def watched(*args: Any, **kwargs: Any) -> Any:
            paths = args[:num_paths]
            paths_are_known = len(paths) == num_paths  # False if they are given by keyword
            if paths_are_known and FOLDER_DESCRIPTOR_ARGUMENTS.isdisjoint(kwargs):
                keep(*paths)
            return plain(*args, **kwargs)

        _replace_os_function(plain, watched)

    def _watch_rmtree(self) -> None:
        """Patches `shutil.rmtree`.

        It needs a patch of its own, since it removes files by their names in a folder that it has
        opened, and not by paths.
        """
        plain_rmtree: Any = shutil.rmtree

        @wraps(plain_rmtree)
        def watched_rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
            self.keep_folder(path)
            plain_rmtree(path, *args, **kwargs)

        vars(watched_rmtree).update(vars(plain_rmtree))  # such as `avoids_symlink_attacks`
        shutil.rmtree = watched_rmtree  # type: ignore[assignment]


def _replace_os_function(plain: Callable[..., Any], watched: Callable[..., Any]) -> None:
    """Replaces a function of `os` by a patched one."""
    setattr(os, plain.__name__, watched)
    # Python's library looks here to see whether a function may be called with `dir_fd`.
    if plain in os.supports_dir_fd:
        os.supports_dir_fd.add(watched)


def restore(folder: Path) -> None:
    """Puts files back as they were before a run, and removes those that it has made.

    Args:
        folder: of the run, which is over.
    """
    index = folder / COPIES_FOLDER / INDEX_FILE
    if not index.exists():  # the run has changed no file
        return

    entries = [json.loads(line) for line in index.read_text(encoding="utf-8").splitlines()]
    for path, kind, detail in entries:
        # Errors are passed over, so that the other files are put back all the same.
        with suppress(OSError):
            _restore_entry(folder, path, kind, detail)

    # Folders that the run has made could not be removed as files are. They are empty now. The
    # outer ones were made first, so they come last.
    for path, kind, _ in reversed(entries):
        if kind == NOTHING:
            with suppress(OSError):  # files are gone already, and are no folders
                os.rmdir(path)


def _restore_entry(folder: Path, path: str, kind: str, detail: str) -> None:
    """Puts back what was at one path, in the place of what is there now.

    Args:
        folder: of the run.
        path: the path.
        kind: what was there before the run: FOLDER, NOTHING, LINK or FILE.
        detail: the name of the copy of a file, or the target of a link.
    """
    if kind == FOLDER:
        os.makedirs(path, exist_ok=True)
    elif kind == NOTHING:
        with suppress(FileNotFoundError):
            os.unlink(path)
    elif kind == LINK:
        with suppress(FileNotFoundError):
            os.unlink(path)  # what the run has put in its place
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(detail, path)
    else:  # FILE
        os.makedirs(os.path.dirname(path), exist_ok=True)
        shutil.copy2(folder / COPIES_FOLDER / detail, path)
