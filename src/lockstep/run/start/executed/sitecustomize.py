"""Imported by an interpreter that a rank has executed in its own place; see `launcher.exec_hook`.

It may be another interpreter, of another version, without Lockstep: nothing here may harm it.
"""

from __future__ import annotations

import json
import os
import sys

TYPE_CHECKING = False  # without importing typing
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any


def begin() -> None:
    """Makes the interpreter what it would be without us, but for the probe."""
    folder = os.path.dirname(os.path.abspath(__file__))
    known = os.environ.pop("LOCKSTEP_EXECUTED", "")
    sys.path[:] = [path for path in sys.path if path != folder]
    paths = os.environ.pop("PYTHONPATH", "").split(os.pathsep)
    paths = [path for path in paths if path not in ("", folder)]
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    if known:
        values = json.loads(known)
        if values["pid"] == os.getpid():  # else a child of the program, which is not the rank
            sys.meta_path.insert(0, AfterTorch(values["packages"]))
    import_hidden()


def import_hidden() -> None:
    """Imports the module of our name that we stand before, if there is one."""
    ours = sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", ours)


class AfterTorch:
    """Finds torch as if it were not there, and installs the probe when it has been imported."""

    def __init__(self, packages: str) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        """Is asked for each module that is imported."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec = find_spec("torch")
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.install()

        loader.exec_module = exec_module
        return spec

    def install(self) -> None:
        """Installs the probe; where that cannot be done, the program runs without it."""
        sys.path.append(self.packages)
        try:
            from lockstep.run.start.worker import install_after_exec

            install_after_exec()
        except Exception:
            pass
        finally:
            sys.path.remove(self.packages)


begin()
