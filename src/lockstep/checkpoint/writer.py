"""Writes checkpoints while the training goes on: one thread of rank 0, one checkpoint at a time.

Communication: none but at the end of the run, where rank 0 tells the others how it went.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path

from lockstep.checkpoint.lock import Lock
from lockstep.checkpoint.together import everywhere
from lockstep.errors import LockstepError
from lockstep.runtime.collectives import Collectives


class Writer:
    """Runs one piece of work after the other, each in a thread that ends with it.

    Python waits for such a thread at its exit, so that what was handed over is finished.

    Args:
        folder: what is written to.
        collectives: of the run.
    """

    def __init__(self, folder: Path, collectives: Collectives) -> None:
        self.lock = Lock(folder)
        self._doing = f"saving a checkpoint in {folder}"
        self._collectives = collectives
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._open = False
        """Whether something was begun, on rank 0, of which the ranks have not heard the end."""

    @property
    def busy(self) -> bool:
        """Something is being written."""
        return self._thread is not None and self._thread.is_alive()

    def told(self, begun: bool) -> None:
        """To be called on all ranks when they have heard that something was begun, or its end."""
        self._open = begun

    def start(self, work: Callable[[], object]) -> None:
        """Begins with the work; what was begun before must be over."""

        def run() -> None:
            try:
                work()
            except Exception as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="lockstep-checkpoint")
        self._thread.start()

    def finish(self) -> None:
        """Returns when all is written. Its result must be told to all ranks.

        Raises:
            Exception: what went wrong since the last call, once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self, failed: bool) -> None:
        """Finishes at the end of the run; on all ranks, but for those that have failed.

        Raises:
            CheckpointError: the last checkpoint could not be written.
        """
        was_open = self._open

        def work() -> tuple[None, str]:
            try:
                self.finish()
            finally:
                self.lock.release()
            return None, ""

        if failed or not was_open:
            try:
                work()
            except Exception as error:
                warnings.warn(f"the last checkpoint is not there: {error}", stacklevel=2)
            return
        self._collectives.blocked = None  # the loop is left
        try:
            everywhere(self._collectives, self._doing, work)
        except RuntimeError as error:
            # The group may be gone with a rank that has failed, which is told elsewhere.
            if isinstance(error, LockstepError) or self._collectives.topology.is_main:
                raise
