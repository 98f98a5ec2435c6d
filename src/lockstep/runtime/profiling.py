"""torch's marks for its profiler, left out while no profiler runs.

Around every DDP forward pass and every optimizer step torch opens a named range, which takes longer
than all that Lockstep does in them; around a forward pass it also notes, for torch.compile, which
DDP module is running. While one of the two watches, everything goes torch's own way. Otherwise the
same calls are made without them, but only where torch's code is the one that this was written from
(torch 2.13: `torch/nn/parallel/distributed.py`, `DistributedDataParallel.forward`;
`torch/optim/optimizer.py`, `Optimizer.profile_hook_step`): each function is known by the names it
uses, and where they differ, torch's own way is taken too.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.autograd import profiler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

_MARK = {"torch", "autograd", "profiler", "record_function"}
_FORWARD = _MARK | {
    "_pre_forward",
    "_delay_all_reduce_all_params",  # of parameters that torch is told to leave out: never set
    "module",
    "forward",
    "_run_ddp_forward",
    "_post_forward",
}
_INNER_FORWARD = {"_use_python_reducer", "module", "_inside_ddp_forward"}
_STEP = _MARK | {
    "cast",
    "Optimizer",
    "__class__",
    "__name__",
    "chain",
    "_global_optimizer_pre_hooks",
    "_optimizer_step_pre_hooks",
    "values",
    "isinstance",
    "tuple",
    "len",
    "RuntimeError",
    "_optimizer_step_code",  # does nothing: a place for the profiler to look at
    "_optimizer_step_post_hooks",
    "_global_optimizer_post_hooks",
}


def _names(code: CodeType) -> set[str]:
    return set(code.co_names)


def knows_forward() -> bool:
    """Whether DDP's forward pass is `_pre_forward`, the module and `_post_forward`, marked."""
    own = DistributedDataParallel
    return (
        _names(own.forward.__code__) == _FORWARD
        and _names(own._run_ddp_forward.__code__) == _INNER_FORWARD
    )


def _nothing() -> None:
    """A step to be wrapped, to see what torch wraps steps in."""


_WRAPPER = Optimizer.profile_hook_step(_nothing).__code__
KNOWS_STEP = _names(_WRAPPER) == _STEP
"""Whether a step that torch has wrapped is the optimizer's own one, its hooks, and the mark."""


def watched() -> bool:
    """A profiler runs, or torch.compile follows the calls: everything goes torch's own way."""
    return (
        profiler._is_profiler_enabled
        or torch.compiler.is_compiling()
        or get_eval_frame_callback() is not None
    )


def step(optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
    """`optimizer.step(closure)` with its hooks, without the mark where no profiler runs."""
    wrapped: Any = type(optimizer).step
    if (
        watched()
        or not KNOWS_STEP
        or getattr(wrapped, "__code__", None) is not _WRAPPER
        or "step" in vars(optimizer)  # replaced on the object itself, as schedulers do
        or optimizer._optimizer_step_pre_hooks
        or torch_optimizer._global_optimizer_pre_hooks
    ):
        return optimizer.step(closure)
    value = wrapped.__wrapped__(optimizer, closure)
    # The launcher's beacon is such a hook, so they are no exception.
    for hooks in (
        optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    ):
        for hook in hooks.values():
            hook(optimizer, (optimizer, closure), {})
    return value
