"""What is found between machines: planted faults, and two machines that are this one."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import schemas
from launched import launch

from lockstep import doctor
from lockstep.cli.doctor import command
from lockstep.doctor import data, helper, hosts
from lockstep.doctor.base import ERROR, OK, UNKNOWN, WARNING
from lockstep.doctor.comparison import judge
from lockstep.run.machines.hosts import Host
from lockstep.run.machines.machine_connection import Problem

pytestmark = pytest.mark.launcher

SOFTWARE = {"python": "3.12.1", "torch": "2.13.0", "cuda": None, "nccl": None, "lockstep": "0.1.0",
            "packages": {"numpy": "2.1", "rich": "15.0"}}  # fmt: skip
DATA = {"files": 2, "bytes": 30, "sizes": {"a.bin": 10, "b.bin": 20}, "names": "n",
        "contents": {"a.bin": "aa", "b.bin": "bb"}}  # fmt: skip
LINK = {"latency_s": 1e-4, "bandwidth": 1.2e8, "interface": "eth0"}
LATE = {UNKNOWN: "no answer within 20 s"}


def machines() -> dict[str, Any]:
    """Three that nothing is wrong with."""
    names = ("a", "b", "c")
    return {
        name: {
            "checks": copy.deepcopy(
                {
                    "software": SOFTWARE,
                    "variables": {"NCCL_DEBUG": "INFO"},
                    "token": {"digest": "12ab"},
                }
            ),
            "data": copy.deepcopy(DATA),
            "own": "10.0.0.9",
            "resolved": {other: [f"10.0.0.{i}"] for i, other in enumerate(names, 1)},
            "script": {"digest": "12345678"},
            "clock": 0.01,
            "shared": True,
            "links": {other: dict(LINK) for other in names if other != name},
        }
        for name in names
    }


def of(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def plant(found: dict[str, Any]) -> None:
        *places, last = path.split("/")
        for place in places:
            found = found[place]
        found[last] = value

    return plant


PLANTED = [
    ("versions", of("b/checks/software/torch", "2.12.0"), ERROR, "2.13.0 on a, c, 2.12.0 on b"),
    ("versions", of("c/checks/software/python", "3.11.2"), ERROR, "python 3.12.1 on a, b"),
    ("packages", of("b/checks/software/packages/numpy", "2.2"), WARNING, "2.1 on a, c, 2.2 on b"),
    ("packages", of("b/checks/software/packages/own", "1"), WARNING, "own none on a, c, 1 on b"),
    ("variables", of("b/checks/variables/NCCL_DEBUG", "WARN"), WARNING, "NCCL_DEBUG INFO on a, c"),
    ("clocks", of("b/clock", -5.0), WARNING, "b is 5.0 s behind this machine"),
    ("clocks", of("c/clock", 3600.0), ERROR, "c is 3600.0 s ahead of this machine"),
    ("names", of("a/resolved/b", ["127.0.1.1"]), ERROR, "on a, b is 127.0.1.1: loopback"),
    ("names", of("b/resolved/b", ["127.0.1.1"]), WARNING, "on b, b is 127.0.1.1: loopback"),
    ("links", of("a/links/b", {"error": "no answer within 5 s"}), ERROR, "a to b: no answer"),
    ("links", of("c/links/a", {"latency_s": 1, "stalled": True}), ERROR, "c to a: short messages"),
    ("links", of("b/links/c/bandwidth", 1e6), WARNING, "b to c is 120 times as slow as"),
    ("folder", of("b/shared", False), WARNING, "not shared: files written there are not visible"),
    ("folder", of("a/shared", None), WARNING, "not known: a cannot write there"),
    ("script", of("b/script/digest", "87654321"), ERROR, "12345678 on a, c, 87654321 on b"),
    ("token", of("b/checks/token/digest", None), WARNING, "digest 12ab on a, c, none on b"),
    ("data", of("b/data", None), ERROR, "missing on b"),
    ("data", of("b/data/sizes/b.bin", 19), ERROR, "differs: b.bin 20 on a, c, 19 on b"),
    ("data", of("c/data/files", 3), ERROR, "differs: files 2 on a, b, 3 on c"),
    ("data", of("c/data/names", "m"), ERROR, "differs: names n on a, b, m on c"),
    ("data", of("b/data/contents/a.bin", "ac"), ERROR, "differs: a.bin aa on a, c, ac on b"),
    ("script", of("b/script", None), ERROR, "missing on b"),
    ("variables", of("b/checks/variables", LATE), WARNING, "not known of b"),
    ("names", of("b/resolved", LATE), WARNING, "not known of b"),
    ("script", of("b/script", LATE), WARNING, "not known of b"),
    ("token", of("b/checks/token", LATE), WARNING, "not known of b"),
    ("data", of("b/data", LATE), WARNING, "not known of b"),
]  # fmt: skip


def test_nothing_is_found_between_sound_machines() -> None:
    findings = judge(machines())
    assert {finding.level for finding in findings.values()} == {OK}
    assert findings["links"].found == "at least 960 Mb/s (and 0.1 ms) each way, over eth0"
    assert set(findings) == {name for name, *_ in PLANTED}


@pytest.mark.parametrize(("check", "plant", "level", "words"), PLANTED)
def test_a_fault_between_machines_is_found(
    check: str, plant: Callable[[dict[str, Any]], None], level: str, words: str
) -> None:
    found = machines()
    plant(found)
    findings = judge(found)
    assert findings[check].level == level
    assert words in findings[check].found
    own = {option for parameter in command.params for option in parameter.opts}
    assert set(re.findall(r"(?<!run )--[a-z-]+", findings[check].do)) <= own
    assert findings[check].do
    assert {f.level for name, f in findings.items() if name != check} == {OK}


def test_variables_that_each_machine_has_for_itself_may_differ() -> None:
    found = machines()
    found["a"]["checks"]["variables"]["CUDA_VISIBLE_DEVICES"] = "2,3"
    found["b"]["checks"]["variables"]["LOCKSTEP_TOKEN"] = "***"  # compared by its digest
    assert judge(found)["variables"].level == OK


def test_machines_whose_facts_are_not_known_are_not_compared() -> None:
    found = machines()
    found["b"]["checks"]["software"] = LATE
    assert [judge(found)[name] for name in ("versions", "packages")] == [
        (WARNING, "not known of b", "see the other findings about that machine")
    ] * 2
    found["c"]["checks"]["software"]["torch"] = "2.12.0"
    assert judge(found)["versions"].level == ERROR
    assert judge(found)["versions"].found == (
        "differs: torch 2.13.0 on a, 2.12.0 on c; not known of b"
    )


def test_a_machine_that_was_lost_is_not_compared() -> None:
    found = machines()
    found["b"] = {"own": "10.0.0.2", "links": {}, "checks": {}}
    findings = judge(found)
    unknown = {name for name, finding in findings.items() if finding.level == WARNING}
    assert unknown == set(findings) - {"clocks", "links"}
    assert {findings[name].found.rpartition("; ")[2] for name in unknown} == {"not known of b"}
    assert ERROR not in {finding.level for finding in findings.values()}


def test_a_name_that_ssh_alone_knows_is_no_error_where_the_address_is_known() -> None:
    found = machines()
    found["a"]["resolved"]["b"] = []
    names = judge(found)["names"]
    assert names.level == OK
    assert "not all know b: a run uses the address" in names.found
    found["b"]["own"] = ""
    assert judge(found)["names"].level == ERROR
    assert "a does not know b" in judge(found)["names"].found


def test_a_machine_alone_has_no_links() -> None:
    alone = machines()["a"] | {"links": {}, "resolved": {"a": ["127.0.1.1"]}}
    alone["data"] |= {"files": 1, "contents": {"": "aa"}}
    findings = judge({"a": alone})
    assert {finding.level for finding in findings.values()} == {OK}
    assert findings["names"].found == "those of 1 machine looked up on each"
    assert findings["data"].found == (
        "the same names and sizes (1 file), and pieces of contents (1 file)"
    )


def test_many_closed_ways_are_counted() -> None:
    found = machines()
    for name, facts in found.items():
        facts["links"] = {other: {"error": "no answer"} for other in facts["links"]}
        facts["shared"] = name == "a"
    links = judge(found)["links"]
    assert links.level == ERROR
    assert links.found.count("no answer") == 5
    assert links.found.endswith("; and 1 more")
    assert "not visible on b, c" in judge(found)["folder"].found


def test_what_is_compared_of_data(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(data, "PIECE_SIZE", 8)
    folder = tmp_path / "data"
    (folder / "in").mkdir(parents=True)
    (folder / "in" / "a").write_bytes(bytes(range(100)))
    for number in range(40):
        (folder / f"{number:02}").write_bytes(bytes([number]))
    (folder / "gone").symlink_to("nowhere")
    assert data.gather(tmp_path / "none") is None
    before = data.gather(folder)
    assert before is not None
    assert (before["files"], before["bytes"]) == (42, 139)
    assert before["sizes"] == {f"{i:02}": 1 for i in range(40)} | {"gone": -1, "in/a": 100}
    assert len(before["contents"]) == 16
    for place, seen in ((0, True), (50, True), (99, True), (20, False)):
        content = bytearray(range(100))
        content[place] += 1
        (folder / "in" / "a").write_bytes(content)
        now = data.gather(folder)
        assert now is not None
        assert (now["contents"]["in/a"] != before["contents"]["in/a"]) is seen
        assert now["names"] == before["names"]
    one = data.gather(folder / "07")
    assert one is not None
    assert (one["files"], one["bytes"], list(one["contents"])) == (1, 1, [""])


def test_the_way_to_another_machine(monkeypatch: Any) -> None:
    monkeypatch.setattr(helper, "CONNECT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(helper, "ANSWER_TIMEOUT_S", 0.5)
    monkeypatch.setattr(helper, "MESSAGE_SIZES", (2**14, 2**16))
    with socket.socket() as refusing:  # bound, so that nobody else listens there
        refusing.bind(("127.0.0.1", 0))
        found = helper.measure("127.0.0.1", refusing.getsockname()[1], "t" * 32)
    assert found == {"error": "Connection refused"}
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections, and says nothing
        found = helper.measure("127.0.0.1", silent.getsockname()[1], "t" * 32)
    assert found == {"error": "no answer within 0.5 s"}


def test_which_of_many_machines_are_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("", 0)) as two:
        places = {"a": one.getsockname(), "b": ("127.0.0.1", two.getsockname()[1])}
        assert helper.unreachable(places) == {}
    assert helper.unreachable(places) == dict.fromkeys(("a", "b"), "Connection refused")


@pytest.mark.parametrize("relative", [True, False])  # the folder has other real names elsewhere
def test_where_a_folder_is_not_there_yet_nothing_is_made(tmp_path: Path, relative: bool) -> None:
    root = Path() if relative else tmp_path
    lines = [
        {"ask": "write", "path": str(root / "runs" / "a" / "file"), "text": "text"},
        {"ask": "read", "path": str(root / "file")},
    ]
    said = subprocess.run(
        [sys.executable, "-m", "lockstep.doctor.helper", "word"],
        input="".join(json.dumps(line) + "\n" for line in lines),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    wrote, read = (json.loads(line.rpartition(" word ")[2]) for line in said.strip().split("\n"))
    assert wrote == {"error": None, "path": str(root / "file")}
    assert read == {"text": "text"}
    assert list(tmp_path.iterdir()) == []


def test_a_way_on_which_long_messages_are_lost(monkeypatch: Any) -> None:
    monkeypatch.setattr(helper, "ANSWER_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                assert connection.recv(32) == b"t" * 32
                while True:
                    size = int.from_bytes(helper.receive(connection, 8))
                    if size > 1400:
                        connection.recv(1 << 20)  # until the other end gives up
                        while connection.recv(1 << 20):
                            pass
                        return
                    helper.receive(connection, size)
                    connection.sendall(b"+")

        thread = threading.Thread(target=answer)
        thread.start()
        found = helper.measure("127.0.0.1", server.getsockname()[1], "t" * 32)
        thread.join()
    assert found.pop("latency_s") > 0
    assert found == {"stalled": True}


def test_who_does_not_know_the_token_is_turned_away() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address) as asking:
            asking.sendall(b"x" * 32 + (1).to_bytes(8) + b"1")
            connection, _ = server.accept()
            helper.acknowledge(connection, b"t" * 32)
            with contextlib.suppress(ConnectionResetError):
                assert asking.recv(1) == b""


def test_two_machines_that_are_this_one(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("pass\n")
    (tmp_path / "data").mkdir()
    arguments = ["doctor", "--hosts", "localhost,127.0.0.1", "--script", "train.py"]
    arguments += ["--data", "data", "--folder", "runs", "--fix"]
    ended = launch([*arguments, "--json", "found.json"], tmp_path)
    report = json.loads((tmp_path / "found.json").read_text())
    schemas.check("doctor_hosts", report)
    between = report["findings"]["between the machines"]
    levels = {name: finding["level"] for name, finding in between.items()}
    assert levels.pop("names") == ERROR  # they are loopback, which no other machine reaches
    assert set(levels.values()) == {OK}, ended.stdout
    assert ended.returncode == 1
    links = {name: of["links"] for name, of in report["facts"].items()}
    assert links["localhost"]["127.0.0.1"]["bandwidth"] > 0
    assert links["127.0.0.1"]["localhost"]["latency_s"] > 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "found.json", "runs", "train.py"]
    assert ended.stdout.count("fixed    made runs") >= 1
    assert "between the machines:" in ended.stdout


def test_a_machine_that_ssh_does_not_reach(tmp_path: Path) -> None:
    (tmp_path / "ssh").write_text(
        "#!/bin/sh\necho 'ssh: Could not resolve hostname nowhere: unknown' >&2\nexit 255\n"
    )
    (tmp_path / "ssh").chmod(0o755)
    ended = launch(["doctor", "--hosts", "nowhere.invalid", "--ssh", "./ssh"], tmp_path)
    assert ended.returncode == 1
    assert "nowhere.invalid:\n  error    reached" in ended.stdout
    assert "the name cannot be resolved" in ended.stdout
    assert "Traceback" not in ended.stderr


def test_a_program_for_ssh_that_is_not_there(tmp_path: Path) -> None:
    ended = launch(["doctor", "--hosts", "nowhere.invalid", "--ssh", "./none"], tmp_path)
    assert ended.returncode == 1
    assert "nowhere.invalid:\n  error    reached  ./none cannot be started here" in ended.stdout
    assert "do: install OpenSSH's client" in ended.stdout
    assert "Traceback" not in ended.stderr


class Answering:
    """A machine that answers, and keeps what it was asked; `b` dies in one step."""

    asked: ClassVar[list[tuple[str, float, dict[str, Any]]]] = []
    dies_in = "none"
    closed: ClassVar[dict[str, dict[str, str]]] = {}

    def __init__(self, host: Host, ssh: Any, module: str) -> None:
        self.host, self.here, self.answer_timeout_s = host, False, 0.0

    async def connect(self, **request: Any) -> dict[str, Any]:
        return await self.ask(**request)

    async def close(self) -> None: ...

    async def ask(self, ask: str, **request: Any) -> dict[str, Any]:
        self.asked.append((ask, self.answer_timeout_s, request))
        if self.host.name == "b" and ask == self.dies_in:
            raise Problem("it died", "look at it")
        facts = {"checks": {"variables": {}}, "fixed": []}
        here = {
            "missing": "",
            "own_address": f"10.0.0.{ord(self.host.name) - 96}",
            "address_ssh_came_from": "",
        }
        return {
            "look": here, "time": {"time": time.time()}, "serve": {"port": 1}, "measure": LINK,
            "reach": self.closed.get(self.host.name, {}), "facts": facts,
            "write": {"error": None, "path": request.get("path")},
            "read": {"text": request.get("path")},
        }[ask]  # fmt: skip


def test_a_way_that_is_closed_is_found_among_many_machines(monkeypatch: Any) -> None:
    monkeypatch.setattr(hosts, "SshConnection", Answering)
    monkeypatch.setattr(Answering, "asked", [])
    monkeypatch.setattr(Answering, "closed", {"a": {"g": "no answer within 4 s"}})
    found, _ = hosts.examine([Host(name) for name in "abcdefgh"], Path("."), files={}, fix=False)
    tried = [request["places"] for ask, _, request in Answering.asked if ask == "reach"]
    assert [len(places) for places in tried] == [7] * 8
    links = judge(found)["links"]
    assert links.level == ERROR
    assert "56 of 56 ways tried, 24 measured" in links.found
    assert "a to g: no answer within 4 s" in links.found
    measured = [name for name, link in found["a"]["links"].items() if link == LINK]
    assert measured == ["b", "c", "d"]


@pytest.mark.parametrize("step", ["time", "serve", "reach", "measure", "facts", "write", "read"])
def test_a_machine_that_is_lost_on_the_way_takes_nothing_from_the_others(
    monkeypatch: Any, step: str
) -> None:
    monkeypatch.setattr(hosts, "SshConnection", Answering)
    monkeypatch.setattr(Answering, "asked", [])
    monkeypatch.setattr(Answering, "dies_in", step)
    names = ("b", "a", "c")
    found, failed = hosts.examine([Host(name) for name in names], Path("."), files={}, fix=False)
    assert failed == {"b": (ERROR, "it died", "look at it")}
    assert found["a"].keys() == found["c"].keys()
    assert found["a"].get("shared") is (None if step == "write" else True)
    assert found["b"]["own"] == "10.0.0.2"
    assert ("clock" in found["b"], "fixed" in found["b"]) == (
        step != "time",
        step in ("write", "read"),
    )
    judge(found)


def test_all_steps_share_one_deadline(monkeypatch: Any) -> None:
    monkeypatch.setattr(hosts, "SshConnection", Answering)
    monkeypatch.setattr(Answering, "asked", [])
    monkeypatch.setattr(hosts, "TOTAL_DEADLINE_S", 4.0)
    hosts.examine([Host("a"), Host("b")], Path("."), files={}, fix=False)
    assert all(0 < patience <= 4.0 for _, patience, _ in Answering.asked)
    request = next(request for ask, _, request in Answering.asked if ask == "facts")
    assert 0 < request["seconds"] <= 2.0


def test_what_is_late_on_a_machine_hides_nothing_else(monkeypatch: Any, tmp_path: Path) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(data, "gather", lambda path: go_on.wait())
    monkeypatch.setattr(doctor, "examine", lambda *_, **__: ({"clock": {"time": 1.0}}, []))
    (tmp_path / "train.py").touch()
    before = set(threading.enumerate())
    files = {"script": str(tmp_path / "train.py"), "data": "data"}
    found = helper.facts("runs", {"a": "127.0.0.1"}, files, fix=False, seconds=0.5)
    go_on.set()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert found["data"] == {UNKNOWN: "no answer within 0.5 s"}
    assert found["script"] == {"digest": "e3b0c442"}
    assert found["checks"] == {"clock": {"time": 1.0}}
