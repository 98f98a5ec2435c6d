"""Two machines: network namespaces with a cable between them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from namespaces import Launcher, Machine, Refusal, launchers, two_machines

pytestmark = pytest.mark.netns

TOKEN = {"LOCKSTEP_TOKEN": "a token of the tests"}
OTHER = {"LOCKSTEP_TOKEN": "another token of them"}
PORT = 29777  # the namespaces have all ports to themselves


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as made:
        yield made


@pytest.fixture
def pair(machines: tuple[Machine, Machine]) -> Iterator[list[Launcher]]:
    with launchers(*machines) as made:
        yield made


def node(machines: tuple[Machine, Machine], rank: int, **more: Any) -> dict[str, Any]:
    endpoint = f"{machines[0].address}:{PORT}"
    return {
        "backend": "static",
        "endpoint": endpoint,
        "nodes": 2,
        "rank": rank,
        "timeout": 600,
    } | more


def dynamic(machines: tuple[Machine, Machine], **more: Any) -> dict[str, Any]:
    return {"endpoint": f"{machines[0].address}:{PORT}", "nodes": 2, "join_timeout": 600} | more


def both(pair: list[Launcher], order: str, *args: Any) -> list[Any]:
    for launcher in pair:
        launcher.start(order, *args)
    return [launcher.result() for launcher in pair]


def start_static(machines: tuple[Machine, Machine], pair: list[Launcher]) -> None:
    for rank, launcher in enumerate(pair):
        assert launcher.do("open", TOKEN, **node(machines, rank)) == "lan"
    assert both(pair, "rendezvous") == [(0, 2, 0), (1, 2, 0)]


@pytest.mark.parametrize("kind", ["static", "c10d"])
def test_a_run_listens_on_loopback_and_at_the_gate_alone(
    machines: tuple[Machine, Machine], pair: list[Launcher], kind: str
) -> None:
    server, visitor = pair
    if kind == "static":
        visitor.start("open", TOKEN, **node(machines, 1))  # it may come first
        server.do("open", TOKEN, **node(machines, 0))
    else:
        visitor.start("open", TOKEN, **dynamic(machines))
        server.do("open", TOKEN, **dynamic(machines))
    assert visitor.result() == "lan"
    joined = both(pair, "rendezvous")
    assert sorted(joined) == [(0, 2, 0), (1, 2, 0)]

    seen = server.do("listening")
    assert (machines[0].address, PORT) in seen
    assert {address for address, _ in seen - {(machines[0].address, PORT)}} == {"127.0.0.1"}
    assert {address for address, _ in visitor.do("listening")} == {"127.0.0.1"}

    for machine, (total, with_gloo) in zip(machines, both(pair, "gloo"), strict=True):
        assert total == 3.0
        assert {address for address, _ in with_gloo} <= {"127.0.0.1", machine.address}

    assert both(pair, "nccl_interfaces") == [None, None]
    with machines[0].with_container():
        # NCCL would take both interfaces of the first machine.
        assert both(pair, "nccl_interfaces") == ["=lan", None]
        assert any(address == machine.address for address, _ in with_gloo)

    for rank, launcher in enumerate(pair):
        assert launcher.do("publish", "first failure", {"rank": rank})
    heard = {0: {"rank": joined[0][0] != 0}, 1: {"rank": joined[1][0] == 1}}
    assert both(pair, "published", "first failure", 2) == [heard, heard]

    assert both(pair, "lost_now") == [0, 0]
    both(pair, "shutdown")
    both(pair, "close")
    assert both(pair, "said") == [[], []]
    for places in both(pair, "listening"):  # the store ends with those who hold it
        assert {address for address, _ in places} <= {"127.0.0.1"}
    assert both(pair, "threads") == [["MainThread"]] * 2


def test_strangers_and_second_comers_are_turned_away_and_the_run_goes_on(
    machines: tuple[Machine, Machine], pair: list[Launcher]
) -> None:
    server, visitor = pair
    server.do("open", TOKEN, **node(machines, 0))
    with launchers(machines[1], machines[1], machines[1]) as (stranger, other, second):
        answer = stranger.do("connect", machines[0].address, PORT, b"GET / HTTP/1.1\r\n\r\n")
        assert answer.startswith(b"lockstep auth")
        assert len(answer) == 48
        stranger.do("connect", machines[0].address, PORT, b"again")
        with pytest.raises(Refusal, match=r"(?s)TokenDiffersError.*the token differs") as refusal:
            other.do("open", OTHER, **node(machines, 1))
        assert "another token of them" not in refusal.value.text
        server.start("rendezvous")
        visitor.do("open", TOKEN, **node(machines, 1))
        with pytest.raises(Refusal, match="DuplicateRankError") as refusal:
            second.do("open", TOKEN, **node(machines, 1))
        pid = visitor.process.pid
        assert f"node 1 has already come: process {pid} on" in refusal.value.text
        with pytest.raises(Refusal, match="DuplicateRankError"):
            second.do("open", TOKEN, **node(machines, 0))  # it serves on the other machine
        with pytest.raises(Refusal, match=r"(?s)WorldSizeError.*--nnodes 3.*--nnodes 2"):
            second.do("open", TOKEN, **node(machines, 1, nodes=3))
        with pytest.raises(Refusal, match=r"(?s)MasterUnreachableError.*another run, 'r'"):
            second.do("open", TOKEN, **node(machines, 1, run_id="s"))
        visitor.do("rendezvous")
        server.result()
        assert [total for total, _ in both(pair, "gloo")] == [3.0, 3.0]
        both(pair, "close")
        said = server.do("said")
        stranger_lines = [line for line in said if "protocol" in line or "token" in line]
        assert len(stranger_lines) == 1, "said once a peer"
        assert machines[1].address in stranger_lines[0]
        assert sum("has already come" in line for line in said) == 2


@pytest.mark.thorough
def test_a_machine_without_loopback_is_told_at_once(
    machines: tuple[Machine, Machine], pair: list[Launcher]
) -> None:
    server, visitor = pair
    with machines[0].unplugged("lo"), machines[1].unplugged("lo"):
        for fields in ({}, node(machines, 0)):
            with pytest.raises(Refusal, match=r"(?s)SettingError.*the loopback interface is down"):
                server.do("open", TOKEN, **fields)
    server.do("open", TOKEN, **node(machines, 0))
    with (
        machines[1].unplugged("lo"),
        pytest.raises(Refusal, match=r"(?s)SettingError.*the loopback interface is down"),
    ):
        visitor.do("open", TOKEN, **node(machines, 1))


def test_a_wrong_token_is_logged_with_its_address(
    machines: tuple[Machine, Machine], pair: list[Launcher]
) -> None:
    server, visitor = pair
    server.do("open", TOKEN, **node(machines, 0))
    for _ in range(2):
        with pytest.raises(Refusal, match="the token differs"):
            visitor.do("open", OTHER, **node(machines, 1))
    (line,) = server.do("said")
    assert f"a connection from {machines[1].address} was turned away: its token differs" in line
    server.do("close", "given up")


def test_a_node_that_is_killed_is_named_on_the_other(
    machines: tuple[Machine, Machine], pair: list[Launcher]
) -> None:
    start_static(machines, pair)
    server, visitor = pair
    visitor.kill()
    (lost,) = server.do("lost")
    assert re.fullmatch(r"node 1 on .* has left \(its connection ended\)", lost)
    server.do("close", "node 1 has left")


def test_a_serving_node_that_is_killed_is_named_and_its_store_is_not_waited_for(
    machines: tuple[Machine, Machine], pair: list[Launcher]
) -> None:
    for launcher in pair:
        launcher.do("open", TOKEN, **dynamic(machines))
    both(pair, "rendezvous")
    server, visitor = pair
    server.kill()
    (lost,) = visitor.do("lost")
    assert "has left (its connection ended)" in lost
    with pytest.raises(Refusal, match=r"(?s)MissingRankError.*has left"):
        visitor.do("rendezvous")
    assert visitor.do("shutdown")
    visitor.do("close", "node 0 has left")


def test_a_pulled_cable_is_noticed_on_both_sides(
    machines: tuple[Machine, Machine], pair: list[Launcher]
) -> None:
    start_static(machines, pair)
    pair[1].start("wait_for_a_key")  # the store's own timeout is 600 s
    with machines[1].unplugged():
        with pytest.raises(Refusal, match="DistNetworkError"):
            pair[1].result()
        (on_server,), (on_visitor,) = both(pair, "lost")
        assert re.match(r"node 1 on .*no message", on_server)
        assert re.match(r"node 0 on .*no message", on_visitor)
        both(pair, "close", "the other node has left")
