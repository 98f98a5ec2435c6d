"""A stand-in for `torch.cuda` with several GPUs, which tells the GPUs that a thread has opened.

A GPU is opened by what torch opens it for: setting its stream, which torch does both at the
beginning and at the end of `torch.cuda.stream`. Each thread begins with GPU 0 as its current one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stream:
    def __init__(self, cuda: OpenedGpus, device: Any) -> None:
        self.cuda = cuda
        self.device = torch.device(device)

    def __repr__(self) -> str:
        return f"stream of {self.device}"

    def wait_event(self, event: Any) -> None:
        self.cuda.done.append(f"{self} waits for {event}")

    def record_event(self) -> str:
        return f"the work of {self.device}"

    def synchronize(self) -> None:
        self.cuda.opened.add(self.device.index)
        self.cuda.done.append(f"the host waits for {self}")


class OpenedGpus:
    """Replaces `torch.cuda`. It is written as torch's own functions are.

    Attributes:
        opened: the numbers of the GPUs on which this process has a context.
        done: what streams were told to wait for, and what the host has waited for, in order.
    """

    def __init__(self) -> None:
        self.opened: set[int] = set()
        self.done: list[str] = []
        self._of_thread = threading.local()

    def current_device(self) -> int:
        return getattr(self._of_thread, "index", 0)

    def set_device(self, device: Any) -> None:
        self._of_thread.index = torch.device(device).index
        self.opened.add(self.current_device())

    def current_stream(self, device: Any = None) -> Stream:
        if device is None:
            device = torch.device("cuda", self.current_device())
        return self._streams.setdefault(torch.device(device).index, Stream(self, device))

    def Stream(self, device: Any) -> Stream:
        return Stream(self, device)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self.current_device()
        self.set_device(device)
        yield
        if before in self.opened:  # torch returns to a GPU only if it has a context there
            self._of_thread.index = before

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        if before.device == stream.device:
            self._set_stream(stream)
            yield
        else:
            before_there = self.current_stream(stream.device)
            self._set_stream(stream)
            yield
            self._set_stream(before_there)
        self._set_stream(before)

    @property
    def _streams(self) -> dict[int, Stream]:
        """The current stream of each GPU in this thread."""
        return self._of_thread.__dict__.setdefault("streams", {})

    def _set_stream(self, stream: Stream) -> None:
        self.set_device(stream.device)
        self._streams[stream.device.index] = stream
