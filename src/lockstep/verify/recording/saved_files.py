"""Redirects what a script saves to a folder of the run, and lets the script find it there.

Otherwise, `torch.save` would overwrite the user's checkpoints, and the next run would resume from
them. A file is saved under a name that is a hash of the script's path, which is called its
*redirected path* below. Functions that open, move or remove files are patched: if the script has
saved a file under the path they are given, they use the redirected path.
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
"""Functions that move or copy the file at their first argument to their second argument."""
PATCHED_FUNCTIONS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (os, ("rename", "replace", "link", "stat", "unlink", "remove")),
    (shutil, ("copyfile", "copy", "copy2")),
    (io, ("open",)),
    (torch, ("load",)),
    (safetensors, ("safe_open",)),
    (safetensors.torch, ("safe_open",)),
)
"""Modules, and those of their functions whose first argument may be the path of a saved file."""


class SavedFiles:
    """The files that the script has saved.

    Args:
        folder: folder for the files, which is the same for all ranks.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._stat = os.stat  # the function before it is patched

    def redirected_path(self, path: Any) -> str:
        """Returns the path at which a file is kept that the script saves under the given path."""
        name = hashlib.blake2b(os.path.abspath(path).encode(), digest_size=8).hexdigest()
        return f"{self._folder}/{name}"

    def patch(self, determinism: Determinism) -> None:
        """Patches the functions that save files, and those that read, move or remove them.

        `torch.save` and `lockstep.save_weights` always use the redirected path. All others use it
        only if the script has saved the file before.

        Args:
            determinism: object that counts everything that is switched off in the run, which the
                verdict lists. Saving a file elsewhere than the script wants is counted there too.
        """
        original_save = torch.save
        original_save_weights = lockstep.save_weights

        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            """Replaces `torch.save`; `f` is a path or an open file."""
            target = f
            if isinstance(f, str | os.PathLike):
                # The verdict lists this among all that was switched off in the run.
                determinism.switched_off["saved files (written elsewhere)"] += 1
                target = self.redirected_path(f)
            original_save(obj, target, *args, **kwargs)

        @wraps(original_save_weights)
        def save_weights(model: nn.Module, path: Any, **options: Any) -> None:
            """Replaces `lockstep.save_weights`."""
            determinism.switched_off["saved weights (written elsewhere)"] += 1
            original_save_weights(model, self.redirected_path(path), **options)

        for owner, names in PATCHED_FUNCTIONS:
            for name in names:
                self._patch_function(owner, name)

        # The built-in `open` is the function `io.open`, which was patched in the loop above.
        builtins.open = io.open
        torch.save = save
        lockstep.save_weights = save_weights

    def _patch_function(self, owner: Any, name: str) -> None:
        """Patches a function whose first argument is a path, to use a saved file if there is one.

        Args:
            owner: module that the function belongs to.
            name: name of the function.
        """
        function = getattr(owner, name)

        @wraps(function)
        def with_saved_file(*args: Any, **kwargs: Any) -> Any:
            """Replaces `function`, such as `os.stat`.

            It calls `function` with the redirected path if the script has saved the file.
            """
            if not args or not self._has(args[0]):
                return function(*args, **kwargs)

            path, *other_args = args
            # In a call such as os.rename(path, target), the target is redirected too.
            if name in MOVING_FUNCTIONS and other_args:
                target = other_args[0]
                other_args[0] = self._redirected_target(path, target)

            return function(self.redirected_path(path), *other_args, **kwargs)

        setattr(owner, name, with_saved_file)
        # Code may ask `os.stat in os.supports_dir_fd`, for example, which must stay true.
        _add_to_supported_functions(function, with_saved_file)

    def _redirected_target(self, path: Any, target: Any) -> str:
        """Returns the path at which a saved file is kept after the script has moved it.

        Args:
            path: old path, as the script knows it.
            target: new path, or an existing folder.
        """
        # shutil.copy("w.pt", "old") writes to "old/w.pt" if "old" is a folder.
        if os.path.isdir(target):
            return self.redirected_path(os.path.join(target, os.path.basename(path)))
        return self.redirected_path(target)

    def _has(self, path: Any) -> bool:
        """True if the script has saved a file under this path."""
        if not isinstance(path, str | os.PathLike):  # such as an open file
            return False
        with suppress(FileNotFoundError):
            self._stat(self.redirected_path(path))
            return True
        return False


def _add_to_supported_functions(function: Any, new_function: Any) -> None:
    """Adds a patched function wherever Python lists which arguments the original one supports."""
    for functions in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if function in functions:
            functions.add(new_function)
