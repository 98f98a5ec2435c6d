"""`lockstep doctor --hosts` over real ssh servers, with faults planted between the machines."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from clusters.machines import Cluster, cluster
from clusters.test_faults import TOLD_WITHIN_S, an_hour_ahead, dropping, one_way_firewall

pytestmark = pytest.mark.clusters


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(3, tmp_path_factory.mktemp("cluster")) as found:
        yield found


def examine(machines: Cluster, folder: Path) -> dict[str, Any]:
    """What is found, by machine and check."""
    line = ["doctor", "--hosts", "node1,node2,node3", "--ssh", machines.ssh, "--folder", "runs"]
    command = machines.run([*line, "--data", "data", "--json", "found.json"], folder)
    assert command.wait() in (0, 1), command.said
    assert time.monotonic() - command.began < TOLD_WITHIN_S
    machines.nothing_runs()
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())["findings"]
    return found


def test_what_stands_between_machines_is_found(made: Cluster, tmp_path: Path) -> None:
    for name in ("runs", "data", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "part").write_text("the data")
    (tmp_path / "other" / "part").write_text("not them")
    sound = examine(made, tmp_path)
    assert list(sound) == ["node1", "node2", "node3", "between the machines"]
    between = sound["between the machines"]
    assert [(name, of["found"]) for name, of in between.items() if of["level"] != "ok"] == []
    with ExitStack() as faults:
        faults.enter_context(made.nodes[1].sees(tmp_path / "other", tmp_path / "data"))
        faults.enter_context(an_hour_ahead(made, tmp_path))
        faults.enter_context(dropping("iifname node3 oifname node2")(made, tmp_path))
        faults.enter_context(one_way_firewall(made, tmp_path))
        faults.enter_context(made.nodes[2].full(tmp_path / "runs"))
        found = examine(made, tmp_path)
    between = found["between the machines"]
    wrong = {name: of["found"] for name, of in between.items() if of["level"] != "ok"}
    assert set(wrong) == {"clocks", "links", "folder", "data"}
    assert wrong["clocks"].startswith("node2 is 36")
    assert wrong["data"].startswith("differs: part ")
    assert wrong["folder"] == "not shared: files written there are not visible on node3"
    _, *ways = sorted(wrong["links"].split("; "))
    assert [way.partition(":")[0] for way in ways] == [
        "node1 to node3",
        "node2 to node3",
        "node3 to node2",
    ]
    assert "no answer" in ways[0]
    assert "long ones do not" in ways[2]
    assert "No space left on device" in found["node3"]["disk"]["found"]
    assert found["node1"]["disk"]["level"] != "error"
