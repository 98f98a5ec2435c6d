from __future__ import annotations

import os

import pytest

from lockstep.distributed.network import choose_interface, nccl_matches, use_gloo_interface
from lockstep.errors import SettingError

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
