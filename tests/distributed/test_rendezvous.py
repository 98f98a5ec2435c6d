"""Real processes that join, and that cannot: every one of them must say why."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import ranks
import torch
import torch.distributed as dist
from ranks import run_ranks

import lockstep
from lockstep.distributed import init_file, join as join_protocol, rendezvous
from lockstep.distributed.backend import choose_backend, close_group, open_group
from lockstep.distributed.manifest import collect
from lockstep.distributed.rendezvous import join, parse_init_method
from lockstep.errors import (
    DuplicateRankError,
    LockstepError,
    MasterUnreachableError,
    MissingRankError,
    PortTakenError,
    RanksDifferError,
    SettingError,
    StaleInitFileError,
    WorldSizeError,
)
from lockstep.machine.network import (
    Endpoint,
    is_loopback_address,
    local_addresses,
    wait_until,
)
from lockstep.machine.topology import Topology, detect

pytestmark = pytest.mark.ranks

Outcome = tuple[str, str]


def try_to_join(init_method: str | None, timeout: float) -> Outcome:
    """The error's class and text, or ("joined", the ranks met).

    Rank 0 stays until all others have read an error. On a busy machine one may come very late.
    """
    join_protocol.READING_GRACE_S = ranks.HANG_S
    topology = detect(os.environ)
    assert topology is not None
    try:
        manifest = collect({"seed": os.environ.get("SEED", "0")})
        joined = join(topology, init_method, manifest=manifest, timeout=timeout)
    except LockstepError as error:
        return type(error).__name__, str(error)
    joined.close()
    return "joined", ",".join(map(str, joined.ranks_on_this_host))


def try_to_join_patiently(init_method: str | None, timeout: float) -> Outcome:
    """`try_to_join` for tests in which a store is there: it may take long to answer.

    Only the wait for the other ranks ends after `timeout`. On a busy machine a store that has not
    answered in time would count as another program that has the port.
    """
    connect = rendezvous.connect
    rendezvous.connect = lambda endpoint, timeout: connect(endpoint, ranks.HANG_S)
    rendezvous.ATTEMPT_TIMEOUT_S = ranks.HANG_S
    return try_to_join(init_method, timeout)


def train_a_little(init_method: str | None) -> float:
    topology = detect(os.environ)
    assert topology is not None
    device = torch.device("cpu")
    manifest = collect({})
    joined = join(topology, init_method, manifest=manifest, timeout=600)
    open_group(topology, choose_backend(None, device)[0], device, joined.store, timeout=None)
    total = torch.tensor(float(topology.rank + 1))
    dist.all_reduce(total)
    close_group()
    joined.close()
    return total.item()


def by_hand(size: int, port: int | None = None, host: str = "127.0.0.1") -> Any:
    """Environments as someone sets them who starts each process by hand."""

    def environment(rank: int) -> dict[str, str]:
        master = {} if port is None else {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
        return {"RANK": str(rank), "WORLD_SIZE": str(size), **local, **master}

    return environment


def changed(environment: Any, **by_process: dict[str, str]) -> Any:
    """With other variables for some processes: `p1={"RANK": "0"}`."""
    return lambda process: environment(process) | by_process.get(f"p{process}", {})


def same(outcomes: list[Outcome], kind: type[LockstepError], *words: str) -> None:
    for name, text in outcomes:
        assert name == kind.__name__, text
        for word in words:
            assert word in text


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("method", ["env", "agent", "tcp", "file"])
def test_ranks_meet_and_reduce(
    size: int, method: str, free_port: Callable[[], int], tmp_path: Path
) -> None:
    port = free_port()
    file = tmp_path / "meeting place"
    total = float(size * (size + 1) // 2)
    if method == "agent":
        assert run_ranks(train_a_little, size, None) == [total] * size
        return
    place = {"env": "env://", "tcp": f"tcp://localhost:{port}", "file": f"file://{file}"}[method]
    environment = by_hand(size, port if method == "env" else None)
    assert run_ranks(train_a_little, size, place, environment=environment) == [total] * size
    assert not file.exists()


def test_the_same_place_serves_again(free_port: Callable[[], int], tmp_path: Path) -> None:
    for place in (f"tcp://127.0.0.1:{free_port()}", f"file://{tmp_path}/f"):
        for _ in range(2):
            outcomes = run_ranks(try_to_join, 2, place, 600, environment=by_hand(2))
            assert outcomes == [("joined", "0,1")] * 2


def test_ipv6(free_port: Callable[..., int]) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    place = f"tcp://[::1]:{free_port('::1')}"
    outcomes = run_ranks(try_to_join, 2, place, 600, environment=by_hand(2))
    assert outcomes == [("joined", "0,1")] * 2


def where_rank_0_listens() -> list[str]:
    topology = detect(os.environ)
    assert topology is not None
    joined = join(topology, None, manifest=collect({}), timeout=600)
    listening = [
        c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"
    ]
    joined.close()
    return listening


def test_on_one_machine_rank_0_listens_on_loopback_alone(free_port: Callable[[], int]) -> None:
    own = [addresses[0] for addresses in local_addresses().values()]
    for name in ("localhost", own[-1]):
        environment = by_hand(2, free_port(), name)
        assert run_ranks(where_rank_0_listens, 2, environment=environment) == [["127.0.0.1"], []]


def test_ranks_that_are_alone_on_their_machines_meet_at_a_loopback_master(
    free_port: Callable[[], int],
) -> None:
    """Each launcher of one rank says LOCAL_WORLD_SIZE=1, also if all launchers are on a machine."""
    port = free_port()

    def environment(rank: int) -> dict[str, str]:
        alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)}
        return by_hand(2, port)(rank) | alone

    topology = detect(environment(0))
    assert topology is not None
    endpoint = Endpoint("127.0.0.1", port, processes_meet_at_loopback=True)
    assert parse_init_method(topology, None) == endpoint
    assert run_ranks(where_rank_0_listens, 2, environment=environment) == [["127.0.0.1"], []]


def place_in_run(init_method: str | None) -> tuple[int, int, int]:
    with lockstep.init(init_method=init_method, device="cpu") as world:
        total = torch.tensor(1.0)
        dist.all_reduce(total)
        assert total.item() == world.size
        return world.local_rank, world.local_size, world.node_rank


@pytest.mark.parametrize("with_local_rank", [False, True])
@pytest.mark.parametrize("method", ["env", "tcp", "tcp on loopback", "file"])
def test_without_a_local_world_size_the_ranks_of_a_machine_are_counted(
    method: str, with_local_rank: bool, free_port: Callable[..., int], tmp_path: Path
) -> None:
    own_addresses = [addresses[0] for addresses in local_addresses().values()]
    outside_addresses = [address for address in own_addresses if not is_loopback_address(address)]
    if not outside_addresses:
        pytest.skip("this machine has no address but loopback")
    host = "127.0.0.1" if method == "tcp on loopback" else outside_addresses[0]
    port = free_port(host)

    def environment(rank: int) -> dict[str, str]:
        variables = {"RANK": str(rank), "WORLD_SIZE": "3"}
        if with_local_rank:
            variables["LOCAL_RANK"] = str(rank)
        if method == "env":
            variables |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        return variables

    init_method = {"env": None, "file": f"file://{tmp_path}/f"}.get(method, f"tcp://{host}:{port}")
    places = run_ranks(place_in_run, 3, init_method, environment=environment)
    assert places == [(0, 3, 0), (1, 3, 0), (2, 3, 0)]


@pytest.fixture(
    params=[
        "tcp",
        pytest.param("file", marks=pytest.mark.thorough),
        pytest.param("agent", marks=pytest.mark.thorough),
    ]
)
def place(
    request: pytest.FixtureRequest, free_port: Callable[[], int], tmp_path: Path
) -> Iterator[tuple[str | None, Callable[[int], Any]]]:
    """An init method, and how to make the environments of a world size for it."""
    port = free_port()
    if request.param == "tcp":
        yield None, lambda size: by_hand(size, port)
    elif request.param == "file":
        yield f"file://{tmp_path}/f", by_hand
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield None, lambda size: lambda rank: ranks.rank_environment(rank, size, store.port)


Place = tuple[str | None, Callable[[int], Any]]


def test_a_missing_rank(place: Place, tmp_path: Path) -> None:
    init_method, environment = place
    outcomes = run_ranks(try_to_join, 2, init_method, 6, environment=environment(3))
    same(outcomes, MissingRankError, "rank 2 did not come within 6 s; came: ranks 0-1 on ")
    assert not list(tmp_path.iterdir())  # this run's file has gone with it


def test_rank_0_missing(place: Place) -> None:
    init_method, environment = place
    shifted = environment(3)
    outcomes = run_ranks(try_to_join, 2, init_method, 6, environment=lambda p: shifted(p + 1))
    if init_method is None and "TORCHELASTIC_RUN_ID" not in shifted(0):
        same(
            outcomes,
            MasterUnreachableError,
            "nothing listens on that port",
            "look at the output of rank 0",
        )
    else:
        same(outcomes, MissingRankError, "rank 0 did not come within 6 s")


@pytest.mark.parametrize("doubled", [0, 1])
def test_two_equal_ranks(place: Place, doubled: int) -> None:
    init_method, environment = place
    three = environment(3)
    outcomes = run_ranks(
        try_to_join_patiently,
        3,
        init_method,
        600,
        environment=lambda p: three(doubled if p == 2 else p),
    )
    same(outcomes, DuplicateRankError, f"two processes claim rank {doubled}: process ")


def test_two_ranks_0_and_nobody_else(free_port: Callable[[], int]) -> None:
    environment = by_hand(2, free_port())
    outcomes = run_ranks(try_to_join_patiently, 2, None, 600, environment=lambda p: environment(0))
    same(outcomes, DuplicateRankError, "two processes claim rank 0: process ")


def try_init(**arguments: Any) -> Outcome:
    """The class and text of the error of `lockstep.init`."""
    join_protocol.READING_GRACE_S = ranks.HANG_S
    with pytest.raises(LockstepError) as error:
        lockstep.init(device="cpu", join_timeout=600, **arguments)
    return type(error.value).__name__, str(error.value)


def test_ranks_that_the_script_has_started_under_a_launcher(free_port: Callable[[], int]) -> None:
    # As if the script of rank 0 had called `mp.spawn`: the processes inherit its variables.
    rank_0 = by_hand(2, free_port())(0) | {"LOCKSTEP_LAUNCHER": "lockstep run"}
    words = (
        "; the script has started this process itself, in a rank of lockstep run",
        "without torch.multiprocessing.spawn, or start the script with --nproc-per-node 1",
    )

    outcomes = run_ranks(try_init, 2, environment=lambda p: rank_0)
    same(outcomes, DuplicateRankError, "two processes claim rank 0: process ", *words)

    outcomes = run_ranks(partial(try_init, rank=1, world_size=2), 1, environment=lambda p: rank_0)
    same(outcomes, SettingError, "lockstep run says rank 0 of 2", *words)

    by_launcher = run_ranks(partial(try_init, rank=1), 1, environment=lambda p: by_hand(2)(0))
    assert "the script has started" not in by_launcher[0][1]


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ({"rank": 1}, "give both, or neither under a launcher"),
        ({"rank": 1, "world_size": 2, "init_method": "tcp//127.0.0.1:1"}, "the forms are 'env://'"),
    ],
)
def test_errors_of_such_ranks_that_are_not_about_their_rank(
    arguments: dict[str, Any], advice: str
) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCKSTEP_LAUNCHER": "lockstep run"}
    ((kind, text),) = run_ranks(partial(try_init, **arguments), 1, environment=lambda p: alone)
    assert kind == "SettingError"
    assert advice in text
    assert "the script has started" not in text


def test_disagreeing_world_sizes(place: Place) -> None:
    init_method, environment = place
    fewer = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    outcomes = run_ranks(
        try_to_join, 3, init_method, 600, environment=changed(environment(3), p1=fewer)
    )
    same(outcomes, WorldSizeError, "rank 1 says world size 2; rank", "0", "world size 3")


def test_differing_settings(place: Place) -> None:
    init_method, environment = place
    outcomes = run_ranks(
        try_to_join,
        3,
        init_method,
        600,
        environment=changed(environment(3), p2={"SEED": "7"}),
    )
    same(outcomes, RanksDifferError, "seed: ranks 0-1 have '0', rank 2 has '7'")


def test_a_port_of_another_program() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcomes = run_ranks(try_to_join, 2, None, 3, environment=by_hand(2, port))
    same(
        outcomes,
        PortTakenError,
        f"port {port} is taken by process {os.getpid()}: ",
        "choose a free port",
    )


@pytest.mark.thorough
def test_a_port_of_another_programs_store() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outcomes = run_ranks(try_to_join_patiently, 2, None, 3, environment=by_hand(2, store.port))
    same(outcomes[:1], PortTakenError, f"is taken by process {os.getpid()}: ")
    same(outcomes[1:], MissingRankError, "rank 0 did not come within 3 s")


def begin_or_intrude(folder: str) -> Outcome:
    """Ranks 0 and 1 hold a run open while a third process tries to start another there."""
    begun, tried = Path(folder, "begun"), Path(folder, "tried")
    if os.environ.get("INTRUDER"):
        wait_until(begun.exists, float("inf"))
        outcome = try_to_join_patiently(None, 600)
        tried.touch()
        return outcome
    topology = detect(os.environ)
    assert topology is not None
    joined = join(topology, None, manifest=collect({"seed": "0"}), timeout=600)
    begun.touch()
    wait_until(tried.exists, float("inf"))
    joined.close()
    return "joined", ""


@pytest.mark.parametrize(
    ("rank", "kind", "words"),
    [
        (0, PortTakenError, "is taken by another Lockstep run: process "),
        (1, DuplicateRankError, "a run has already begun there, with process "),
    ],
)
def test_a_second_run_on_the_port_of_one_that_has_begun(
    rank: int,
    kind: type[LockstepError],
    words: str,
    free_port: Callable[[], int],
    tmp_path: Path,
) -> None:
    intruder = {"RANK": str(rank), "LOCAL_RANK": str(rank), "INTRUDER": "1"}
    environment = changed(by_hand(2, free_port()), p2=intruder)
    outcomes = run_ranks(begin_or_intrude, 3, str(tmp_path), environment=environment)
    assert outcomes[:2] == [("joined", "")] * 2
    same(outcomes[2:], kind, words)


def test_malformed_init_methods_are_errors_that_show_the_forms() -> None:
    topology = Topology(rank=0, size=2, local_size=2)
    for init_method, words in [
        ("tcp://host", "the port is missing"),
        ("tcp://:29500", "the host is missing"),
        ("tcp://host:0", "the port is missing"),
        ("tcp://host:99999", "Port out of range"),
        ("tcp://host:abc", "could not be cast"),
        ("tcp://host:29500/x", "something follows the port"),
        ("tcp://host:29500?rank=0", "arguments of init"),
        ("tcp://[::1:29500", "Invalid IPv6"),
        ("http://host:29500", "the scheme is 'http'"),
        ("host:29500", "the scheme is 'host'"),
        ("", "the scheme is ''"),
        ("file://relative/path", "not absolute"),
        ("file:/one/slash", "the scheme is 'file'"),
        ("env://x", "the scheme is 'env'"),
    ]:
        with pytest.raises(SettingError) as caught:
            parse_init_method(topology, init_method)
        assert words in str(caught.value)
        assert "'tcp://host:port'" in caught.value.do


@pytest.mark.parametrize(("name", "value"), [("MASTER_ADDR", "h"), ("MASTER_PORT", 1)])
def test_env_without_the_address_of_rank_0(name: str, value: Any) -> None:
    other = {"MASTER_ADDR": "master_port", "MASTER_PORT": "master_addr"}[name]
    topology = Topology(size=2, local_size=2, **{other: value if other == "master_addr" else 1})
    if other == "master_addr":
        topology = Topology(size=2, local_size=2, master_addr="h")
    with pytest.raises(SettingError, match=f"{name} is not set, so rank 0 cannot be found"):
        parse_init_method(topology, "env://")


def test_places() -> None:
    topology = Topology(size=2, master_addr="h", master_port=5)
    assert parse_init_method(topology, None) == Endpoint("h", 5, False)
    assert str(parse_init_method(topology, "tcp://[::1]:6")) == "[::1]:6"
    assert parse_init_method(topology, "file:///a b/c?d#e") == Path("/a b/c?d#e")


def test_a_name_that_does_not_resolve(free_port: Callable[[], int]) -> None:
    environment = by_hand(2, free_port(), "no-such-host.invalid")
    outcomes = run_ranks(try_to_join, 2, None, 1, environment=environment)
    same(outcomes, MasterUnreachableError, "the host name does not resolve", "check the spelling")


def test_an_address_that_is_not_rank_0s(free_port: Callable[[], int]) -> None:
    environment = by_hand(2, free_port(), "198.51.100.7")  # set aside for documentation
    outcomes = run_ranks(try_to_join, 2, None, 1, environment=environment)
    same(outcomes, MasterUnreachableError, "198.51.100.7")
    assert "198.51.100.7 is not an address of this machine, which has " in outcomes[0][1]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TimeoutError(), "no answer"),
        (OSError(errno.EHOSTUNREACH, "no route"), "no answer"),
        (ConnectionRefusedError(), "nothing listens on that port"),
    ],
)
def test_hindrances_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, error: OSError, words: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(socket, "create_connection", fail)
    with pytest.raises(MasterUnreachableError, match=words):
        rendezvous.connect(Endpoint("198.51.100.7", 5, False), 0.1)


def test_something_that_listens_but_is_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "is_here", lambda address: False)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = Endpoint("127.0.0.1", silent.getsockname()[1], False)
        with pytest.raises(MasterUnreachableError, match="not a torch store"):
            rendezvous.connect(endpoint, 0.3)


def test_a_store_that_accepts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "answers_as_store", lambda connection: True)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:  # there is room for one
        endpoint = Endpoint("127.0.0.1", full.getsockname()[1], False)
        with pytest.raises(MasterUnreachableError, match="no answer"):
            rendezvous.connect(endpoint, 0.3)


def leave_a_file(path: str) -> None:
    """A run that ends without closing its store."""
    topology = Topology(rank=1, size=2, local_rank=1, local_size=2)
    try:
        join(topology, f"file://{path}", manifest=collect({}), timeout=0.1)
    finally:
        os._exit(0)


def test_a_file_left_over_by_a_run_that_died(tmp_path: Path) -> None:
    path = tmp_path / "init"
    process = ranks.context.Process(target=leave_a_file, args=(str(path),))
    process.start()
    process.join()
    before = path.read_bytes()
    outcomes = run_ranks(try_to_join, 2, f"file://{path}", 600, environment=by_hand(2))
    same(
        outcomes,
        StaleInitFileError,
        f"file://{path}",
        "left over from an earlier run: last changed ",
        f"owner {path.owner()}; written by process {process.pid} on ",
        f"rm {path}",
    )
    assert path.read_bytes() == before


def test_an_old_file_that_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "init"
    path.write_bytes(b"something")
    os.utime(path, (0, path.stat().st_mtime - 3 * 86400))
    outcomes = run_ranks(try_to_join, 2, f"file://{path}", 600, environment=by_hand(2))
    same(outcomes, StaleInitFileError, "last changed 3 days ago", "before this process was started")
    assert path.read_bytes() == b"something"


def test_an_old_refusal_is_not_read_as_that_of_this_run() -> None:
    """The processes that wrote the file may be of other machines, so they are not known to end."""
    refusal = init_file.ERROR_MARK.encode() + b"rank 1 has another version"
    assert "before this process" in init_file._reason_file_is_stale(refusal, 3 * 86400, 600)
    assert init_file._reason_file_is_stale(refusal, 1, 600) == ""


def test_an_empty_file_is_as_good_as_none(tmp_path: Path) -> None:
    path = tmp_path / "init"
    path.touch()
    os.utime(path, (0, 0))
    outcomes = run_ranks(try_to_join, 2, f"file://{path}", 600, environment=by_hand(2))
    assert outcomes == [("joined", "0,1")] * 2


@pytest.mark.parametrize(
    ("path", "words"), [("", "it is a folder"), ("/no/file", "there is no folder")]
)
def test_a_path_that_cannot_hold_the_file(tmp_path: Path, path: str, words: str) -> None:
    topology = Topology(rank=0, size=2, local_size=2)
    manifest = collect({})
    with pytest.raises(SettingError, match=words):
        join(topology, f"file://{tmp_path}{path}", manifest=manifest, timeout=1)
