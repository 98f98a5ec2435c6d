"""For `torch.load(..., pickle_module=...)` of files that are trusted: models in DDP open anywhere.

A pickled DistributedDataParallel joins a process group while it is unpickled, fails where there is
none, and waits for the other ranks where there is one. Here it is a plain module around the model.
"""

from __future__ import annotations

import pickle
from typing import IO, Any, ClassVar

from torch import nn

__all__ = ["Unpickler", "load"]

_DDP = ("torch.nn.parallel.distributed", "DistributedDataParallel")


class Opened(nn.Module):
    """What was a DistributedDataParallel."""

    wraps_module: ClassVar[bool] = True


class Unpickler(pickle.Unpickler):
    """Python's own, but for that class."""

    def find_class(self, module: str, name: str) -> Any:
        """What a name in the pickle stands for."""
        return Opened if (module, name) == _DDP else super().find_class(module, name)


def load(file: IO[bytes], **options: Any) -> Any:
    """As `pickle.load`."""
    return Unpickler(file, **options).load()
