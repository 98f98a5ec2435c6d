"""The guide "Several machines", as a new user walks it: each of its commands, on three machines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from clusters.machines import Cluster, cluster

pytestmark = pytest.mark.clusters

GUIDE = Path(__file__).parents[2] / "docs" / "several_machines.md"
WORD = "a password of the guide"
_ASK = """#!/bin/sh
case "$1" in *yes/no*) echo yes;; *) echo '{word}';; esac
"""


def blocks(info: str) -> list[str]:
    return re.findall(rf"^```{info}\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Cluster]:
    """Where root has a home folder and a password of its own on each machine."""
    with cluster(3, tmp_path / "cluster", password=True) as made, ExitStack() as stack:
        known = subprocess.run(["openssl", "passwd", "-6", WORD], capture_output=True, text=True)
        for node in made.nodes:
            home = node.folder / "home"
            (home / ".ssh").mkdir(parents=True)
            passwd, shadow = node.folder / "passwd", node.folder / "shadow"
            passwd.write_text(
                f"root:x:0:0:root:{home}:/bin/sh\nsshd:x:101:65534::/run/sshd:/bin/false\n"
            )
            shadow.write_text(
                f"root:{known.stdout.strip()}:19000:0:99999:7:::\nsshd:!:19000::::::\n"
            )
            stack.enter_context(node.sees(passwd, Path("/etc/passwd")))
            stack.enter_context(node.sees(shadow, Path("/etc/shadow")))
        yield made
        made.nothing_runs()


def test_the_walk(machines: Cluster, tmp_path: Path) -> None:
    (first, *_), project = machines.nodes, tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("".join(blocks("python")))
    ask = tmp_path / "ask"
    ask.write_text(_ASK.format(word=WORD))
    ask.chmod(0o755)
    environment = {
        **os.environ,
        "HOME": str(first.folder / "home"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SSH_ASKPASS": str(ask),
        "SSH_ASKPASS_REQUIRE": "force",
    }
    machine = ["nsenter", "-t", str(first.server.pid), "-m", "-n", "-u", f"--wd={project}"]
    said = {}
    for line in "".join(blocks("sh")).splitlines():
        if "--ray" in line:  # needs a Ray cluster: tests/launcher/test_ray.py
            continue
        done = subprocess.run(
            [*machine, "sh", "-c", line],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        said[line] = done.stdout
    assert said["ssh node2 hostname"] == "node2\n"
    losses = [
        re.findall(r"epoch \d: loss [\d.]+", text)
        for line, text in said.items()
        if line.startswith("lockstep run") and "--dry-run" not in line
    ]
    assert len(losses) == 3
    assert losses[0] == losses[1] == losses[2]
    assert len(losses[0]) == 3
    assert (project / "runs" / "first" / "report.html").exists()
