"""What the flags of torchrun say about the meeting place, and why nothing can listen there."""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from lockstep.errors import PortTakenError, SettingError
from lockstep.launch.nodes import Node
from lockstep.sockets import owner_of

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

# torch's own defaults.
_C10D_PORT = 29400
_STATIC_TIMEOUT_S = _JOIN_TIMEOUT_S = 600.0
_READ_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Endpoint:
    """What the store is known by to the launchers: a host name or address, and a port."""

    host: str
    port: int

    @property
    def text(self) -> str:
        """The endpoint as it is written on the command line."""
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def check(config: LaunchConfig) -> None:
    """Refuses node ranks that the number of nodes does not have.

    Raises:
        SettingError: as said.
    """
    rank = config.rdzv_configs.get("rank", 0)
    if config.rdzv_backend == "static" and not 0 <= int(rank) < config.max_nodes:
        raise SettingError(
            f"--node-rank {rank} with --nnodes {config.max_nodes}",
            f"node ranks count from 0 to {config.max_nodes - 1}",
            "give each machine a --node-rank of its own",
        )


def own_node(config: LaunchConfig) -> Node:
    """This launcher, as it introduces itself."""
    rank = int(config.rdzv_configs.get("rank", 0)) if config.rdzv_backend == "static" else None
    fewest = config.max_nodes if config.rdzv_backend == "static" else config.min_nodes
    return Node(
        number=0,
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        run_id=config.run_id or "none",
        nodes=f"{fewest}:{config.max_nodes}",
    )


def join_timeout(config: LaunchConfig) -> float:
    """Seconds that nodes wait for each other: `timeout` (static), `join_timeout` (c10d).

    Raises:
        SettingError: not a number above 0.
    """
    static = config.rdzv_backend == "static"
    name, default = ("timeout", _STATIC_TIMEOUT_S) if static else ("join_timeout", _JOIN_TIMEOUT_S)
    return _seconds(config, name, default)


def store_timeout(config: LaunchConfig) -> timedelta:
    """How long the store waits for an answer: `timeout` (static) or `read_timeout`."""
    static = config.rdzv_backend == "static"
    name, default = ("timeout", _STATIC_TIMEOUT_S) if static else ("read_timeout", _READ_TIMEOUT_S)
    return timedelta(seconds=_seconds(config, name, default))


def _seconds(config: LaunchConfig, name: str, default: float) -> float:
    given = config.rdzv_configs.get(name, default)
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise SettingError(
            f"--rdzv-conf {name}={given}", "not a number of seconds above 0", "write a number"
        )
    return seconds


def endpoint_of(config: LaunchConfig) -> Endpoint:
    """The host and port that all nodes were given.

    Raises:
        SettingError: they are malformed, or not given.
    """
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    static = config.rdzv_backend == "static"
    flags = "--master-addr and --master-port" if static else "--rdzv-endpoint"
    try:
        host, port = parse_rendezvous_endpoint(config.rdzv_endpoint, -1 if static else 29400)
    except ValueError as error:
        raise SettingError(
            f"{flags}: {config.rdzv_endpoint!r}", str(error), "write HOST:PORT"
        ) from None
    if port < 1 and config.max_nodes > 1:
        raise SettingError(
            f"{flags}: {config.rdzv_endpoint!r}",
            "there is no port at which several machines could meet",
            "give the address of one of the machines and a free port there, the same on all",
        )
    return Endpoint(host, port)


def cannot_listen(error: OSError, endpoint: Endpoint) -> PortTakenError | SettingError | OSError:
    """The error for a socket that could not be bound."""
    if error.errno == errno.EADDRINUSE:
        return PortTakenError(
            f"this machine serves the run at {endpoint.text}",
            f"port {endpoint.port} is taken by {owner_of(endpoint.port)}",
            "choose another port, the same on all nodes, or end that program",
        )
    if error.errno == errno.EACCES:
        return SettingError(
            f"this machine serves the run at {endpoint.text}",
            f"this user may not listen on port {endpoint.port}",
            "choose a port above 1023, the same on all nodes",
        )
    return error
