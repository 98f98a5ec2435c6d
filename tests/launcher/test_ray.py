"""`lockstep run --ray` on a Ray cluster of two nodes, which are processes of this machine."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import socket
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

import lockstep
from lockstep.cli.main import main
from lockstep.errors import EXIT_DEADLOCK, HostError, RankFailedError, SettingError
from lockstep.run.machines import ray_launch, ray_placement, ray_run
from lockstep.run.machines.hosts import HostsSpec
from lockstep.run.machines.ray_call import CallOutcome
from lockstep.run.machines.ray_placement import RayNode, names_of_nodes

pytestmark = pytest.mark.launcher

NUM_AGENTS = 2
"""The number of processes that each node of a cluster runs besides its workers."""
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


LAUNCHES = """
import sys, threading
import ray, torch
import lockstep.errors
from beside import OFFSET

SEVEN = 7

class Mine:
    def __init__(self, rank): self.rank = rank

def train(start):
    world = lockstep.init(seed=0)
    world.print("in", sys.argv[0])
    return world.rank, world.sum(start + SEVEN + world.rank) + OFFSET - 3, Mine(world.rank)

def fails():
    with lockstep.init() as world:
        if world.rank == 1:
            raise ValueError("broken batch")
        world.barrier()

def hangs():
    with lockstep.init() as world:
        if world.rank == 1:
            torch.distributed.all_reduce(torch.zeros(1))
        world.barrier()

ray.init(sys.argv[1], logging_level="ERROR")
values = lockstep.launch(train, (3,), nproc=2, ray=True)
same = [(rank, total, type(mine) is Mine) for rank, total, mine in values]
print("returned", same, "from", sys.argv[0] + ",", {7: "seven"}[SEVEN])
print("of the lambda", lockstep.launch(lambda: lockstep.init().sum(1), nproc="gpu", ray=True))
try:
    lockstep.launch(fails, nproc=2, ray=sys.argv[1])
except lockstep.errors.RankFailedError as error:
    line = next(line for line in error.found.splitlines() if "launches.py" in line)
    print("rank", error.rank, "failed at", line.strip())
    print(error.remote_traceback)
try:
    lockstep.launch(hangs, nproc=2, ray=True)
except lockstep.errors.RankFailedError as error:
    print(error.found)
try:
    lockstep.launch(print, (threading.Lock(),), nproc=2, ray=True)
except lockstep.errors.LockstepError as error:
    print("not sent:", error.found.partition("nodes: ")[2])
print("still connected:", ray.is_initialized())
"""
WAITS = """
import sys, threading
import lockstep

def wait():
    print("waits", flush=True)
    threading.Event().wait()

lockstep.launch(wait, nproc=2, ray=sys.argv[1])
"""
BY_CLIENT = """
import os, sys
import lockstep

def train():
    with lockstep.init(seed=0) as world:
        if sys.argv[1:] == ["fail"] and world.rank == 1:
            raise ValueError("no data")
        world.print("the sum is", world.sum(1))
        return world.sum(1)

if "RANK" in os.environ:
    train()
elif sys.argv[1] == "address":
    print("returned", lockstep.launch(train, nproc=2, ray=sys.argv[2]))
else:
    import ray

    ray.init(sys.argv[2], logging_level="ERROR")
    print("returned", lockstep.launch(train, nproc=2, ray=True))
"""
RESUMES = """
import os, sys
from pathlib import Path
import torch
import lockstep
from torch.utils.data import TensorDataset

def train():
    world = lockstep.init("ddp", seed=0)
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    model = torch.nn.Linear(8, 1)
    model, optimizer = world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = world.loader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    checkpoint = world.checkpoint("saved", model=model, optimizer=optimizer, loader=loader)
    checkpoint.resume()
    world.print(f"begins with step {world.step}")
    for epoch in world.epochs(3):
        for inputs, targets in loader:
            world.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            mean = world.loss()
            optimizer.step()
            optimizer.zero_grad()
            if world.step == 18 and Path("waits").exists():
                world.barrier()
                world.print("in the middle of an epoch")
                __import__("threading").Event().wait()
        checkpoint.save()
        checkpoint.wait()
        world.print(f"epoch {epoch}: loss {mean!r}")
    return world.step

if "RANK" in os.environ:
    train()
else:
    print("returned", lockstep.launch(train, nproc=2, ray=sys.argv[1], max_restarts=2))
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
    with pytest.raises(SettingError, match="pip install ray"):
        lockstep.launch(print, ray=True)


def test_what_is_no_address_is_told() -> None:
    for value in ("", None, 3):
        with pytest.raises(SettingError, match="not the address of a Ray cluster"):
            lockstep.launch(print, ray=value)  # type: ignore[arg-type]


def test_an_error_of_another_node_is_the_same_here() -> None:
    error = RankFailedError("launch(f)", "rank 3 failed", "repair it", 3, "Traceback")
    same = pickle.loads(pickle.dumps(error))
    assert type(same) is RankFailedError
    assert str(same) == str(error)
    assert (same.rank, same.remote_traceback, same.args) == (3, "Traceback", error.args)


def test_the_error_of_the_rank_that_failed_first_is_raised() -> None:
    """All launchers know what has failed first; that of the same node knows more."""
    brief = CallOutcome(error=RankFailedError("launch(f)", "rank 1 failed", "repair it", 1))
    full = CallOutcome(
        error=RankFailedError("launch(f)", "rank 1 failed", "repair it", 1, "Traceback")
    )
    for outcomes in ([brief, full], [full, brief], [None, brief, full]):
        with pytest.raises(RankFailedError) as raised:
            ray_launch.returned_values(outcomes, 1, "launch(f)")
        assert raised.value.remote_traceback == "Traceback"
    with pytest.raises(HostError, match="exit code 1"):
        ray_launch.returned_values([CallOutcome(values=[]), None], 1, "launch(f)")


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


def test_launchers_meet_at_a_free_port_unless_one_is_given() -> None:
    nodes = [
        RayNode(name, nproc="1", node_id=name, ip_address=address, bundle_index=index, gpu_ids=())
        for index, (name, address) in enumerate((("a", "10.0.0.1"), ("b", "10.0.0.2")))
    ]

    def flags(*given: str, num_nodes: int = 2) -> list[str]:
        spec = HostsSpec(
            hosts=[], arguments=[], script=["t.py"], environment={}, torchrun=list(given)
        )
        return list(ray_run._spec_with_nodes(spec, nodes[:num_nodes]).torchrun)

    assert flags() == ["--master-addr", "10.0.0.1", "--master-port", "0"]
    given = ["--master-addr", "10.0.0.9", "--master-port", "5000"]
    assert flags(*given) == given
    assert "--master-port" not in flags(num_nodes=1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two nodes with a core and a made-up GPU each."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'torch-lockstep[ray]'")
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    node = {"num_cpus": 1, "num_gpus": 1}
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        client_port = reserved.getsockname()[1]
    head = {**node, "include_dashboard": False, "ray_client_server_port": client_port}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.client_address = f"ray://127.0.0.1:{client_port}"
    cluster.add_node(**node)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def four_nodes(cluster: Any) -> Any:
    """The same cluster, with two more nodes; for the last tests, each of which loses one."""
    for _ in range(2):
        cluster.add_node(num_cpus=1, num_gpus=1)

    # The agents of a new node start later, and would count as processes that a test has left.
    deadline = time.monotonic() + LEAVE_S
    for process in psutil.Process().children(recursive=True):
        while process.name() == "raylet" and len(process.children()) < NUM_AGENTS:
            assert time.monotonic() < deadline, process
            time.sleep(0.1)
    return cluster


def lose_node(cluster: Any, said: str) -> None:
    """Ends a node on which the ranks run, but not the head node.

    Args:
        cluster: the cluster.
        said: what the run has said, with the names of its nodes.
    """
    [names] = re.findall(r"\d hosts: (.*);", said)
    used = [node for node in cluster.worker_nodes if node.node_id[:6] in names]
    cluster.remove_node(used[0], allow_graceful=False)


def start(
    cluster: Any, folder: Path, mode: str, *options: str, nproc: int = 2
) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "lockstep", "run", f"--ray={cluster.address}", *options]
    return subprocess.Popen(
        [*command, f"--nproc={nproc}", "train.py", mode],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def python(folder: Path, *arguments: str) -> str:
    """Runs a script, and returns what it says."""
    result = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=HANG_S
    )
    return result.stdout + result.stderr


def wait_for_client_server(address: str, folder: Path) -> None:
    """Waits until Ray Client's server answers: on a busy machine its first answers are errors."""
    connect = f"import ray; ray.init({address!r}); print('connected')"
    deadline = time.monotonic() + HANG_S
    while "connected" not in python(folder, "-c", connect):
        assert time.monotonic() < deadline


def python_with_client(folder: Path, *arguments: str) -> str:
    """Runs a script that connects by Ray Client, and returns what it says.

    On a busy machine, Ray Client's server sometimes cannot start its process for a client. Then the
    script is run again.
    """
    deadline = time.monotonic() + HANG_S
    while True:
        said = python(folder, *arguments)
        if "Initialization failure from server" not in said:
            return said
        assert time.monotonic() < deadline, said


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

    def test_launch_returns_what_the_ranks_return(self, cluster: Any, tmp_path: Path) -> None:
        """Also a failure with its line, and a hang, in a process that stays connected to Ray."""
        (tmp_path / "beside.py").write_text("OFFSET = 3")
        (tmp_path / "launches.py").write_text(LAUNCHES)
        said = python(tmp_path, "launches.py", cluster.address)
        assert "returned [(0, 21, True), (1, 21, True)] from launches.py, seven" in said, said
        assert "of the lambda [2, 2]" in said
        assert "rank 1 failed at launches.py:20: raise ValueError" in said
        assert 'launches.py", line 20, in fails' in said
        assert "deadlock: " in said
        assert "not sent: cannot pickle" in said
        assert "still connected: True" in said
        assert "SystemExit" not in said  # Ray would print it for an actor that it ends
        assert_nothing_is_left(tmp_path)

    def test_through_ray_client(self, cluster: Any, tmp_path: Path) -> None:
        """`ray://`: the process that starts the run is on no node of the cluster."""
        (tmp_path / "train.py").write_text(BY_CLIENT)
        wait_for_client_server(cluster.client_address, tmp_path)
        command = ["-m", "lockstep", "run", f"--ray={cluster.client_address}", "--nproc=2"]
        assert "the sum is 2" in python_with_client(tmp_path, *command, "train.py")
        assert "FIRST FAILURE: rank 1" in python_with_client(tmp_path, *command, "train.py", "fail")
        for mode in ("address", "connected"):
            said = python_with_client(tmp_path, "train.py", mode, cluster.client_address)
            assert "returned [2, 2]" in said, said
        assert_nothing_is_left(tmp_path)

    def test_ctrl_c_ends_a_launch(self, cluster: Any, tmp_path: Path) -> None:
        (tmp_path / "launches.py").write_text(WAITS)
        process = subprocess.Popen(
            [sys.executable, "launches.py", cluster.address],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        said_until(process, "waits", count=2)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=HANG_S)
        assert process.returncode == -signal.SIGINT
        assert "KeyboardInterrupt" in said
        assert_nothing_is_left(tmp_path)

    def test_two_runs_at_once(self, four_nodes: Any, tmp_path: Path) -> None:
        """Their launchers meet on one machine, so at different ports."""
        processes = [start(four_nodes, tmp_path, "train") for _ in range(2)]
        for process in processes:
            said, _ = process.communicate(timeout=HANG_S)
            assert process.returncode == 0, said

    def test_ranks_of_a_lost_node_go_on_elsewhere(self, four_nodes: Any, tmp_path: Path) -> None:
        """From the last checkpoint."""
        (tmp_path / "train.py").write_text(RESUMES)
        here = launch(["run", "--nproc", "2", "train.py"], cwd=tmp_path)
        losses = re.findall(r"epoch \d: loss \S+", here.stdout)
        assert len(losses) == 3, here
        shutil.rmtree(tmp_path / "saved")

        (tmp_path / "waits").touch()
        process = subprocess.Popen(
            [sys.executable, "train.py", four_nodes.address],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        said = said_until(process, "in the middle of an epoch")
        (tmp_path / "waits").unlink()
        lose_node(four_nodes, said)
        rest, _ = process.communicate(timeout=HANG_S)
        assert process.returncode == 0, said + rest
        assert "1 restart left after that" in rest
        assert "begins with step 12" in rest
        assert re.findall(r"epoch \d: loss \S+", said + rest) == losses
        assert "returned [36, 36]" in rest
        assert_nothing_is_left(tmp_path)

    def test_ranks_that_find_no_place(self, four_nodes: Any, tmp_path: Path) -> None:
        num_nodes = 1 + len(four_nodes.worker_nodes)
        options = ["--max-restarts=1", "--rdzv-conf=timeout=20"]
        process = start(four_nodes, tmp_path, "wait", *options, nproc=num_nodes)
        said = said_until(process, "waits", count=num_nodes)
        lose_node(four_nodes, said)
        said, _ = process.communicate(timeout=HANG_S)
        assert process.returncode == HostError.exit_code
        assert "0 restarts left after that" in said
        needs = f"they need {num_nodes} GPUs, and the cluster has {num_nodes - 1}, of which 0 are"
        assert f"within 20 s its ranks have found no place on other nodes: {needs}" in said, said
        assert_nothing_is_left(tmp_path)

    def test_a_lost_node_ends_the_run(self, four_nodes: Any, tmp_path: Path) -> None:
        process = start(four_nodes, tmp_path, "wait")
        said = said_until(process, "waits", count=2)
        lose_node(four_nodes, said)
        said, _ = process.communicate(timeout=HANG_S)
        assert process.returncode != 0
        assert re.search(r"the connection to \S+ is lost; all ranks are ended$", said, re.MULTILINE)
        assert_nothing_is_left(tmp_path)
