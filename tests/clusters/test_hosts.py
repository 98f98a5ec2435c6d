"""`lockstep run --hosts` over real ssh servers, on machines that are network namespaces."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from namespaces import until

import lockstep
from clusters.machines import Cluster, Command, cluster

pytestmark = pytest.mark.clusters

TRAINS = """
import json, os, sys
import torch, lockstep
from torch.utils.data import TensorDataset
world = lockstep.init("ddp", seed=0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(12, 3, generator=torch.Generator().manual_seed(0)))
model, optimizer = world.prepare(model, optimizer)
for (x,) in world.loader(data, batch_size=6):
    world.backward(model(x).mean())
    optimizer.step()
    optimizer.zero_grad()
world.print("TRAINED", [round(float(v), 6) for p in model.parameters() for v in p.flatten()])
seen = {"host": os.uname().nodename, "mine": os.environ.get("MINE")}
print("SEEN", json.dumps(seen | {"omp": os.environ["OMP_NUM_THREADS"]}), flush=True)
world.close()
"""
LOOP = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print("LOOPS", flush=True)
on = torch.ones(1)
while on:
    time.sleep(0.01)
    on.fill_(not os.path.exists("enough"))
    dist.all_reduce(on, dist.ReduceOp.MIN)
print("ENOUGH", flush=True)
dist.destroy_process_group()
"""
FAILS = LOOP.replace(
    "on.fill_", "if dist.get_rank() == 1: raise ValueError('planted')\n    on.fill_"
)
LINGERS = LOOP.replace(
    "dist.destroy", "time.sleep(1e6 if dist.get_rank() == 1 else 0)\ndist.destroy"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(3, tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture
def machines(made: Cluster) -> Iterator[Cluster]:
    yield made
    made.nothing_runs()


@pytest.fixture
def run(machines: Cluster, tmp_path: Path):
    def start(script: str, *options: str, hosts: str = "node1,node2", **more) -> Command:
        (tmp_path / "train.py").write_text(script)
        line = ["run", "--hosts", hosts, "--ssh", machines.ssh, *options, "train.py"]
        return machines.run(line, tmp_path, **more)

    return start


def test_it_trains_on_two_and_on_three_machines_with_the_same_result(
    run, machines: Cluster
) -> None:
    secret = "a secret of this test's own"
    env = {"LOCKSTEP_TOKEN": secret, "MINE": "forwarded"}
    results = []
    for hosts, ranks in (("node1,node2:2", 3), ("node1,node2,node3", 3)):
        command = run(TRAINS, "--forward-env", "MINE", hosts=hosts, env=env)
        assert command.wait() == 0, command.said
        seen = [json.loads(text) for text in re.findall(r"SEEN (.*)", command.said)]
        assert len(seen) == ranks
        assert {s["mine"] for s in seen} == {"forwarded"}
        assert {s["omp"] for s in seen} == {"1"}
        assert {s["host"] for s in seen} == {part.partition(":")[0] for part in hosts.split(",")}
        assert re.search(r"^\[node2\] \[rank 1\] SEEN", command.said, re.M)
        results += re.findall(r"^\[node1\] \[rank 0\] (TRAINED .*)", command.said, re.M)
    assert len(results) == 2
    assert results[0] == results[1]


def test_it_is_started_from_a_machine_that_takes_no_part_and_tells_no_secret(
    run, machines: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "hostfile").write_text(
        "# two of them\nnode2 slots=2\n\nnode3 slots = 1 max_slots=4\n"
    )
    secret = "a secret of this test's own"
    command = run(LOOP, hosts="hostfile", env={"LOCKSTEP_TOKEN": secret})
    until(lambda: command.said.count("LOOPS") == 3 or command.process.poll() is not None)
    lines = [line for node in machines.nodes for line in node.running()]
    assert any("lockstep.run.machines.helper" in line for line in lines)
    assert not any(secret in line for line in lines)
    assert not any(
        "train.py" in line for line in machines.nodes[0].running() if "--hosts" not in line
    )
    (tmp_path / "enough").touch()
    assert command.wait() == 0, command.said
    assert secret not in command.said
    assert "they meet at 10.98.0.2" in command.said


def test_a_failure_is_told_once_and_is_the_exit_code(run) -> None:
    command = run(FAILS)
    assert command.wait() == 1, command.said
    assert command.said.count("FIRST FAILURE: rank 1 on host node2") == 1
    assert "ValueError: planted" in command.said


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_it_everywhere(run, name: str) -> None:
    command = run(LOOP)
    command.until("LOOPS")
    command.process.send_signal(signal.Signals[name])
    assert command.wait() == 128 + signal.Signals[name], command.said
    assert "INTERRUPTED" in command.said


def test_nothing_is_left_when_the_first_is_killed(run, machines: Cluster) -> None:
    command = run(LOOP, hosts="node1,node2,node3")
    until(lambda: command.said.count("LOOPS") == 3)
    command.process.kill()
    command.wait()
    machines.nothing_runs()


def test_a_lost_connection_ends_the_run(run, machines: Cluster) -> None:
    command = run(LOOP)
    command.until("LOOPS")
    machines.nodes[1].cut_connections()
    assert command.wait() not in (0, None), command.said
    assert "the connection to node2 is lost; the run is ended (--on-lost stop)" in command.said


def test_or_it_goes_on(run, machines: Cluster, tmp_path: Path) -> None:
    command = run(LOOP, "--on-lost", "keep")
    until(lambda: command.said.count("LOOPS") == 2)
    machines.nodes[1].cut_connections()
    command.until("the connection to node2 is lost; its ranks go on")
    assert any("train.py" in line for line in machines.nodes[1].running())
    (tmp_path / "enough").touch()
    assert command.wait() == 0, command.said


def test_a_pulled_cable_ends_the_run_on_both_sides(run, machines: Cluster) -> None:
    command = run(LOOP)
    until(lambda: command.said.count("LOOPS") == 2)
    with machines.nodes[1].unplugged():
        assert command.wait() == lockstep.errors.EXIT_LOST_RANK, command.said

        def launchers() -> bool:
            return any("train.py" in line for line in machines.nodes[1].running())

        until(lambda: not launchers(), 60.0)
        machines.nodes[1].cut_connections()  # the server waits for TCP's own timeout
    assert "node 1 on host node2 has left" in command.said


def test_behind_an_open_connection_a_machine_that_falls_silent_is_noticed(
    run, machines: Cluster, tmp_path: Path
) -> None:
    """A ControlMaster of the user's: ssh itself does not look whether the machine is there."""
    master = machines.start([*machines.ssh.split(), "-M", "-N", "-S", "open", "node2"], tmp_path)
    until((tmp_path / "open").exists)
    command = run(LOOP, "--ssh", f"{machines.ssh} -S open")
    until(lambda: command.said.count("LOOPS") == 2)
    with machines.nodes[1].unplugged():
        assert command.wait() == lockstep.errors.EXIT_LOST_RANK, command.said
    assert "the connection to node2 is lost" in command.said
    master.process.kill()
    machines.nodes[1].cut_connections()


def test_it_goes_through_a_jump_host(run, machines: Cluster) -> None:
    command = run(LOOP, "--ssh", f"{machines.ssh} -J node3", hosts="node2")
    command.until("LOOPS")
    assert any(each.name().startswith("sshd") for each in machines.nodes[2].processes())
    command.process.send_signal(signal.SIGINT)
    assert command.wait() == 130, command.said


# What keeps a run from being started; test_faults has more of it


def refused(command: Command, found: str, do: str, host: str = "node2") -> None:
    assert command.wait() == 3, command.said
    assert f"--hosts: a run on {host}\n" in command.said
    assert found in command.said.partition("  do:")[0], command.said
    assert do in command.said.partition("  do:")[2], command.said
    assert "Traceback" not in command.said


def test_several_hosts_are_told_in_one_error(run) -> None:
    command = run(LOOP, hosts="node1,node9,node8")
    refused(
        command,
        "node9: the name cannot be resolved; node8: the name",
        "spelling",
        "node9, node8",
    )


def test_a_folder_that_is_not_there(run, machines: Cluster, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    folder = tmp_path / "project" / "part"
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(LOOP)
    with machines.nodes[1].sees(tmp_path / "empty", folder.parent):
        line = ["run", "--hosts", "node1,node2", "--ssh", machines.ssh, "train.py"]
        command = machines.run(line, folder)
        refused(command, f"{folder}: No such file or directory", "--copy")


@pytest.mark.parametrize("git", [True, False])
def test_a_folder_that_is_sent(git: bool, run, machines: Cluster, tmp_path: Path) -> None:
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    for folder in (elsewhere, tmp_path / "data"):
        folder.mkdir()
    (elsewhere / "of its own").touch()
    (tmp_path / ".gitignore").write_text("data/*\n" + "!data/small\n" * git)
    for name in ("small", "large"):
        (tmp_path / "data" / name).touch()
    if git:
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    with machines.nodes[1].sees(elsewhere, tmp_path):
        command = run(TRAINS, "--copy")
        assert command.wait() == 0, command.said
    sent = {str(path.relative_to(elsewhere)) for path in elsewhere.rglob("*")}
    expected = {"train.py", ".gitignore", "of its own", "data"}
    assert sent == expected | ({"data/small"} if git else set())


def test_a_link_stays_a_link_where_a_folder_is_sent(run, machines: Cluster, tmp_path: Path) -> None:
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    disk = tmp_path.parent / f"{tmp_path.name}-disk"
    for folder in (elsewhere, disk, tmp_path / "runs"):
        folder.mkdir()
    (elsewhere / "runs").symlink_to(disk)
    (disk / "best").touch()
    (tmp_path / "runs" / "a note").touch()
    with machines.nodes[1].sees(elsewhere, tmp_path):
        command = run("", "--copy")
        if command.wait():  # of late rsync follows no link that leads out of the folder
            assert "a folder that is sent is a link there" in command.said
            assert "name it in .gitignore" in command.said
        else:
            assert (disk / "a note").exists()
    assert (elsewhere / "runs").is_symlink()
    assert (disk / "best").exists()


def test_another_lockstep(run, machines: Cluster, tmp_path: Path) -> None:
    package = Path(lockstep.__file__)
    (tmp_path / "init.py").write_text(
        package.read_text().replace(
            f'__version__ = "{lockstep.__version__}"', '__version__ = "9.9"'
        )
    )
    with machines.nodes[1].sees(tmp_path / "init.py", package):
        refused(run(LOOP), f"Lockstep 9.9 there, {lockstep.__version__} here", "install Lockstep")


def test_machines_that_do_not_reach_each_other(run, machines: Cluster) -> None:
    route = ["ip", "-n", machines.nodes[2].namespace, "route"]
    subprocess.run([*route, "add", "blackhole", "10.98.0.2/32"], check=True)
    try:
        command = run(LOOP, hosts="node2,node3")
        refused(command, "it cannot reach node2 at 10.98.0.2", "firewall", "node3")
    finally:
        subprocess.run([*route, "del", "blackhole", "10.98.0.2/32"], check=True)
