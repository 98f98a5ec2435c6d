"""`lockstep run --ray` on a Ray cluster of two nodes, which are processes of this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from launched import launch
from ranks import HANG_S, LEAVE_S

from lockstep.cli.main import main
from lockstep.errors import EXIT_DEADLOCK, SettingError
from lockstep.run.machines import ray_placement, ray_run
from lockstep.run.machines.hosts import HostsSpec
from lockstep.run.machines.ray_placement import names_of_nodes

pytestmark = pytest.mark.launcher

TRAIN = """
import os, sys, threading
import torch
import lockstep
from torch.utils.data import TensorDataset

mode = sys.argv[1]
world = lockstep.init("ddp", seed=0)
model, x = torch.nn.Linear(8, 1), torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
model, optimizer = world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
loader = world.loader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
for epoch in world.epochs(2):
    for number, (inputs, targets) in enumerate(loader):
        world.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        mean = world.loss()
        optimizer.step()
        optimizer.zero_grad()
        if epoch == 1 and number == 3 and world.rank == 1:
            if mode == "fail":
                raise ValueError("broken batch")
            if mode == "hang":
                torch.distributed.barrier()
    world.print(f"epoch {epoch}: loss {mean!r}")
    if mode == "wait":
        print("GPUs", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
        print("waits", flush=True)
        threading.Event().wait()
world.close()
"""


def test_words_that_are_no_address_are_told() -> None:
    result = CliRunner().invoke(main, ["run", "--ray", "train.py"])
    assert "--ray=auto" in result.output


def test_the_address_may_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(address: str, spec: HostsSpec) -> str:
        return f"{address}, {spec.nproc}, {spec.script}, {sorted(spec.environment)}"

    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINE", "1")
    monkeypatch.setattr(ray_run, "describe", describe)
    options = ["--nproc=2", "--forward-env=MINE", "--dry-run", "train.py", "fast"]
    said = CliRunner().invoke(main, ["run", "--ray", *options]).output
    assert said.startswith("auto, 2, ('train.py', 'fast'), ")
    assert "'MINE'" in said
    said = CliRunner().invoke(main, ["run", "--ray=node1:6379", *options]).output
    assert said.startswith("node1:6379, 2, ")


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    spec = HostsSpec(hosts=[], arguments=[], script=["train.py"], environment={})
    with pytest.raises(SettingError, match="pip install ray"):
        ray_run.run_on_ray("auto", spec, [].append)


def test_a_cluster_that_is_gone_does_not_change_how_the_run_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class RayError(Exception):
        pass

    def remove_placement_group(group: object) -> None:
        raise RayError("the cluster is gone")

    modules = {
        "ray": SimpleNamespace(),
        "ray.exceptions": SimpleNamespace(RayError=RayError),
        "ray.util": SimpleNamespace(),
        "ray.util.placement_group": SimpleNamespace(remove_placement_group=remove_placement_group),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    ray_placement.release("a group")


def test_options_that_exclude_ray_are_told() -> None:
    for option in (["--hosts", "node1"], ["--slurm"], ["--copy"]):
        result = CliRunner().invoke(main, ["run", "--ray=auto", *option, "train.py"])
        assert result.exit_code != 0
        assert option[0] in result.output


def test_nodes_with_one_host_name_have_names_of_their_own() -> None:
    assert names_of_nodes({"a1": "one", "b2": "two"}) == {"a1": "one", "b2": "two"}
    names = names_of_nodes({"abcdefgh": "one", "12345678": "one"})
    assert names == {"abcdefgh": "one-abcdef", "12345678": "one-123456"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two nodes with a core and a made-up GPU each."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'torch-lockstep[ray]'")
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    node = {"num_cpus": 1, "num_gpus": 1}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.second = cluster.add_node(**node)
    yield cluster
    cluster.shutdown()


def start(cluster: Any, folder: Path, mode: str, *options: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "lockstep", "run", f"--ray={cluster.address}", *options]
    return subprocess.Popen(
        [*command, "--nproc=2", "train.py", mode],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def said_until(process: subprocess.Popen[str], text: str, count: int = 1) -> str:
    """What it says until a text has come several times."""
    said = ""
    assert process.stdout is not None
    while said.count(text) < count:
        line = process.stdout.readline()
        assert line, said
        said += line
    return said


def assert_nothing_is_left(folder: Path) -> None:
    """No process of the run is left: they all work in its folder."""
    deadline = time.monotonic() + LEAVE_S
    while True:
        left = []
        for process in psutil.process_iter():
            try:
                if Path(process.cwd()) == folder:
                    left.append(process.cmdline())
            except (psutil.Error, OSError):
                continue
        if not left:
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
class TestTwoNodes:
    def test_it_trains_as_on_one_machine(self, cluster: Any, tmp_path: Path) -> None:
        said, _ = start(cluster, tmp_path, "train").communicate(timeout=HANG_S)
        here = launch(["run", "--nproc", "2", "train.py", "train"], cwd=tmp_path)
        losses = re.findall(r"epoch \d: loss \S+", here.stdout)
        assert len(losses) == 2, here
        assert re.findall(r"epoch \d: loss \S+", said) == losses, said
        assert "2 hosts: " in said

    def test_a_failed_rank_is_named(self, cluster: Any, tmp_path: Path) -> None:
        process = start(cluster, tmp_path, "fail")
        said, _ = process.communicate(timeout=HANG_S)
        assert process.returncode == 1
        assert said.count("FIRST FAILURE: rank 1 on host") == 1, said
        assert "ValueError: broken batch" in said
        assert_nothing_is_left(tmp_path)

    def test_a_failed_rank_starts_again(self, cluster: Any, tmp_path: Path) -> None:
        process = start(cluster, tmp_path, "fail", "--max-restarts=1")
        said, _ = process.communicate(timeout=HANG_S)
        assert process.returncode == 1
        assert len(re.findall(r"\[rank 1\] ValueError: broken batch", said)) == 2, said

    def test_a_hang_is_told(self, cluster: Any, tmp_path: Path) -> None:
        process = start(cluster, tmp_path, "hang", "--hang-after=2")
        said, _ = process.communicate(timeout=HANG_S)
        assert process.returncode == EXIT_DEADLOCK, said
        assert "deadlock" in said, said
        assert_nothing_is_left(tmp_path)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
    def test_a_signal_leaves_nothing(self, cluster: Any, tmp_path: Path, number: int) -> None:
        process = start(cluster, tmp_path, "wait")
        said = said_until(process, "waits", count=2)
        assert said.count("GPUs 0") == 2, said  # each node has one, with the number 0
        process.send_signal(number)
        process.communicate(timeout=HANG_S)
        assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
        assert_nothing_is_left(tmp_path)

    def test_one_who_waits_for_resources_can_give_up(self, cluster: Any, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text(TRAIN)
        command = [sys.executable, "-m", "lockstep", "run", f"--ray={cluster.address}"]
        waiting = subprocess.Popen(
            [*command, "--nproc=3", "train.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
        )
        assert waiting.stderr is not None
        assert "waiting until the Ray cluster has 3 GPUs" in waiting.stderr.readline()
        waiting.send_signal(signal.SIGINT)
        waiting.communicate(timeout=HANG_S)
        assert waiting.returncode == 128 + signal.SIGINT

    def test_a_dry_run_starts_nothing(self, cluster: Any, tmp_path: Path) -> None:
        said, _ = start(cluster, tmp_path, "train", "--dry-run").communicate(timeout=HANG_S)
        assert "for all ranks (--nproc 2)" in said, said
        assert "lockstep run --nproc=N " in said, said
        assert "epoch" not in said

    def test_a_lost_node_ends_the_run(self, cluster: Any, tmp_path: Path) -> None:
        """The last test, as the node is gone then."""
        process = start(cluster, tmp_path, "wait")
        said_until(process, "waits", count=2)
        cluster.remove_node(cluster.second, allow_graceful=False)
        said, _ = process.communicate(timeout=HANG_S)
        assert process.returncode != 0
        assert re.search(r"the connection to \S+ is lost; the run is ended$", said, re.MULTILINE)
        assert_nothing_is_left(tmp_path)
