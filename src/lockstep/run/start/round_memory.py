"""Memory in which DiLoCo's last rounds outlive the ranks that made them.

Under DiLoCo a rank writes its state after each *round* (a number of local steps, then an averaging
of all replicas) into two files in memory by turns, see `lockstep.checkpoint.rounds`. The launcher
holds the files, so ranks that it starts again after a failure find the last complete round.
"""

from __future__ import annotations

import os

_FILES_PER_RANK = 2
"""While one is being written, the other one holds the round before."""


class RoundMemory:
    """Two files in memory for each rank of this machine.

    They are not in /dev/shm, which containers make small, and where files stay when a launcher is
    killed. They are anonymous files (memfd_create(2)) of this process, which its ranks open as
    `/proc/PID/fd/NUMBER`.

    Args:
        nproc: how many ranks get such files.
    """

    def __init__(self, nproc: int) -> None:
        self._descriptors = []
        for _ in range(_FILES_PER_RANK * nproc):
            self._descriptors.append(os.memfd_create("lockstep-rounds"))

    def variables(self, local_rank: int) -> dict[str, str]:
        """Returns the environment variable with the paths of a rank's files; empty: it has none."""
        begin = _FILES_PER_RANK * local_rank
        descriptors = self._descriptors[begin : begin + _FILES_PER_RANK]
        if not descriptors:
            return {}
        paths = [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in descriptors]
        return {"LOCKSTEP_MEMORY": " ".join(paths)}

    def write_times(self) -> list[int]:
        """Returns when each file was last written, in nanoseconds; 0: it was never written."""
        times = []
        for descriptor in self._descriptors:
            status = os.fstat(descriptor)
            times.append(status.st_mtime_ns if status.st_size else 0)
        return times

    @property
    def is_being_written(self) -> bool:
        """True if a rank is writing a round now: the first bytes of a file are written last."""
        for descriptor in self._descriptors:
            first_bytes = os.pread(descriptor, 8, 0)  # empty if the file was never written
            if first_bytes == bytes(8):  # still zero
                return True
        return False

    def close(self) -> None:
        """Frees the memory."""
        for descriptor in self._descriptors:
            os.close(descriptor)
