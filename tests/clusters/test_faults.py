"""Faults of machines and of what lies between them: each is told by its name within 30 seconds, and
nothing is left running anywhere."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from namespaces import until

import lockstep
from clusters.machines import Cluster, Command, cluster, firewall
from clusters.test_hosts import LINGERS, LOOP, TRAINS

pytestmark = pytest.mark.clusters

TOLD_WITHIN_S = 30.0
"""What is promised. Machines that are namespaces share the cores of one, and still keep it."""
Plant = Callable[[Cluster, Path], AbstractContextManager[None]]
BIN, PACKAGE = Path(sys.executable).parent, Path(lockstep.__file__).parent


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(3, tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture
def machines(made: Cluster) -> Iterator[Cluster]:
    yield made
    made.nothing_runs()


def start(machines: Cluster, folder: Path, script: str, *options: str) -> Command:
    (folder / "train.py").write_text(script)
    (folder / "logs").mkdir(exist_ok=True)
    hosts = ["--hosts", "node1,node2,node3", "--ssh", machines.ssh, "--log-dir", "logs"]
    return machines.run(["run", *hosts, *options, "train.py"], folder)


# What a fault is


def unplugged(machines: Cluster, folder: Path) -> AbstractContextManager[None]:
    return machines.nodes[1].unplugged()


@contextmanager
def changed(file: Path, text: str) -> Iterator[None]:
    before = file.read_text()
    file.write_text(text)
    try:
        yield
    finally:
        file.write_text(before)


def another_port(machines: Cluster, folder: Path) -> AbstractContextManager[None]:
    config = machines.keys / "config"
    return changed(config, f"Host node2\n  Port 2222\n{config.read_text()}")


def another_host_key(machines: Cluster, folder: Path) -> AbstractContextManager[None]:
    known = machines.keys / "known_hosts"
    first, second, third = known.read_text().splitlines()
    second = f"{second.split()[0]} {' '.join(first.split()[1:])}"
    return changed(known, f"{first}\n{second}\n{third}\n")


def no_host_key(machines: Cluster, folder: Path) -> AbstractContextManager[None]:
    known = machines.keys / "known_hosts"
    first, _, third = known.read_text().splitlines()
    return changed(known, f"{first}\n{third}\n")


def no_permission(machines: Cluster, folder: Path) -> AbstractContextManager[None]:
    (folder / "none").touch()
    return machines.nodes[1].sees(folder / "none", machines.keys / "authorized_keys")


def empty_in_place_of(what: Path) -> Plant:
    def plant(machines: Cluster, folder: Path) -> AbstractContextManager[None]:
        (folder / "empty").mkdir()
        return machines.nodes[1].sees(folder / "empty", folder / what)

    return plant


def python_runs(line: str) -> Plant:
    return lambda machines, folder: machines.nodes[1].python_runs(line, folder)


def an_hour_ahead(machines: Cluster, folder: Path) -> AbstractContextManager[None]:
    line = "time; time.time = lambda now=time.time_ns: now() / 1e9 + 3600"
    return machines.nodes[1].python_runs(line, folder)


def full_disk(machines: Cluster, folder: Path) -> AbstractContextManager[None]:
    return machines.nodes[1].full(folder / "logs")


def dropping(way: str) -> Plant:
    """The switch drops long packets and says nothing, as where a tunnel's MTU is 1400."""
    return lambda machines, folder: firewall(
        machines.hub, "bridge", "forward", f"{way} meta length gt 1400 drop"
    )


def one_way_firewall(machines: Cluster, folder: Path) -> AbstractContextManager[None]:
    """Nobody connects to node3, but by ssh; node3 connects to all."""
    new = "tcp flags & (syn | ack) == syn tcp dport != 22 drop"
    return firewall(machines.nodes[2].namespace, "inet", "input", new)


_OTHER_TORCH = (
    "importlib.metadata as m; m.version = lambda name, was=m.version: "
    "'1.0' if name == 'torch' else was(name)"
)
_OTHER_PYTHON = "platform; platform.python_version_tuple = lambda: ('3', '9', '1')"

_LONG = "packets are longer than the way carries (MTU)"
_PING = "ping -M do -s 1472 node2"
BEFORE: dict[str, tuple[Plant, str, str]] = {
    "unreachable": (unplugged, "it does not answer", "ping node2"),
    "another port": (another_port, "no ssh server is listening there", "start sshd"),
    "host key changed": (another_host_key, "not the one that this machine knows", "-R node2"),
    "host key unknown": (no_host_key, "its host key is not known here", "config node2`"),
    "no permission": (no_permission, "it requires a password", "ssh-copy-id node2"),
    "other Python": (python_runs(_OTHER_PYTHON), "Python 3.9 there", "install Python"),
    "other torch": (python_runs(_OTHER_TORCH), "torch 1.0 there", "install torch"),
    "no Python": (empty_in_place_of(BIN), "cannot be started there", "same path"),
    "no Lockstep": (empty_in_place_of(PACKAGE.parent), "has no Lockstep there", "same env"),
    "other Lockstep": (empty_in_place_of(PACKAGE), "is not this version", "the same version"),
    "wrong folder": (empty_in_place_of(Path()), "train.py: there is no such file", "--copy"),
    "MTU to here": (dropping("iifname node2 oifname node1"), _LONG, _PING),
    "MTU from here": (dropping("iifname node1 oifname node2"), _LONG, _PING),
    "MTU elsewhere": (dropping("iifname node2 oifname node3"), "long ones do not", "set the MTU"),
    "one-way firewall": (one_way_firewall, "it cannot reach node3 at 10.98.0.3",
                         "on all ports"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BEFORE)
def test_what_keeps_a_run_from_being_started(machines: Cluster, tmp_path: Path, fault: str) -> None:
    plant, found, do = BEFORE[fault]
    (tmp_path / "logs").mkdir()
    with plant(machines, tmp_path):
        command = start(machines, tmp_path, LOOP)
        assert command.wait() == 3, command.said
        took = time.monotonic() - command.began
    hosts = "node1, node2" if plant is one_way_firewall else "node2"
    assert f"lockstep: --hosts: a run on {hosts}\n" in command.said, command.said
    was_found, _, to_do = command.said.partition("  do:")
    assert found in was_found, command.said
    assert do in to_do, command.said
    assert took < TOLD_WITHIN_S


def test_a_disk_that_is_full(machines: Cluster, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with full_disk(machines, tmp_path):
        command = start(machines, tmp_path, LOOP)
        assert command.wait() == 2, command.said
    assert time.monotonic() - command.began < TOLD_WITHIN_S
    assert "[node2]   found: [Errno 28] No space left on device" in command.said
    assert "[node1] [rank" not in command.said


def test_a_clock_that_is_wrong(machines: Cluster, tmp_path: Path) -> None:
    with an_hour_ahead(machines, tmp_path):
        command = start(machines, tmp_path, TRAINS)
        assert command.wait() == 0, command.said
    assert re.search(r"the clock of node2 is 3\d\d\d s ahead: the report may name", command.said)
    assert command.said.count("the clock") == 1


@pytest.mark.parametrize("when", ["start", "middle", "end"])
def test_a_machine_that_dies(machines: Cluster, tmp_path: Path, when: str) -> None:
    command = start(machines, tmp_path, LINGERS if when == "end" else LOOP)
    command.until({"start": "they meet", "middle": "LOOPS", "end": "LOOPS"}[when])
    if when == "end":
        (tmp_path / "enough").touch()
        until(lambda: command.said.count("ENOUGH") == 3)
    began = time.monotonic()
    machines.nodes[1].die()
    try:
        assert command.wait() == lockstep.errors.EXIT_LOST_RANK, command.said
        assert time.monotonic() - began < TOLD_WITHIN_S
        assert "the connection to node2 is lost" in command.said
        if when != "start":
            assert re.search("FIRST FAILURE: .*on host node2", command.said), command.said
    finally:
        machines.nodes[1].revive()
