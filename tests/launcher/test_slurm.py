"""What `lockstep run` makes of Slurm's variables, and the job script; see also tests/clusters."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from lockstep.distributed.topology import port_of
from lockstep.errors import SettingError
from lockstep.launcher.plan import meeting_given
from lockstep.launcher.slurm import InJob, Request, in_job, job_script, srun

BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "0",
    "SLURMD_NODENAME": "n1",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_JOB_NODELIST": "n[1-2]",
}
STEP = {
    **BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}
ONE = {**BATCH, "SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "4", "SLURM_NTASKS": "4"}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, None),
        (BATCH, InJob(nproc="1", nodes=2)),
        (BATCH | {"SLURM_GPUS_ON_NODE": "8"}, InJob(nproc="8", nodes=2)),
        (BATCH | {"SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)"}, InJob(nproc="4", nodes=2)),
        # Without --ntasks Slurm counts the cores.
        (BATCH | {"SLURM_TASKS_PER_NODE": "48(x2)"}, InJob(nproc="1", nodes=2)),
        (ONE, InJob(nproc="4")),
        ({k: v for k, v in ONE.items() if k != "SLURMD_NODENAME"}, InJob(nproc="4", nodes=1)),
        (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, InJob(nproc="1")),
        (
            STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "4294967290"},
            InJob(nproc="1", nodes=2),
        ),
        (STEP | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "SLURM_PROCID": "0"}, None),
    ],
)
def test_the_place_in_a_job(environ: dict[str, str], place: InJob | None) -> None:
    assert in_job(environ) == place


def test_the_place_in_a_step() -> None:
    where = ("--master-addr=n1", f"--master-port={port_of('7.0')}")
    place = InJob(nproc="4", meeting=("--nnodes=2", "--node-rank=1", *where))
    assert in_job(STEP | {"SLURM_GPUS_ON_NODE": "4"}) == place


def test_what_has_no_place() -> None:
    several = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    with pytest.raises(SettingError, match="2 tasks of this machine start it"):
        in_job(STEP | several | {"SLURM_PROCID": "3", "SLURM_LOCALID": "1"})
    with pytest.raises(SettingError, match="4,2 tasks on its machines"):
        in_job(BATCH | {"SLURM_NTASKS": "6", "SLURM_TASKS_PER_NODE": "4,2"})


@pytest.mark.parametrize(
    "given", [["--nnodes", "2"], ["--rdzv-endpoint", "a:1"], ["--standalone"], ["--node_rank", "1"]]
)
def test_what_the_user_says_of_the_machines_wins(given: list[str]) -> None:
    assert meeting_given(given, {})
    assert not meeting_given(["--max-restarts", "3"], {})
    assert meeting_given([], {"PET_NNODES": "2"})


def test_the_command_of_a_job() -> None:
    line = srun(2, "4", ["--seed", "1", "train.py"])
    assert line[:4] == ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]
    assert line[-5:] == ["run", "--nproc=4", "--seed", "1", "train.py"]


def test_the_job_script() -> None:
    request = Request(
        nodes=2, gpus_per_node=4, time="1:00:00", options=("--partition=gpu", "--job-name x")
    )
    text = job_script(request, "4", ["train.py", "--name", "two words"], "a/train.py")
    lines = text.splitlines()
    for line in ("nodes=2", "gpus-per-node=4", "time=1:00:00", "requeue", "partition=gpu"):
        assert f"#SBATCH --{line}" in lines
    assert not any("--job-name=" in line for line in lines)
    assert "'two words' &" in text
    assert "--nproc=4 train.py" in text
    if shutil.which("bash"):
        assert subprocess.run(["bash", "-n"], input=text.encode()).returncode == 0
