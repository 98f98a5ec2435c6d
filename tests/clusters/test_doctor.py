"""`lockstep doctor --hosts` over real ssh servers, with faults planted between the machines."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusters.machines import Cluster, cluster


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(3, tmp_path_factory.mktemp("cluster")) as found:
        yield found


def examine(machines: Cluster, folder: Path) -> dict[str, Any]:
    """What is found, by machine and check."""
    line = ["doctor", "--hosts", "node1,node2,node3", "--ssh", machines.ssh, "--json", "found.json"]
    command = machines.run(line, folder)
    assert command.wait() in (0, 1), command.said
    machines.nothing_runs()
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())["findings"]
    return found


def test_what_stands_between_machines_is_found(made: Cluster, tmp_path: Path) -> None:
    sound = examine(made, tmp_path)
    assert list(sound) == ["node1", "node2", "node3", "between the machines"]
    between = sound["between the machines"]
    assert [(name, of["found"]) for name, of in between.items() if of["level"] != "ok"] == []
    other = tmp_path / "other"
    other.mkdir()
    route = ["ip", "-n", made.nodes[1].namespace, "route"]
    blocked = ["blackhole", f"{made.nodes[2].address}/32"]
    subprocess.run([*route, "add", *blocked], check=True)
    try:
        with made.nodes[1].sees(other, tmp_path):
            between = examine(made, tmp_path)["between the machines"]
    finally:
        subprocess.run([*route, "del", *blocked], check=True)
    wrong = {name: of for name, of in between.items() if of["level"] != "ok"}
    assert set(wrong) == {"links", "folder"}
    assert wrong["folder"]["found"] == "not shared: node2 does not see what is written"
    ways = [part.partition(":")[0] for part in wrong["links"]["found"].split("; ")[1:]]
    assert ways == ["node2 to node3", "node3 to node2"]
    assert wrong["links"]["level"] == "error"
