from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def free_port() -> Iterator[Callable[[], int]]:
    """Ports on loopback that nobody listens on; they stay ours, but a rank may listen there."""
    held: list[socket.socket] = []

    def reserve() -> int:
        holder = socket.socket()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        held.append(holder)
        return int(holder.getsockname()[1])

    yield reserve
    for holder in held:
        holder.close()
