"""Files that a script changes are as before when a run of it is over.

So the next run finds what the first one found: a script that resumes from its own checkpoint, or
goes on with its own log, begins alike each time, and nothing of the user's is written over. What
`torch.save` writes goes elsewhere from the beginning, see `patches`.
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

_KEPT, _INDEX = "before", "index"
_NOTHING, _FILE, _LINK, _FOLDER = "nothing", "file", "link", "folder"
"""What was there before."""
_WRITES = frozenset("wax+")
"""In the mode of a file that may be written to."""


class FilesBefore:
    """Keeps what files were like before a run, for all of its ranks.

    Args:
        folder: of the run; what lies beside it is not the user's either.
    """

    def __init__(self, folder: Path) -> None:
        run = os.path.realpath(folder)
        self._own = os.path.dirname(run) + os.sep  # with what other runs left for this one
        self._folder = os.path.join(run, _KEPT)
        os.makedirs(self._folder, exist_ok=True)
        self._start = os.stat(self._folder).st_mtime
        # What is patched later may be no part of keeping.
        self._copy = shutil.copy2
        self._open_descriptor = os.open

    def keep(self, path: Any) -> None:
        """The file that a path leads to may be written to from here on.

        Args:
            path: what the script has given; what is no path is left alone.
        """
        if isinstance(path, str | os.PathLike):
            self._keep(os.path.realpath(path))

    def keep_name(self, path: Any) -> None:
        """What a path names may be made, moved or removed; of a link this is the link itself.

        Args:
            path: what the script has given; what is no path is left alone.
        """
        if isinstance(path, str | os.PathLike):
            folder, name = os.path.split(os.path.abspath(path))
            self._keep(os.path.join(os.path.realpath(folder), name))

    def keep_folder(self, path: Any, moved_to: Any = None) -> None:
        """A folder, and all that is in it, may be moved or removed.

        Args:
            path: of the folder; of something else nothing is done.
            moved_to: what becomes of the path; None: nothing.
        """
        if not isinstance(path, str | os.PathLike) or os.path.islink(path):
            return
        top = os.fsdecode(path)
        for folder, folders, files in os.walk(top):
            for name in (*folders, *files):
                inside = os.path.join(folder, name)
                self.keep_name(inside)
                if moved_to is not None:
                    there = os.path.join(os.fsdecode(moved_to), os.path.relpath(inside, top))
                    self.keep_name(there)

    def _keep(self, place: str | bytes) -> None:
        place = os.fsdecode(place)
        if not place.startswith(self._own):
            with self._alone():
                self._keep_once(place)

    def _keep_once(self, place: str) -> None:
        name = hashlib.blake2b(place.encode(), digest_size=16).hexdigest()
        copy = os.path.join(self._folder, name)
        known = copy + ".known"
        if os.path.exists(known):
            return
        was, more = _NOTHING, ""
        with suppress(FileNotFoundError):
            found = os.lstat(place)
            if S_ISDIR(found.st_mode):
                was = _FOLDER
            elif found.st_mtime >= self._start:
                return  # the run has made it itself, as a temporary file: it was not there before
            elif S_ISLNK(found.st_mode):
                was, more = _LINK, os.readlink(place)
            elif S_ISREG(found.st_mode):
                self._copy(place, copy)
                was, more = _FILE, name
            else:
                return
        for file, text in ((known, ""), (os.path.join(self._folder, _INDEX), [place, was, more])):
            descriptor = self._open_descriptor(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.write(descriptor, (json.dumps(text) + "\n").encode())
            os.close(descriptor)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One rank at a time: another must not write to a file that is being copied."""
        lock = os.path.join(self._folder, "lock")
        descriptor = self._open_descriptor(lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def watch(self) -> None:
        """Keeps every file that this process opens to write, moves or removes from here on."""
        plain = builtins.open

        @wraps(plain)
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if isinstance(mode, str) and _WRITES & {*mode}:
                self.keep(file)
            return plain(file, mode, *args, **kwargs)

        builtins.open = io.open = opened
        self._watch_descriptors()
        for name in ("remove", "unlink", "rmdir", "mkdir"):
            self._watch_function(name, self.keep_name)
        self._watch_function("truncate", self.keep)
        for name in ("rename", "replace"):
            self._watch_function(name, self._moves)
        for name in ("symlink", "link"):
            self._watch_function(name, lambda _, path: self.keep_name(path))
        remove_tree: Any = shutil.rmtree

        @wraps(remove_tree)
        def removed(path: Any, *args: Any, **kwargs: Any) -> None:
            self.keep_folder(path)
            remove_tree(path, *args, **kwargs)

        vars(removed).update(vars(remove_tree))
        shutil.rmtree = removed  # type: ignore[assignment]

    def _moves(self, path: Any, to: Any) -> None:
        self.keep_name(path)
        self.keep_name(to)
        self.keep_folder(path, moved_to=to)

    def _watch_descriptors(self) -> None:
        plain = os.open

        @wraps(plain)
        def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and "dir_fd" not in kwargs:
                self.keep(path)
            return plain(path, flags, *args, **kwargs)

        _replace(plain, opened)

    def _watch_function(self, name: str, keep: Callable[..., None]) -> None:
        """Keeps what a function of `os` is about to change.

        Args:
            name: of the function.
            keep: is given the paths that it is called with, as many as it takes.
        """
        plain: Callable[..., Any] = getattr(os, name)
        signature = inspect.signature(keep)
        count = len(signature.parameters)

        @wraps(plain)
        def called(*args: Any, **kwargs: Any) -> Any:
            relative = {"dir_fd", "src_dir_fd", "dst_dir_fd"} & kwargs.keys()
            paths = args[:count]
            if len(paths) == count and not relative:
                keep(*paths)
            return plain(*args, **kwargs)

        _replace(plain, called)


def _replace(plain: Callable[..., Any], watched: Callable[..., Any]) -> None:
    """Puts a function in the place of one of `os`, which can do the same."""
    setattr(os, plain.__name__, watched)
    if plain in os.supports_dir_fd:
        os.supports_dir_fd.add(watched)


def restore(folder: Path) -> None:
    """Brings back what files were like before a run; those that it has made are removed.

    Args:
        folder: of the run, which is over.
    """
    index = folder / _KEPT / _INDEX
    if not index.exists():
        return
    entries = [json.loads(line) for line in index.read_text(encoding="utf-8").splitlines()]
    for place, was, more in entries:
        with suppress(OSError):
            _restore(place, was, folder / _KEPT / more, more)
    # A folder is empty only now; those inside of others were made later.
    for place, was, _ in reversed(entries):
        if was == _NOTHING:
            with suppress(OSError):
                os.rmdir(place)


def _restore(place: str, was: str, copy: Path, target: str) -> None:
    if was == _FOLDER:
        os.makedirs(place, exist_ok=True)
        return
    if was in (_NOTHING, _LINK):
        with suppress(FileNotFoundError):
            os.unlink(place)
    if was == _NOTHING:
        return
    os.makedirs(os.path.dirname(place), exist_ok=True)
    if was == _LINK:
        os.symlink(target, place)
    else:
        shutil.copy2(copy, place)
