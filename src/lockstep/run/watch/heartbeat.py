"""Implements a rank's heartbeat: a small file in shared memory with a count of its optimizer steps.

The rank updates it after each step, which takes about a microsecond. The launcher reads it often,
to see whether the rank still makes progress.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from pathlib import Path
from typing import NamedTuple

_MAGIC = b"lkheart1"
# The magic bytes, then the fields of `Heartbeat` in their order.
_LAYOUT = struct.Struct("=8sqQQdd")
# The last three fields, which change with every step.
_STEP_LAYOUT = struct.Struct("=Qdd")
_STEP_OFFSET = _LAYOUT.size - _STEP_LAYOUT.size


class Heartbeat(NamedTuple):
    """The contents of a rank's heartbeat."""

    pid: int
    main_thread: int
    """The main thread's identifier, as in `flight.json`."""
    steps: int
    """Optimizer steps so far."""
    last_step: float
    """The end of the last step by `time.monotonic()`, which all processes of a host share; 0 if
    there was none."""
    took_s: float
    """The time between the ends of the last two steps; 0 if there were fewer."""


def read_heartbeat(path: Path) -> Heartbeat | None:
    """Reads a rank's heartbeat, which takes a few microseconds.

    Returns:
        The heartbeat, or None if the rank has not written one yet.
    """
    try:
        data = path.read_bytes()
        magic, *values = _LAYOUT.unpack(data[: _LAYOUT.size])
    except (OSError, struct.error):  # there is no such file, or it is still empty
        return None
    if magic != _MAGIC:
        return None
    return Heartbeat(*values)


class HeartbeatWriter:
    """Writes the heartbeat of this process into a file that no other process writes."""

    def __init__(self, path: Path) -> None:
        self.steps = 0
        self._last_step_at = 0.0
        main_thread = threading.main_thread().ident or 0
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        os.pwrite(descriptor, _LAYOUT.pack(_MAGIC, os.getpid(), main_thread, 0, 0.0, 0.0), 0)
        self._memory: mmap.mmap | None = mmap.mmap(descriptor, _LAYOUT.size)
        os.close(descriptor)

    def count_step(self, *_: object) -> None:
        """Counts one optimizer step, and writes its number, time and duration into the file.

        This is a step hook of torch's optimizers. The arguments of the hook are not used.
        """
        if self._memory is None:  # see `stop`
            return
        self.steps += 1
        now = time.monotonic()
        is_first_step = self._last_step_at == 0.0
        took_s = 0.0 if is_first_step else now - self._last_step_at
        _STEP_LAYOUT.pack_into(self._memory, _STEP_OFFSET, self.steps, now, took_s)
        self._last_step_at = now

    def stop(self) -> None:
        """Stops counting, in a forked child whose steps are not the rank's."""
        self._memory = None
