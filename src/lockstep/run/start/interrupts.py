"""Ends a run when the user asks for it, by Ctrl-C or another signal."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

from torch.distributed.elastic.multiprocessing import SignalException

from lockstep.run.watch.exit_status import Interruption


class Interrupts:
    """The signals that the user sends to the launcher to end the run."""

    def __init__(self) -> None:
        self.received: Interruption | None = None
        """The first signal; None if there was none."""
        self.kill_at_once = False
        """True once a second signal has come: ranks that are still running are not waited for."""
        self._is_in_delayed_block = False
        self._delayed_error: SignalException | None = None
        """The exception of a signal that has come in a `delayed` block."""

    def interrupt(self, number: int) -> None:
        """Ends the run in an orderly way. The second call has the ranks killed at once.

        Args:
            number: number of the signal that the launcher has received.

        Raises:
            SignalException: at the first call. Inside a `delayed` block, the exception is raised
                when the block ends.
        """
        if self.received is not None:
            self.kill_at_once = True
            return

        self.received = Interruption(signal=number, time=time.time())
        error = SignalException(
            f"process {os.getpid()} got signal {number}", signal.Signals(number)
        )
        if self._is_in_delayed_block:
            self._delayed_error = error
        else:
            raise error

    @contextlib.contextmanager
    def delayed(self) -> Iterator[None]:
        """Delays a signal that ends the run until the end of the block.

        Such a block reads from the fork server which ranks have ended, for example, and records
        that. If a signal came in between, the end of a rank would be lost, and the launcher would
        wait for it forever.
        """
        self._is_in_delayed_block = True
        try:
            yield
        finally:
            self._is_in_delayed_block = False

            # If a signal has come in the block, its exception was kept. It is raised even if the
            # block has raised another one, as the user wants the run to end.
            error = self._delayed_error
            self._delayed_error = None
            if error is not None:
                raise error
