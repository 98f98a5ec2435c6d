"""Implements `lockstep run --slurm`: writes a job script for Slurm, and submits it by sbatch.

The job has one *task* on each machine, a launcher, which starts the ranks there. Shortly before the
job's time is over, Slurm signals the script. The script asks the ranks to save, and requeues the
job when they have ended. The job then resumes from the checkpoint.

Source: the manual pages of sbatch and scontrol.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import SettingError
from lockstep.run.machines.hosts import current_folder
from lockstep.run.machines.run_token import TOKEN_VARIABLE
from lockstep.run.machines.slurm import JobPlacement, missing_program, srun_command

WARNING_S = 120
"""The seconds before the end of the job's time at which the ranks are asked to save."""
SAVING_TIMEOUT_S = 110
"""The seconds that they may take to save."""

# "--partition=gpu", "--qos high", "-p gpu", "-n8"
OPTION_PATTERN = re.compile(r"(?P<name>--[\w-]+|-\w)(?P<separator>=|\s*)(?P<value>.*)", re.DOTALL)
# "-n", "--ntasks", "--ntasks-per-node"
TASKS_OPTION_PATTERN = re.compile("-n|--nt")
# The beginning of another option after a space: " --qos", " -p"
NEXT_OPTION_PATTERN = re.compile(r"\s--?[A-Za-z]")
# Characters that a line of options in a job script cannot contain.
UNWRITABLE_PATTERN = re.compile(r"[\\\n]")


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """The resources that a job requests from Slurm."""

    nodes: int = 1
    gpus_per_node: int | None = None
    time: str | None = None
    """The time limit, in sbatch's form: "1:00:00"."""
    options: tuple[str, ...] = ()
    """Other options of sbatch, such as `--partition=gpu`."""


def sbatch_options(request: JobRequest, script: str) -> list[str]:
    """Returns the options of sbatch for a job, each with its value: `--nodes=2`.

    If the user gives one of them too, sbatch uses the user's, which comes last.

    Args:
        request: the resources that the job requests.
        script: path of the training script, from which the job gets its name.

    Raises:
        SettingError: an option or the working folder cannot be used for such a job.
    """
    folder = current_folder()
    if UNWRITABLE_PATTERN.search(folder):
        raise SettingError(
            f"--slurm in {folder!r}",
            "sbatch can name no file in a folder with a backslash or a line's end in its name",
            "start it in another folder",
        )

    # In the names of files, sbatch replaces %x by the name of the job and %j by its number.
    output_file = folder.replace("%", "%%") + "/%x-%j.out"
    options = [
        f"--job-name={Path(script).stem}",
        f"--nodes={request.nodes}",
        "--ntasks-per-node=1",
    ]
    if request.gpus_per_node is not None:
        options.append(f"--gpus-per-node={request.gpus_per_node}")
    if request.time is not None:
        options.append(f"--time={request.time}")

    options += [
        f"--output={output_file}",
        "--open-mode=append",
        f"--chdir={folder}",
        "--requeue",
        # Sends SIGUSR1 this long before the job's time is up, only to the batch shell ("B:").
        f"--signal=B:USR1@{WARNING_S}",
    ]
    return options + [_normalize_option(text.strip()) for text in request.options]


def _normalize_option(text: str) -> str:
    """Turns the value of one --sbatch into one word.

    sbatch could mistake a second word for the name of a script. Examples:

        --qos high      --qos=high
        -p gpu          -pgpu
        --exclusive     --exclusive

    Raises:
        SettingError: the value is not one option, or cannot be used for such a job.
    """
    was_set = f"--sbatch {text!r}"
    match = OPTION_PATTERN.fullmatch(text)
    if match is None:
        raise SettingError(
            was_set, "that is not an option", "write it as in --sbatch --partition=gpu"
        )

    name = match["name"]
    separator = match["separator"]
    value = match["value"]
    _check_name_of_option(was_set, name)

    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    if is_quoted:
        value = value[1:-1]
    elif NEXT_OPTION_PATTERN.search(text):  # "--exclusive --qos=high"
        raise SettingError(was_set, "this is two options", "give each its own --sbatch")

    if UNWRITABLE_PATTERN.search(value):
        raise SettingError(
            was_set, "sbatch takes no backslash or line's end there", "write it without them"
        )

    is_long_name = name.startswith("--")
    has_value = bool(separator or value)
    if is_long_name and has_value:
        return f"{name}={value}"
    return name + value


def _check_name_of_option(was_set: str, name: str) -> None:
    """Raises SettingError for an option of sbatch that such a job cannot have.

    Args:
        was_set: the option as the user has set it, for the error.
        name: the name of sbatch's option, such as `--ntasks`.
    """
    if TASKS_OPTION_PATTERN.match(name):
        raise SettingError(
            was_set,
            "each machine of the job has one task, the launcher, which starts the ranks there",
            "say with --nproc how many ranks, and with --nodes how many machines",
        )

    if name in ("-W", "--wait"):
        raise SettingError(
            was_set,
            "sbatch would say nothing, not even the job's number, until the job has ended",
            "leave it out; use `squeue --me` to see the job",
        )


def job_script(options: Sequence[str], nproc: str | None, arguments: Sequence[str]) -> str:
    """Writes the job script.

    Args:
        options: the result of `sbatch_options`.
        nproc: processes on each machine; None for one per GPU that the job has there, or one.
        arguments: the arguments of `lockstep run`, including the script and its own arguments, but
            without --nproc.
    """
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH {_quote_value(option)}" for option in options]
    command = srun_command(JobPlacement(nproc=nproc), arguments)
    lines.append(
        SCRIPT_BODY.format(
            token_variable=TOKEN_VARIABLE,
            saving_timeout=SAVING_TIMEOUT_S,
            warning=WARNING_S,
            srun_command=shlex.join(command),
        )
    )
    return "\n".join(lines)


def _quote_value(option: str) -> str:
    """Quotes an option for a shell: `--comment=a b` -> `--comment='a b'`."""
    name, equals, value = option.partition("=")
    if not value:
        return shlex.quote(option)
    return name + equals + shlex.quote(value)


# Slurm sends USR1 to the script before the time is over; scancel and preemption send TERM. Exit
# code 143 (128 + 15) means that the ranks were asked to end. If the job was not cancelled, its time
# was over or others need the machines, and it is requeued. If the time limit leaves no more than
# the time to save, it would be requeued forever.
SCRIPT_BODY = """
export {token_variable}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={saving_timeout}  # seconds in which the ranks may save
job=$SLURM_JOB_ID early=0  # this number means in an array's last task all of them
[ -z "$SLURM_ARRAY_TASK_ID" ] || job=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID
trap 'scancel --signal=TERM "$job"; early=$((SECONDS < 30))' USR1  # the time is almost over
trap true TERM  # when the job is cancelled or preempted the ranks are told too; wait for them
{srun_command} &
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
    """Submits a job script by sbatch, and returns the output of sbatch.

    Args:
        script: the result of `job_script`.
        options: the options in the script. They are also given on the command line of sbatch,
            because variables such as SBATCH_PARTITION override the lines of the script.

    Raises:
        SettingError: sbatch is not installed, or refuses the job.
    """
    if not shutil.which("sbatch"):
        raise missing_program("sbatch")

    result = subprocess.run(["sbatch", *options], input=script, capture_output=True, text=True)
    if result.returncode:
        raise SettingError(
            "lockstep run --slurm",
            f"sbatch rejected the job: {result.stderr.strip() or 'without a word'}",
            "compare what the cluster offers (sinfo) with what --dry-run prints",
        )

    return result.stdout.strip()
