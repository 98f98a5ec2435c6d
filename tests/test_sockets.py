from __future__ import annotations

import errno
import os
import socket
from datetime import timedelta

import psutil
import pytest

from lockstep.machine.network import (
    LOOPBACK,
    address_reaching,
    is_loopback_address,
    listening_socket,
    local_addresses,
    means_loopback,
    owner_of,
    resolve,
    serve_store,
)

pytestmark = pytest.mark.unit


def test_this_machine_has_loopback() -> None:
    assert any("127.0.0.1" in own for own in local_addresses().values())
    assert address_reaching("127.0.0.1") == "127.0.0.1"
    assert address_reaching("no.such.host.invalid") is None
    assert address_reaching(None) is None
    assert resolve("127.0.0.1") == ["127.0.0.1"]
    assert resolve("no.such.host.invalid") == []
    assert (resolve("a..b"), address_reaching("a..b")) == ([], None)  # no name for a look-up


@pytest.mark.parametrize(
    ("host", "means"),
    [
        ("localhost", True),
        ("127.0.1.1", True),
        ("::1", True),
        ("::1%lo", True),
        ("10.0.0.5", False),
        ("node0", False),
        ("", False),
        (None, False),
    ],
)
def test_what_can_only_mean_the_own_machine(host: str | None, means: bool) -> None:
    assert means_loopback(host) is means


def test_only_an_address_is_judged_as_one() -> None:
    assert is_loopback_address("127.0.1.1")
    assert not is_loopback_address("fd00::5%eth0")
    with pytest.raises(ValueError, match="localhost"):
        is_loopback_address("localhost")


def test_the_owner_of_a_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert owner_of(server.getsockname()[1]).startswith(f"process {os.getpid()}: ")
        arguments = ["python", "-c", "import socket\nserver =\tsocket.socket()\n"]
        monkeypatch.setattr(psutil.Process, "cmdline", lambda process: arguments)
        assert owner_of(server.getsockname()[1]) == (
            f"process {os.getpid()}: python -c import socket server = socket.socket()"
        )
    assert owner_of(1) == "another program"


def test_a_store_listens_at_one_address_and_a_taken_port_is_an_error() -> None:
    store = serve_store(LOOPBACK, 0, timedelta(seconds=10))
    with socket.create_connection((LOOPBACK, store.port), timeout=10):
        pass
    with pytest.raises(ConnectionRefusedError):  # torch's own would listen here as well
        socket.create_connection(("127.0.0.2", store.port), timeout=10)
    with pytest.raises(OSError, match="in use") as caught:
        listening_socket(LOOPBACK, store.port)
    assert caught.value.errno == errno.EADDRINUSE
