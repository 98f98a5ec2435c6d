"""Runs the thread in which a rank writes its part of a checkpoint while training continues.

A save is *given up* if the run ends before everything is written: the thread stops, and the hidden
folder into which it writes is removed. The same happens before a signal such as SIGTERM ends the
process (`termination`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection
from pathlib import Path

from lockstep.checkpoint import termination
from lockstep.checkpoint.lock import Lock
from lockstep.checkpoint.save import begin_checkpoint, remove_unfinished
from lockstep.distributed.collectives import Collectives, run_on_all_ranks
from lockstep.errors import LockstepError, warn

MAX_WAIT_FOR_THREAD_S = 2.0
"""How long `give_up` waits for the thread to stop by itself. The thread checks after each chunk of
a file whether it must stop."""


class SaveGivenUp(Exception):
    """Raised in the writing thread to end it, after the save has been given up."""


class Writer:
    """Runs one task after the other, each in a thread of its own.

    Python waits for such a thread when it exits, so a save that was started is completed.

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
        """The error that the thread has raised. The next call of `finish` raises it."""
        self._unfinished_folder: Path | None = None
        """The hidden folder into which this rank writes, until it has written its part."""
        self._given_up = threading.Event()
        self._run_failed = False
        self.has_unconfirmed_save = False
        """True from the beginning of a save until the ranks have told each other how it ended. It
        is the same on all ranks."""

    @property
    def busy(self) -> bool:
        """True while something is being written."""
        return self._thread is not None and not self._thread_ended.is_set()

    def begin(
        self, temporary: Path, damaged_names: Collection[str], *, may_replace_step: bool
    ) -> None:
        """Creates the hidden folder of a checkpoint (see `begin_checkpoint`), and protects it."""
        self.protect_folder(temporary)
        begin_checkpoint(temporary, damaged_names, self.lock, may_replace_step=may_replace_step)

    def protect_folder(self, temporary: Path) -> None:
        """Makes sure that a folder is removed if the save is given up or a signal ends the process.

        The protection ends when this rank has written its part.
        """
        self._given_up.clear()
        self._unfinished_folder = temporary
        termination.protect(self._clean_up_at_signal)

    def start(self, work: Callable[[], object]) -> None:
        """Starts a thread that calls `work`. The previous thread must have ended.

        If `work` raises an error, the next call of `finish` raises it.
        """

        def run() -> None:
            """Runs in the thread, and keeps the error if `work` raises one."""
            try:
                work()
                self._unfinished_folder = None  # this rank's part is written, and must remain
            except SaveGivenUp:
                pass  # no error of the thread: `give_up` was called, to end it
            except Exception as error:
                self._error = error
            finally:
                self._thread_ended.set()

        self._thread_ended.clear()
        self._thread = threading.Thread(target=run, name="lockstep-checkpoint")
        try:
            self._thread.start()
        except RuntimeError:  # the system allows no more threads
            self._thread = None  # so that nobody waits for its end
            raise

    def cancel(self) -> None:
        """Undoes `begin`, `protect_folder` and `start` after the save has failed."""
        self.give_up()
        # While a thread still writes, the signal handlers are needed. `finish` removes them.
        if not self.busy:
            termination.unprotect(self._clean_up_at_signal)

    def raise_if_given_up(self) -> None:
        """Raises SaveGivenUp if the save was given up. The thread calls this while it writes."""
        if self._given_up.is_set():
            raise SaveGivenUp("the run was ended before it was written")

    def run_has_failed(self) -> bool:
        """Returns True if the run has failed, so that other ranks may never write their parts."""
        # After an uncaught error, Python sets `sys.last_type` and ends the main thread. It then
        # waits for our thread before it calls `close`, so `_run_failed` is not set yet.
        ended_by_error = hasattr(sys, "last_type") and not threading.main_thread().is_alive()
        return self._run_failed or ended_by_error

    def give_up(self) -> None:
        """Stops the thread and removes the hidden folder, unless this rank has written its part.

        If the thread does not stop in time, because it waits for a disk, the folder is removed
        anyway.
        """
        # The folder is None if there is no save, or if this rank has written its part.
        temporary = self._unfinished_folder
        if temporary is None:
            return

        self._given_up.set()
        # A signal handler may call this in the writing thread, which cannot wait for itself.
        is_writing_thread = threading.current_thread() is self._thread
        if self._thread is not None and not is_writing_thread:
            self._thread_ended.wait(MAX_WAIT_FOR_THREAD_S)
        self._unfinished_folder = None
        remove_unfinished(temporary)

    def _clean_up_at_signal(self) -> None:
        """Cleans up before a signal ends this process. Called by `termination`."""
        self.give_up()
        self.lock.release()

    def finish(self, timeout_s: float | None = None) -> None:
        """Waits until this rank has written its part. Raises the error of the thread, if any.

        Args:
            timeout_s: seconds after which a save that is not complete is given up; None: never.

        Raises:
            Exception: the error that the thread has raised since the last call.
        """
        if self._thread is not None:
            # Not `Thread.join`: if Ctrl-C interrupts it, Python 3.11 and 3.12 believe that the
            # thread has ended.
            has_ended = self._thread_ended.wait(timeout_s)
            if not has_ended:
                self.give_up()
                raise SaveGivenUp("there was no time left for it")
            self._thread.join()  # takes no time, because the thread has nothing left to do
            self._thread = None

        # No folder is half-written now, so a signal has nothing to remove.
        termination.unprotect(self._clean_up_at_signal)

        error = self._error
        self._error = None
        if error is not None:
            raise error

    def close(self, failed: bool, timeout_s: float | None = None) -> None:
        """Completes the last save at the end of the run.

        - Usually all ranks do this together. If one cannot write its part, all raise the error.
        - If this rank has failed, other ranks may be missing. So it completes its part alone, and
          only warns if that does not succeed.
        - If all ranks already know how the last save ended, there is nothing to wait for.

        If a signal interrupts the wait, the half-written checkpoint is removed.

        Args:
            failed: True if this process ends with an error.
            timeout_s: if this rank has failed, the seconds after which a save that is not complete
                is given up; None: never.

        Raises:
            CheckpointError: the last checkpoint could not be written. Not raised if this rank has
                failed, so that the error with which it ends is not replaced.
        """
        self._run_failed = self._run_failed or failed

        # The handler of `checkpoint.step()` for SIGTERM has been removed, so the signal ends the
        # process from now on. The half-written folder must be removed before that.
        if self.busy:
            termination.protect(self._clean_up_at_signal)

        if self.has_unconfirmed_save and not failed:
            self._close_together()
            return
        if failed and self._user_has_interrupted():
            timeout_s = 0.0  # give up at once
        # If all ranks know how the last save ended, this only releases the lock.
        self._close_alone(timeout_s)

    def _close_alone(self, timeout_s: float | None) -> None:
        """Completes the part of this rank, and only warns if that does not succeed."""
        try:
            self._finish_and_release(timeout_s)
        except Exception as error:
            reason = str(error)
            advice = "resume from the checkpoint before it"
            if isinstance(error, LockstepError):
                reason = error.found
                advice = error.do
            warn(
                self._action,
                found=f"the last checkpoint is not there: {reason}",
                do=advice,
                on_this_rank=True,
            )

    def _close_together(self) -> None:
        """Completes the parts of all ranks, which all call this.

        If a rank cannot write its part, all of them raise the error.
        """
        # The training loop may have blocked collectives. It has ended, so they are allowed again.
        self._collectives.unblock()
        try:
            run_on_all_ranks(
                self._collectives, self._action, lambda: self._finish_and_release(timeout_s=None)
            )
        except LockstepError:
            raise
        except RuntimeError:
            # This is torch's error: the process group is gone, because another rank has failed.
            # That is reported elsewhere, so it is enough if rank 0 raises this one.
            if self._collectives.topology.is_main:
                raise

    def _user_has_interrupted(self) -> bool:
        """Returns True if the user has pressed Ctrl-C while Python waited for the writing thread.

        After an uncaught error, Python first ends the main thread, then waits for all other
        threads, and only then calls `close`. If the writing thread is still busy by then, that wait
        was interrupted.
        """
        main_thread_has_ended = not threading.main_thread().is_alive()
        return self.busy and main_thread_has_ended

    def _finish_and_release(self, timeout_s: float | None) -> None:
        """Calls `finish`, and then releases the lock on the folder, even after an error."""
        try:
            self.finish(timeout_s)
        finally:
            self.give_up()
            termination.unprotect(self._clean_up_at_signal)
            self.lock.release()
