"""Copies tensors from a GPU to memory in a thread, while the training goes on.

The copies are on a stream of their own, which waits for what the training has queued until then. So
neither this process nor the GPU waits for them before the tensors change. Whoever changes them
calls `wait` first.

A tensor that is changed meanwhile all the same, by code of the user's, makes the copy worthless:
that is found by torch's count of the writes to each tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lockstep.distributed.streams import side_stream
from lockstep.distributed.torch_compat import copy_to_each, write_counts


class BackgroundCopy:
    """Runs one copy after the other, each in a thread that ends with it.

    Args:
        device: where the tensors are.
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
        self, places: Sequence[Tensor], sources: Sequence[Tensor], finish: Callable[[], object]
    ) -> None:
        """Starts to copy; the copy before must have ended.

        Args:
            places: where the sources are copied to, in the same order.
            sources: are not changed before `wait`.
            finish: is called in the thread when all is copied, and nothing has changed meanwhile.
        """
        counts = write_counts(sources)
        begun = None
        if self._stream is not None:
            begun = torch.cuda.current_stream(self._device).record_event()

        def copy() -> None:
            """Runs in the thread: keeps the error, if there is one."""
            try:
                with self._on_stream(begun):
                    copy_to_each(list(places), list(sources))
                if self._stream is not None:
                    self._stream.synchronize()
                self._was_changed = write_counts(sources) != counts
                if not self._was_changed:
                    finish()
            except Exception as error:
                self._error = error

        self._thread = threading.Thread(target=copy, name="lockstep-kept-step")
        self._thread.start()

    def _on_stream(self, begun: Any) -> Any:
        """Returns a context in which copies are queued after an event of the training's stream."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_event(begun)
        return torch.cuda.stream(self._stream)

    def wait(self) -> bool:
        """Waits until the copy has ended.

        Returns:
            True if there was none, or its sources have not changed.

        Raises:
            Exception: what the copy has raised.
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
