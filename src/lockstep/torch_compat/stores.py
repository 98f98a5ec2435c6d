"""The stores by which ranks meet."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any


def list_keys(store: Any) -> list[str] | None:
    """Returns the keys in a TCPStore; None: a torch before 2.10 does not tell them."""
    if not hasattr(store, "list_keys"):
        return None
    keys: list[str] = store.list_keys()
    return keys


def separate_attempts(attempt: int) -> None:
    """Gives the keys of each attempt a prefix of their own, `attempt_1/`, for torch before 2.10.

    The launcher's store outlives the ranks. Without the prefix, the ranks of the second attempt
    would read the addresses that the ranks of the first one have written, and connect to processes
    that are gone. With torch 2.10 or later, the launcher deletes these keys instead.

    Only scripts that call torch's `init_process_group` themselves need this. `lockstep.init` opens
    its store in another way, with such a prefix of its own.

    Args:
        attempt: how often the ranks of the run have been started before.
    """
    from torch.distributed import PrefixStore, TCPStore

    launcher_deletes_old_keys = hasattr(TCPStore, "list_keys")
    if launcher_deletes_old_keys:
        return

    def create_store(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        store = original(*args, **kwargs)
        is_store_of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if is_store_of_launcher:
            return PrefixStore(f"attempt_{attempt}", store)
        return store

    replace_store_creation(create_store)


_VALIDATE_AND_PING = struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 0x10C5)
"""The first requests of TCPStore's client (torch/csrc/distributed/c10d/TCPStore.cpp): VALIDATE with
a magic number, PING with any number."""


_PONG = struct.pack("<I", 0x10C5)
"""The answer of a store: the number of PING."""


def answers_as_store(connection: socket.socket) -> bool:
    """Returns True if a TCPStore is at the other end of a connection.

    Torch's own client cannot be used: it waits without end, whatever its timeout, for something
    that listens and sends nothing.

    Args:
        connection: a connected socket that has a timeout.
    """
    try:
        connection.sendall(_VALIDATE_AND_PING)
        return connection.recv(len(_PONG), socket.MSG_WAITALL) == _PONG
    except OSError:
        return False


def replace_store_creation(replacement: Callable[..., Any]) -> None:
    """Makes `init_process_group` create its TCPStore by another function.

    Args:
        replacement: the function; it is called with torch's own function, followed by the host, the
            port, the rank, the world size, and what else torch passes.
    """
    rendezvous: Any = import_module("torch.distributed.rendezvous")
    rendezvous._create_c10d_store = partial(replacement, rendezvous._create_c10d_store)


def redirect_store(*, from_port: int, to_port: int) -> None:
    """Makes `init_process_group` connect to a running store instead of serving one.

    A store that torch serves listens on all interfaces of the machine, so others could reach it.
    Lockstep serves a store that listens on one address only, and redirects torch to it.

    Args:
        from_port: the port in `tcp://HOST:PORT`, or MASTER_PORT for `env://`. Calls with any
            other port are not changed.
        to_port: the port of the running store.
    """
    from torch.distributed import TCPStore

    def create_store(
        original: Any, host: str, port: int, rank: int, size: int, timeout: Any, *rest: Any
    ) -> Any:
        if port != from_port:
            return original(host, port, rank, size, timeout, *rest)
        return TCPStore(host, to_port, size, is_master=False, timeout=timeout)

    replace_store_creation(create_store)
