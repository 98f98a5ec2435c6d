from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from namespaces import THIS_MACHINE, Launcher, Refusal, config, launchers, listening

from lockstep.errors import (
    DuplicateRankError,
    MasterUnreachableError,
    MissingRankError,
    PortTakenError,
    SettingError,
)
from lockstep.run.machines import auth, wait_announcer
from lockstep.run.machines.dynamic_rendezvous import DynamicRendezvous
from lockstep.run.machines.nodes import Node, Peers
from lockstep.run.machines.open_rendezvous import open_rendezvous
from lockstep.run.machines.rendezvous import Rendezvous
from lockstep.run.machines.static_rendezvous import StaticRendezvous
from lockstep.run.machines.torch_rendezvous import TorchRendezvous

pytestmark = pytest.mark.netns

TOKEN = {"LOCKSTEP_TOKEN": "a token of the tests"}


def static(port: int, rank: int, nodes: int = 2, **more: Any) -> dict[str, Any]:
    own = {"backend": "static", "endpoint": f"127.0.0.1:{port}", "nodes": nodes, "rank": rank}
    return {**own, "timeout": 600} | more


def both(pair: list[Launcher], order: str, *args: Any) -> list[Any]:
    for launcher in pair:
        launcher.start(order, *args)
    return [launcher.result() for launcher in pair]


@pytest.fixture
def pair() -> Iterator[list[Launcher]]:
    with launchers(THIS_MACHINE, THIS_MACHINE) as made:
        yield made


@pytest.fixture
def port(free_port: Callable[[], int]) -> int:
    return free_port()


# One machine.


@pytest.mark.parametrize("endpoint", ["localhost:0", "localhost:29400", ""])
def test_one_machine_needs_a_store_on_loopback_and_nothing_else(endpoint: str) -> None:
    before, threads = listening(), threading.enumerate()
    said: list[str] = []
    with open_rendezvous(config(endpoint=endpoint), said.append, {}) as rendezvous:
        info = rendezvous.next_rendezvous()
        place = info.bootstrap_store_info
        assert listening() - before == {("127.0.0.1", place.master_port)}
        assert place.master_addr == "127.0.0.1"
        assert threading.enumerate() == threads
        assert (info.rank, info.world_size, rendezvous.attempt) == (0, 1, 0)
        assert rendezvous.use_agent_store
        assert rendezvous.num_nodes_waiting() == 0
        assert rendezvous.departed_nodes() == []
        assert rendezvous.interface in {name for _, name in socket.if_nameindex()}
    assert said == []


def test_each_start_has_an_empty_store_and_a_number() -> None:
    with open_rendezvous(config(), print, {}) as rendezvous:
        assert rendezvous.attempt is None
        for attempt in range(3):
            store = rendezvous.next_rendezvous().store
            assert rendezvous.attempt == attempt
            assert not store.check(["key"])
            store.set("key", "value")


def test_launchers_hear_what_was_told_in_this_attempt() -> None:
    with open_rendezvous(config(), print, {}) as rendezvous:
        rendezvous.next_rendezvous()
        assert rendezvous.publish("failure", {"rank": 3})
        assert rendezvous.published("failure") == {0: {"rank": 3}}
        assert rendezvous.published("other") == {}
        assert not rendezvous.publish("failure", "x" * (1 << 20))
        assert rendezvous.published("failure") == {0: {"rank": 3}}
        rendezvous.next_rendezvous()
        assert rendezvous.published("failure") == {}


def test_a_port_that_was_asked_for_becomes_the_ranks_master_port(port: int) -> None:
    with open_rendezvous(config(**static(port, 0, nodes=1)), print, {}) as rendezvous:
        assert rendezvous.next_rendezvous().bootstrap_store_info.master_port == port
        with pytest.raises(PortTakenError, match=f"port {port} is taken by process"):
            open_rendezvous(config(**static(port, 0, nodes=1)), print, {})


def test_the_handlers_have_all_methods_of_torchs() -> None:
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    wanted = {name for name in dir(RendezvousHandler) if not name.startswith("_")}
    for kind in (StaticRendezvous, DynamicRendezvous):
        assert wanted - set(dir(kind)) == set()
        assert not kind.__abstractmethods__


RANK = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RESTART_COUNT",
         "TORCHELASTIC_USE_AGENT_STORE")
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
with open(f"{sys.argv[1]}/{attempt}-{os.environ['RANK']}", "w") as file:
    json.dump([os.environ[name] for name in names], file)
sys.exit(int(attempt) == 0)
"""


def test_torchs_own_agent_runs_and_restarts_with_it(tmp_path: Path) -> None:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    (tmp_path / "seen").mkdir()
    with open_rendezvous(config(), print, {}) as rendezvous:
        spec = WorkerSpec(
            role="r",
            local_world_size=2,
            rdzv_handler=rendezvous,
            entrypoint=sys.executable,
            args=("-c", RANK, str(tmp_path / "seen")),
            max_restarts=1,
            monitor_interval=0.02,
        )
        agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=str(tmp_path / "log")))
        assert not agent.run().is_failed()
    # Of the second attempt: a rank of the first may have been ended while it wrote.
    seen = {p.name: json.loads(p.read_text()) for p in (tmp_path / "seen").glob("1-*")}
    assert seen["1-0"] == ["0", "2", "127.0.0.1", "1", "True"]
    assert seen["1-1"] == ["1", "2", "127.0.0.1", "1", "True"]


# What cannot be.


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (static(1234, 2), r"--node-rank 2 with --nnodes 2"),
        (static(1234, -1), r"--node-rank -1"),
        ({"backend": "static", "endpoint": "127.0.0.1", "nodes": 2, "rank": 0}, "no port"),
        ({"backend": "static", "endpoint": "a:b", "nodes": 2, "rank": 0}, "--master-port"),
        ({"nodes": 2, "endpoint": "a b:1"}, "--rdzv-endpoint"),
        ({"nodes": 2, "endpoint": "localhost:0"}, "no port"),
        ({"nodes": 2, "endpoint": "localhost:1234", "is_host": "perhaps"}, "is_host=perhaps"),
        ({"nodes": 2, "endpoint": "localhost:1234", "join_timeout": "-1", "is_host": 0}, "join_t"),
        (static(1234, 1, timeout="soon"), "timeout=soon"),
        (static(1234, 1, timeout="nan"), "timeout=nan"),
        ({"nodes": 2, "endpoint": "localhost:1234", "join_timeout": "inf", "is_host": 0}, "inf"),
    ],
)
def test_flags_that_make_no_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        open_rendezvous(config(**fields), print, TOKEN)


@pytest.mark.parametrize(
    ("host", "found"),
    [
        ("127.0.0.1", "the machine answers, but nothing listens on that port"),
        ("no.such.host.invalid", "the host name does not resolve"),
    ],
)
def test_a_master_that_cannot_be_reached_raises_an_error(port: int, host: str, found: str) -> None:
    fields = static(port, 1, endpoint=f"{host}:{port}", timeout=1)
    with pytest.raises(MasterUnreachableError, match=found):
        open_rendezvous(config(**fields), print, TOKEN)


def test_another_service_at_the_masters_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "HANDSHAKE_TIMEOUT_S", 0.2)  # it says nothing, like a torch store
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        with pytest.raises(PortTakenError, match=f"port {taken} is taken by process"):
            open_rendezvous(config(**static(taken, 0)), print, TOKEN)
        with pytest.raises(MasterUnreachableError, match="it is not `lockstep run`"):
            open_rendezvous(config(**static(taken, 1, timeout=0.1)), print, TOKEN)


def test_a_node_that_never_comes_is_named(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_announcer, "FIRST_ANNOUNCEMENT_S", 0.2)
    said: list[str] = []
    with open_rendezvous(config(**static(port, 0, timeout=1)), said.append, TOKEN) as rendezvous:
        with pytest.raises(MissingRankError) as error:
            rendezvous.next_rendezvous()
        rendezvous.close("node 1 has not come")
    missing = f"node 1 of 2 has not joined; here: node 0 on host {socket.gethostname()}"
    assert error.value.found == f"{missing} (waited 1 s)"
    assert said == [f"{missing} (waiting for 0 s)"]


def test_a_dynamic_rendezvous_with_too_few_nodes_raises_an_error(port: int) -> None:
    fields = {"endpoint": f"localhost:{port}", "nodes": 2, "join_timeout": 1}
    with open_rendezvous(config(**fields), print, TOKEN) as rendezvous:
        with pytest.raises(MissingRankError, match="within the join timeout; here: process"):
            rendezvous.next_rendezvous()
        rendezvous.close("too few")


# Several launchers on this machine.


def test_a_second_node_of_a_rank_gets_the_error_and_the_first_goes_on(port: int) -> None:
    with open_rendezvous(config(**static(port, 0)), print, TOKEN) as rendezvous:
        with pytest.raises(DuplicateRankError, match="node 0 has already come"):
            open_rendezvous(config(**static(port, 0)), print, TOKEN)
        with pytest.raises(PortTakenError, match="is taken by process"):
            open_rendezvous(config(**static(port, 0, run_id="other")), print, TOKEN)
        with pytest.raises(PortTakenError, match="is taken by process"):
            other = {"LOCKSTEP_TOKEN": "the token of somebody else"}
            open_rendezvous(config(**static(port, 0)), print, other)
        rendezvous.close("done with it")


@pytest.mark.parametrize("kind", ["static", "c10d"])
def test_all_nodes_start_anew_together(pair: list[Launcher], port: int, kind: str) -> None:
    for rank, launcher in enumerate(pair):
        fields = {"endpoint": f"localhost:{port}", "nodes": 2}
        launcher.do("open", TOKEN, **(static(port, rank) if kind == "static" else fields))
    assert {attempt for _, _, attempt in both(pair, "rendezvous")} == {0}
    both(pair, "publish", "failure", "old")
    pair[1].start("rendezvous")  # its ranks have failed
    assert pair[0].do("waiting") == 1
    pair[0].start("rendezvous")
    joined = [launcher.result() for launcher in pair]
    assert sorted(joined) == [(0, 2, 1), (1, 2, 1)]
    assert [total for total, _ in both(pair, "gloo")] == [3.0, 3.0]
    both(pair, "publish", "failure", "new")
    assert both(pair, "published", "failure", 2) == [{0: "new", 1: "new"}] * 2
    both(pair, "shutdown")
    both(pair, "close")
    assert both(pair, "threads") == [["MainThread"]] * 2


def test_a_node_started_again_takes_the_place_of_the_lost_one(
    pair: list[Launcher], port: int
) -> None:
    for rank, launcher in enumerate(pair):
        launcher.do("open", TOKEN, **static(port, rank))
    both(pair, "rendezvous")
    server, visitor = pair
    visitor.kill()
    assert len(server.do("lost")) == 1
    with launchers(THIS_MACHINE) as (again,):
        again.do("open", TOKEN, **static(port, 1))
        again.start("rendezvous")
        assert server.do("waiting") == 1
        assert server.do("rendezvous") == (0, 2, 1)
        assert again.result() == (1, 2, 1)
        assert server.do("lost_now") == 0
        assert [total for total, _ in both([server, again], "gloo")] == [3.0, 3.0]
        both([server, again], "close")


def test_a_node_that_leaves_early_says_why(pair: list[Launcher], port: int) -> None:
    for rank, launcher in enumerate(pair):
        launcher.do("open", TOKEN, **static(port, rank))
    both(pair, "rendezvous")
    server, visitor = pair
    visitor.do("close", "rank 3 failed")
    (lost,) = server.do("lost")
    assert lost == f"node 1 on host {socket.gethostname()} has left (rank 3 failed)"
    with pytest.raises(Refusal, match=r"(?s)MissingRankError.*has left \(rank 3 failed\)"):
        server.do("rendezvous")  # it will not come again
    server.do("close", "node 1 has left")


def test_the_servers_reason_reaches_the_others(pair: list[Launcher], port: int) -> None:
    for rank, launcher in enumerate(pair):
        launcher.do("open", TOKEN, **static(port, rank))
    both(pair, "rendezvous")
    server, visitor = pair
    server.start("close", "interrupted")
    assert visitor.do("lost") == [f"node 0 on host {socket.gethostname()} has left (interrupted)"]
    visitor.do("close", "node 0 has left")
    server.result()


def test_a_run_without_a_token_is_announced_as_open(port: int) -> None:
    said: list[str] = []
    open_rendezvous(config(**static(port, 0)), said.append, {"LOCKSTEP_TOKEN": "none"}).close(
        "over"
    )
    assert said == [f"LOCKSTEP_TOKEN=none: anyone who can reach 127.0.0.1:{port} can join this run"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (None, ""),
        (KeyboardInterrupt(), "its launcher ended with KeyboardInterrupt"),
        (SettingError("what was set", "what was found", "do"), "what was found"),
    ],
)
def test_an_error_is_the_reason_that_other_nodes_are_given(
    error: BaseException | None, reason: str
) -> None:
    own = Node(number=0, rank=0, host="h", pid=1, run_id="r", nodes="2:2")
    nodes = Peers(own)
    rendezvous: Rendezvous = StaticRendezvous(config(), nodes, None, print, None)
    with contextlib.suppress(KeyboardInterrupt, SettingError), rendezvous:
        if error:
            raise error
    assert (nodes.own.state, nodes.own.why) == ("left", reason)


LOST = {"state": "lost", "why": "its machine"}


@pytest.mark.parametrize(
    ("other", "has_left"),
    [
        ({"last_started_round": 2}, False),
        # It has asked for the next attempt too.
        ({"last_started_round": 2, "requested_round": 3}, False),
        ({"last_started_round": 3, "requested_round": 3}, True),
        ({"last_started_round": 2, "requested_round": 2, **LOST}, True),
        ({"last_started_round": 1, "requested_round": 1, **LOST}, False),  # long ago
        ({"last_started_round": 0, "requested_round": 3}, False),  # it wants to join
    ],
)
def test_after_a_restart_was_asked_for_nodes_that_leave_the_attempt_are_known(
    other: dict[str, Any], has_left: bool
) -> None:
    about = {"host": "h", "pid": 1, "run_id": "r", "nodes": "1:2"}
    peers = Peers(Node(number=0, rank=0, last_started_round=2, requested_round=2, **about))
    peers.write(1, {"number": 1, "rank": 1, **about, **other})
    rendezvous = DynamicRendezvous(config(nodes=2), peers, None, print, None)
    rendezvous.request_restart()
    assert rendezvous.has_node_left_attempt() is has_left


def test_other_backends_are_torchs_own(tmp_path: Path) -> None:
    said: list[str] = []
    fields = {"endpoint": str(tmp_path / "store"), "nodes": 2, "store_type": "file"}
    with open_rendezvous(config(**fields), said.append, {}) as rendezvous:
        assert type(rendezvous) is TorchRendezvous
        assert rendezvous.attempt is None
        assert rendezvous.interface is None
    assert "torch's own rendezvous" in said[0]
