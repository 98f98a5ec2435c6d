"""Keeps what a script saves apart from the user's files, and lets it find what it saved.

`torch.save` would write over a checkpoint of the user's, and the next run would resume from it. So
a file is saved in a folder of the run, under a name that is a hash of the script's path: its
*place*. Functions that open, move or remove files are patched to take the file at this place when
they are called with the path that the script knows.
"""

from __future__ import annotations

import builtins
import hashlib
import io
import os
import shutil
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

import lockstep
from lockstep.verify.recording.determinism import Determinism

MOVING_FUNCTIONS = {"rename", "replace", "link", "copyfile", "copy", "copy2"}
"""Functions that put the file of their first path under their second path."""
PATCHED_FUNCTIONS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (os, ("rename", "replace", "link", "stat", "unlink", "remove")),
    (shutil, ("copyfile", "copy", "copy2")),
    (io, ("open",)),
    (torch, ("load",)),
    (safetensors, ("safe_open",)),
    (safetensors.torch, ("safe_open",)),
)
"""Modules, and those of their functions that begin with a path of a file that was perhaps saved."""


class SavedFiles:
    """The files that the script has saved.

    Args:
        folder: where they are; it is the same for all ranks.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._stat = os.stat  # the function before it is patched

    def place_of(self, path: Any) -> str:
        """Returns where a file is kept that the script saves under this path."""
        name = hashlib.blake2b(os.path.abspath(path).encode(), digest_size=8).hexdigest()
        return f"{self._folder}/{name}"

    def patch(self, determinism: Determinism) -> None:
        """Patches what saves files and what reads, moves or removes them.

        Args:
            determinism: counts the files that are saved elsewhere, for the verdict.
        """
        original_save = torch.save
        original_save_weights = lockstep.save_weights

        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            """Takes the place of `torch.save`; `f` may be a path or an open file."""
            target = f
            if isinstance(f, str | os.PathLike):
                determinism.switched_off["saved files (written elsewhere)"] += 1
                target = self.place_of(f)
            original_save(obj, target, *args, **kwargs)

        @wraps(original_save_weights)
        def save_weights(model: nn.Module, path: Any, **options: Any) -> None:
            determinism.switched_off["saved weights (written elsewhere)"] += 1
            original_save_weights(model, self.place_of(path), **options)

        for owner, names in PATCHED_FUNCTIONS:
            for name in names:
                self._patch_function(owner, name)

        builtins.open = io.open  # the same function has two names
        torch.save = save
        lockstep.save_weights = save_weights

    def _patch_function(self, owner: Any, name: str) -> None:
        """Lets a function that begins with a path take the saved file, if there is one."""
        function = getattr(owner, name)

        @wraps(function)
        def with_saved_file(*args: Any, **kwargs: Any) -> Any:
            """Calls the function with the place of a saved file, or as it was called."""
            if not args or not self._has(args[0]):
                return function(*args, **kwargs)

            path, *other_args = args
            place = self.place_of(path)
            if name in MOVING_FUNCTIONS and other_args:
                # os.rename(path, target): the moved file is kept at the place of its new path.
                target, *options = other_args
                return function(place, self._place_after_move(path, target), *options, **kwargs)

            return function(place, *other_args, **kwargs)

        setattr(owner, name, with_saved_file)

        # Python's library looks functions up in these sets, to know which arguments they take. The
        # replacement takes the same ones.
        for functions in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if function in functions:
                functions.add(with_saved_file)

    def _place_after_move(self, path: Any, target: Any) -> str:
        """Returns where a saved file is kept after it was moved to a path, or into a folder.

        Args:
            path: the old path, as the script knows it.
            target: the new path, or an existing folder.
        """
        if os.path.isdir(target):
            return self.place_of(os.path.join(target, os.path.basename(path)))
        return self.place_of(target)

    def _has(self, path: Any) -> bool:
        """True if the script has saved a file under this path."""
        if not isinstance(path, str | os.PathLike):  # such as an open file
            return False
        with suppress(FileNotFoundError):
            self._stat(self.place_of(path))
            return True
        return False
