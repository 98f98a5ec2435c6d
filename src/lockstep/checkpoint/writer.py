"""The thread in which a rank writes its part of a checkpoint while the training goes on.

A save is *given up* when the run ends before it is written: the thread stops, and the hidden folder
that it has begun to write is removed. That also happens before a signal such as SIGTERM ends the
process (`termination`).
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Collection
from pathlib import Path

from lockstep.checkpoint import termination
from lockstep.checkpoint.lock import Lock
from lockstep.checkpoint.save import begin_checkpoint, remove_unfinished
from lockstep.distributed.collectives import Collectives, run_on_all_ranks
from lockstep.errors import LockstepError

MAX_WAIT_FOR_THREAD_S = 2.0
"""How long `give_up` waits for the thread to stop by itself. The thread looks after each chunk of a
file whether it is to stop."""


class SaveGivenUp(Exception):
    """Ends the thread that writes a checkpoint which has been given up."""


class Writer:
    """Runs one task after the other, each in a thread that ends with it.

    Python waits for such a thread at its exit, so a save that was begun is finished.

    Args:
        folder: the folder of the run's checkpoints.
        collectives: the collectives of the run.
    """

    def __init__(self, folder: Path, collectives: Collectives) -> None:
        self.lock = Lock(folder)
        self._action = f"saving a checkpoint in {folder}"
        self._collectives = collectives
        self._thread: threading.Thread | None = None
        self._thread_ended = threading.Event()
        self._error: Exception | None = None
        """What the thread has raised. The next call of `finish` raises it."""
        self._unfinished_folder: Path | None = None
        """The hidden folder that this rank has begun to write to, until its part is in it."""
        self._given_up = threading.Event()
        self._run_failed = False
        self.has_unconfirmed_save = False
        """True from the beginning of a save until the ranks have told each other how it ended. It
        is the same on all ranks."""

    @property
    def busy(self) -> bool:
        """True while something is being written."""
        return self._thread is not None and not self._thread_ended.is_set()

    def begin(self, temporary: Path, damaged_names: Collection[str]) -> None:
        """Makes the hidden folder of a checkpoint, and protects it; see `begin_checkpoint`."""
        self.protect_folder(temporary)
        begin_checkpoint(temporary, damaged_names, self.lock)

    def protect_folder(self, temporary: Path) -> None:
        """Has this folder removed if the save is given up, or if a signal ends this process."""
        self._given_up.clear()
        self._unfinished_folder = temporary
        termination.protect(self._end_at_signal)

    def start(self, work: Callable[[], object]) -> None:
        """Starts a thread that does the work. The previous thread must have ended.

        What the work raises is raised by the next call of `finish`.
        """

        def run() -> None:
            """Runs in the thread: keeps the error, if the work raises one."""
            try:
                work()
                self._unfinished_folder = None  # so that `give_up` does not remove it
            except SaveGivenUp:
                pass  # whoever has given it up tells the user
            except Exception as error:
                self._error = error
            finally:
                self._thread_ended.set()

        self._thread_ended.clear()
        self._thread = threading.Thread(target=run, name="lockstep-checkpoint")
        try:
            self._thread.start()
        except RuntimeError:  # the system allows no more threads
            self._thread = None
            raise

    def cancel(self) -> None:
        """Undoes `begin`, `protect_folder` and `start` after the save has failed."""
        self.give_up()
        # While a thread still writes, the signals stay ours: `finish` gives them back.
        if not self.busy:
            termination.unprotect(self._end_at_signal)

    def raise_if_given_up(self) -> None:
        """Raises SaveGivenUp if the thread, which calls this while it writes, is to stop."""
        if self._given_up.is_set():
            raise SaveGivenUp("the run was ended before it was written")

    def run_has_failed(self) -> bool:
        """Returns True if the run has failed, so that other ranks may not write their parts."""
        # After an uncaught error (`sys.last_type`) the main thread ends, and Python waits for our
        # thread before it calls `close`, which would set `_run_failed`.
        ended_by_error = hasattr(sys, "last_type") and not threading.main_thread().is_alive()
        return self._run_failed or ended_by_error

    def give_up(self) -> None:
        """Removes the hidden folder, unless this rank has written its part.

        The thread is told to stop. If it does not, because it waits for a disk, the folder is
        removed all the same.
        """
        temporary = self._unfinished_folder
        if temporary is None:
            return
        self._given_up.set()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread_ended.wait(MAX_WAIT_FOR_THREAD_S)
        self._unfinished_folder = None
        remove_unfinished(temporary)

    def _end_at_signal(self) -> None:
        """Cleans up before a signal ends this process; `termination` calls it."""
        self.give_up()
        self.lock.release()

    def finish(self, timeout_s: float | None = None) -> None:
        """Waits until everything is written. The caller tells all ranks how that went.

        Args:
            timeout_s: seconds after which a save that is not complete is given up; None: never.

        Raises:
            Exception: what the thread has raised since the last call.
        """
        if self._thread is not None:
            # Thread.join is not used to wait: in Python 3.11 and 3.12, a join that Ctrl-C
            # interrupts marks the thread as ended.
            if not self._thread_ended.wait(timeout_s):
                self.give_up()
                raise SaveGivenUp("there was no time left for it")
            self._thread.join()
            self._thread = None
        termination.unprotect(self._end_at_signal)
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def close(self, failed: bool, timeout_s: float | None = None) -> None:
        """Finishes at the end of the run, together with all ranks that have not failed.

        If a signal ends the waiting, what is half written is removed.

        Args:
            failed: True if this process ends with an error.
            timeout_s: as in `finish`, if it has failed.

        Raises:
            CheckpointError: the last checkpoint could not be written.
        """
        self._run_failed = self._run_failed or failed
        if self.busy:
            # The handlers of `checkpoint.step()` for SIGTERM are gone: the signal ends the process
            # from now on, and the half-written folder must go before.
            termination.protect(self._end_at_signal)
            if failed and not threading.main_thread().is_alive():
                # Python is at its exit, where it waits for all threads before it calls `close`. If
                # one is still busy, Ctrl-C has ended that wait: do not wait again.
                timeout_s = 0.0

        # After a failure some ranks may be missing, so this rank does not wait for the others. Nor
        # does it if all ranks know already how the last save ended.
        if failed or not self.has_unconfirmed_save:
            try:
                self._finish_and_release(timeout_s)
            except Exception as error:
                warnings.warn(f"the last checkpoint is not there: {error}", stacklevel=2)
            return

        self._collectives.blocked_reason = None  # the training loop has ended
        try:
            run_on_all_ranks(
                self._collectives, self._action, lambda: self._finish_and_release(timeout_s)
            )
        except RuntimeError as error:
            # An error that is not ours comes from the process group, which is gone because another
            # rank has failed. That is reported elsewhere, so only rank 0 raises it.
            if isinstance(error, LockstepError) or self._collectives.topology.is_main:
                raise

    def _finish_and_release(self, timeout_s: float | None) -> None:
        """Does what `finish` does, and then releases the lock on the folder, whatever happens."""
        try:
            self.finish(timeout_s)
        finally:
            self.give_up()
            termination.unprotect(self._end_at_signal)
            self.lock.release()
