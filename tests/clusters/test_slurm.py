"""`lockstep run` under a real Slurm of two nodes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from namespaces import until

from clusters.machines import cluster
from clusters.scheduler import Slurm, slurm

pytestmark = pytest.mark.clusters

TRAINS = """
import os, sys, time
import torch, lockstep
from torch.utils.data import TensorDataset
world = lockstep.init("ddp", seed=0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)))
model, optimizer = world.prepare(model, optimizer)
loader = world.loader(data, batch_size=4)
checkpoint = world.checkpoint("runs", model=model, optimizer=optimizer, loader=loader)
resumed = checkpoint.resume()
world.print("BEGINS", "AGAIN" if resumed else "ANEW", world.size)
for epoch in world.epochs(int(sys.argv[1])):
    for (x,) in loader:
        world.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.step()
        time.sleep(0.0 if os.path.exists("enough") else 0.05)
gpus = os.environ.get("SLURM_GPUS_ON_NODE", "no")
print(f"TRAINED on {os.uname().nodename} with {gpus} GPUs", flush=True)
world.close()
"""


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("cluster")
    with cluster(2, folder) as machines, slurm(machines, folder / "slurm") as found:
        yield found


@pytest.fixture
def jobs(scheduler: Slurm, tmp_path: Path) -> Iterator[Slurm]:
    (tmp_path / "train.py").write_text(TRAINS)
    yield scheduler
    scheduler.cancel_all()
    scheduler.cluster.nothing_runs()


def submitted(jobs: Slurm, folder: Path, *options: str, epochs: int = 100_000) -> tuple[str, Path]:
    """Submits the run; the job and the file of what it prints."""
    line = ["run", "--slurm", "--nodes", "2", *options, "train.py", str(epochs)]
    command = jobs.run(line, folder)
    assert command.wait() == 0, command.said
    job = re.search(r"Submitted batch job (\d+)", command.said)[1]
    return job, folder / f"train-{job}.out"


def said(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def test_a_submitted_job_trains_on_its_machines(jobs: Slurm, tmp_path: Path) -> None:
    job, output = submitted(jobs, tmp_path, "--nproc", "2", epochs=2)
    until(lambda: jobs.state(job) in ("COMPLETED", "FAILED"))
    assert jobs.state(job) == "COMPLETED", said(output)
    assert "BEGINS ANEW 4" in said(output)
    assert sorted(re.findall(r"TRAINED on (\w+)", said(output))) == [
        "node1",
        "node1",
        "node2",
        "node2",
    ]


def test_a_submitted_job_has_a_rank_for_each_gpu(jobs: Slurm, tmp_path: Path) -> None:
    folder = tmp_path / "a %j"  # which is a pattern to sbatch
    folder.mkdir()
    (folder / "train.py").write_text(TRAINS)
    asked = ["--sbatch", "--gpus=3", "--sbatch", "--comment it's train.py"]
    job, output = submitted(jobs, folder, *asked, epochs=2)
    assert "Comment=it's train.py" in jobs.ask("scontrol", "show", "job", job)
    until(lambda: jobs.state(job) in ("COMPLETED", "FAILED"))
    assert jobs.state(job) == "COMPLETED", said(output)
    assert "BEGINS ANEW 3" in said(output)
    trained = sorted(re.findall(r"TRAINED on (\w+) with (\d) GPUs", said(output)))
    assert trained == [("node1", "2"), ("node1", "2"), ("node2", "1")]


def test_a_cancelled_job_ends_and_does_not_begin_again(jobs: Slurm, tmp_path: Path) -> None:
    job, output = submitted(jobs, tmp_path)
    until(lambda: "BEGINS" in said(output))
    jobs.ask("scancel", job)
    until(lambda: jobs.state(job) == "CANCELLED" and not jobs.ask("squeue", "-h").strip())
    jobs.cluster.nothing_runs()
    assert said(output).count("BEGINS") == 1


def begins_again(jobs: Slurm, job: str, output: Path) -> None:
    """Waits until the job was given back to the queue, and resumes."""
    # A node that is idle has revoked the job's credential, and refuses another one of that second.
    until(lambda: jobs.state(job) == "PENDING" and jobs.idle())
    # Slurm would wait for two minutes.
    jobs.ask("scontrol", "update", f"JobId={job}", "StartTime=now+2")
    until(lambda: "BEGINS AGAIN" in said(output))


def test_a_preempted_job_is_requeued_and_resumes(jobs: Slurm, tmp_path: Path) -> None:
    job, output = submitted(jobs, tmp_path)
    until(lambda: "BEGINS ANEW" in said(output))
    line = ["--partition=high", "--nodes=2", "--output=/dev/null", "--wrap", "sleep 1"]
    assert "Submitted" in jobs.ask("sbatch", *line)
    begins_again(jobs, job, output)
    assert "stopped by SIGTERM" in said(output)


def test_a_job_whose_time_is_over_begins_again(jobs: Slurm, tmp_path: Path) -> None:
    # Slurm sends the signal when two minutes are left, and looks twice a minute; what is left until
    # then has to do for the start, also on a busy machine.
    job, output = submitted(jobs, tmp_path, "--time", "4:00")
    until(lambda: "BEGINS ANEW" in said(output))
    begins_again(jobs, job, output)
    assert "stopped by SIGTERM" in said(output)


def in_a_job(jobs: Slurm, folder: Path, line: str, *options: str) -> str:
    """What a job script of one line prints."""
    (folder / "job.sh").write_text(f"#!/bin/bash\n{line}\n")
    (folder / "enough").touch()
    output = folder / "job.out"
    options = (f"--chdir={folder}", f"--output={output}", *options)
    printed = jobs.ask("sbatch", *options, str(folder / "job.sh"))
    job = printed.split()[-1]
    until(lambda: jobs.state(job) in ("COMPLETED", "FAILED"))
    return said(output)


@pytest.mark.parametrize("kind", ["script", "step"])
def test_in_a_job_it_finds_its_place(jobs: Slurm, tmp_path: Path, kind: str) -> None:
    run = f"{sys.executable} -m lockstep run train.py 1"
    if kind == "script":
        tasks = ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-task=1")
        printed = in_a_job(jobs, tmp_path, run, *tasks)
        assert "BEGINS ANEW 4" in printed
        assert printed.count("with 2 GPUs") == 4
    else:
        printed = in_a_job(jobs, tmp_path, f"srun {run}", "--nodes=2", "--ntasks-per-node=1")
        assert "BEGINS ANEW 2" in printed
    assert set(re.findall(r"TRAINED on (\w+)", printed)) == {"node1", "node2"}


def test_two_launchers_on_a_machine_are_refused(jobs: Slurm, tmp_path: Path) -> None:
    run = f"srun {sys.executable} -m lockstep run train.py 1"
    printed = in_a_job(jobs, tmp_path, run, "--nodes=1", "--ntasks-per-node=2")
    assert "2 tasks of this machine start it" in printed


def test_a_job_that_slurm_refuses(jobs: Slurm, tmp_path: Path) -> None:
    line = ["run", "--slurm", "--sbatch", "--partition=nowhere", "train.py"]
    command = jobs.run(line, tmp_path)
    assert command.wait() == 2
    assert "sbatch rejected the job" in command.said
    assert "nowhere" in command.said or "invalid partition" in command.said
