"""Lockstep trains your PyTorch model on any number of devices with the same results as on one."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lockstep.errors import install_excepthook
from lockstep.familiar_names import error_of_module_name

if TYPE_CHECKING:
    from lockstep import (
        errors as errors,
        optim as optim,
        strategies as strategies,
        testing as testing,
    )
    from lockstep.checkpoint.weights import (
        load_weights as load_weights,
        save_weights as save_weights,
    )
    from lockstep.extensions.report.notebook import report as report
    from lockstep.optim.activation_checkpointing import (
        checkpoint_activations as checkpoint_activations,
    )
    from lockstep.optim.deferred_init import deferred_init as deferred_init
    from lockstep.run.start.spawn import launch as launch
    from lockstep.strategies.data_parallel.balanced import (
        BalancedDataParallel as BalancedDataParallel,
    )
    from lockstep.strategies.sync_batchnorm import SyncBatchNorm as SyncBatchNorm
    from lockstep.world import World as World, init as init

__version__ = "0.1.0"

# Lets `torch.cuda.is_available()` ask NVIDIA's management library. Otherwise it initialises CUDA,
# and `lockstep.launch` could not use GPUs in copies of this process (of a notebook, for example).
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

install_excepthook()

# Imported when first used: the command line needs none of them, and must not import torch.
_WHERE = {
    "BalancedDataParallel": "lockstep.strategies.data_parallel.balanced",
    "SyncBatchNorm": "lockstep.strategies.sync_batchnorm",
    "World": "lockstep.world",
    "checkpoint_activations": "lockstep.optim.activation_checkpointing",
    "deferred_init": "lockstep.optim.deferred_init",
    "errors": "lockstep.errors",
    "init": "lockstep.world",
    "launch": "lockstep.run.start.spawn",
    "load_weights": "lockstep.checkpoint.weights",
    "optim": "lockstep.optim",
    "report": "lockstep.extensions.report.notebook",
    "save_weights": "lockstep.checkpoint.weights",
    "strategies": "lockstep.strategies",
    "testing": "lockstep.testing",
}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        known_error = error_of_module_name(name)
        if known_error is not None:
            raise known_error
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    module = import_module(_WHERE[name])
    value = module if _WHERE[name] == f"lockstep.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
