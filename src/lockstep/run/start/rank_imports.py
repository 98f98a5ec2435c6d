"""Imports the modules that every rank needs, in the process from which the ranks are forked."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import types
from collections.abc import Iterator, Sequence
from importlib import import_module


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Switches the garbage collector off for a block of imports, and makes Ctrl-C end the block.

    While torch is imported, the collector would go through all of torch's objects again and again,
    which takes longer than the import itself. And Ctrl-C alone would not end the imports if one of
    the modules catches all exceptions.
    """
    was_enabled = gc.isenabled()
    with _interrupt_ends_block():
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


@contextlib.contextmanager
def _interrupt_ends_block() -> Iterator[None]:
    """Makes Ctrl-C end a block of imports with a KeyboardInterrupt, even if a module catches it.

    A module may catch it together with other exceptions, so it is raised again when the block ends.
    """
    # Only the main thread may set handlers, and a handler that the user has set stays in place.
    is_main_thread = threading.current_thread() is threading.main_thread()
    has_default_handler = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_main_thread or not has_default_handler:
        yield
        return

    was_interrupted = threading.Event()

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        was_interrupted.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    if was_interrupted.is_set():
        raise KeyboardInterrupt


@without_garbage_collection()
def import_for_ranks(modules: Sequence[str]) -> None:
    """Imports the modules that every rank would import, without starting threads or using CUDA.

    This is called in the fork server, of which the ranks are copies, so that they start quickly.

    Args:
        modules: names of further modules that these ranks would import.
    """
    import torch
    import torch.distributed
    import torch.nn.parallel
    import torch.utils.data

    # When `torch.distributed.nn.functional` is imported, the default process group becomes a
    # default argument of its functions. If a rank imported it while a group is open, the functions
    # would keep that group alive after it was destroyed. So it is imported here, where no group is
    # open.
    import torch.distributed.nn.functional  # noqa: F401  # isort: skip

    from lockstep.run.watch import error_record, probe, script_processes  # noqa: F401

    for name in modules:
        import_module(name)
