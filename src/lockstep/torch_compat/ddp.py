"""DDP, and `torch.distributed.algorithms.Join`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.parallel import DistributedDataParallel


def enclosing_ddp() -> DistributedDataParallel | None:
    """Returns the DDP module whose forward pass is running, or None."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel._active_ddp_module


def await_another_backward(module: DistributedDataParallel, roots: Sequence[Tensor]) -> None:
    """Lets DDP average the gradients of one more backward pass of the same forward passes.

    Torch calls `prepare_for_backward` at the end of each forward pass, so that DDP averages the
    gradients of one backward pass. This calls it once more.

    If the previous backward pass has not produced the gradients of all parameters, nothing changes:
    DDP still expects the missing gradients from the next backward pass.

    Args:
        module: the DDP module, after a forward pass.
        roots: the outputs from which DDP looks for unused parameters. If empty, DDP expects a
            gradient of every parameter.
    """
    # If some gradients are missing, `prepare_for_backward` would forget which have come already.
    if _has_averaged_all_gradients(module):
        module.reducer.prepare_for_backward(list(roots))


def _has_averaged_all_gradients(module: DistributedDataParallel) -> bool:
    """Returns True if DDP has averaged the gradients of all parameters in the last backward pass.

    DDP does not say so. But `_rebuild_buckets`, which torch calls before each forward pass, raises
    a RuntimeError if it has not.
    """
    try:
        module.reducer._rebuild_buckets()
    except RuntimeError:
        return False
    return True


def on_shadowed_iteration(callback: Callable[[], object]) -> None:
    """Makes `Join` call `callback` on a rank without batches, for each batch of the other ranks.

    Under torch's `Join`, such a rank shadows the iterations of the others: it takes part in their
    collectives, without a batch of its own.

    Args:
        callback: called before this rank takes part in the collectives of an iteration.
    """
    from torch.distributed.algorithms.join import Join

    # A rank without batches asks once per iteration how many ranks still have batches, and takes
    # part in their collectives if there are any.
    original: Any = Join._get_num_nonjoined_procs

    def get_num_nonjoined_procs(self: Join) -> int:
        num_ranks_with_batches: int = original(self)
        if num_ranks_with_batches > 0:
            callback()
        return num_ranks_with_batches

    Join._get_num_nonjoined_procs = get_num_nonjoined_procs  # type: ignore[method-assign]
