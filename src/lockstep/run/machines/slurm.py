"""Slurm: `lockstep run` inside a job finds its place by itself, and `--slurm` submits one.

    in a step of srun, one task a machine   the launcher of this machine; the others are tasks too
    in the script of a job, or in salloc    srun starts a launcher on each machine of the job
    elsewhere, with --slurm                 a job script that does the latter, for sbatch

Source: "INPUT/OUTPUT ENVIRONMENT VARIABLES" in the manual pages of srun and sbatch.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from lockstep.distributed.topology import detect, expand_tasks
from lockstep.errors import SettingError
from lockstep.run.machines.hosts import current_folder
from lockstep.run.machines.run_token import TOKEN_VARIABLE

_INTERACTIVE_STEP = "4294967290"
"""The step in which salloc's shell may run (SLURM_INTERACTIVE_STEP in slurm.h)."""
_WARNING_S, _SAVING_S = 120, 110
"""Before the time is over the ranks are asked to save; and how long they may take."""
_SRUN = ("--ntasks-per-node=1", "--cpu-bind=none", "--export=ALL", "--kill-on-bad-exit=0")
"""A launcher on each machine, with all of the job's cores there; launchers end each other."""
_OF_TASKS = "SLURM_GPUS_PER_TASK SLURM_NTASKS_PER_GPU SLURM_TRES_PER_TASK SRUN_CPUS_PER_TASK"
"""By these srun would give a launcher what the job asks for each rank."""


@dataclass(frozen=True, kw_only=True)
class InJob:
    """What a job says about a run that is started in it."""

    nproc: str | None
    """Processes on each machine; None: the launcher there finds out."""
    meeting: tuple[str, ...] = ()
    """Torchrun's flags by which the machines of the job meet."""
    nodes: int = 0
    """Machines on which launchers are still to be started; 0: here, by this one."""
    gpus: int = 0
    """GPUs of each machine, where srun would hand on those of one task alone."""


def in_job(environ: Mapping[str, str], nproc: str | None = None) -> InJob | None:
    """The place of this launcher in a job; None: it is in none.

    Args:
        environ: the environment variables.
        nproc: processes on each machine, where the user says how many.

    Raises:
        SettingError: several launchers share a machine, or the tasks are spread unevenly.
    """
    if not environ.get("SLURM_JOB_ID"):
        return None
    place, gpus = detect(environ), environ.get("SLURM_GPUS_ON_NODE")
    if place is not None and place.source == "Slurm":
        if place.local_size > 1:
            raise SettingError(
                "lockstep run, started by srun",
                f"{place.local_size} tasks of this machine start it, and each would start ranks",
                "srun --ntasks-per-node=1 lockstep run ..., or srun python ... with a task a rank",
            )
        meeting = (f"--nnodes={place.size}", f"--node-rank={place.node_rank}")
        where = (f"--master-addr={place.master_addr}", f"--master-port={place.master_port}")
        return InJob(nproc=nproc or gpus or "1", meeting=meeting + where)
    if place is not None:
        return None
    in_step = environ.get("SLURM_STEP_NUM_TASKS")
    if in_step and environ.get("SLURM_STEP_ID") != _INTERACTIVE_STEP:
        return InJob(nproc=nproc or gpus or "1")
    if int(environ.get("SLURM_HET_SIZE") or 1) > 1:
        raise SettingError(
            "lockstep run in a Slurm job",
            "the job is heterogeneous, and srun starts a step on its first component alone",
            "ask for one component; or start the launchers yourself: srun --het-group ... "
            "lockstep run --nnodes ... --rdzv-backend c10d --rdzv-endpoint ...",
        )
    nodes = int(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or 1)
    nproc = nproc or _tasks(environ)
    if nodes == 1 and environ.get("SLURMD_NODENAME"):
        return InJob(nproc=nproc or gpus or "1")
    of_task = environ.get("SLURM_GPUS_PER_TASK", "0").rpartition(":")[2]  # a type may stand before
    gpus_there = int(of_task) * int(environ.get("SLURM_NTASKS") or nodes) // nodes
    return InJob(nproc=nproc, nodes=nodes, gpus=gpus_there)


def _tasks(environ: Mapping[str, str]) -> str | None:
    """The tasks a machine that the job asks for; None: one, or it does not say."""
    asked = environ.get("SLURM_NTASKS") or environ.get("SLURM_NTASKS_PER_NODE")
    text = environ.get("SLURM_TASKS_PER_NODE", "1")
    counts = set(expand_tasks(text)) if asked else {1}
    if len(counts) > 1:
        raise SettingError(
            "lockstep run in a Slurm job, without --nproc",
            f"the job has {text} tasks on its machines",
            "give --nproc, or ask for as many on each: --ntasks-per-node",
        )
    (count,) = counts
    return str(count) if count > 1 else None


def srun(job: InJob, arguments: Sequence[str]) -> list[str]:
    """The command that starts a launcher on each machine of the job.

    Args:
        job: how many machines (0: as srun reads it from the job), and what runs on each.
        arguments: of `lockstep run`, but for --nproc.
    """
    size = [f"--nodes={job.nodes}", f"--ntasks={job.nodes}"] if job.nodes else []
    size += [f"--gpus-per-node={job.gpus}"] if job.gpus else []
    nproc = [f"--nproc={job.nproc}"] if job.nproc else []
    own = [sys.executable, "-m", "lockstep", "run", *nproc]
    return ["srun", *size, *_SRUN, *own, *arguments]


def become(line: list[str]) -> NoReturn:
    """Executes srun in the place of this process; the launchers that it starts share a token.

    Raises:
        SettingError: there is no srun.
    """
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(32)
    environment = {k: v for k, v in os.environ.items() if k not in _OF_TASKS.split()}
    try:
        os.execvpe(line[0], line, {**environment, TOKEN_VARIABLE: token})
    except FileNotFoundError:
        raise _missing(line[0]) from None


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a job asks for."""

    nodes: int = 1
    gpus_per_node: int | None = None
    time: str | None = None
    options: tuple[str, ...] = ()
    """Others of sbatch's, such as `--partition=gpu`."""


def sbatch_options(request: Request, script: str) -> list[str]:
    """What sbatch is asked for, each option a word of its own; the last of two counts.

    Args:
        request: what the job asks for.
        script: its name.

    Raises:
        SettingError: an option of sbatch's, or a working folder, that such a job cannot have.
    """
    folder = current_folder()
    if re.search(r"[\\\n]", folder):
        found = "sbatch can name no file in a folder with a backslash or a line's end in its name"
        raise SettingError(f"--slurm in {folder!r}", found, "start it in another folder")
    own = {
        "job-name": Path(script).stem,
        "nodes": request.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": request.gpus_per_node,
        "time": request.time,
        "output": folder.replace("%", "%%") + "/%x-%j.out",
        "open-mode": "append",
        "chdir": folder,
        "requeue": "",
        "signal": f"B:USR1@{_WARNING_S}",
    }
    given = {name: value for name, value in own.items() if value is not None}
    options = [f"--{name}={value}" if value else f"--{name}" for name, value in given.items()]
    return options + [_option(text.strip()) for text in request.options]


def _option(text: str) -> str:
    """What one --sbatch gives, in one word: sbatch would take one by itself for the script."""
    was_set = f"--sbatch {text!r}"
    found = re.fullmatch(r"(--[\w-]+|-\w)(=|\s*)(.*)", text, re.DOTALL)
    if not found:
        do = "write it as in --sbatch --partition=gpu"
        raise SettingError(was_set, "that is no option", do)
    name, between, value = found.groups()
    if re.match("-n|--nt", name):
        raise SettingError(
            was_set,
            "each machine of the job has one task, the launcher, which starts the ranks there",
            "say with --nproc how many ranks, and with --nodes how many machines",
        )
    if name in ("-W", "--wait"):
        why = "sbatch would say nothing, not even the job's number, until the job has ended"
        raise SettingError(was_set, why, "leave it out; `squeue --me` shows the job")
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]
    elif re.search(r"\s--?[A-Za-z]", between + value):
        raise SettingError(was_set, "these are two options", "give each its own --sbatch")
    if re.search(r"[\\\n]", value):
        why = "sbatch takes no backslash or line's end there"
        raise SettingError(was_set, why, "write it without")
    return name + ("=" if name.startswith("--") and (between or value) else "") + value


def job_script(options: Sequence[str], nproc: str | None, arguments: Sequence[str]) -> str:
    """The job script, which also says what happens when the job's time is over.

    Args:
        options: as `sbatch_options` gives them.
        nproc: processes on each machine; None: one a GPU that the job has there, else one.
        arguments: of `lockstep run`, but for --nproc; the script and its own are among them.
    """
    lines = ["#!/bin/bash", *(f"#SBATCH {_quoted(option)}" for option in options)]
    run = shlex.join(srun(InJob(nproc=nproc), arguments))
    body = _BODY.format(token=TOKEN_VARIABLE, saving=_SAVING_S, warning=_WARNING_S, srun=run)
    return "\n".join([*lines, body])


def _quoted(option: str) -> str:
    name, equals, value = option.partition("=")
    return name + equals + shlex.quote(value) if value else shlex.quote(option)


_BODY = """
export {token}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={saving}  # seconds in which the ranks may save
job=$SLURM_JOB_ID early=0  # this number means in an array's last task all of them
[ -z "$SLURM_ARRAY_TASK_ID" ] || job=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID
trap 'scancel --signal=TERM "$job"; early=$((SECONDS < 30))' USR1  # the time is almost over
trap true TERM  # when the job is cancelled or preempted the ranks are told too; wait for them
{srun} &
while kill -0 $! 2>/dev/null; do wait $!; done  # a signal ends the waiting
wait $!; code=$?
# Asked to end (128 + 15), but not cancelled: the time was over, or others need the machines.
if [ $code -eq 143 ] && [[ $(scontrol show job "$job") == *JobState=RUNNING*Requeue=1* ]]; then
    if [ $early -eq 0 ]; then
        scontrol requeue "$job"
    else
        echo "lockstep: not requeued: the time limit leaves nothing but the {warning} s to save" >&2
    fi
fi
exit $code
"""


def submit(script: str, options: Sequence[str]) -> str:
    """Hands a job script to sbatch; what it prints.

    Args:
        script: as `job_script` gives it.
        options: those in it, for sbatch's command line: variables such as SBATCH_PARTITION go
            before the script's lines.

    Raises:
        SettingError: there is no sbatch, or it refuses the job.
    """
    if not shutil.which("sbatch"):
        raise _missing("sbatch")
    done = subprocess.run(["sbatch", *options], input=script, capture_output=True, text=True)
    if done.returncode:
        raise SettingError(
            "lockstep run --slurm",
            f"sbatch refuses the job: {done.stderr.strip() or 'without a word'}",
            "see what the cluster has (sinfo), and what --dry-run prints",
        )
    return done.stdout.strip()


def _missing(program: str) -> SettingError:
    return SettingError(
        "a run under Slurm",
        f"there is no {program} on this machine",
        "start it where Slurm's commands are, such as the login node",
    )
