"""Copies tensors from a GPU to host memory in a thread, while training continues.

The copies run on a CUDA stream of their own, which first waits for the work that the training has
queued so far. So neither this process nor the GPU waits for the copies, as long as the tensors do
not change. Code that is going to change them calls `wait` first.

If the user's own code changes a tensor during the copy, the copy is invalid. This is found with the
number of writes that torch counts for each tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lockstep.distributed.streams import side_stream, take_gpu_in_this_thread
from lockstep.torch_compat import copy_to_each, write_counts


class BackgroundCopy:
    """Runs one copy at a time, each in a thread of its own.

    Args:
        device: the device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        """None if the tensors are on the CPU, as in tests."""
        if device.type == "cuda":
            self._stream = side_stream(device, "kept steps")
        self._thread: threading.Thread | None = None
        self._was_changed = False
        self._error: Exception | None = None

    def start(
        self,
        destinations: Sequence[Tensor],
        sources: Sequence[Tensor],
        finish: Callable[[], object],
    ) -> None:
        """Starts to copy tensors in a thread. The previous copy must have ended.

        Args:
            destinations: the tensors that are overwritten, one for each source.
            sources: the tensors to copy. They must not be changed before `wait` returns.
            finish: called in the thread when everything has been copied, unless a source was
                changed during the copy.
        """
        self._was_changed = False

        # A tensor that is changed during the copy has a higher number of writes at its end.
        write_counts_at_start = write_counts(sources)

        # This event marks the end of the work that the training has queued on the GPU so far.
        end_of_queued_work = None
        if self._stream is not None:
            end_of_queued_work = torch.cuda.current_stream(self._device).record_event()

        self._thread = threading.Thread(
            target=self._copy_and_finish,
            args=(destinations, sources, write_counts_at_start, end_of_queued_work, finish),
            name="lockstep-kept-step",
        )
        self._thread.start()

    def _copy_and_finish(
        self,
        destinations: Sequence[Tensor],
        sources: Sequence[Tensor],
        write_counts_at_start: object,
        end_of_queued_work: Any,
        finish: Callable[[], object],
    ) -> None:
        """Runs in the thread: copies the sources, and then calls `finish`.

        If a source was changed during the copy, `finish` is not called. If an error is raised,
        `wait` raises it.

        Args:
            destinations: as in `start`.
            sources: as in `start`.
            write_counts_at_start: how often each source had been written when the copy was started.
            end_of_queued_work: the event of the GPU that the copies wait for; None on the CPU.
            finish: as in `start`.
        """
        try:
            take_gpu_in_this_thread(self._device)
            with self._on_copy_stream_after(end_of_queued_work):
                copy_to_each(list(destinations), list(sources))
            if self._stream is not None:
                self._stream.synchronize()
            self._was_changed = write_counts(sources) != write_counts_at_start
            if not self._was_changed:
                finish()
        except Exception as error:
            self._error = error

    def _on_copy_stream_after(self, event: Any) -> Any:
        """Returns a context in which copies are queued on the stream of this object.

        On the CPU, which has no streams, the context does nothing.

        Args:
            event: an event of the training's stream, which the copies wait for; None on the CPU.
        """
        if self._stream is None:
            return nullcontext()
        self._stream.wait_event(event)
        return torch.cuda.stream(self._stream)

    def wait(self) -> bool:
        """Waits until the present copy has ended, if there is one.

        Returns:
            False if one of its sources was changed during the copy, otherwise True.

        Raises:
            Exception: the error that was raised in the thread.
        """
        if self._thread is None:
            return True
        self._thread.join()
        self._thread = None

        error = self._error
        self._error = None
        if error is not None:
            raise error
        return not self._was_changed
