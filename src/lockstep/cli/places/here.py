"""Starts a run on this machine, which may be one of several whose launchers meet."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import click

from lockstep.cli.file_defaults import file_and_its_options
from lockstep.cli.output import print_line
from lockstep.cli.places.place import Place
from lockstep.cli.run_options import SETTING_NAMES, check_nproc, check_settings
from lockstep.cli.torchrun_options import TORCHRUN_FLAGS
from lockstep.run.machines.slurm import JobPlacement
from lockstep.run.start.plan import HangRules, LaunchSpec
from lockstep.run.start.torchrun_flags import TorchrunFlags
from lockstep.run.start.worker import Script
from lockstep.settings import FROM_FILE_VARIABLE, is_quiet
from lockstep.units import parse_seconds


class ThisMachine(Place):
    """This machine, of which this command is the launcher.

    Args:
        ctx, script, args: see `Place`.
        placement: how the run is started in a job of Slurm; None outside of one.
    """

    def __init__(
        self,
        ctx: click.Context,
        script: str,
        args: tuple[str, ...],
        placement: JobPlacement | None,
    ) -> None:
        params = ctx.params
        nproc = params["nproc"]
        torchrun_flags = tuple(ctx.meta[TORCHRUN_FLAGS])

        # Inside a job of Slurm, its variables say how the machines of the job find each other.
        if placement is not None:
            nproc = placement.nproc
            torchrun_flags += placement.meeting_flags

        check_nproc(ctx, nproc)
        check_settings(ctx, os.environ, _world_size_if_known(nproc, torchrun_flags, os.environ))
        quiet = params["quiet"] or is_quiet(os.environ)
        self._spec = LaunchSpec(
            script=Script(path=script, arguments=args, module=params["module"]),
            nproc=nproc,
            settings=_settings_of_ranks(ctx, quiet),
            torchrun=torchrun_flags,
            warm=params["warm"],
            keep_in_memory=params["keep_in_memory"],
            hang=HangRules(params["on_hang"], parse_seconds("--hang-after", params["hang_after"])),
            local_rank_argument=params["local_rank_argument"],
            from_file=file_and_its_options(ctx),
            quiet=quiet,
        )

    def describe(self) -> str:
        """Describes the plan of the run."""
        from lockstep.run.start.script import plan_run

        return plan_run(self._spec).describe()

    def start(self) -> int:
        """Starts the ranks, and waits for their end."""
        from lockstep.run.start.script import run_script

        return run_script(self._spec, print_line)


def _settings_of_ranks(ctx: click.Context, quiet: bool) -> dict[str, Any]:
    """Returns the settings that are passed on to the ranks, without those that were not given.

    Args:
        ctx: the context of the command.
        quiet: whether the run prints only the script's output and failures.
    """
    given = {}
    for name in SETTING_NAMES:
        if ctx.params[name] is not None:
            given[name] = ctx.params[name]
    if quiet:
        given["quiet"] = 1

    # The ranks print which options come from a launch file.
    options_from_file = file_and_its_options(ctx)  # "lockstep.toml: nproc, precision", or ""
    # If a script of another run has started this one, the variable is set already, for that run. An
    # empty text overwrites it too.
    is_set_for_other_run = FROM_FILE_VARIABLE in os.environ
    if options_from_file or is_set_for_other_run:
        given["from_file"] = options_from_file
    return given


def _world_size_if_known(
    nproc: str | None, torchrun_flags: Sequence[str], environ: Mapping[str, str]
) -> int | None:
    """Returns the world size of a run that is started on this machine.

    It is None if it is not known yet: with several machines, or with a number of processes that
    depends on the machine, such as --nproc=auto.

    Args:
        nproc: the value of --nproc.
        torchrun_flags: torchrun's flags and their values: `["--nnodes", "2"]`, `["--nnodes=2"]`.
        environ: environment variables of this process.
    """
    flags = TorchrunFlags(torchrun_flags, environ)
    num_nodes = flags.get("--nnodes") or "1"
    nproc = nproc or flags.get("--nproc-per-node") or "1"

    # The same command on another machine may start another number of processes.
    has_several_machines = num_nodes != "1"
    if has_several_machines or not nproc.isdigit():
        return None
    return int(nproc)
