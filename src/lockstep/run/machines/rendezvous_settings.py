"""Reads the settings of a rendezvous from torchrun's flags: timeouts, host and port.

torch parses --rdzv-backend, --rdzv-endpoint and --rdzv-conf into `RendezvousParameters`. With the
backend "static", their endpoint consists of --master-addr and --master-port. The options and their
defaults are torch's own.
"""

from __future__ import annotations

import math
from datetime import timedelta

from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from lockstep.errors import SettingError
from lockstep.machine import network
from lockstep.machine.network import Endpoint

# Torch's own defaults.
DEFAULT_JOIN_TIMEOUT_S = 600.0
DEFAULT_READ_TIMEOUT_S = 60.0
DEFAULT_LAST_CALL_TIMEOUT_S = 30.0
NO_PORT = -1  # of an endpoint without a port
DEFAULT_C10D_PORT = 29400


def join_timeout(parameters: RendezvousParameters) -> float:
    """Returns how long nodes wait for each other, in seconds."""
    return _read_seconds(parameters, "join_timeout", DEFAULT_JOIN_TIMEOUT_S)


def store_timeout(parameters: RendezvousParameters) -> timedelta:
    """Returns how long clients of the store wait for an answer."""
    seconds = _read_seconds(parameters, "read_timeout", DEFAULT_READ_TIMEOUT_S)
    return timedelta(seconds=seconds)


def last_call_timeout(parameters: RendezvousParameters) -> float:
    """Returns how long the first round waits for more nodes once there are enough, in seconds."""
    return _read_seconds(parameters, "last_call_timeout", DEFAULT_LAST_CALL_TIMEOUT_S)


def _read_seconds(parameters: RendezvousParameters, name: str, default: float) -> float:
    """Reads a number of seconds from --rdzv-conf.

    Args:
        parameters: torchrun's flags for the rendezvous.
        name: the name of the option. The static backend has one option for all timeouts, `timeout`,
            so `name` and `default` are not used with it.
        default: the value if the option is not given.

    Raises:
        SettingError: it is not a number above 0.
    """
    if parameters.backend == "static":
        name = "timeout"
        default = DEFAULT_JOIN_TIMEOUT_S

    value = parameters.get(name, default)
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan  # not a number, so the check below raises the error

    if not 0 < seconds < math.inf:
        raise SettingError(
            f"--rdzv-conf {name}={value}", "not a number of seconds above 0", "write a number"
        )
    return seconds


def read_endpoint(parameters: RendezvousParameters) -> Endpoint:
    """Returns the host and port at which the nodes meet.

    Raises:
        SettingError: the endpoint is malformed, or has no port at which several nodes could meet.
    """
    if parameters.backend == "static":
        flags = "--master-addr and --master-port"
        default_port = NO_PORT
        advice = "give --master-port a number from 1 to 65535"
    else:
        flags = "--rdzv-endpoint"
        default_port = DEFAULT_C10D_PORT
        advice = "write HOST:PORT, with a port from 1 to 65535"

    was_set = f"{flags}: {parameters.endpoint!r}"
    try:
        host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port)
    except ValueError as error:
        # torch's message says what is wrong with the port; a host may be missing as well.
        raise SettingError(was_set, str(error), advice) from None

    has_port = port >= 1
    if not has_port and parameters.max_nodes > 1:
        raise SettingError(
            was_set,
            "no port is given at which the machines can meet",
            "give the address of one of the machines and a free port there, the same on all",
        )

    return Endpoint(host, port, processes_meet_at_loopback=network.means_loopback(host))
