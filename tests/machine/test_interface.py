from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist

from lockstep.distributed import backend
from lockstep.errors import SettingError
from lockstep.machine import network
from lockstep.machine.interface import (
    choose_interface,
    choose_nccl_interfaces,
    gloo_variables,
    nccl_matches,
    use_gloo_interface,
)
from lockstep.machine.topology import Topology

pytestmark = pytest.mark.unit

LAN = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.5"], "docker0": ["172.17.0.1"]}
ONE = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.5"]}


@pytest.mark.parametrize(
    ("environ", "addresses", "one_node", "reaching", "own", "name", "reason"),
    [
        ({}, LAN, True, None, "10.0.0.5", "lo", "on this machine"),
        ({}, LAN, False, "10.0.0.5", "10.0.0.5", None, "resolves to 10.0.0.5"),
        ({}, LAN, False, "10.0.0.5", "127.0.1.1", "eth0", "127.0.1.1, which only this machine"),
        ({}, LAN, False, "10.0.0.5", None, "eth0", "does not resolve; eth0 (10.0.0.5)"),
        # on rank 0's own machine the way to the master is loopback, which says nothing
        ({}, ONE, False, "127.0.0.1", "127.0.1.1", "eth0", "only interface to the outside"),
        ({"GLOO_SOCKET_IFNAME": "docker0"}, LAN, True, None, None, "docker0", "GLOO_SOCKET_IFNAME"),
        ({"GLOO_SOCKET_IFNAME": "lo,eth0"}, LAN, True, None, None, "lo,eth0", "GLOO_SOCKET_IFNAME"),
        ({"NCCL_SOCKET_IFNAME": "eth"}, LAN, False, None, None, "eth0", "NCCL_SOCKET_IFNAME"),
        ({"NCCL_SOCKET_IFNAME": "^lo"}, LAN, True, None, None, "lo", "on this machine"),
    ],
)
def test_the_choice(
    environ: dict[str, str],
    addresses: dict[str, list[str]],
    one_node: bool,
    reaching: str | None,
    own: str | None,
    name: str | None,
    reason: str,
) -> None:
    chosen, why = choose_interface(environ, addresses, one_node, reaching, own)
    assert chosen == name
    assert reason in why


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"GLOO_SOCKET_IFNAME": "eth9"}, ["GLOO_SOCKET_IFNAME=eth9", "eth0 (10.0.0.5)", "docker0"]),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, ["NCCL_SOCKET_IFNAME==eth", "eth0 (10.0.0.5)"]),
        ({}, ["several machines", "127.0.1.1", "docker0", "set GLOO_SOCKET_IFNAME"]),
    ],
)
def test_what_cannot_be_chosen(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(SettingError) as caught:
        choose_interface(environ, LAN, False, "127.0.0.1", "127.0.1.1")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("eth", "eth0", True),
        ("eth", "ib0", False),
        ("eth,ib", "ib0", True),
        ("=eth0", "eth0", True),
        ("=eth", "eth0", False),
        ("^docker", "docker0", False),
        ("^docker", "eth0", True),
        ("^=eth0", "eth01", True),
    ],
)
def test_nccl_patterns(pattern: str, name: str, matches: bool) -> None:
    assert nccl_matches(pattern, name) is matches


@pytest.mark.parametrize(
    ("interfaces", "reaching_master", "value", "unusable"),
    [
        # NCCL's own choice is right
        ("lo eth0", "eth0", None, ""),
        ("lo eth0 eth1", "eth0", None, ""),
        ("lo eth0 ib0 ib1", "eth0", None, ""),
        ("lo eth0 docker0", "eth0", None, ""),
        ("lo eth0 ib0 br-0123456789ab veth1", "eth0", None, ""),
        ("lo eth0 veth1", "lo", None, ""),  # all ranks are on this machine
        ("lo enp1s0 br-ex br0 tailscale0", "br-ex", None, ""),  # bridges with the machine's address
        # it would use an interface to containers, too
        ("lo eth0 docker0 br-0123456789ab", "eth0", "=eth0", "br-0123456789ab"),
        ("lo eth0 docker0 veth4f1 veth5a2", "eth0", "=eth0", "veth4f1, veth5a2"),
        ("lo eth0 eth1 virbr0", "eth0", "=eth0,eth1", "virbr0"),  # both, as NCCL would
        ("lo eth0 cni0 flannel.1 cali12", None, "=eth0", "cni0, flannel.1, cali12"),
        # or nothing that leads to the others
        ("lo docker0 lowpan0", "docker0", None, ""),
        ("lo", "lowpan0", None, ""),
        ("lo docker0", "docker_gwbridge", "=docker_gwbridge", "docker0"),
        ("lo cni0", None, None, ""),
        ("", "eth0", None, ""),
    ],
)
def test_nccl_chooses_its_interfaces_unless_one_leads_to_containers(
    interfaces: str, reaching_master: str | None, value: str | None, unusable: str
) -> None:
    chosen = choose_nccl_interfaces({}, interfaces.split(), reaching_master)
    if value is None:
        assert chosen is None
        return
    assert chosen is not None
    assert chosen[0] == value
    assert f"NCCL would use {unusable}, by the name" in chosen[1]
    for variable in ("NCCL_SOCKET_IFNAME", "NCCL_COMM_ID"):
        assert choose_nccl_interfaces({variable: "x"}, interfaces.split(), reaching_master) is None


@pytest.mark.parametrize(
    ("hosts", "interfaces", "reaching", "found"),
    [
        (2, "lo eth0 veth1", "10.0.0.5", "eth0"),
        (2, "lo eth0 veth1", "127.0.0.1", "eth0"),  # on the master's machine
        (2, "lo veth1 docker0", "172.17.0.1", "docker0"),
        (2, "lo eth0 eth1", "10.0.0.5", None),
        (1, "lo eth0 veth1", "10.0.0.5", None),
    ],
)
def test_ranks_of_other_launchers_set_it_for_themselves(
    monkeypatch: pytest.MonkeyPatch, hosts: int, interfaces: str, reaching: str, found: str | None
) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(network, "running_interfaces", lambda: interfaces.split())
    monkeypatch.setattr(network, "address_reaching", lambda host: reaching)
    topology = Topology(rank=0, size=2, local_size=2 // hosts, master_addr="node0")
    choices = backend._set_nccl_interfaces(topology, LAN)
    if found is None:
        assert choices == []
        assert "NCCL_SOCKET_IFNAME" not in os.environ
        return
    [choice] = choices
    assert choice.value == found
    assert "veth1" in choice.reason
    assert os.environ["NCCL_SOCKET_IFNAME"] == f"={found}"
    assert backend._set_nccl_interfaces(topology, LAN) == []  # as under `lockstep run`
    use_gloo_interface(None)
    assert "NCCL_SOCKET_IFNAME" not in os.environ


def test_gloo_has_one_interface_unless_the_user_has_set_it() -> None:
    assert gloo_variables({}, "eth0") == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert gloo_variables({"NCCL_SOCKET_IFNAME": "ib"}, "eth0") == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert gloo_variables({"GLOO_SOCKET_IFNAME": "eth1"}, "eth0") == {}
    assert gloo_variables({}, None) == {}


def test_the_variable_is_set_until_the_end_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for name in ("eth0", "eth1"):
        use_gloo_interface(name)
        assert os.environ["GLOO_SOCKET_IFNAME"] == name
    use_gloo_interface(None)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "the-users")
    for given in ("eth0", None):
        use_gloo_interface(given)
        assert os.environ["GLOO_SOCKET_IFNAME"] == "the-users"


def test_gloo_connects_many_ranks_only_where_they_talk(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = "TORCH_GLOO_LAZY_INIT"
    monkeypatch.delenv(lazy, raising=False)
    for ranks, expected in ((64, None), (65, "1")):
        use_gloo_interface("lo", ranks)
        assert os.environ.get(lazy) == expected
        use_gloo_interface(None)
        assert lazy not in os.environ
    monkeypatch.setenv(lazy, "0")
    use_gloo_interface("lo", 65)
    use_gloo_interface(None)
    assert os.environ[lazy] == "0"  # the user's own


@pytest.mark.parametrize(("lazy", "connections"), [("0", 12), ("1", 0)])
def test_torch_reads_whether_all_are_to_be_connected(
    monkeypatch: pytest.MonkeyPatch, lazy: str, connections: int
) -> None:
    """A variable that torch's documentation does not have: this tells when it changes."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", lazy)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store, size, minute = dist.HashStore(), 4, timedelta(minutes=10)

    def established() -> int:
        found = psutil.Process().net_connections("tcp")
        return sum(each.status == psutil.CONN_ESTABLISHED for each in found)

    before = established()
    with ThreadPoolExecutor(size) as threads:
        ranks = range(size)
        groups = list(
            threads.map(lambda rank: dist.ProcessGroupGloo(store, rank, size, minute), ranks)
        )
        assert established() - before == connections
        tensors = [torch.tensor([float(rank)]) for rank in ranks]
        for work in threads.map(lambda g, x: g.allreduce([x]), groups, tensors):
            work.wait()
    assert tensors == [torch.tensor([6.0])] * size
