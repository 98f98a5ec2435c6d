"""Running out of memory: how it is known, and what is said to it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

import torch

from lockstep.errors import LockstepError
from lockstep.runtime.step import Step

# Of the CPU's allocator, of CUDA itself, and of its libraries: plain RuntimeErrors.
_TEXTS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_BEGIN = "lockstep: out of memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the CPU's allocator, had no memory left."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    plain = isinstance(error, RuntimeError) and not isinstance(error, LockstepError)
    return plain and any(text in str(error) for text in _TEXTS)


def advise(error: BaseException | None, samples: int, devices: int = 1) -> None:
    """Adds to an error of this kind, once, what can be done about it.

    Args:
        error: anything; None: nothing.
        samples: what this rank was computing at a time.
        devices: of this rank, which divide them; `micro_batch` is of one.
    """
    if error is None or not is_out_of_memory(error):
        return
    if any(note.startswith(_BEGIN) for note in getattr(error, "__notes__", ())):
        return
    pieces = ""
    each = -(-samples // devices)
    if each > 1:
        pieces = (
            f"Set a smaller micro_batch, such as micro_batch={each // 2}: the global batch and "
            "the numbers stay the same; micro_batch='auto' finds the largest that fits. Or "
        )
    error.add_note(
        f"{_BEGIN} with {samples} sample{'s' * (samples != 1)} at a time on this rank"
        f"{f' of {devices} devices' * (devices > 1)}. {pieces}"
        f"{'let' if pieces else 'Let'} lockstep.checkpoint_activations(model) keep less for the "
        "backward pass, compute with precision='bf16', or divide the model over the ranks with "
        "strategy='fsdp'."
    )


def advise_at_end(step: Step) -> Callable[[], None]:
    """Advises on an error that nobody catches, before it is printed.

    Returns:
        What ends that.
    """
    before = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        advise(error, step.latest.local, step.devices)
        before(kind, error, traceback)

    def undo() -> None:
        if sys.excepthook is hook:
            sys.excepthook = before

    sys.excepthook = hook
    return undo
