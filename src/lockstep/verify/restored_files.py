"""Restores the files that a script has changed, once a run of the script is over.

So the next run finds the same files as the first one, and the user loses nothing. Before the script
changes a file, its rank *keeps* the file: it copies the file and adds a line to an index. The line
holds the path, the name of the copy, and the *kind* of what was at the path before the run: a file,
a link, a folder, or nothing. After the run, `restore` puts everything back. The folder of the run
holds, for all ranks together:

- a copy of each file, named by a hash of its path
- a file HASH.known for each path that was kept
- the index: one line of JSON for each path, `[path, kind, name of the copy or target of the link]`

Files written by `torch.save` are redirected and never reach their path (see
`recording/saved_files.py`).
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from stat import S_ISDIR, S_ISLNK, S_ISREG
from typing import Any, NamedTuple

COPIES_FOLDER = "before"
INDEX_FILE = "index"
# What was at a path before the run.
NOTHING = "nothing"
FILE = "file"
LINK = "link"
FOLDER = "folder"
NOT_RESTORED = "unrestored"
"""The kind of what is not restored. Its path is not written to the index."""
WRITING_MODE_LETTERS = frozenset("wax+")
"""Letters in the mode of `open` that allow writing."""
WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
FOLDER_DESCRIPTOR_ARGUMENTS = {"dir_fd", "src_dir_fd", "dst_dir_fd"}
"""Arguments that make a path relative to an open folder. Such paths are not supported here."""


class _Kept(NamedTuple):
    """What was at a path before the run."""

    kind: str
    """NOTHING, FILE, LINK, FOLDER, or NOT_RESTORED."""
    copy_or_link_target: str = ""
    """The name of the copy of a file, or the target of a link."""


class FilesBefore:
    """Keeps copies of files as they were before a run, for all of its ranks.

    Args:
        folder: folder of the run. Folders beside it belong to other runs, so files in them are not
            the user's.
    """

    def __init__(self, folder: Path) -> None:
        run_folder = os.path.realpath(folder)
        # The folder of all runs. It ends with a separator, so that it is a prefix of all its files.
        self._verify_folder = os.path.dirname(run_folder) + os.sep
        self._copies = os.path.join(run_folder, COPIES_FOLDER)
        os.makedirs(self._copies, exist_ok=True)

        # Taken from the clock of the file system, since it is compared with the times of files.
        self._start_time = os.stat(self._copies).st_mtime

        # The original functions, before `watch` patches them.
        self._copy_file = shutil.copy2
        self._open_descriptor = os.open

    def keep_target(self, path: Any) -> None:
        """Keeps the file that a path leads to, before it may be written to.

        If the path is a link, the file behind the link is kept.

        Args:
            path: path argument of the script's call. Anything that is not a path is ignored.
        """
        if isinstance(path, str | os.PathLike):
            self._keep(os.path.realpath(path))

    def keep_path(self, path: Any) -> None:
        """Keeps what is at a path, before it may be created, moved or removed.

        If the path is a link, the link itself is kept, and not the file behind it.

        Args:
            path: path argument of the script's call. Anything that is not a path is ignored.
        """
        if isinstance(path, str | os.PathLike):
            folder, name = os.path.split(os.path.abspath(path))
            # Links in the path of the folder are resolved, so that each file has only one path.
            self._keep(os.path.join(os.path.realpath(folder), name))

    def keep_folder(self, path: Any, moved_to: Any = None) -> None:
        """Keeps everything inside a folder, before the folder may be moved or removed.

        If the folder is moved, each of its files gets a new path. The new paths are kept too.
        Keeping a path at which there is nothing means that what the run puts there is removed after
        the run.

        Args:
            path: path of the folder. Anything that is not a folder is ignored.
            moved_to: new path of the folder; None if the folder is removed.
        """
        # If a link to a folder is moved or removed, the files in the folder are not touched.
        if not isinstance(path, str | os.PathLike) or os.path.islink(path):
            return

        top = os.fsdecode(path)
        for folder, folder_names, file_names in os.walk(top):
            for name in (*folder_names, *file_names):
                old_path = os.path.join(folder, name)
                self.keep_path(old_path)
                if moved_to is not None:
                    relative_path = os.path.relpath(old_path, top)
                    new_path = os.path.join(os.fsdecode(moved_to), relative_path)
                    self.keep_path(new_path)

    def keep_moved(self, path: Any, moved_to: Any) -> None:
        """Keeps what a move changes: what is at both paths, and the contents of a folder."""
        self.keep_path(path)
        self.keep_path(moved_to)
        self.keep_folder(path, moved_to=moved_to)

    def _keep(self, path: str | bytes) -> None:
        """Keeps what is at a path, unless the path belongs to `lockstep verify` itself."""
        path = os.fsdecode(path)
        if path.startswith(self._verify_folder):
            return
        with self._lock():
            self._keep_once(path)

    def _keep_once(self, path: str) -> None:
        """Copies what is at a path and adds it to the index, unless a rank has done so.

        Every rank does this before it changes a file, so the file is still as it was before the
        run, unless the run itself has created it. Only one rank does this at a time.
        """
        copy_name = hashlib.blake2b(path.encode(), digest_size=16).hexdigest()
        copy_path = os.path.join(self._copies, copy_name)

        # A file beside the copy shows that the path was kept before.
        marker_file = copy_path + ".known"
        if os.path.exists(marker_file):
            return

        try:
            kept = self._copy_if_file(path, copy_name)
        except FileNotFoundError:
            kept = _Kept(NOTHING)  # what the run creates here is removed after the run

        has_entry_in_index = kept.kind != NOT_RESTORED
        if has_entry_in_index:
            self._append_line(marker_file, "")  # creates the file
            index = os.path.join(self._copies, INDEX_FILE)
            self._append_line(index, [path, kept.kind, kept.copy_or_link_target])

    def _copy_if_file(self, path: str, copy_name: str) -> _Kept:
        """Copies what is at a path, if it is a file. The path must not have been kept before.

        Returns:
            What is there.

        Raises:
            FileNotFoundError: There is nothing at the path.
        """
        status = os.lstat(path)
        if S_ISDIR(status.st_mode):
            return _Kept(FOLDER)  # files in the folder are kept by their own paths

        # A file that the run has created is not restored. It is known by its time: the run would
        # have kept a file of the user's before it modified it.
        was_modified_during_run = status.st_mtime >= self._start_time
        if was_modified_during_run:
            return _Kept(NOT_RESTORED)

        if S_ISLNK(status.st_mode):
            return _Kept(LINK, os.readlink(path))

        if S_ISREG(status.st_mode):
            self._copy_file(path, os.path.join(self._copies, copy_name))
            return _Kept(FILE, copy_name)

        return _Kept(NOT_RESTORED)  # such as a device

    def _append_line(self, file: str, value: object) -> None:
        """Appends a value to a file as a line of JSON; the file is created if it does not exist."""
        descriptor = self._open_descriptor(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(descriptor, (json.dumps(value) + "\n").encode())
        os.close(descriptor)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Returns a context manager that only one rank can enter at a time.

        The other ranks wait, so that none of them writes to a file while it is being copied.
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
        """Patches Python's functions so that this process keeps every file before changing it."""
        self._watch_open()
        self._watch_os_open()
        self._watch_rmtree()

        # `os.remove(path)` removes what is at the path, and `os.mkdir(path)` creates it. If there
        # is a link at the path, `keep_path` keeps the link itself.
        for name in ("remove", "unlink", "rmdir", "mkdir"):
            self._watch_os_function(name, self.keep_path, num_paths=1)

        # `os.truncate(path, length)` follows a link at the path. So `keep_target` keeps the file
        # that the link leads to.
        self._watch_os_function("truncate", self.keep_target, num_paths=1)

        # `os.rename(src, dst)` changes what is at both paths.
        for name in ("rename", "replace"):
            self._watch_os_function(name, self.keep_moved, num_paths=2)

        # `os.symlink(target, path)` has two paths, but only changes what is at the second one.
        for name in ("symlink", "link"):
            self._watch_os_function(name, lambda target, path: self.keep_path(path), num_paths=2)

    def _watch_open(self) -> None:
        """Patches `open`, to keep files that are opened for writing."""
        plain_open = builtins.open

        @wraps(plain_open)
        def watched_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            # If the mode is not a string, `open` itself will raise an error.
            may_write = isinstance(mode, str) and not WRITING_MODE_LETTERS.isdisjoint(mode)
            if may_write:
                self.keep_target(file)
            return plain_open(file, mode, *args, **kwargs)

        builtins.open = watched_open
        io.open = watched_open  # another name of the same function, which pathlib uses

    def _watch_os_open(self) -> None:
        """Patches `os.open`, to keep files that are opened for writing."""
        plain_open = os.open

        @wraps(plain_open)
        def watched_open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            # With `dir_fd` the path is relative to an open folder. Such paths are not supported.
            if flags & WRITING_FLAGS and "dir_fd" not in kwargs:
                self.keep_target(path)
            return plain_open(path, flags, *args, **kwargs)

        _replace_os_function(plain_open, watched_open)

    def _watch_os_function(
        self, name: str, keep_paths: Callable[..., None], *, num_paths: int
    ) -> None:
        """Patches a function of `os` that changes files, such as `os.rename(src, dst)`.

        Args:
            name: name of the function.
            keep_paths: function that keeps what will be changed. It is called with the paths that
                the script passes, before the patched function changes what is there.
            num_paths: number of leading arguments of the patched function that are paths.
        """
        plain_function: Callable[..., Any] = getattr(os, name)

        @wraps(plain_function)
        def watched_function(*args: Any, **kwargs: Any) -> Any:
            paths = _paths_of_call(plain_function, num_paths, args, kwargs)
            if paths is not None:
                keep_paths(*paths)
            return plain_function(*args, **kwargs)

        _replace_os_function(plain_function, watched_function)

    def _watch_rmtree(self) -> None:
        """Patches `shutil.rmtree`, to keep everything in the folder that it removes.

        It needs a patch of its own. It calls `os.unlink(name, dir_fd=...)` with the name of a file
        in an open folder, which the patch of `os.unlink` ignores.
        """
        plain_rmtree: Any = shutil.rmtree

        @wraps(plain_rmtree)
        def watched_rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
            self.keep_folder(path)
            plain_rmtree(path, *args, **kwargs)

        vars(watched_rmtree).update(vars(plain_rmtree))  # such as `avoids_symlink_attacks`
        shutil.rmtree = watched_rmtree  # type: ignore[assignment]


def _paths_of_call(
    function: Callable[..., Any], num_paths: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any] | None:
    """Returns the paths in a call: ["a.txt", "b.txt"] for `os.rename("a.txt", dst="b.txt")`.

    Args:
        function: function that is called. None of its paths has a default.
        num_paths: number of leading arguments of the function that are paths.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.

    Returns:
        The paths. None if the arguments are wrong, in which case the function itself will raise an
        error, or if paths are relative to an open folder, which is not supported.
    """
    is_relative_to_open_folder = bool(FOLDER_DESCRIPTOR_ARGUMENTS & kwargs.keys())
    if is_relative_to_open_folder:
        return None

    signature = inspect.signature(function)
    try:
        arguments = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return None

    names_of_paths = list(signature.parameters)[:num_paths]
    return [arguments[name] for name in names_of_paths]


def _replace_os_function(plain: Callable[..., Any], watched: Callable[..., Any]) -> None:
    """Replaces a function of `os` by its patched version."""
    setattr(os, plain.__name__, watched)
    # Python's standard library looks up here whether a function supports `dir_fd`.
    if plain in os.supports_dir_fd:
        os.supports_dir_fd.add(watched)


def restore(folder: Path) -> None:
    """Restores files as they were before a run, and removes files that the run has created.

    Args:
        folder: folder of the run, which is over.
    """
    index = folder / COPIES_FOLDER / INDEX_FILE
    if not index.exists():  # the run has changed no files
        return

    entries = [json.loads(line) for line in index.read_text(encoding="utf-8").splitlines()]
    for path, kind, copy_or_link_target in entries:
        # An error with one file must not prevent the others from being restored.
        with suppress(OSError):
            _restore_entry(folder, path, kind, copy_or_link_target)

    # Remove the folders that the run has created, which are empty now. Inner folders were created
    # last, so they are removed first.
    for path, kind, _ in reversed(entries):
        if kind == NOTHING:
            with suppress(OSError):  # raised for files, which are removed already
                os.rmdir(path)


def _restore_entry(folder: Path, path: str, kind: str, copy_or_link_target: str) -> None:
    """Restores what was at one path, and replaces what is there now.

    Args:
        folder: folder of the run.
        path: path to be restored.
        kind: what was there before the run: FOLDER, NOTHING, LINK or FILE.
        copy_or_link_target: name of the copy of a file, or target of a link; else empty.
    """
    if kind == FOLDER:
        os.makedirs(path, exist_ok=True)
    elif kind == NOTHING:
        with suppress(FileNotFoundError):
            os.unlink(path)
    elif kind == LINK:
        with suppress(FileNotFoundError):
            os.unlink(path)  # what the run has put there instead
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(copy_or_link_target, path)
    else:  # FILE
        os.makedirs(os.path.dirname(path), exist_ok=True)
        shutil.copy2(folder / COPIES_FOLDER / copy_or_link_target, path)
