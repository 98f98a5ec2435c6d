"""Submits a run to the scheduler Slurm (--slurm), and places it on the machines of its job."""

from __future__ import annotations

import os
import shlex

import click

from lockstep.cli.places.place import Place, launcher_arguments
from lockstep.cli.run_options import check_settings
from lockstep.cli.torchrun_options import TORCHRUN_FLAGS
from lockstep.run.machines import slurm, slurm_batch
from lockstep.run.start.step_memory import check_keep_in_memory
from lockstep.run.start.torchrun_flags import (
    TorchrunFlags,
    check_flags_usable_with,
    parse_flags,
)
from lockstep.run.start.worker import Script


class NewSlurmJob(Place):
    """The machines that Slurm will give to a job."""

    def __init__(self, ctx: click.Context, script: str, args: tuple[str, ...]) -> None:
        check_settings(ctx, os.environ, num_processes=None)  # only the job will know the number
        self._options = _sbatch_options(ctx, script)
        arguments = launcher_arguments(ctx, script, args)
        self._job_script = slurm_batch.job_script(self._options, ctx.params["nproc"], arguments)

    def describe(self) -> str:
        """Returns the script of the job."""
        return self._job_script

    def start(self) -> None:
        """Submits the job, and prints its number."""
        click.echo(slurm_batch.submit(self._job_script, self._options))


class PresentSlurmJob(Place):
    """The machines of the job in which this command runs, on the first of them.

    Args:
        ctx, script, args: see `Place`.
        placement: how the run is started in the job.
    """

    def __init__(
        self,
        ctx: click.Context,
        script: str,
        args: tuple[str, ...],
        placement: slurm.JobPlacement,
    ) -> None:
        arguments = launcher_arguments(ctx, script, args)
        self._command_line = slurm.srun_command(placement, arguments)

    def describe(self) -> str:
        """Returns the command line of srun."""
        return shlex.join(self._command_line)

    def start(self) -> None:
        """Starts a launcher on each machine by srun, which replaces this process."""
        slurm.exec_srun(self._command_line)


def placement_in_job(ctx: click.Context) -> slurm.JobPlacement | None:
    """Returns how the run is started in the Slurm job that this process belongs to.

    Returns None outside of a job, and if torchrun's flags say how the machines find each other.
    """
    if TorchrunFlags(ctx.meta[TORCHRUN_FLAGS], os.environ).describe_nodes:
        return None
    return slurm.find_placement(os.environ, ctx.params["nproc"])


def _sbatch_options(ctx: click.Context, script: str) -> list[str]:
    """Returns the options for sbatch, which submits the job.

    All that can be wrong is checked here, so that the job does not fail after hours in the queue.

    Raises:
        SettingError: an option is wrong, one of torchrun's flags cannot be used with --slurm, or
            there is no such script.
    """
    from lockstep.run.start.script_check import check_script

    params = ctx.params
    torchrun_flags = ctx.meta[TORCHRUN_FLAGS]
    if params["keep_in_memory"]:
        # --keep-in-memory excludes some of torchrun's flags. To check that, the flags are parsed,
        # together with the script, as torchrun's parser demands one.
        check_keep_in_memory(parse_flags([*torchrun_flags, script]))
    check_flags_usable_with("--slurm", torchrun_flags)
    check_script(Script(path=script, arguments=params["args"], module=params["module"]))

    request = slurm_batch.JobRequest(
        nodes=params["nodes"] or 1,
        gpus_per_node=params["gpus_per_node"],
        time=params["time"],
        options=params["sbatch"],
    )
    return slurm_batch.sbatch_options(request, script)  # also checks the request
