"""What `lockstep run` makes of Slurm's variables, and the job script; see also tests/clusters."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from lockstep.errors import SettingError
from lockstep.machine.topology import port_of
from lockstep.run.machines.slurm import (
    JobPlacement,
    exec_srun,
    find_placement,
    srun_command,
)
from lockstep.run.machines.slurm_batch import JobRequest, job_script, sbatch_options, submit
from lockstep.run.start.torchrun_flags import TorchrunFlags

pytestmark = pytest.mark.launcher

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
        (BATCH, JobPlacement(nproc=None, srun_nodes=2)),
        # These are the GPUs of the first machine; another one may have more or fewer.
        (BATCH | {"SLURM_GPUS_ON_NODE": "8"}, JobPlacement(nproc=None, srun_nodes=2)),
        (
            BATCH | {"SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)"},
            JobPlacement(nproc="4", srun_nodes=2),
        ),
        # Without --ntasks Slurm counts the cores.
        (BATCH | {"SLURM_TASKS_PER_NODE": "48(x2)"}, JobPlacement(nproc=None, srun_nodes=2)),
        (ONE, JobPlacement(nproc="4")),
        (BATCH | {"SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "8"}, JobPlacement(nproc="8")),
        (
            {k: v for k, v in ONE.items() if k != "SLURMD_NODENAME"},
            JobPlacement(nproc="4", srun_nodes=1),
        ),
        (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, JobPlacement(nproc="1")),
        (
            STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "4294967290"},
            JobPlacement(nproc=None, srun_nodes=2),
        ),
        (STEP | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "SLURM_PROCID": "0"}, None),
    ],
)
def test_a_launcher_finds_its_place_in_a_job(
    environ: dict[str, str], place: JobPlacement | None
) -> None:
    assert find_placement(environ) == place


def test_a_launcher_finds_its_place_in_a_step() -> None:
    where = ("--master-addr=n1", f"--master-port={port_of('7.0')}")
    place = JobPlacement(nproc="4", meeting_flags=("--nnodes=2", "--node-rank=1", *where))
    assert find_placement(STEP | {"SLURM_GPUS_ON_NODE": "4"}) == place


def test_jobs_and_steps_in_which_a_launcher_has_no_place_are_refused() -> None:
    several = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    with pytest.raises(SettingError, match="2 tasks of this machine start it"):
        find_placement(STEP | several | {"SLURM_PROCID": "3", "SLURM_LOCALID": "1"})
    with pytest.raises(SettingError, match="heterogeneous"):
        find_placement(BATCH | {"SLURM_HET_SIZE": "2"})
    with pytest.raises(SettingError, match="4,2 tasks on its machines"):
        find_placement(BATCH | {"SLURM_NTASKS": "6", "SLURM_TASKS_PER_NODE": "4,2"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLURM_HET_SIZE", "two"),
        ("SLURM_JOB_NUM_NODES", "2-4"),
        ("SLURM_GPUS_PER_TASK", "a100:"),
        ("SLURM_NTASKS", "-1"),
    ],
)
def test_a_malformed_number_of_slurm_is_named(name: str, value: str) -> None:
    with pytest.raises(SettingError, match="it is not a whole number of at least 0") as refused:
        find_placement(BATCH | {name: value})
    assert refused.value.was_set == f"{name}={value}"


def test_tasks_that_are_spread_unevenly_do_not_matter_where_nproc_is_given() -> None:
    uneven = BATCH | {"SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "3,1"}
    assert find_placement(uneven, "2") == JobPlacement(nproc="2", srun_nodes=2)


@pytest.mark.parametrize(
    "given", [["--nnodes", "2"], ["--rdzv-endpoint", "a:1"], ["--standalone"], ["--node_rank", "1"]]
)
def test_what_the_user_says_of_the_machines_wins(given: list[str]) -> None:
    assert TorchrunFlags(given).describe_nodes
    assert not TorchrunFlags(["--max-restarts", "3"]).describe_nodes
    assert TorchrunFlags([], {"PET_NNODES": "2"}).describe_nodes


def test_srun_starts_one_launcher_on_each_machine() -> None:
    line = srun_command(JobPlacement(nproc="4", srun_nodes=2), ["--seed", "1", "train.py"])
    assert line[:4] == ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]
    assert line[-5:] == ["run", "--nproc=4", "--seed", "1", "train.py"]


def test_gpus_per_task_are_summed_for_each_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks = {"SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)"}
    job = find_placement(BATCH | tasks | {"SLURM_GPUS_PER_TASK": "a100:2"})
    assert job == JobPlacement(nproc="4", srun_nodes=2, gpus_per_node=8)
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr("os.execvpe", lambda name, *rest: started.append(rest))
    for name in ("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU", "SRUN_CPUS_PER_TASK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")  # srun does not read it, a script may
    exec_srun(srun_command(job, ["train.py"]))
    ((line, environ),) = started
    assert "--gpus-per-node=8" in line
    assert {name for name in environ if "_PER_" in name} == {"SLURM_CPUS_PER_TASK"}


def test_the_job_script_has_the_options_and_the_quoted_command() -> None:
    request = JobRequest(
        nodes=2, gpus_per_node=4, time="1:00:00", options=("--partition=gpu", "--job-name x")
    )
    options = sbatch_options(request, "a/train.py")
    text = job_script(options, "4", ["train.py", "--name", "two words\n#SBATCH --x='"])
    lines = text.splitlines()
    for line in ("nodes=2", "gpus-per-node=4", "time=1:00:00", "requeue", "partition=gpu"):
        assert f"#SBATCH --{line}" in lines
    names = [line for line in lines if "--job-name" in line]
    assert names == ["#SBATCH --job-name=train", "#SBATCH --job-name=x"]  # the last one counts
    assert "--name 'two words\n" in text
    assert "--nproc=4 train.py" in text


@pytest.mark.parametrize("option", ["--gres=gpu:4", "--gpus=8", "--gpus-per-task=4"])
def test_a_launcher_counts_the_gpus_that_it_is_given(option: str) -> None:
    options = sbatch_options(JobRequest(options=(option,)), "train.py")
    text = job_script(options, None, ["train.py"])
    assert "-m lockstep run train.py &" in text


@pytest.mark.parametrize(
    ("text", "word", "line"),
    [
        ("-p gpu", "-pgpu", "-pgpu"),
        ("--qos high", "--qos=high", "--qos=high"),
        ("--exclusive", "--exclusive", "--exclusive"),
        ("--partition\t gpu", "--partition=gpu", "--partition=gpu"),
        ("--comment=first train.py", "--comment=first train.py", "--comment='first train.py'"),
        ("--comment 'a --b'", "--comment=a --b", "--comment='a --b'"),
        ("--comment it's", "--comment=it's", """--comment='it'"'"'s'"""),
    ],
)
def test_an_option_of_sbatch_becomes_one_line_of_the_script(
    text: str, word: str, line: str
) -> None:
    options = sbatch_options(JobRequest(options=(text,)), "train.py")
    assert options[-1] == word
    assert f"#SBATCH {line}" in job_script(options, None, ["train.py"]).splitlines()


@pytest.mark.parametrize(
    ("option", "found"),
    [
        ("--wait", "until the job has ended"),
        ("--partition=p --qos=high", "this is two options"),
        ("--hold --comment=x", "this is two options"),
        ("-H -p p", "this is two options"),
        ("--comment=a\\b", "no backslash"),
        ("-W", "until the job has ended"),
        ("", "that is not an option"),
        (" ", "that is not an option"),
        ("partition=gpu", "that is not an option"),
        ("--ntasks-per-node=2", "one task, the launcher"),
        ("--ntasks 8", "one task, the launcher"),
        ("-n8", "one task, the launcher"),
    ],
)
def test_options_that_contradict_the_job_are_refused(option: str, found: str) -> None:
    with pytest.raises(SettingError, match=found):
        sbatch_options(JobRequest(options=("--nodelist=a", option)), "train.py")


def test_a_folder_with_characters_of_a_pattern_is_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a %j", "a\\j"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "a %j")
    lines = job_script(sbatch_options(JobRequest(), "train.py"), None, ["train.py"]).splitlines()
    assert f"#SBATCH --output='{tmp_path}/a %%j/%x-%j.out'" in lines
    assert f"#SBATCH --chdir='{tmp_path}/a %j'" in lines
    monkeypatch.chdir(tmp_path / "a\\j")
    with pytest.raises(SettingError, match="backslash"):
        sbatch_options(JobRequest(), "train.py")


def test_options_override_the_variables_of_sbatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's order is command line, variables, lines of the script."""
    (tmp_path / "sbatch").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\ncat\n')
    (tmp_path / "sbatch").chmod(0o755)
    (tmp_path / "a b").mkdir()
    monkeypatch.chdir(tmp_path / "a b")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    options = sbatch_options(JobRequest(options=("--partition gpu",)), "train.py")
    text = job_script(options, None, ["train.py"])
    said = submit(text, options)
    assert said.endswith(text.strip())
    given = said.removesuffix(text.strip()).splitlines()
    assert given[0] == "--job-name=train"
    assert f"--chdir={tmp_path}/a b" in given
    assert given[-1] == "--partition=gpu"


_COMMANDS = {
    # The time is over at once, and it waits until it is told; or it is told by others.
    "srun": '[ -z "$SHORT" ] || {{ kill -USR1 $PPID; read -r _ < {folder}/told; }}; exit 143',
    "scancel": "echo scancel $* >> {folder}/log; echo > {folder}/told",
    "scontrol": "echo scontrol $* >> {folder}/log; echo JobState=RUNNING Requeue=$REQUEUE",
}


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize("array", [False, True])
@pytest.mark.parametrize(("short", "requeue"), [(False, "1"), (True, "1"), (False, "0")])
def test_a_terminated_job_is_requeued_if_it_may_be(
    tmp_path: Path, array: bool, short: bool, requeue: str
) -> None:
    os.mkfifo(tmp_path / "told")
    for name, line in _COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line.format(folder=tmp_path)}\n")
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.defpath}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    environ |= {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"} if array else {}
    environ |= {"REQUEUE": requeue} | ({"SHORT": "1"} if short else {})
    text = job_script([], "1", ["train.py"])
    done = subprocess.run(
        ["bash"], input=text, env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 143
    job = "7_3" if array else "7"  # 7 would be all of the array
    told = [f"scancel --signal=TERM {job}"] if short else []
    requeued = [] if short or requeue == "0" else [f"scontrol requeue {job}"]
    log = (tmp_path / "log").read_text().splitlines()
    assert log == [*told, f"scontrol show job {job}", *requeued]
    assert ("not requeued: the time limit" in done.stderr) is short
