"""Finds a file of the user's that Python has imported in place of an installed module.

Python looks beside the script before it looks at installed modules. If the script is `cuda.py`, or
`random.py` lies beside it, then `import cuda` and `import random` get these files, in every library
as well. The exception that follows says nothing about it: "module 'random' has no attribute
'shuffle'".
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from lockstep.user_code import is_user_file


def find_hiding_file(errors: Iterable[BaseException]) -> str:
    """Returns the user's file that hides an installed module, and so caused one of the exceptions.

    Args:
        errors: an exception, and those that it was raised from or while handling.

    Returns:
        The path of the file; an empty text if there is none.
    """
    for error in errors:
        module = _module_of(error)
        if module:
            file = _file_in_place_of_installed(module)
            if file:
                return file
    return ""


def _module_of(error: BaseException) -> str:
    """Returns the outermost package or module that an exception says something about.

    It is "torch" for "No module named 'torch.utils'", and empty for most exceptions.
    """
    name = ""
    if isinstance(error, ImportError):
        name = error.name or ""
    elif isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        name = error.obj.__name__
    return name.partition(".")[0]


def _file_in_place_of_installed(module: str) -> str:
    """Returns the user's file that Python finds first for a module that is installed as well.

    For the module `random` it is `/home/ann/random.py` if all of this is so:

    - It is the first file of this name that Python finds, and is the user's.
    - It was imported, or importing it has failed.
    - Python finds another file elsewhere, `/usr/lib/.../random.py`.

    Returns:
        The file, or an empty text.
    """
    if module in sys.builtin_module_names:  # files are not looked for
        return ""

    first = PathFinder.find_spec(module, sys.path)
    if first is None or first.origin is None or not is_user_file(first.origin):
        return ""

    # If another file was imported by this name, the user's file is not to blame. If the import has
    # failed, the module is not in `sys.modules`.
    imported = sys.modules.get(module)
    if imported is not None and getattr(imported, "__file__", None) != first.origin:
        return ""

    is_package = first.submodule_search_locations is not None
    file = Path(first.origin)  # of a package, its `__init__.py`
    folder = file.parent.parent if is_package else file.parent
    return first.origin if _is_found_outside(module, folder) else ""


def _is_found_outside(module: str, folder: Path) -> bool:
    """Returns True if Python finds a module in another folder of `sys.path` than this one."""
    real_folder = os.path.realpath(folder)
    other_entries = [entry for entry in sys.path if os.path.realpath(entry) != real_folder]
    installed = PathFinder.find_spec(module, other_entries)
    return installed is not None and installed.origin is not None
