"""Says whether this process is a copy of the one that has called `lockstep.launch`.

OpenMP keeps the threads of a parallel region for the next one. In a copy that `fork` makes they do
not exist, and the next parallel region would wait for them forever. So a copy has to compute with a
single thread, whatever number the user or a checkpoint asks for.
"""

from __future__ import annotations

THREADS_OF_COPY = 1
WHY_ONE_THREAD = (
    "OpenMP's threads do not survive in copies of a process, in which lockstep.launch runs "
    "closures and functions of a notebook"
)

WAY_TO_SEVERAL_THREADS = "define the function in a module: launch then runs it in new processes"

_is_copy = False
_threads_asked_for: int | None = None


def become_copy(threads_asked_for: int | None) -> None:
    """Records that this process is a copy.

    Args:
        threads_asked_for: the number of threads that the user has set for the processes of the
            launch, in OMP_NUM_THREADS; None if there is none.
    """
    global _is_copy, _threads_asked_for
    _is_copy = True
    _threads_asked_for = threads_asked_for


def is_copy() -> bool:
    """Returns True if this process is a copy."""
    return _is_copy


def threads_asked_for() -> int | None:
    """Returns the number of threads that the user has set for this copy, which it cannot use."""
    return _threads_asked_for
