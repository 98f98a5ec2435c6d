"""Defines the messages between the launcher and the fork server, which forks the ranks.

They talk over a socket that keeps messages apart. The launcher sends requests:

    START                              start a rank; it comes with four descriptors: the rank's
                                       streams, and a file that contains a `RankRequest`
    {"signal": 15, "ranks": [0, 1]}    send ranks a signal
    {"give_up": 3}                     do not wait for the end of rank 3 any longer
    {"left_behind": 2}                 end the processes that ranks have left behind; this is the
                                       second request to do so

The fork server sends an `Event`, as a JSON list, when it has started a rank and when a rank has
ended. When it has ended what ranks have left behind, it sends a JSON object:

    {"left_behind": 2, "not_ended": [4711]}   this answers the second request; process 4711 does
                                              not end
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Iterable, Sequence
from typing import IO, Any, NamedTuple

START = b"start"
"""The message that comes with descriptors."""
_MESSAGE_BYTES = 1 << 17
_MAX_DESCRIPTORS = 4
"""The descriptors of a message: a rank's input, output and error, and the file with its request."""


class Event(NamedTuple):
    """Says that a rank was started, could not be started, or has ended."""

    local_rank: int
    """The number of the rank on this machine."""
    pid: int | None
    """The process id; None if the system refused to create the process."""
    code: int | None = None
    """The exit code, or minus the number of the signal that ended it; None while it is running."""
    reason: str = ""
    """Why the system refused to create the process."""

    @property
    def says_start_was_refused(self) -> bool:
        """True if the system has refused to create the process of the rank."""
        return self.pid is None

    @property
    def says_started(self) -> bool:
        """True if the rank was started; otherwise a process that was created has ended."""
        return self.pid is not None and self.code is None


def read_event(message: Any) -> Event | None:
    """Returns the event that a message of the fork server is; None if the message is an answer."""
    return Event(*message) if isinstance(message, list) else None


def answer_on_left_behind(request: int, pids: Sequence[int]) -> dict[str, Any]:
    """Returns the message that answers a request to end the processes left behind by ranks.

    Args:
        request: the number of the request.
        pids: the processes that do not end.
    """
    return {"left_behind": request, "not_ended": list(pids)}


def read_answer_on_left_behind(message: Any, request: int) -> list[int] | None:
    """Returns the process ids in a message of the fork server that answers a request.

    Args:
        message: the message.
        request: the number of the request.

    Returns:
        The ids of the processes that do not end; None if the message is an event, or answers
        another request.
    """
    if not isinstance(message, dict) or message["left_behind"] != request:
        return None
    pids: list[int] = message["not_ended"]
    return pids


class RankRequest(NamedTuple):
    """Says how a rank is to be started. Its values are plain, as it is written as JSON."""

    local_rank: int
    """The number of the rank on this machine."""
    environment: dict[str, str]
    """The environment variables that it gets in addition to the launcher's."""
    own_session: bool
    """True if it gets a session of its own, False if it stays in that of the terminal."""
    command: list[str]
    """The program that it executes; empty if it stays a copy of the fork server."""


def send_rank_request(channel: socket.socket, request: RankRequest, streams: Iterable[int]) -> None:
    """Sends the request for a rank.

    Args:
        channel: the launcher's end of the socket to the fork server.
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
