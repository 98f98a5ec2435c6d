"""Defines the messages between the launcher and the zygote, which forks the ranks.

They talk over a socket that keeps messages apart. The launcher sends requests:

    START                              start a rank; it comes with four descriptors: the rank's
                                       streams, and a file that contains a `RankRequest`
    {"signal": 15, "ranks": [0, 1]}    send ranks a signal
    {"give_up": 3}                     do not wait for the end of rank 3 any longer
    {"left_behind": true}              end the processes that ranks have left behind

The zygote sends an `Event` when it has started a rank, when a rank has ended, and when it has ended
what ranks have left behind.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Iterable, Sequence
from typing import IO, NamedTuple

START = b"start"
"""The message that comes with descriptors."""
_MESSAGE_BYTES = 1 << 17
_MAX_DESCRIPTORS = 4
"""The descriptors of a message: a rank's input, output and error, and the file with its request."""
_LEFT_BEHIND = -1
"""Used in an event instead of a rank's number: the processes left behind by ranks have ended."""


class Event(NamedTuple):
    """Says that a rank was started, could not be started, or has ended."""

    rank: int
    """The number of the rank on this machine."""
    pid: int | None
    """The process id; None if the system refused to create the process."""
    code: int | None = None
    """The exit code, or minus the number of the signal that ended it; None while it is running."""
    reason: str = ""
    """Why the system refused to create the process. If the event is about processes left behind by
    ranks, the ids of those that do not end."""

    @property
    def says_start_was_refused(self) -> bool:
        """True if the system has refused to create the process of the rank."""
        return self.pid is None

    @property
    def pids_left_behind(self) -> list[int] | None:
        """The processes left behind by ranks that do not end; None if the event is about a rank."""
        if self.rank != _LEFT_BEHIND:
            return None
        return [int(pid) for pid in self.reason.split()]

    @property
    def says_started(self) -> bool:
        """True if the rank was started; otherwise a process that was created has ended."""
        return self.pid is not None and self.code is None


def event_about_left_behind(pids: Iterable[int]) -> Event:
    """Returns the event that says which processes left behind by ranks do not end."""
    return Event(rank=_LEFT_BEHIND, pid=None, reason=" ".join(str(pid) for pid in pids))


class RankRequest(NamedTuple):
    """Says how a rank is to be started. Its values are plain, as it is written as JSON."""

    rank: int
    """The number of the rank on this machine."""
    environment: dict[str, str]
    """The environment variables that it gets in addition to the launcher's."""
    own_session: bool
    """True if it gets a session of its own, False if it stays in that of the terminal."""
    command: list[str]
    """The program that it executes; empty if it stays a copy of the zygote."""


def send_rank_request(channel: socket.socket, request: RankRequest, streams: Iterable[int]) -> None:
    """Sends the request for a rank.

    Args:
        channel: the launcher's end of the socket to the zygote.
        request: the request.
        streams: descriptors that become the rank's standard input, output and error.
    """
    with unnamed_file() as file:  # the request may be too long for a message
        file.write(json.dumps(request).encode())
        file.flush()
        socket.send_fds(channel, [START], [*streams, file.fileno()])


def read_rank_request(files: Sequence[int]) -> RankRequest:
    """Reads the request for a rank.

    Args:
        files: descriptors of the rank's input, output and error, and of the file with the request.
    """
    request_file = files[-1]
    size = os.fstat(request_file).st_size
    return RankRequest(*json.loads(os.pread(request_file, size, 0)))


def receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """Receives a message and the descriptors that came with it; both are empty at the end of the
    stream.
    """
    try:
        data, descriptors, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, _MAX_DESCRIPTORS)
    except ConnectionResetError:
        return b"", []
    return data, descriptors


def unnamed_file() -> IO[bytes]:
    """Creates an empty file without a name, which is passed to other processes by its descriptor.

    It is in memory if the system has such files, as the disk with the temporary folder may be full.
    """
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("lockstep-request"), "w+b")
    return tempfile.TemporaryFile()


def control_sockets() -> tuple[socket.socket, socket.socket]:
    """Creates two connected sockets that preserve the boundaries of messages."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
