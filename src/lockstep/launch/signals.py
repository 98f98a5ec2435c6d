"""SIGTERM to the launcher as an exception that unwinds it, so that what it started is ended."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(SystemExit):
    """The launcher was sent SIGTERM, as `KeyboardInterrupt` says that it was sent SIGINT."""


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Within it SIGTERM raises `Terminated`; elsewhere than in the main thread it does nothing.

    A handler that the user has set is left in place.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _raise(number: int, frame: FrameType | None) -> None:
    raise Terminated(128 + number)
