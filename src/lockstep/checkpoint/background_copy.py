"""Copies tensors from GPUs to host memory in a thread, while training continues.

The copies from a GPU run on a CUDA stream of their own, which first waits for the work that the
training has queued on this GPU so far. So neither this process nor the GPU waits for the copies, as
long as the tensors do not change. Code that is going to change them calls `wait` first. A model may
be spread over several GPUs of one process: each of them has its own stream.

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

THREAD_NAME = "lockstep-kept-step"


class BackgroundCopy:
    """Runs one copy at a time, each in a thread of its own."""

    def __init__(self) -> None:
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

        # How often each source was written to. If a source is changed during the copy, its number
        # is higher at the end.
        write_counts_at_start = write_counts(sources)

        copies_by_device: dict[torch.device, _CopiesOfDevice] = {}
        for destination, source in zip(destinations, sources, strict=True):
            if source.device not in copies_by_device:
                copies_by_device[source.device] = _CopiesOfDevice(source.device)
            copies_by_device[source.device].add(destination, source)

        self._thread = threading.Thread(
            target=self._copy_and_finish,
            args=(list(copies_by_device.values()), sources, write_counts_at_start, finish),
            name=THREAD_NAME,
        )
        self._thread.start()

    def _copy_and_finish(
        self,
        copies_of_devices: Sequence[_CopiesOfDevice],
        sources: Sequence[Tensor],
        write_counts_at_start: list[int],
        finish: Callable[[], object],
    ) -> None:
        """Runs in the thread: copies the sources, and then calls `finish`.

        If a source was changed during the copy, `finish` is not called. If an error is raised,
        `wait` raises it.

        Args:
            copies_of_devices: the copies to make, which together have all sources.
            sources: as in `start`.
            write_counts_at_start: how often each source had been written when the copy was started.
            finish: as in `start`.
        """
        try:
            for copies in copies_of_devices:
                copies.run()
            self._was_changed = write_counts(sources) != write_counts_at_start
            if not self._was_changed:
                finish()
        except Exception as error:
            self._error = error

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


class _CopiesOfDevice:
    """The copies from one device.

    It is made in the training thread, while the sources have the values to copy.

    Args:
        device: the device of the sources: a GPU, or the CPU in tests.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._destinations: list[Tensor] = []
        self._sources: list[Tensor] = []
        self._stream: Any = None
        """None on the CPU, which has no streams."""
        self._end_of_queued_work: Any = None
        """The event after the work that the training has queued on the GPU so far."""
        if device.type == "cuda":
            self._stream = side_stream(device, "kept steps")
            self._end_of_queued_work = torch.cuda.current_stream(device).record_event()

    def add(self, destination: Tensor, source: Tensor) -> None:
        """Adds a copy of a source to a destination."""
        self._destinations.append(destination)
        self._sources.append(source)

    def run(self) -> None:
        """Makes the copies, and returns once they are complete."""
        take_gpu_in_this_thread(self._device)
        with self._on_copy_stream():
            copy_to_each(self._destinations, self._sources)
        if self._stream is not None:
            self._stream.synchronize()

    def _on_copy_stream(self) -> Any:
        """Returns a context in which copies are queued on the copy stream. The CPU has no stream.

        The copy stream first waits for the work of the training that writes the sources.
        """
        if self._stream is None:
            return nullcontext()
        self._stream.wait_event(self._end_of_queued_work)
        return torch.cuda.stream(self._stream)
