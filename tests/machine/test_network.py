from __future__ import annotations

import socket
import time

import pytest

from lockstep.errors import MasterUnreachableError, SettingError
from lockstep.machine import network

pytestmark = pytest.mark.unit

ONE = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.1.0.5", "fd00::5"]}
TWO = {**ONE, "ib0": ["10.2.0.5"]}
NAMES = {
    "localhost": ["127.0.0.1"],
    "node0": ["127.0.1.1"],  # as many systems have it in /etc/hosts
    "node0.lan": ["10.1.0.5"],
    "fast": ["10.2.0.5"],
    "service": ["172.20.0.9"],
    "both": ["fd00::5", "10.1.0.5"],
}


def endpoint(host: str) -> network.Endpoint:
    at_loopback = network.means_loopback(host)
    return network.Endpoint(host, 29400, processes_meet_at_loopback=at_loopback)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(network, "local_addresses", lambda: request.param)
    monkeypatch.setattr(network, "resolve", lambda host: NAMES.get(host, [host]))
    monkeypatch.setattr(network, "address_reaching", lambda *host: "10.2.0.5")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("machine", "host", "local_addr", "address"),
    [
        (ONE, "10.1.0.5", None, "10.1.0.5"),
        (ONE, "node0.lan", None, "10.1.0.5"),
        (ONE, "both", None, "fd00::5"),
        (TWO, "fast", "node0.lan", "10.2.0.5"),  # where the others go
        (TWO, "node0", "node0.lan", "10.1.0.5"),
        (TWO, "node0", None, "10.2.0.5"),  # on the default route
        ({"lo": ONE["lo"], "eth0": ["10.1.0.5"]}, "node0", None, "10.1.0.5"),  # the only one
        (TWO, "service", None, "10.2.0.5"),
        (ONE, "localhost", None, "127.0.0.1"),
        (ONE, "127.0.0.1", None, "127.0.0.1"),
    ],
    indirect=["machine"],
)
def test_the_gate_is_where_the_others_go(host: str, local_addr: str | None, address: str) -> None:
    assert network.serving_address(endpoint(host), local_addr) == address


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("machine", [{**ONE, "ib0": ["10.3.0.5"]}], indirect=True)
def test_a_loopback_address_is_never_chosen_for_others() -> None:
    with pytest.raises(MasterUnreachableError, match=r"172\.20\.0\.9 is not an address of this"):
        network.serving_address(endpoint("service"))
    with pytest.raises(SettingError, match=r"--local-addr 9\.9\.9\.9"):
        network.serving_address(endpoint("service"), "9.9.9.9")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("machine", [TWO], indirect=True)
def test_interfaces_are_found_by_address() -> None:
    assert network.interface_of("10.2.0.5") == "ib0"
    assert network.interface_of("fd00::5") == "eth0"
    assert network.interface_of("127.0.1.1") == "lo"
    assert network.interface_of("10.9.9.9") is None


def test_this_machine_is_known() -> None:
    assert network.interface_of("127.0.0.1") in {name for _, name in socket.if_nameindex()}
    assert network.is_here("127.0.0.1")
    assert not network.is_here("203.0.113.1")


def test_a_machine_has_interfaces_that_are_up() -> None:
    assert network.interface_of("127.0.0.1") in network.running_interfaces()


def test_many_ranks_ask_a_store_less_often_each(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(network.time, "sleep", pauses.append)
    deadline = time.monotonic() + 600
    network.wait_until(lambda: len(pauses) == 20, deadline)
    network.wait_until(lambda: len(pauses) == 40, deadline, ranks=8000)
    assert max(pauses[:20]) == 0.05
    assert pauses[-1] == 2.0
