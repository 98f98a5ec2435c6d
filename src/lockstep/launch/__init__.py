"""Starting processes.

The package shares its name with the function that users call, `lockstep.launch(fn, ...)`, and the
import system binds `lockstep.launch` to the package as soon as any file of it is imported. The
package can therefore be called itself, whichever of the two was bound last.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        nproc: int | str = "auto",
        *,
        timeout: float | None = None,
    ) -> list[Any]:
        """See `lockstep.launch.spawn.launch`."""
        from lockstep.launch.spawn import launch

        return launch(fn, args, nproc, timeout=timeout)


sys.modules[__name__].__class__ = _CallablePackage
