"""Installs the probe in an interpreter that a rank has executed in its place.

`exec_hook` adds this folder to PYTHONPATH, so that the interpreter imports this module when it
starts. The interpreter may be of another version and may not have Lockstep. So nothing here may
fail in it, or change what the program finds.
"""

from __future__ import annotations

import json
import os
import sys

TYPE_CHECKING = False  # as typing's, which would take time to import
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any


def begin() -> None:
    """Prepares a rank for its probe, and then imports the user's `sitecustomize`, as Python would
    have done without this file.
    """
    restore_search_path()

    # `exec_hook` has described the rank in this variable: {"pid": 4242, "lockstep_folder": "/..."}.
    description = os.environ.pop("LOCKSTEP_EXECUTED", "")
    if description:
        rank = json.loads(description)
        is_rank = rank["pid"] == os.getpid()  # otherwise this process is a child of the rank
        if is_rank:
            # Installs the probe as soon as the program has imported torch.
            sys.meta_path.insert(0, AfterTorch(folder_of_lockstep=rank["lockstep_folder"]))

    # At its start, Python imports the first module called `sitecustomize` that it finds, which was
    # this file. If the user has such a module as well, it must be imported here.
    import_users_sitecustomize()


def restore_search_path() -> None:
    """Removes the folder of this file, which `exec_hook` has added, from `sys.path` and PYTHONPATH.

    If nothing else is in PYTHONPATH, the variable is removed.
    """
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != folder]

    paths = []
    for path in os.environ.pop("PYTHONPATH", "").split(os.pathsep):
        if path not in ("", folder):
            paths.append(path)
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def import_users_sitecustomize() -> None:
    """Imports the user's own `sitecustomize`, if there is one, after this one."""
    # This module's folder is not in sys.path any more, so the import finds the next module of this
    # name. Python would not search for it while this module is registered under the name.
    this_module = sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")
    except ImportError as error:
        user_has_none = error.name == "sitecustomize"
        if not user_has_none:
            raise
    finally:
        # If nothing was imported, register this module again.
        sys.modules.setdefault("sitecustomize", this_module)


class AfterTorch:
    """An import hook (PEP 451) that installs the probe after torch has been imported.

    Args:
        folder_of_lockstep: the folder that holds the package.
    """

    def __init__(self, folder_of_lockstep: str) -> None:
        self.folder_of_lockstep = folder_of_lockstep

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        """Finds torch, and makes its loader install the probe after torch has been imported.

        Python calls this for each module that is imported. For other modules it returns None.
        """
        if name != "torch":
            return None

        sys.meta_path.remove(self)  # so that the search below does not come here again
        from importlib import util

        spec = util.find_spec("torch")
        if spec is None or spec.loader is None:
            return spec

        # Python will call `loader.exec_module` to run torch's code.
        loader: Any = spec.loader
        original_exec_module = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            original_exec_module(module)
            self.install()

        loader.exec_module = exec_module
        return spec

    def install(self) -> None:
        """Installs the probe. If that fails, the program runs without it."""
        # The program's search path may not contain this folder, so it is added for this import.
        sys.path.append(self.folder_of_lockstep)

        try:
            from lockstep.run.start.worker import install_after_exec

            install_after_exec()
        except Exception:
            pass
        finally:
            sys.path.remove(self.folder_of_lockstep)


begin()
