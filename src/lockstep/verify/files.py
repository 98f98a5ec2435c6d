"""Files that a script changes are as before when a run of it is over.

So the next run finds what the first one found: a script that resumes from its own checkpoint, or
goes on with its own log, begins alike each time, and nothing of the user's is written over. What
`torch.save` writes goes elsewhere from the beginning, see `patches`.
"""

from __future__ import annotations

import builtins
import fcntl
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from stat import S_ISREG
from typing import Any

_FOLDER, _INDEX = "before", "index"
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
        self._folder = os.path.join(run, _FOLDER)
        os.makedirs(self._folder, exist_ok=True)
        self._start = os.stat(self._folder).st_mtime
        # What is patched later may be no part of keeping.
        self._open, self._copy = io.open, shutil.copy2

    def keep(self, path: Any) -> None:
        """A file may be written to, moved or removed from here on."""
        if not isinstance(path, str | os.PathLike):
            return
        place = os.path.realpath(path)
        if place.startswith(self._own):
            return
        with self._alone():
            self._keep_once(os.fsdecode(place))

    def _keep_once(self, place: str) -> None:
        name = hashlib.blake2b(place.encode(), digest_size=16).hexdigest()
        copy = os.path.join(self._folder, name)
        known = copy + ".known"
        if os.path.exists(known):
            return
        kept = None
        with suppress(FileNotFoundError):
            found = os.stat(place)
            # What the run has made itself, as a temporary file, was not there before.
            if not S_ISREG(found.st_mode) or found.st_mtime >= self._start:
                return
            self._copy(place, copy)
            kept = name
        for file, text in ((known, ""), (os.path.join(self._folder, _INDEX), [place, kept])):
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.write(descriptor, (json.dumps(text) + "\n").encode())
            os.close(descriptor)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One rank at a time: another must not write to a file that is being copied."""
        descriptor = os.open(os.path.join(self._folder, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
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
        for owner, name, count in (
            (os, "remove", 1),
            (os, "unlink", 1),
            (os, "rename", 2),
            (os, "replace", 2),
            (os, "truncate", 1),
        ):
            self._watch_function(owner, name, count)
        remove_tree: Any = shutil.rmtree

        @wraps(remove_tree)
        def removed(path: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(path, str | os.PathLike):
                for folder, _, names in os.walk(os.fsdecode(path)):
                    for name in names:
                        self.keep(os.path.join(folder, name))
            remove_tree(path, *args, **kwargs)

        vars(removed).update(vars(remove_tree))
        shutil.rmtree = removed  # type: ignore[assignment]

    def _watch_function(self, owner: Any, name: str, count: int) -> None:
        plain: Callable[..., Any] = getattr(owner, name)

        @wraps(plain)
        def called(*args: Any, **kwargs: Any) -> Any:
            relative = {"dir_fd", "src_dir_fd", "dst_dir_fd"} & kwargs.keys()
            for path in args[:count] if not relative else ():
                self.keep(path)
            return plain(*args, **kwargs)

        setattr(owner, name, called)
        if plain in os.supports_dir_fd:
            os.supports_dir_fd.add(called)


def restore(folder: Path) -> None:
    """Brings back what files were like before a run; those that it has made are removed.

    Args:
        folder: of the run, which is over.
    """
    index = folder / _FOLDER / _INDEX
    if not index.exists():
        return
    for line in index.read_text(encoding="utf-8").splitlines():
        place, kept = json.loads(line)
        with suppress(OSError):
            if kept is None:
                os.unlink(place)
            else:
                os.makedirs(os.path.dirname(place), exist_ok=True)
                shutil.copy2(folder / _FOLDER / kept, place)
